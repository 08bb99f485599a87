"""Which way of choosing problems teaches a simulated learner most, at equal numbers of rollouts.

Each method is tuned first: every one of its settings on seeds that are not reported, on the world of the same pool size
at lag 4. Then each runs with its best setting on seeds 0, 1, 2, ..., paired: a seed makes the same problems for all.
The area is the mean held-out accuracy over 10,000 to 180,000 rollouts, whatever the method paid them for; a method
named `free` has offline pass rates of two models that are not counted, `charged` pays for them.

What has run is kept in a file and not run again. Interrupt and go on as you like.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from curation.cells import Cell, Results, best_settings, make_cell, run_cells, tuning_cells
from curation.methods import METHODS
from curation.show import FIGURES, Rows, mean, picture, table
from curation.world import CORE, VARIATIONS, WORLDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=[*WORLDS, "core", "variations"], default=["core"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to so many less one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no cell begins after so many")
    parser.add_argument("--results", type=Path, default=Path("runs/bench_curation/cells.jsonl"))
    parser.add_argument("--picture", type=Path, help="PNG file of the curves")
    parser.add_argument("--json", action="store_true", help="a last line with the figures of every method")
    options = parser.parse_args()
    worlds = list(dict.fromkeys(world for name in options.worlds for world in _worlds(name)))
    until = time.monotonic() + 60 * options.minutes
    results = Results(options.results)
    if not run_cells(tuning_cells(worlds, options.methods), results, num_jobs=options.jobs, until=until):
        raise SystemExit("out of time while tuning; run it again to go on")
    cells = [
        make_cell(world, method, seed, best_settings(results.cells, world, method))
        for seed in range(options.seeds)
        for world in worlds
        for method in options.methods
    ]
    is_whole = run_cells(cells, results, num_jobs=options.jobs, until=until)
    _report(results, cells, worlds, options.methods, is_whole)
    shown = {world: _rows(results, cells, world, options.methods) for world in worlds}
    if options.picture:
        picture(shown, options.picture)
    if options.json:
        print(json.dumps(_summary(shown, options.methods)))


def _worlds(name: str) -> tuple[str, ...]:
    return {"core": CORE, "variations": VARIATIONS}.get(name, (name,))


def _rows(results: Results, cells: list[Cell], world: str, methods: list[str]) -> Rows:
    """Figures of the seeds that every method has: pairs are of whole seeds."""
    of_world = [cell for cell in cells if cell.world == world]
    seeds = sorted({cell.seed for cell in of_world} - {cell.seed for cell in of_world if cell not in results.cells})
    found = {(cell.method, cell.seed): cell for cell in of_world}
    return {method: {seed: results.cells[found[method, seed]] for seed in seeds} for method in methods}


def _report(results: Results, cells: list[Cell], worlds: list[str], methods: list[str], is_whole: bool) -> None:
    for world in worlds:
        print(f"\n{world}\n\n{table(_rows(results, cells, world, methods))}")
    print("\nsettings of the largest area on the tuning seeds:")
    for world in sorted({cell.world for cell in cells}):
        chosen = {method: dict(best_settings(results.cells, world, method)) for method in methods}
        print(f"  {world}: {json.dumps({name: settings for name, settings in chosen.items() if settings})}")
    costs = [(results.cells[cell]["cpu_s"], cell) for cell in cells if cell in results.cells]
    if costs:
        slowest, cell = max(costs)
        print(f"\n{len(costs)} cells, {sum(cost for cost, _ in costs):.0f} s of processor time; the slowest cell:")
        print(
            f"  {cell.method} on {cell.world}: {cell.num_rollouts} rollouts in {slowest:.1f} s (goal on 12k: under 5)"
        )
    if not is_whole:
        print("not all cells have run; run it again to go on")


def _summary(shown: dict[str, Rows], methods: list[str]) -> dict[str, dict[str, Any]]:
    summary = {}
    for method in methods:
        every = [row for rows in shown.values() for row in rows[method].values()]
        summary[method] = {name: None if (v := mean(every, name)) is None else round(v, 4) for name in FIGURES}
    return summary


if __name__ == "__main__":
    main()
