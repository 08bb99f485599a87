"""The command `sweep`: a grid of settings trained for real, and what the planner predicts of each."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_grpo.config import Config
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError
from stream_grpo.experiments.cells import Cell, Series, name_of
from stream_grpo.experiments.predicted import draw_predicted
from stream_grpo.files import read_object
from stream_grpo.planner.calibration import calibrate
from stream_grpo.planner.measured import Compared, Measured, compare, measure
from stream_grpo.planner.world import World

MAX_CELLS = 64
COLUMNS = ("trained/s", "predicted", "error", "age", "predicted age", "age error", "rise", "bottleneck")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell: what it did, and what was predicted of it or why nothing was."""

    values: Mapping[str, str]
    run: Path
    measured: Measured
    compared: Compared | None
    refusal: str
    rise: Mapping[str, Any] | None
    """Of held-out pass@1, where it was evaluated."""

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        predicted = self.compared.as_fields() if self.compared else {"refusal": self.refusal}
        measured = {"throughput": self.measured.throughput, "age": self.measured.age}
        return {"settings": dict(self.values), "run": str(self.run), **measured, **predicted, "rise": self.rise}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All cells of a grid."""

    names: tuple[str, ...]
    results: tuple[Result, ...]
    calibrated_by: Path
    defaults: tuple[str, ...]
    """Figures that the calibrating run does not give."""

    @property
    def predicted(self) -> list[tuple[Result, Compared]]:
        """Those with a prediction."""
        return [(result, result.compared) for result in self.results if result.compared]

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        errors = {
            f"worst_{name}": max((abs(getattr(compared, name)) for _, compared in self.predicted), default=None)
            for name in ("throughput_error", "age_error")
        }
        cells = [result.as_fields() for result in self.results]
        return {"cells": cells, "calibrated_by": str(self.calibrated_by), "defaults": list(self.defaults), **errors}


def parse_grid(texts: Iterable[str]) -> dict[str, list[str]]:
    """`section.name=value,value` as lists of TOML texts. Raises ConfigError."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or "." not in name or not all(value.strip() for value in values.split(",")):
            raise ConfigError(
                f"--grid {text}: expected section.name=value,value, for example --grid stream.max_policy_age=1,4"
            )
        if name.strip() in grid:
            raise ConfigError(f"--grid {name}: given twice; list all its values once")
        grid[name.strip()] = [value.strip() for value in values.split(",")]
    if not grid:
        raise ConfigError("sweep: no --grid; name settings and their values, as --grid stream.max_policy_age=1,4")
    num = math.prod(len(values) for values in grid.values())
    if num > MAX_CELLS:
        raise ConfigError(f"--grid: {num} combinations, at most {MAX_CELLS} are trained; leave out values")
    return grid


def cells_of(grid: Mapping[str, list[str]]) -> list[Cell]:
    """Every combination; the last setting varies fastest."""
    cells = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        cells.append(Cell(name_of(f"{key.rpartition('.')[2]}-{value}" for key, value in settings.items()), settings))
    return cells


def sweep(series: Series, grid: Mapping[str, list[str]], like: Path | None, say: Callable[[str], None]) -> Sweep:
    """Train every cell that has not ended yet; calibrate the model by `like`, or by the first cell.

    Raises ConfigError before anything starts for a cell that cannot be run, CellFailed for one that fails.
    """
    cells = cells_of(grid)
    series.check(cells)
    calibration = None if like is None else calibrate(like)
    runs = [series.made(cell, say) for cell in cells]
    calibration = calibration or calibrate(runs[0])
    results = tuple(
        _result(cell, run, calibration.world, cores_of(series.config(cell)))
        for cell, run in zip(cells, runs, strict=True)
    )
    return Sweep(names=tuple(grid), results=results, calibrated_by=like or runs[0], defaults=calibration.defaults)


def cores_of(config: Config) -> int:
    """Cores that samplers and learner share on this machine; 0 where each has its own, or they compute on GPUs."""
    available = len(os.sched_getaffinity(0))
    on_gpus = config.sampler.num_gpus and config.learner.num_gpus
    return 0 if on_gpus or available > config.sampler.num_samplers else available


def _result(cell: Cell, run: Path, world: World, cores: int) -> Result:
    compared, refusal = None, ""
    try:
        compared = compare(world, run, cores)
    except (ConfigError, ValueError) as error:
        refusal = str(error)
    rise = read_object(run / "summary.json").get("heldout_rise")
    return Result(values=cell.settings, run=run, measured=measure(run), compared=compared, refusal=refusal, rise=rise)


def show(found: Sweep, console: Console) -> None:
    """The table, and what was not measured."""
    names = tuple(name.rpartition(".")[2] for name in found.names)
    columns = (*names, *COLUMNS)
    console.table(columns, map(_cells, found.results), numbers=columns[:-1])
    for result in found.results:
        if result.refusal:
            console.say(f"{result.run.name}: nothing predicted: {result.refusal}")
    console.say(f"predictions are calibrated by {found.calibrated_by}")
    for sentence in found.defaults:
        console.say(f"not measured: {sentence}")


def _cells(result: Result) -> tuple[str, ...]:
    compared, rise = result.compared, result.rise
    return (
        *result.values.values(),
        f"{result.measured.throughput:,.0f}",
        f"{compared.predicted_throughput:,.0f}" if compared else "",
        f"{compared.throughput_error:+.1%}" if compared else "",
        f"{result.measured.age:.2f}",
        f"{compared.predicted_age:.2f}" if compared else "",
        f"{compared.age_error:+.1%}" if compared else "",
        f"{rise['mean']:+.3f}" if rise else "",
        compared.bottleneck.partition(":")[0] if compared else "",
    )


def draw(found: Sweep, path: Path) -> None:
    """Write the picture: predicted against measured, throughput and age, each cell with its values."""
    labels = " / ".join(name.rpartition(".")[2] for name in found.names)
    cells = [(" / ".join(result.values.values()), compared) for result, compared in found.predicted]
    draw_predicted(cells, f"labels: {labels}", path)
