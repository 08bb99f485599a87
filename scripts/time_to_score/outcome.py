"""When a curve first reaches the target, and the ratios between contestants. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from time_to_score.contestants import TRL, Point


class Reached(NamedTuple):
    """What it took; where the target was not reached, what was spent without."""

    step: float
    seconds: float
    tokens: float
    is_bound: bool = False
    """Whether it would have taken more."""


RATIOS = {
    "vs_trl": (TRL, "seconds", 2.0),
    "vs_sync_uniform": ("sync_uniform", "seconds", 1.7),
    "tokens_vs_uniform": ("uniform", "tokens", 1.5),
}
"""By name: against whom, of what, and the goal."""


def reached(curve: Sequence[Point], target: float) -> Reached:
    """The first crossing, on the straight line between the two points around it. Raises ValueError without a point."""
    if not curve:
        raise ValueError("a curve without a point")
    before = None
    for point in curve:
        if point.score >= target:
            if before is None:
                return Reached(point.step, point.seconds, point.tokens)
            share = (target - before.score) / (point.score - before.score)
            step, seconds, tokens = (a + share * (b - a) for a, b in zip(before[:3], point[:3], strict=True))
            return Reached(step, seconds, tokens)
        before = point
    last = curve[-1]
    return Reached(last.step, last.seconds, last.tokens, is_bound=True)


def typical(seeds: Sequence[Reached]) -> Reached:
    """Medians over seeds; a bound where the median seed, or one below it, has not reached the target."""
    values = [median(getattr(found, name) for found in seeds) for name in ("step", "seconds", "tokens")]
    by_time = sorted(seeds, key=lambda found: found.seconds)
    return Reached(*values, is_bound=any(found.is_bound for found in by_time[: len(seeds) // 2 + 1]))


def ratios(found: Mapping[str, Reached]) -> dict[str, float | None]:
    """How many times as much the others take; None where this trainer has not reached the target, or one is missing."""
    ours = found.get("default")
    return {
        name: None
        if ours is None or ours.is_bound or other not in found
        else getattr(found[other], of) / getattr(ours, of)
        for name, (other, of, _) in RATIOS.items()
    }
