"""What staleness costs and what it buys, so that a user can choose `max_policy_age` and a preset.

imposed: presets on weights of an imposed age, as `bench_recipes` does it: the rise of held-out pass@1. own: runs
of the default preset, one for each `max_policy_age`, in which the age works out by itself: rise, seconds of the loop,
mean age. Every training is kept in --root: --minutes stops between two, the next call goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_recipes
from benchmarks.page import PAGE, table, write_section
from recipes import verdict
from recipes.plan import Cell as Imposed
from recipes.results import Results, settings_hash
from staleness import picture, runs

from stream_grpo.algo.presets import PRESETS
from stream_grpo.experiments.cells import Series, call

LAGS, AGES = (0, 4, 8, 16, 32), (0, 1, 2, 4, 8, 16)
CHOSEN = ("dppo_kl", "topr", "tis", "m2po", "grpo")
"""A divergence mask (the default), the two-sided weight that bears 16 as well, a truncated correction, a mask by second
moment, and plain clipping."""
NOT_EVALUATED = ("evaluation.interval=0", "tracking.wandb=disabled", "tracking.dashboard=false")


def main() -> int:
    options = parse_arguments()
    root = options.root.resolve()
    models = root / "models"
    if not (models / "model" / "model.safetensors").exists():
        root.mkdir(parents=True, exist_ok=True)
        call(["make-model", str(models)], root / "make-model.log")
    deadline = time.monotonic() + 60 * options.minutes
    imposed = impose(models, root / "imposed.jsonl", options, deadline)
    own = let_run(models, root / "runs", options, deadline)
    report(imposed, own, options, root)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder that is kept; runs/bench_staleness, or ..._quick")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), metavar="NAME", help=f"{' '.join(CHOSEN)}")
    parser.add_argument("--lags", nargs="+", type=int, help="imposed ages")
    parser.add_argument("--ages", nargs="+", type=int, help="of max_policy_age")
    parser.add_argument("--seeds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--steps", type=int, help="learner steps of a training; 40, or 4 with --quick")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no training after so many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="trainings of an imposed age at once, each on one core")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the section is written, the picture beside it")
    parser.add_argument("--quick", action="store_true", help="some minutes: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="a last line {imposed, own}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all trainings")
    options = parser.parse_args()
    whole = {"presets": CHOSEN, "lags": LAGS, "ages": AGES, "seeds": 3, "steps": 40}
    quick = {"presets": CHOSEN[:1], "lags": (0, 2), "ages": (0, 4), "seeds": 1, "steps": 4}
    for name, value in (quick if options.quick else whole).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.root = options.root or Path(f"runs/bench_staleness{'_quick' if options.quick else ''}")
    return options


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def impose(models: Path, path: Path, options: argparse.Namespace, deadline: float) -> list[verdict.Row]:
    """The cells of an imposed age, where they are not there yet."""
    cells = [
        Imposed(preset, lag, seed, options.steps)
        for seed in range(1, options.seeds + 1)
        for preset in options.presets
        for lag in options.lags
    ]

    def config_of(cell: Imposed) -> Any:
        return bench_recipes.configuration(models, cell, options.set)

    results = Results(path, functools.cache(lambda cell: settings_hash(cell, config_of(cell))))
    bench_recipes.run_stage("imposed", cells, results, config_of, num_jobs=options.jobs, deadline=deadline)
    return verdict.rows(results.of(cells))


def let_run(models: Path, root: Path, options: argparse.Namespace, deadline: float) -> list[runs.Row]:
    """Runs of each `max_policy_age`; those that the time does not suffice for are missing in the rows."""
    files = {name: json.dumps([str(models / f"{name}.jsonl")]) for name in ("pool", "heldout")}
    overrides = (
        f"model.path={models / 'model'}",
        f"pool.files={files['pool']}",
        f"evaluation.files={files['heldout']}",
        *NOT_EVALUATED,
        *(("evaluation.num_problems=64", "evaluation.num_samples=4") if options.quick else ()),
        f"run.num_steps={options.steps}",
        *options.set,
    )
    series = Series(file=bench_recipes.CONFIG, overrides=overrides, root=root)
    seeds = range(1, options.seeds + 1)
    cells = runs.cells(options.ages, seeds)
    series.check(cells)
    made: dict[str, Path] = {}
    for cell in cells:
        if time.monotonic() >= deadline:
            log("the time is up; the same command goes on")
            break
        made[cell.name] = series.made(cell, log)
    return runs.rows(made, options.ages, seeds)


def report(imposed: Sequence[verdict.Row], own: Sequence[runs.Row], options: argparse.Namespace, root: Path) -> None:
    """Tables, picture, page, and the line for programs."""
    heads = ("`max_policy_age`", "seeds", "mean age", "seconds of the loop", "rise of held-out pass@1", "95 %", "after")
    cells = [
        (
            str(row.max_policy_age),
            str(row.num_seeds),
            f"{row.mean_age:.2f}",
            f"{row.seconds:.0f}",
            f"{row.rise:+.3f}",
            f"{row.low:+.3f} to {row.high:+.3f}",
            f"{row.score:.3f}",
        )
        for row in own
    ]
    text = "\n\n".join(
        [
            f"`{bench_recipes.CONFIG.name}`, {options.steps} learner steps. Runs of the default preset, one for each "
            f"`max_policy_age`; the interval of a run is over problems, here the mean over seeds:",
            table(heads, cells),
            "Weights of an imposed age, as `scripts/bench_recipes` imposes it (8 groups a step); the interval is over "
            "seeds and problems:",
            verdict.markdown(imposed),
            "![Rise by imposed age, rise and seconds by max_policy_age](images/staleness_cost.png)",
        ]
    )
    print(text)
    image = options.page.parent / "images" / "staleness_cost.png"
    drawn = root / image.name
    picture.draw(imposed, own, drawn)
    if write_section(options.page, "bench_staleness", "What staleness costs and buys", text, is_quick=options.quick):
        image.parent.mkdir(parents=True, exist_ok=True)
        os.replace(drawn, image)
    else:
        log(f"{options.page}: left as it is; it has figures of a whole measurement")
    if options.json:
        by_preset: dict[str, dict[int, Any]] = {}
        for row in imposed:
            by_preset.setdefault(row.preset, {})[row.lag] = row._asdict()
        print(json.dumps({"imposed": by_preset, "own": {row.max_policy_age: row._asdict() for row in own}}))


if __name__ == "__main__":
    sys.exit(main())
