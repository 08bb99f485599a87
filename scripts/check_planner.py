"""Holds the planner's predictions against real runs of the small model.

One run calibrates the model. Six others differ from it in age, publish interval, group size, passes of the learner and
cores. Predicted and measured are trained tokens a second and mean policy age, over the same steps: those after a third
of the run. Goals: throughput within 15%, mean age within 20%. Exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.small_model import made_model

from stream_grpo.experiments.cells import Cell, Series
from stream_grpo.experiments.predicted import draw_predicted
from stream_grpo.planner.calibration import calibrate
from stream_grpo.planner.measured import Compared, compare

ROOT = Path(__file__).parents[1]
MAX_THROUGHPUT_ERROR, MAX_AGE_ERROR = 0.15, 0.20


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    parser.add_argument("--steps", type=int, default=90, help="learner steps of each run")
    parser.add_argument("--root", type=Path, help="a folder to keep; by default a temporary one")
    parser.add_argument("--picture", type=Path, help="a file for predicted against measured, .png or .svg")
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="these settings alone")
    options = parser.parse_args()
    root = (options.root or Path(tempfile.mkdtemp(prefix="check-planner-"))).resolve()
    models = made_model(root)
    world = calibrate(made_run(root, models, "calibration", CALIBRATION, options.steps)).world
    found: dict[str, Compared] = {}
    print(HEADER)
    for name in options.only or CASES:
        run = made_run(root, models, name, CASES[name], options.steps)
        found[name] = compare(world, run, CASES[name].cores)
        print(line(name, found[name]), flush=True)
    worst = {
        "worst_throughput_error": max(abs(c.throughput_error) for c in found.values()),
        "worst_age_error": max(abs(c.age_error) for c in found.values()),
    }
    print(f"goals: throughput within {MAX_THROUGHPUT_ERROR:.0%}, mean age within {MAX_AGE_ERROR:.0%}; {worst}")
    if options.picture is not None:
        draw_predicted(found.items(), f"{options.steps} learner steps, small model, two cores", options.picture)
    if options.json:
        print(json.dumps({"settings": {name: c.as_fields() for name, c in found.items()}, **worst}))
    is_met = worst["worst_throughput_error"] <= MAX_THROUGHPUT_ERROR and worst["worst_age_error"] <= MAX_AGE_ERROR
    return 0 if is_met else 1


def made_run(root: Path, models: Path, name: str, case: Case, num_steps: int) -> Path:
    """A run that has ended; one that is there from an earlier call is taken as it is."""
    settings = {
        "run.num_steps": num_steps,
        "model.path": models / "model",
        "pool.files": json.dumps([str(models / "pool.jsonl")]),
        "evaluation.files": "[]",
        "evaluation.interval": 0,
        "evaluation.num_problems": 0,
        "tracking.wandb": "disabled",
        **case.changes,
    }
    config = ROOT / "configs" / "arithmetic-cpu.toml"
    series = Series(file=config, overrides=(), root=root / "runs", num_cores=case.cores)
    cell = Cell(name, {key: str(value) for key, value in settings.items()})
    return series.made(cell, lambda text: print(text, file=sys.stderr))


HEADER = f"{'setting':16} {'trained/s':>10} {'predicted':>10} {'error':>7} {'age':>6} {'predicted':>10} {'error':>7}"


def line(name: str, c: Compared) -> str:
    return (
        f"{name:16} {c.throughput:10,.0f} {c.predicted_throughput:10,.0f} {c.throughput_error:+7.1%} "
        f"{c.age:6.2f} {c.predicted_age:10.2f} {c.age_error:+7.1%}  {c.bottleneck}"
    )


if __name__ == "__main__":
    sys.exit(main())
