"""Which recipe bears staleness, measured on the small model with an age that is imposed.

screen: every preset without a critic at lag 16; seeds: the best of them at lags 0, 4 and 16 with three seeds; long: the
three best at lag 64. The default is the preset whose rise has the largest lower bound at lags 4 and 16.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from recipes import plan, verdict
from recipes.plan import BenchError, Cell
from recipes.results import Results, settings_hash
from recipes.workers import run_cells

from stream_grpo.algo.presets import PRESETS
from stream_grpo.config import Config
from stream_grpo.config_file import load

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "arithmetic-cpu.toml"
SETTINGS = ("stream.groups_per_step=8", "evaluation.interval_problems=128", "evaluation.interval_samples=8")
"""What differs from the configuration: a step of about a second, and an evaluation of every cell."""
STAGES = ("screen", "seeds", "long")


def main() -> int:
    arguments = parse_arguments()
    if not (arguments.model / "model").is_dir():
        subprocess.run(["stream-grpo", "make-model", str(arguments.model)], check=True)

    def config_of(cell: Cell) -> Config:
        return configuration(arguments.model, cell, arguments.set)

    results = Results(arguments.results, functools.cache(lambda cell: settings_hash(cell, config_of(cell))))
    deadline = time.monotonic() + 60 * arguments.minutes
    for stage in STAGES if arguments.stage == "all" else [arguments.stage]:
        cells = cells_of(stage, results)
        run_stage(stage, cells, results, config_of, num_jobs=arguments.jobs, deadline=deadline)
        if results.missing(cells):
            break  # what comes next depends on it
    report(results, arguments.report, as_json=arguments.json)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all", help="what is run")
    parser.add_argument("--model", type=Path, default=Path("models/arithmetic"), help="folder of the small model")
    parser.add_argument("--results", type=Path, default=Path("runs/bench_recipes.jsonl"), help="where cells are kept")
    parser.add_argument("--report", type=Path, help="file for the table")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each on one core")
    parser.add_argument("--json", action="store_true", help="a last line for programs")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="another setting, for all cells")
    return parser.parse_args()


def configuration(model: Path, cell: Cell, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a cell."""
    files = {name: json.dumps([str(model / f"{name}.jsonl")]) for name in ("pool", "heldout")}
    return load(
        CONFIG,
        [
            f"model.path={model / 'model'}",
            f"pool.files={files['pool']}",
            f"evaluation.files={files['heldout']}",
            *SETTINGS,
            f"algo.preset={cell.preset}",
            f"run.seed={cell.seed}",
            *overrides,
        ],
    )


def cells_of(stage: str, results: Results) -> list[Cell]:
    """The cells of a stage. Raises BenchError where the stage before it, which they depend on, is not complete."""
    if stage == "screen":
        # A critic begins with no idea, and has hardly one by the end of a cell.
        return plan.screen(name for name, preset in PRESETS.items() if not preset.recipe.has_critic)
    before = STAGES[STAGES.index(stage) - 1]
    earlier = cells_of(before, results)
    if missing := results.missing(earlier):
        raise BenchError(
            f"--stage {stage}: {len(missing)} of {len(earlier)} cells of {before} are missing; run that first"
        )
    table = verdict.rows(results.of(earlier))
    if stage == "seeds":
        return plan.seeds(verdict.best(table, [plan.SCREEN_LAG]))
    return plan.long(verdict.best(table, verdict.DECIDING_LAGS))


def run_stage(
    stage: str,
    cells: list[Cell],
    results: Results,
    config_of: Callable[[Cell], Config],
    *,
    num_jobs: int,
    deadline: float,
) -> None:
    """Run what is missing of a stage, until the deadline."""
    missing = results.missing(cells)
    outdated = f", {n} of them again because settings have changed" if (n := results.num_outdated(missing)) else ""
    print(f"{stage}: {len(cells)} cells, {len(missing)} to run{outdated}", flush=True)
    if not missing:
        return
    waiting = ((cell, config_of(cell)) for cell in until(deadline, missing))
    for number, (cell, result) in enumerate(
        run_cells(waiting, num_jobs=num_jobs, start_with=config_of(missing[0])), start=1
    ):
        results.add(cell, result)
        print(f"[{number}/{len(missing)}] {line_of(cell, result)}", flush=True)


def until(deadline: float, cells: Iterable[Cell]) -> Iterator[Cell]:
    """Cells as long as there is time to begin one."""
    for cell in cells:
        if time.monotonic() >= deadline:
            return
        yield cell


def line_of(cell: Cell, result: dict[str, Any]) -> str:
    rise = result["rise"]
    line = (
        f"{cell.preset:11} lag {cell.lag:2} seed {cell.seed}  mean age {result['age']}  rise {rise['mean']:+.3f} "
        f"[{rise['low']:+.3f}, {rise['high']:+.3f}]  {result['seconds']:.0f} s, "
        f"{result['train_s'] / max(1, result['steps']):.2f} s a step"
    )
    return f"{line}  {result['ended_early']}" if result["ended_early"] else line


def report(results: Results, path: Path | None, *, as_json: bool) -> None:
    """Print the table of all cells that are there, and the default once it is decided."""
    cells, decided = known_cells(results)
    found = results.of(cells)
    table = verdict.rows(found)
    best = verdict.best(table, verdict.DECIDING_LAGS)
    default = best[0] if decided and best else None
    lags = " and ".join(map(str, verdict.DECIDING_LAGS))
    said = (
        f"Default by measurement: `{default}`, the largest lower bound of the rise at the worse of lags {lags}."
        if default
        else "Default by measurement: not decided, cells of the stages screen or seeds are missing."
    )
    text = (
        f"{verdict.markdown(table)}\n\nRise of held-out pass@1 from before to after, by problem; its interval is a "
        f"95 % bootstrap over\nseeds and problems. `ess`, shares of tokens and age are means over the steps after the "
        f"first `lag`.\nSettings: {CONFIG.name} with {', '.join(SETTINGS)}; {plan.NUM_STEPS} learner steps after the "
        f"first `lag`, {plan.NUM_LONG_STEPS} at lag {plan.LONG_LAG}.\n\n{said}\n"
    )
    print("\n" + text)
    if path is not None:
        path.write_text(text)
    if as_json:
        by_preset: dict[str, dict[int, Any]] = {}
        for row in table:
            by_preset.setdefault(row.preset, {})[row.lag] = row._asdict()
        print(json.dumps({"cells": len(found), "default": default, "by_preset": by_preset}))


def known_cells(results: Results) -> tuple[list[Cell], bool]:
    """The cells of all stages that are known by now, and whether the default is decided.

    What was chosen by the screen is judged by the other seeds alone: the best of many is best partly by luck.
    """
    screen = cells_of("screen", results)
    if results.missing(screen):
        return screen, False
    seeds = cells_of("seeds", results)
    if results.missing(seeds):
        return screen, False
    chosen = {cell.preset for cell in seeds}
    rest = [cell for cell in screen if cell.preset not in chosen]
    return rest + seeds + cells_of("long", results), True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"bench_recipes: {error}")
