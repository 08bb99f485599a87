"""Scenes with kills at chosen places, on the fake run. A program of its own: the run is forked from a process that must
have started no thread. Prints what each scene came to as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kills.audit import audit
from kills.driver import Driver
from kills.fake_parts import configuration
from kills.fake_run import FakeTarget
from kills.schedule import Kill

from stream_grpo.metrics import MetricsReader


def forever() -> float:
    return float("inf")


def a_sampler_dies_while_it_takes_weights(root: Path) -> dict[str, Any]:
    """Report C23: of two samplers one is killed between reading new weights and applying them."""
    target = FakeTarget(configuration(root, num_steps=10**6, seed=3))
    driver = Driver(target, 0, lambda line: None)
    driver.begin()
    driver.carry_out([Kill("sampler", "sampler.weights_read", passage=9, after_steps=3)], forever())
    step = driver.step
    before = _acknowledged(target)
    driver.wait_for(lambda: _has_grown(target, before), "groups of both samplers")
    driver.wait_for_step(step + 3)
    target.stop()
    driver.wait_for_end()
    found = audit(target.run_dir, [name for names in _acknowledged(target) for name in names])
    return {"code": target.ended(), "findings": found.findings, "num_both_had": len(before)}


def _has_grown(target: FakeTarget, before: list[list[str]]) -> bool:
    return all(len(now) > len(then) for now, then in zip(_acknowledged(target), before, strict=True))


def _acknowledged(target: FakeTarget) -> list[list[str]]:
    return [path.read_text().split() for path in target.witnesses()]


def six_steps_with_a_kill_after_the_third(root: Path) -> dict[str, Any]:
    """Report C34: 6 problems, 2 a step, a checkpoint after step 3, everything killed, resumed for the rest."""
    sections = {"learner": {"checkpoint_interval": 3}, "stream": {"groups_per_step": 2}}
    target = FakeTarget(configuration(root, num_steps=6, seed=3, **sections), num_problems=6)
    driver = Driver(target, 0, lambda line: None)
    driver.begin()
    driver.carry_out([Kill("learner", "checkpoint.renamed"), Kill("all")], forever())
    driver.wait_for_end()
    lines = [line for line in MetricsReader(target.run_dir).new_lines() if line["event"] == "step"]
    return {
        "code": target.ended(),
        "steps_after": [line["step"] for line in lines if line["branch"] == lines[-1]["branch"]],
        "steps": sorted({line["step"] for line in lines}),
        "findings": audit(target.run_dir).findings,
        "final": audit(target.run_dir).final,
    }


def further_uses_and_old_rollouts_through_kills(root: Path) -> dict[str, Any]:
    """Every group may be used three times, and rollouts that are too old stay in the baseline."""
    stream = {
        "groups_per_step": 3,
        "max_uses": 3,
        "reuse_share": 0.34,
        "too_old": "baseline_only",
        "max_policy_age": 1,
        "partial_interval_s": 0.05,
    }
    target = FakeTarget(configuration(root, num_steps=10**6, seed=3, stream=stream))
    driver = Driver(target, 0, lambda line: None)
    driver.begin()
    kills = [Kill("buffer", "journal.log_written", passage=3, after_steps=2), Kill("learner", "learner.stepped")]
    kills += [Kill("learner", "checkpoint.renaming"), Kill("sampler", after_steps=1), Kill("all", after_steps=1)]
    driver.carry_out(kills * 2, forever())
    driver.wait_for_steps(3)
    target.stop()
    driver.wait_for_end()
    found = audit(target.run_dir, [name for names in _acknowledged(target) for name in names])
    return {"code": target.ended(), "findings": found.findings, "was_reused": found.reused["uses"] > 0}


def groups_of_several_sizes_through_kills(root: Path) -> dict[str, Any]:
    """The curator chooses among three sizes; whoever goes on with a group makes it as large as it was to be."""
    sections = {
        "curator": {"group_sizes": [2, 3, 5], "estimator": "last_mean", "exploration": 0.5, "flush_outcomes": 4}
    }
    target = FakeTarget(configuration(root, num_steps=10**6, seed=3, **sections))
    driver = Driver(target, 0, lambda line: None)
    driver.begin()
    kills = [Kill("sampler", after_steps=2), Kill("curator", "outcomes.flushed"), Kill("buffer", after_steps=1)]
    kills += [Kill("sampler", after_steps=1), Kill("learner", "learner.stepped"), Kill("all", after_steps=1)]
    driver.carry_out(kills * 2, forever())
    driver.wait_for_steps(15)
    target.stop()
    driver.wait_for_end()
    found = audit(target.run_dir, [name for names in _acknowledged(target) for name in names])
    rows = [
        row
        for path in sorted((target.run_dir / "journal").glob("transitions-*.arrow"))
        for row in decoded(path)
        if row["kind"] in ("picked", "accepted", "no_signal")
    ]
    chosen = {row["group_id"]: row["num_rollouts"] for row in rows if row["kind"] == "picked"}
    made = {row["group_id"]: row["num_rollouts"] for row in rows if row["kind"] != "picked"}
    return {
        "code": target.ended(),
        "findings": found.findings,
        "are_several": len(set(made.values())) > 1,
        "num_of_another_size": sum(chosen[name] != size for name, size in made.items() if name in chosen),
        "has_some": sum(name in chosen for name in made) > 5,
    }


def decoded(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, up to where a kill has torn it."""
    rows: list[dict[str, Any]] = []
    with pa.ipc.open_stream(path) as reader, suppress(pa.ArrowInvalid, OSError, EOFError):
        for batch in reader:
            rows += batch.to_pylist()
    return rows


SCENES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "C23": a_sampler_dies_while_it_takes_weights,
    "C34": six_steps_with_a_kill_after_the_third,
    "uses": further_uses_and_old_rollouts_through_kills,
    "sizes": groups_of_several_sizes_through_kills,
}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: scene(Path(sys.argv[1]) / name) for name, scene in SCENES.items()}))
