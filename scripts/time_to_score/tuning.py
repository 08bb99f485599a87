"""Which learning rate TRL is given, of a few that are tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from time_to_score.contestants import Point
from time_to_score.outcome import reached

RATES = (1e-4, 2e-4, 4e-4, 8e-4)
SEED = 100
"""Of the trials; no training that counts has it."""


def key(rate: float) -> str:
    """Under which a trial is kept."""
    return f"trl-tune-{rate:g}"


def best(tried: Mapping[float, Sequence[Any]], target: float) -> float | None:
    """Of the curves by rate that which reaches the target first, else that with the best last score; None of none."""
    if not tried:
        return None

    def rank(rate: float) -> tuple[bool, float, float]:
        curve = [Point(*point) for point in tried[rate]]
        found = reached(curve, target)
        return found.is_bound, 0.0 if found.is_bound else found.seconds, -curve[-1].score

    return min(tried, key=rank)
