"""A run as a whole: what weights on their way cost of a step, how soon it trains, and what memory it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.watch import peak_memory

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
    with peak_memory() as peaks:
        run = series.made(cell, say)
    lines = list(MetricsReader(run).new_lines())
    return {**figures(lines, read_object(run / "summary.json"), begun_s), "peak_bytes": peaks}


def figures(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], begun_s: float) -> dict[str, Any]:
    """Seconds of one step on average: publishing, as the learner's lines have it; loading and proving, by update."""
    steps = [line for line in lines if line["event"] == "step"]
    samplers = {line["part"]: line for line in lines if line["event"] == "status" and "apply_s" in line}
    num_updates = sum(status["num_updates"] for status in samplers.values())
    return {
        "step_s": summary["loop_wall_s"] / summary["steps"],
        "publish_s": sum(line["publish_s"] for line in steps) / len(steps),
        "apply_s": sum(status["apply_s"] for status in samplers.values()) / num_updates,
        "prove_s": sum(status["prove_s"] for status in samplers.values()) / num_updates,
        "start_s": steps[0]["time_s"] - begun_s,
    }
