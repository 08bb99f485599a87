"""Holds the planner's predictions against real runs of the small model.

One run calibrates the model. Six others differ from it in age, publish interval, group size, passes of the learner and
cores. Predicted and measured are trained tokens a second and mean policy age, over the same steps: those after a third
of the run. Goals: throughput within 15%, mean age within 20%. Exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from stream_grpo.config_file import load_run
from stream_grpo.metrics import MetricsReader
from stream_grpo.planner.calibration import calibrate
from stream_grpo.planner.commands import settings_of
from stream_grpo.planner.simulation import simulate
from stream_grpo.planner.world import World

ROOT = Path(__file__).parents[1]
MAX_THROUGHPUT_ERROR, MAX_AGE_ERROR = 0.15, 0.20
WARMUP_SHARE = 1 / 3
RUN_LIMIT_S = 1800.0


class Case(NamedTuple):
    """A run: what differs from the configuration, and the cores it may use."""

    changes: Mapping[str, int]
    cores: int = 2


CALIBRATION = Case({})
CASES: Mapping[str, Case] = {
    "age-1": Case({"stream.max_policy_age": 1}),
    "age-2-publish-2": Case({"stream.max_policy_age": 2, "stream.publish_interval": 2}),
    "age-8-publish-4": Case({"stream.max_policy_age": 8, "stream.publish_interval": 4}),
    # Half the group, twice the groups: steps of the same size.
    "group-8": Case({"sampler.group_size": 8, "stream.groups_per_step": 32}),
    # Four passes over each batch: the learner is the bottleneck.
    "four-epochs": Case({"learner.num_epochs": 4}),
    # Sampler and learner share a core.
    "one-core": Case({}, cores=1),
}


class Compared(NamedTuple):
    """Predicted and measured figures of a setting."""

    throughput: float
    predicted_throughput: float
    age: float
    predicted_age: float
    bottleneck: str

    @property
    def throughput_error(self) -> float:
        """Relative to what was measured."""
        return self.predicted_throughput / self.throughput - 1

    @property
    def age_error(self) -> float:
        """Relative to what was measured; ages of a fraction of a step are held against a whole one."""
        return (self.predicted_age - self.age) / max(self.age, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    parser.add_argument("--steps", type=int, default=90, help="learner steps of each run")
    parser.add_argument("--root", type=Path, help="a folder to keep; by default a temporary one")
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="these settings alone")
    options = parser.parse_args()
    root = (options.root or Path(tempfile.mkdtemp(prefix="check-planner-"))).resolve()
    models = make_models(root)
    world = calibrate(made_run(root, models, "calibration", CALIBRATION, options.steps)).world
    found: dict[str, Compared] = {}
    print(HEADER)
    for name in options.only or CASES:
        run = made_run(root, models, name, CASES[name], options.steps)
        found[name] = compare(world, run, CASES[name], options.steps)
        print(line(name, found[name]), flush=True)
    worst = {
        "worst_throughput_error": max(abs(c.throughput_error) for c in found.values()),
        "worst_age_error": max(abs(c.age_error) for c in found.values()),
    }
    print(f"goals: throughput within {MAX_THROUGHPUT_ERROR:.0%}, mean age within {MAX_AGE_ERROR:.0%}; {worst}")
    if options.json:
        print(json.dumps({"settings": {name: as_fields(c) for name, c in found.items()}, **worst}))
    is_met = worst["worst_throughput_error"] <= MAX_THROUGHPUT_ERROR and worst["worst_age_error"] <= MAX_AGE_ERROR
    return 0 if is_met else 1


def make_models(root: Path) -> Path:
    """The small model and its problems."""
    models = root / "models"
    if not (models / "model" / "model.safetensors").exists():
        call(["make-model", str(models)])
    return models


def made_run(root: Path, models: Path, name: str, case: Case, num_steps: int) -> Path:
    """A run that has ended; one that is there from an earlier call is taken as it is."""
    run = root / "runs" / name
    if not (run / "summary.json").exists():
        settings = {
            "run.name": name,
            "run.root": str(root / "runs"),
            "run.num_steps": num_steps,
            "model.path": str(models / "model"),
            "pool.files": json.dumps([str(models / "pool.jsonl")]),
            "evaluation.files": "[]",
            "evaluation.interval": 0,
            "evaluation.num_problems": 0,
            "tracking.wandb": "disabled",
            **case.changes,
        }
        overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        call(["train", str(ROOT / "configs" / "arithmetic-cpu.toml"), *overrides], case.cores)
    return run


def call(arguments: Sequence[str], num_cores: int = 2) -> None:
    """Run the command on the first cores that this process may use. Raises CalledProcessError where it fails."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    subprocess.run(
        [sys.executable, "-m", "stream_grpo.cli", *arguments],
        check=True,
        timeout=RUN_LIMIT_S,
        stdout=sys.stderr,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def compare(world: World, run: Path, case: Case, num_steps: int) -> Compared:
    """The same steps of a real run and of the model."""
    warmup = int(num_steps * WARMUP_SHARE)
    settings = replace(settings_of(load_run(run)), cores=case.cores)
    predicted = simulate(world, settings, num_steps=num_steps, warmup_steps=warmup)
    steps = [step for step in MetricsReader(run).new_lines() if step["event"] == "step"]
    first, rest = steps[warmup - 1], steps[warmup:]
    seconds = rest[-1]["time_s"] - first["time_s"]
    return Compared(
        throughput=(rest[-1]["tokens"]["trained"] - first["tokens"]["trained"]) / seconds,
        predicted_throughput=predicted.trained_tokens_per_s,
        age=sum(step["age_mean"] for step in rest) / len(rest),
        predicted_age=predicted.age_mean,
        bottleneck=predicted.bottleneck(),
    )


HEADER = f"{'setting':16} {'trained/s':>10} {'predicted':>10} {'error':>7} {'age':>6} {'predicted':>10} {'error':>7}"


def line(name: str, c: Compared) -> str:
    return (
        f"{name:16} {c.throughput:10,.0f} {c.predicted_throughput:10,.0f} {c.throughput_error:+7.1%} "
        f"{c.age:6.2f} {c.predicted_age:10.2f} {c.age_error:+7.1%}  {c.bottleneck}"
    )


def as_fields(c: Compared) -> dict[str, Any]:
    return c._asdict() | {"throughput_error": c.throughput_error, "age_error": c.age_error}


if __name__ == "__main__":
    sys.exit(main())
