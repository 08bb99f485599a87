"""The trainings: an hour of each trainer, and shorter ones that choose learning rate and batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OURS, TRL = "ours", "trl"
SAID = {OURS: "this trainer", TRL: "TRL's GRPOTrainer, its own generation"}
TRIALS = ((1e-5, 8), (3e-5, 8), (1e-4, 8), (3e-5, 4))
"""Learning rate and groups of a step: four of each trainer."""


class Cell(NamedTuple):
    """One training of one trainer."""

    name: str
    trainer: str
    learning_rate: float
    groups_per_step: int
    minutes: float
    """On its own clock."""


def trials(minutes: float) -> list[Cell]:
    """The same for both."""
    return [
        Cell(f"{trainer}-trial-{number}", trainer, rate, groups, minutes)
        for trainer in (OURS, TRL)
        for number, (rate, groups) in enumerate(TRIALS, start=1)
    ]


def chosen(trainer: str, scores: Mapping[str, float], default: tuple[float, int]) -> tuple[float, int]:
    """Learning rate and groups of the trial that scored best, the smaller rate of two alike; `default` without any."""
    there = [(scores[cell.name], -cell.learning_rate, cell) for cell in trials(0) if cell.name in scores]
    there = [found for found in there if found[2].trainer == trainer]
    if not there:
        return default
    best = max(there)[2]
    return best.learning_rate, best.groups_per_step


class Score(NamedTuple):
    """Weights of a training, and what they score."""

    step: int
    seconds: float
    tokens: int
    pass_at_1: float
    low: float
    high: float
    """95 % interval over problems."""


def reaches(curve: Sequence[Score], target: float) -> float | None:
    """Seconds at which a curve first reaches a score, on the line between two points; None where it does not."""
    before = None
    for point in curve:
        if point.pass_at_1 >= target:
            if before is None:
                return point.seconds
            share = (target - before.pass_at_1) / (point.pass_at_1 - before.pass_at_1)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def both_reach(curves: Mapping[str, Sequence[Score]]) -> float | None:
    """The highest score that both trainers reach, where that is above what both began with."""
    if not curves.get(OURS) or not curves.get(TRL):
        return None
    level = min(max(point.pass_at_1 for point in curves[name]) for name in (OURS, TRL))
    return level if level > max(curves[name][0].pass_at_1 for name in (OURS, TRL)) else None


def step_of(loop: Mapping[str, Any], groups: int, wanted_groups: int) -> float:
    """Seconds of a step of `wanted_groups` groups, where a step had `groups`."""
    return float(loop["wall_s"] / loop["steps"] * wanted_groups / groups)
