"""Which way of choosing problems teaches a simulated learner most, at equal numbers of rollouts.

Each method is tuned first: every one of its settings on seeds that are not reported, on the world of the same pool size
at lag 4. Then each runs with its best setting on seeds 0, 1, 2, ..., paired: a seed makes the same problems for all.
The area is the mean held-out accuracy over 10,000 to 180,000 rollouts, whatever the method paid them for; a method
named `free` has offline pass rates of two models that are not counted, `charged` pays for them.

What has run is kept in a file and not run again. Interrupt and go on as you like. All figures, with their page:

    scripts/bench_curation --worlds all --page docs/curation_figures.md --picture docs/images/curation.png --json

`--quick` runs each method with its first setting for 30,000 rollouts on two seeds: seconds, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curation.cells import Cell, Results, best_settings, make_cell, run_cells, tuned_on, tuning_cells
from curation.methods import METHODS, Settings
from curation.page import page, short_table
from curation.run import NUM_ROLLOUTS
from curation.show import FIGURES, Rows, mean, picture, table
from curation.world import CORE, VARIATIONS, WORLDS

QUICK_ROLLOUTS, QUICK_SEEDS = 30_000, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=[*WORLDS, "core", "variations", "all"], default=["core"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, help="seeds 0 to so many less one; else 20, 8 of a variation, 3 of 100k")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no cell begins after so many")
    parser.add_argument("--results", type=Path, default=Path("runs/bench_curation/cells.jsonl"))
    parser.add_argument("--picture", type=Path, help="PNG file of the curves")
    parser.add_argument("--page", type=Path, help="Markdown file of all tables")
    parser.add_argument("--quick", action="store_true", help="seconds, on the smallest world")
    parser.add_argument("--json", action="store_true", help="a last line with the figures of every method")
    options = parser.parse_args()
    if options.quick and (options.page or options.picture):
        parser.error("--quick makes no page and no picture")
    worlds = ["2k_lag4"] if options.quick else list(dict.fromkeys(w for name in options.worlds for w in _worlds(name)))
    until = time.monotonic() + 60 * options.minutes
    results = Results(options.results)
    chosen = {tuned_on(world): {name: METHODS[name][0].trials[0] for name in options.methods} for world in worlds}
    if not options.quick:
        tuning = tuning_cells(worlds, options.methods)
        if not run_cells(tuning, results, num_jobs=options.jobs, until=until, say=print):
            raise SystemExit("out of time while tuning; run it again to go on")
        chosen = {world: {m: best_settings(results.cells, world, m) for m in options.methods} for world in chosen}
    cells = _cells(worlds, options, chosen)
    is_whole = run_cells(cells, results, num_jobs=options.jobs, until=until, say=print)
    shown = {world: _rows(results, cells, world, options.methods) for world in worlds}
    _report(results, cells, shown, chosen, is_whole)
    if options.picture:
        picture(shown, options.picture)
    if options.page:
        cpu_s = sum(figures["cpu_s"] for figures in results.cells.values())
        text = page(shown, chosen, cpu_s=cpu_s, picture=options.picture, at=options.page)
        options.page.write_text(text, encoding="utf-8")
    if options.json:
        print(json.dumps(_summary(shown, options.methods)))


def _worlds(name: str) -> tuple[str, ...]:
    return {"core": CORE, "variations": VARIATIONS, "all": (*CORE, *VARIATIONS, "100k")}.get(name, (name,))


def _num_seeds(world: str) -> int:
    return 20 if world in CORE else 8 if world in VARIATIONS else 3


def _cells(worlds: list[str], options: argparse.Namespace, chosen: Mapping[str, Mapping[str, Settings]]) -> list[Cell]:
    """By seed first, so that what is there at any time is of as many seeds everywhere as can be."""
    num_seeds = {world: options.seeds or (QUICK_SEEDS if options.quick else _num_seeds(world)) for world in worlds}
    rollouts = QUICK_ROLLOUTS if options.quick else NUM_ROLLOUTS
    return [
        make_cell(world, method, seed, chosen[tuned_on(world)][method])._replace(num_rollouts=rollouts)
        for seed in range(max(num_seeds.values()))
        for world in worlds
        if seed < num_seeds[world]
        for method in options.methods
    ]


def _rows(results: Results, cells: list[Cell], world: str, methods: list[str]) -> Rows:
    """Figures of the seeds that every method has: pairs are of whole seeds."""
    of_world = [cell for cell in cells if cell.world == world]
    seeds = sorted({cell.seed for cell in of_world} - {cell.seed for cell in of_world if cell not in results.cells})
    found = {(cell.method, cell.seed): cell for cell in of_world}
    return {method: {seed: results.cells[found[method, seed]] for seed in seeds} for method in methods}


def _report(
    results: Results,
    cells: list[Cell],
    shown: Mapping[str, Rows],
    chosen: Mapping[str, Mapping[str, Settings]],
    is_whole: bool,
) -> None:
    for world, rows in shown.items():
        print(f"\n{world}\n\n{table(rows)}")
    print(f"\n{short_table(shown)}\n\nsettings of the largest area on the tuning seeds:")
    for world, by_method in chosen.items():
        print(f"  {world}: {json.dumps({name: dict(settings) for name, settings in by_method.items() if settings})}")
    costs = [(results.cells[cell]["cpu_s"], cell) for cell in cells if cell in results.cells]
    if costs:
        slowest, cell = max(costs)
        print(f"\n{len(costs)} cells, {sum(cost for cost, _ in costs):.0f} s of processor time; the slowest cell:")
        print(
            f"  {cell.method} on {cell.world}: {cell.num_rollouts} rollouts in {slowest:.1f} s (goal on 12k: under 5)"
        )
    if not is_whole:
        print("not all cells have run; run it again to go on")


def _summary(shown: Mapping[str, Rows], methods: list[str]) -> dict[str, dict[str, Any]]:
    summary = {}
    for method in methods:
        every = [row for rows in shown.values() for row in rows[method].values()]
        summary[method] = {name: None if (v := mean(every, name)) is None else round(v, 4) for name in FIGURES}
    return summary


if __name__ == "__main__":
    main()
