"""The cells of the comparison, as lines of a file: what has run is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from curation.methods import METHODS, Settings
from curation.run import NUM_ROLLOUTS, run
from curation.world import WORLDS

TUNING_SEEDS = (1000, 1001)
"""Never reported."""


class Cell(NamedTuple):
    """One run."""

    world: str
    method: str
    seed: int
    settings: str
    """As JSON with sorted keys."""
    num_rollouts: int = NUM_ROLLOUTS


def make_cell(world: str, method: str, seed: int, settings: Settings) -> Cell:
    """A cell of some settings."""
    return Cell(world, method, seed, json.dumps(dict(settings), sort_keys=True))


def tuned_on(world: str) -> str:
    """The world whose tuning seeds decide a method's settings: that of its size, at lag 4."""
    return "2k_lag4" if WORLDS[world].num_problems <= 2000 else "12k_lag4"


def tuning_cells(worlds: Iterable[str], methods: Iterable[str]) -> list[Cell]:
    """Every setting of every method on the tuning seeds."""
    return [
        make_cell(world, method, seed, settings)
        for world in sorted({tuned_on(world) for world in worlds})
        for method in methods
        for settings in _trials(method)
        for seed in TUNING_SEEDS
    ]


def _trials(method: str) -> Sequence[Settings]:
    trials = METHODS[method][0].trials
    return trials if len(trials) > 1 else ()


def best_settings(results: Mapping[Cell, dict[str, Any]], world: str, method: str) -> Settings:
    """The trial with the largest area under the curve on the tuning seeds; the first where nothing is tuned."""

    def area(settings: Settings) -> float:
        return sum(float(results[make_cell(tuned_on(world), method, s, settings)]["auc"]) for s in TUNING_SEEDS)

    trials = _trials(method)
    return max(trials, key=area) if trials else {}


class Results:
    """A JSONL file of cells and figures. A last line that is cut off counts as not run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cells: dict[Cell, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                self.cells[Cell(*row["cell"])] = row["figures"]
        if text and not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")

    def add(self, cell: Cell, figures: dict[str, Any]) -> None:
        """Keep a cell that has run."""
        self.cells[cell] = figures
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": list(cell), "figures": figures}) + "\n")


def run_cells(
    cells: Iterable[Cell],
    results: Results,
    *,
    num_jobs: int,
    until: float,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Run what has not run, in order, until the time `until` (of `time.monotonic`); whether all have run.

    `say` is told twenty times how far it is.
    """
    left = [cell for cell in dict.fromkeys(cells) if cell not in results.cells]
    start, every = time.monotonic(), max(1, len(left) // 20)
    for done, (cell, figures) in enumerate(_figures_of(left, num_jobs, until), start=1):
        results.add(cell, figures)
        if done % every == 0:
            minutes = (time.monotonic() - start) / 60
            rest = minutes * (len(left) - done) / done
            say(f"{done} of {len(left)} cells in {minutes:.1f} minutes, about {rest:.0f} more")
    return all(cell in results.cells for cell in left)


def _figures_of(cells: Sequence[Cell], num_jobs: int, until: float) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if num_jobs == 1:
        for cell in cells:
            if (figures := _run_before(cell, until)) is not None:
                yield cell, figures
        return
    # A fork copies threads' locks, and needs as much memory again as the process that forks.
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as executor:
        futures = {executor.submit(_run_before, cell, until): cell for cell in cells}
        for future in as_completed(futures):
            if (figures := future.result()) is not None:
                yield futures[future], figures


def run_cell(cell: Cell) -> dict[str, Any]:
    """Its figures, and the processor time that they took."""
    start = time.process_time()
    settings = json.loads(cell.settings)
    figures = run(WORLDS[cell.world], cell.method, cell.seed, settings, cell.num_rollouts)
    return {**figures, "cpu_s": round(time.process_time() - start, 3)}


def _run_before(cell: Cell, until: float) -> dict[str, Any] | None:
    return run_cell(cell) if time.monotonic() <= until else None
