"""What staleness costs and what it buys, so that a user can choose `max_policy_age` and a preset.

imposed: presets on weights of an imposed age, as `bench_recipes` does it: the rise of held-out pass@1. own: runs
of the default preset, one for each `max_policy_age`, in which the age works out by itself: rise, seconds of the loop,
mean age. score: the weights of those runs, when they have ended. Only `own` needs an idle machine. Every training is
kept in --root (imposed.jsonl, own.jsonl): --minutes stops between two, the next call goes on. Exit code 3: not all of
it is there yet.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_recipes
from benchmarks import made, page
from benchmarks.page import table
from benchmarks.results import Results
from benchmarks.small_model import made_model
from benchmarks.watch import memory_table, watched_memory
from recipes import results as imposed_results
from recipes import verdict
from recipes.plan import BenchError
from recipes.plan import Cell as Imposed
from staleness import picture, runs
from time_to_score.scoring import scorer

from stream_grpo.algo.presets import PRESETS
from stream_grpo.config_file import load
from stream_grpo.errors import StreamGrpoError
from stream_grpo.experiments.cells import Series
from stream_grpo.files import read_object, sha256, write_json

LAGS, AGES = (0, 4, 8, 16, 32), (0, 1, 2, 4, 8, 16)
CHOSEN = ("dppo_kl", "topr", "tis", "m2po", "grpo")
"""A divergence mask (the default), the two-sided weight that bears 16 as well, a truncated correction, a mask by second
moment, and plain clipping."""
NOT_EVALUATED = (
    "evaluation.interval=0",
    "evaluation.num_problems=0",
    "tracking.wandb=disabled",
    "tracking.dashboard=false",
)
PARTS = ("imposed", "own", "score")
START = "start"
"""Key of the scores of the weights that all runs begin with."""
RUN_S = 120.0
"""A run is reckoned with so many seconds until one is there."""


def main() -> int:
    options = parse_arguments()
    bench = Bench(options)
    deadline = time.monotonic() + 60 * options.minutes
    try:
        if "imposed" in options.only:
            bench.impose(deadline)
        if "own" in options.only:
            bench.let_run(deadline)
        if "score" in options.only:
            bench.score(deadline)
    except (BenchError, StreamGrpoError) as error:
        sys.exit(f"bench_staleness: {error}")
    if bench.imposed_rows() or bench.own_rows():
        report(bench)
    return 0 if bench.is_whole() else 3


class Bench:
    """The cells of both parts, and what is there of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.root = options, options.root.resolve()
        self._models = made_model(self.root)
        self._seeds = range(1, options.seeds + 1)
        self._imposed = [
            Imposed(preset, lag, seed, options.steps)
            for seed in self._seeds
            for preset in options.presets
            for lag in options.lags
        ]
        self._imposed_results = imposed_results.Results(
            self.root / "imposed.jsonl",
            functools.cache(lambda cell: imposed_results.settings_hash(cell, self._imposed_config(cell))),
        )
        self._own = runs.cells(options.ages, self._seeds)
        files = {name: json.dumps([str(self._models / f"{name}.jsonl")]) for name in ("pool", "heldout")}
        self._places = (
            f"model.path={self._models / 'model'}",
            f"pool.files={files['pool']}",
            f"evaluation.files={files['heldout']}",
        )
        overrides = (*self._places, *NOT_EVALUATED, f"run.num_steps={options.steps}", *options.set)
        self._series = Series(file=bench_recipes.CONFIG, overrides=overrides, root=self.root / "runs")
        self.own_results = Results(self.root / "own.jsonl")

    def _imposed_config(self, cell: Imposed) -> Any:
        return bench_recipes.configuration(self._models, cell, self.options.set)

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "config": sha256(bench_recipes.CONFIG),
            "weights": sha256(self._models / "model" / "model.safetensors"),
            "pool": sha256(self._models / "pool.jsonl"),
            "num_steps": options.steps,
            "set": list(options.set),
            "num_problems": options.problems,
            "num_samples": options.samples,
        }

    def impose(self, deadline: float) -> None:
        """The cells of an imposed age, where they are not there yet."""
        bench_recipes.run_stage(
            "imposed",
            self._imposed,
            self._imposed_results,
            self._imposed_config,
            num_jobs=self.options.jobs,
            deadline=deadline,
        )

    def let_run(self, deadline: float) -> None:
        """Runs of each `max_policy_age`, where they are not there yet."""
        self._series.check(self._own)
        took_s = RUN_S
        for cell in self._own:
            if self.own_results.find(cell.name, self._settings()) is not None or self._ended(cell.name):
                continue
            if time.monotonic() + took_s > deadline:
                log(f"{cell.name} would not end in time; the same command goes on")
                return
            # A loop that was cut off has no seconds that could be compared.
            shutil.rmtree(self.root / "runs" / cell.name, ignore_errors=True)
            begun = time.monotonic()
            with watched_memory() as memory:
                self._series.made(cell, log)
            took_s = time.monotonic() - begun
            write_json(self.root / "runs" / f"{cell.name}.memory.json", memory)

    def _ended(self, name: str) -> bool:
        return (self.root / "runs" / name / "summary.json").exists()

    def score(self, deadline: float) -> None:
        """What the weights of the runs that have ended score, and of those that they began with."""
        settings = self._settings()
        waiting = [
            (cell.name, self.root / "runs" / cell.name / "model")
            for cell in self._own
            if self.own_results.find(cell.name, settings) is None and self._ended(cell.name)
        ]
        if self.own_results.find(START, settings) is None:
            waiting.insert(0, (START, self._models / "model"))
        if not waiting:
            return
        config = load(bench_recipes.CONFIG, [*self._places, *self.options.set, "evaluation.num_problems=100000"])
        with scorer(config, self.options.problems, self.options.samples) as asked:
            for name, folder in waiting:
                if time.monotonic() > deadline:
                    log("the time is up; the same command goes on")
                    return
                (counts,) = asked.counts([folder / "model.safetensors"])
                values: dict[str, Any] = {"counts": counts}
                if name != START:
                    run = folder.parent
                    memory = run.with_name(f"{name}.memory.json")
                    values |= runs.result_of(read_object(run / "summary.json"))
                    values |= {"memory": read_object(memory)} if memory.exists() else {}
                self.own_results.add(name, settings, values)
                log(f"{name}: scored")

    def imposed_rows(self) -> list[verdict.Row]:
        """Of the cells that are there."""
        return verdict.rows(self._imposed_results.of(self._imposed))

    def own_lines(self) -> dict[str, dict[str, Any]]:
        """By the name of their cell, those that are there."""
        found = {cell.name: self.own_results.find(cell.name, self._settings()) for cell in self._own}
        return {name: line for name, line in found.items() if line is not None}

    def own_rows(self) -> list[runs.Row]:
        """Of the runs that are there and scored."""
        start = self.own_results.find(START, self._settings())
        if start is None:
            return []
        return runs.rows(self.own_lines(), start["counts"], self.options.ages, self._seeds)

    def told(self) -> str:
        """How much of it is there, where not all is."""
        there = len(self._imposed_results.of(self._imposed)), len(self.own_lines())
        wanted = len(self._imposed), len(self._own)
        if there == wanted:
            return ""
        return (
            f"**{there[0]} of {wanted[0]} trainings of an imposed age and {there[1]} of {wanted[1]} runs are there.** "
        )

    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.told()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder that is kept; runs/bench_staleness, or ..._quick")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), metavar="NAME", help=f"{' '.join(CHOSEN)}")
    parser.add_argument("--lags", nargs="+", type=int, help="imposed ages")
    parser.add_argument("--ages", nargs="+", type=int, help="of max_policy_age")
    parser.add_argument("--seeds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--steps", type=int, help="learner steps of a training; 40, or 4 with --quick")
    parser.add_argument("--problems", type=int, help="held-out problems of a score; 300, or 64 with --quick")
    parser.add_argument("--samples", type=int, help="of each; 8, or 4 with --quick")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="what is done; all of it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="trainings of an imposed age at once, each on one core")
    parser.add_argument(
        "--page", type=Path, default=page.PAGE, help="where the section is written, the picture beside it"
    )
    parser.add_argument("--quick", action="store_true", help="some minutes: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="a last line {imposed, own}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all trainings")
    options = parser.parse_args()
    whole = {"presets": CHOSEN, "lags": LAGS, "ages": AGES, "seeds": 3, "steps": 40, "problems": 300, "samples": 8}
    quick = {
        "presets": CHOSEN[:1],
        "lags": (0, 2),
        "ages": (0, 4),
        "seeds": 1,
        "steps": 4,
        "problems": 64,
        "samples": 4,
    }
    for name, value in (quick if options.quick else whole).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.root = options.root or Path(f"runs/bench_staleness{'_quick' if options.quick else ''}")
    return options


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(bench: Bench) -> None:
    """Tables, picture, page, and the line for programs."""
    options, imposed, own = bench.options, bench.imposed_rows(), bench.own_rows()
    text = section(bench, imposed, own)
    print(text)
    page.put(
        options.page,
        "bench_staleness",
        "What staleness costs and buys",
        text,
        is_quick=options.quick,
        command=made.command("bench_staleness", sys.argv[1:]),
        made=[line["made"] for line in bench.own_lines().values()],
        image="staleness_cost.png",
        draw=lambda path: picture.draw(imposed, own, path),
        say=log,
    )
    if options.json:
        by_preset: dict[str, dict[int, Any]] = {}
        for row in imposed:
            by_preset.setdefault(row.preset, {})[row.lag] = row._asdict()
        print(json.dumps({"imposed": by_preset, "own": {row.max_policy_age: row._asdict() for row in own}}))


def section(bench: Bench, imposed: Sequence[verdict.Row], own: Sequence[runs.Row]) -> str:
    """The section in docs/benchmarks.md."""
    options = bench.options
    heads = ("`max_policy_age`", "seeds", "mean age", "seconds of the loop", "rise of held-out pass@1", "95 %", "after")
    cells = [
        (
            str(row.max_policy_age),
            str(row.num_seeds),
            f"{row.mean_age:.2f}",
            f"{row.seconds:.0f} ({row.least_s:.0f} to {row.most_s:.0f})",
            f"{row.rise:+.3f}",
            f"{row.low:+.3f} to {row.high:+.3f}",
            f"{row.score:.3f}",
        )
        for row in own
    ]
    parts = [
        f"{bench.told()}`{bench_recipes.CONFIG.name}`, {options.steps} learner steps. Runs of the default preset, one "
        f"for each `max_policy_age`; intervals are over seeds and problems:",
        table(heads, cells),
    ]
    memory = next((line["memory"] for line in bench.own_lines().values() if "memory" in line), None)
    if imposed:
        parts += [
            "Weights of an imposed age, as `scripts/bench_recipes` imposes it (8 groups a step):",
            verdict.markdown(imposed),
            *held(imposed),
        ]
    parts.append("![Rise by imposed age, rise and seconds by max_policy_age](images/staleness_cost.png)")
    if memory is not None:
        parts += ["Memory of the processes of one of the runs:", memory_table(memory)]
    return "\n\n".join(parts)


def held(imposed: Sequence[verdict.Row]) -> list[str]:
    """How far each preset holds: the largest age up to which its interval lies above half of its own rise at age 0."""
    lines = []
    for preset in dict.fromkeys(row.preset for row in imposed):
        rows = sorted((row for row in imposed if row.preset == preset), key=lambda row: row.lag)
        if rows[0].lag or len(rows) == 1:
            continue
        fresh, last = rows[0].rise, None
        for row in rows:
            if row.low <= fresh / 2 or row.num_ended_early:
                break
            last = row.lag
        told = "not even at age 0" if last is None else f"up to age {last}"
        lines.append(f"- `{preset}`: {told}, of ages {', '.join(str(row.lag) for row in rows)}")
    if not lines:
        return []
    return ["How far each holds, by a 95 % interval that lies above half of its own rise at age 0:", "\n".join(lines)]


if __name__ == "__main__":
    sys.exit(main())
