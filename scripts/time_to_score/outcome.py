"""When a curve first reaches the target, and the ratios between contestants. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from time_to_score.contestants import PEERS, Point


class Reached(NamedTuple):
    """What it took; where the target was not reached, what was spent without."""

    step: float
    seconds: float
    tokens: float
    is_bound: bool = False
    """Whether it would have taken more."""


class Compared(NamedTuple):
    """What the goal of a ratio is about."""

    others: tuple[str, ...]
    """Against whom: of several the one that takes the least."""
    of: str
    goal: float


RATIOS = {
    "vs_trl": Compared(PEERS, "seconds", 2.0),
    "vs_sync_uniform": Compared(("sync_uniform",), "seconds", 1.7),
    "tokens_vs_uniform": Compared(("uniform",), "tokens", 1.5),
}


class Ratio(NamedTuple):
    """How many times as much the other takes."""

    value: float | None
    """None where one is missing, or neither has reached the target."""
    against: str = ""
    bound: str = ""
    """"at least" where the other has not reached the target, "at most" where this trainer has not."""

    def __str__(self) -> str:
        return "not known" if self.value is None else f"{self.bound} {self.value:.2f}".strip()


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
    """Medians over seeds; a bound where one of them would be larger had the seeds that are bounds gone on for ever."""
    names = ("step", "seconds", "tokens")
    values = [median(getattr(found, name) for found in seeds) for name in names]
    largest = [median(math.inf if found.is_bound else getattr(found, name) for found in seeds) for name in names]
    return Reached(*values, is_bound=values != largest)


def ratio(ours: Reached | None, others: Mapping[str, Reached], compared: Compared) -> Ratio:
    """Of this trainer and the best of those it is compared with."""
    there = {name: others[name] for name in compared.others if name in others}
    if ours is None or not there:
        return Ratio(None)
    # One that has reached the target comes before all that have not, however little those have spent.
    name, other = min(there.items(), key=lambda item: (item[1].is_bound, getattr(item[1], compared.of)))
    if ours.is_bound and other.is_bound:
        return Ratio(None, name)
    value = getattr(other, compared.of) / getattr(ours, compared.of) if getattr(ours, compared.of) else math.inf
    return Ratio(value, name, "at most" if ours.is_bound else "at least" if other.is_bound else "")


def ratios(found: Mapping[str, Reached]) -> dict[str, Ratio]:
    """All of RATIOS, of medians or of one seed."""
    return {name: ratio(found.get("default"), found, compared) for name, compared in RATIOS.items()}


def spread(by_seed: Mapping[int, Mapping[str, Reached]]) -> dict[str, list[Ratio]]:
    """The ratios of every seed of which both sides are there, seed by seed."""
    return {
        name: [ratio(found["default"], found, compared) for found in by_seed.values() if _has_both(found, compared)]
        for name, compared in RATIOS.items()
    }


def _has_both(found: Mapping[str, Reached], compared: Compared) -> bool:
    return "default" in found and any(other in found for other in compared.others)


def most_of_overlap(sampler_s: float, learner_s: float) -> float:
    """How many times as fast a loop can be whose two halves overlap wholly: (s + l) / max(s, l)."""
    return (sampler_s + learner_s) / max(sampler_s, learner_s)
