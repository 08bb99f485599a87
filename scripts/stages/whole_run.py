"""A run as a whole: what weights on their way cost of a step, where its seconds go, its start, and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.watch import watched_memory

from stream_grpo.experiments.cells import Cell, Series
from stream_grpo.files import read_object
from stream_grpo.metrics import MetricsReader

SETTINGS = ("evaluation.interval=0", "evaluation.num_problems=0", "tracking.wandb=disabled")
"""Nothing is evaluated, so that samplers and learner have the machine to themselves."""


def measured(
    file: Path, overrides: Sequence[str], root: Path, *, num_steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """One run of so many steps in a folder that has none yet. Raises CellFailed where it does not end well."""
    cell = Cell(f"stages-{num_steps}-{int(time.time())}", {})
    series = Series(file=file, overrides=(*overrides, *SETTINGS, f"run.num_steps={num_steps}"), root=root)
    begun_s = time.time()
    with watched_memory() as memory:
        run = series.made(cell, say)
    lines = list(MetricsReader(run).new_lines())
    return {**figures(lines, read_object(run / "summary.json"), begun_s), "memory": memory}


def figures(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], begun_s: float) -> dict[str, Any]:
    """Seconds of one step on average: publishing, as the learner's lines have it; loading and proving, by update.

    `loop`: of sampler and learner the share of the loop that each kind of work or wait took.
    """
    steps = [line for line in lines if line["event"] == "step"]
    samplers = {line["part"]: line for line in lines if line["event"] == "status" and "apply_s" in line}
    num_updates = sum(status["num_updates"] for status in samplers.values())
    wall_s = summary["loop_wall_s"]
    return {
        "step_s": wall_s / summary["steps"],
        "publish_s": sum(line["publish_s"] for line in steps) / len(steps),
        "apply_s": sum(status["apply_s"] for status in samplers.values()) / num_updates,
        "prove_s": sum(status["prove_s"] for status in samplers.values()) / num_updates,
        "start_s": steps[0]["time_s"] - begun_s,
        "loop": {
            "sampler": with_rest(sampler_seconds(list(samplers.values())), wall_s),
            "learner": with_rest(learner_seconds(steps, wall_s), wall_s),
        },
    }


def sampler_seconds(samplers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over samplers, by what they did."""

    def mean(name: str) -> float:
        return sum(float(status.get(name, 0.0)) for status in samplers) / len(samplers)

    idle_s = sum(sum(status.get("idle_s", {}).values()) for status in samplers) / len(samplers)
    found = {"generation": mean("busy_s"), "weights": mean("stall_s"), "verification": mean("score_s")}
    return {**found, "nothing to sample": idle_s}


def learner_seconds(steps: Sequence[Mapping[str, Any]], wall_s: float) -> dict[str, float]:
    """By what it did, in a loop that ends with the last step; of the first wait what lies in it."""
    begun_s = steps[-1]["time_s"] - wall_s
    first_wait_s = max(0.0, steps[0]["time_s"] - steps[0]["step_s"] - begun_s)

    def total(name: str, lines: Sequence[Mapping[str, Any]] = steps) -> float:
        return sum(float(line.get(name) or 0.0) for line in lines)

    return {
        "forward, backward, update": total("seconds"),
        "making the batch": total("step_s") - total("seconds"),
        "publishing": total("publish_s", steps[1:]),
        "checkpoints": total("checkpoint_s"),
        "waiting for groups": first_wait_s + total("waited_s", steps[1:]),
    }


def with_rest(seconds: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """As shares of the loop, and what is left of it."""
    shares = {name: value / wall_s for name, value in seconds.items()}
    return {**shares, "the rest": 1.0 - sum(shares.values())}
