"""Pass rates that came with a data set, once somebody has said which way and on which scale they count.

The columns of public pools differ in both: a `difficulty` of 5/8 may be passes of eight, one of 9 a level, one of 16
the failures of sixteen. So nothing is taken that is not stated, and what looks like a rate is only named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from curator.errors import RowRefused

Of = Literal["success", "failure"]
COUNTS = "k/n"
"""The scale of text such as `5/8`."""
_SCALE = re.compile(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")
_COUNTS = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")
_NOT_MEASURED = frozenset({"", "n/a", "na", "nan", "none", "null", "-"})
_LOOKS_LIKE_A_RATE = re.compile(
    r"pass_?rate|solve_?rate|(^|_)avg@\d|_avg_reward$|total_correct|(^|\.)(model_)?difficulty|pass_at_", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """A column of rates, and what its numbers mean."""

    column: str
    of: Of
    low: float = 0.0
    high: float = 1.0
    """Ends of the scale; a rate is (value - low) / (high - low)."""
    is_counts: bool = False
    """Whether a value is text `k/n`."""

    def read(self, value: Any) -> float | None:
        """The share of passes, 0 to 1; None where none was measured. Raises RowRefused for what is off the scale."""
        if value is None or (isinstance(value, str) and value.strip().lower() in _NOT_MEASURED):
            return None
        share = self._of_counts(value) if self.is_counts else self._of_scale(value)
        if share is None:
            return None
        if not 0 <= share <= 1:
            raise RowRefused(f"a pass rate in column '{self.column}' is off the stated scale")
        return share if self.of == "success" else 1 - share

    def _of_counts(self, value: Any) -> float | None:
        found = _COUNTS.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise RowRefused(f"a pass rate in column '{self.column}' is not of the form k/n")
        passes, attempts = int(found[1]), int(found[2])
        return passes / attempts if attempts else None

    def _of_scale(self, value: Any) -> float | None:
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None:
            raise RowRefused(f"a pass rate in column '{self.column}' is no number")
        return None if math.isnan(number) else (number - self.low) / (self.high - self.low)


def parse_pass_rate(column: str, scale: str | None, of: str | None) -> PassRate:
    """The pass rate that the options describe. Raises ValueError where scale or direction are missing or unknown."""
    if scale is None or of is None:
        raise ValueError(
            f"--pass-rate {column}: say what it means with --pass-rate-scale (0..1, 0..100, {COUNTS}) and "
            "--pass-rate-of (success, failure); a high number is an easy problem in one data set, a hard one in another"
        )
    if of not in ("success", "failure"):
        raise ValueError(f"--pass-rate-of {of}: expected success or failure")
    direction: Of = "success" if of == "success" else "failure"
    if scale == COUNTS:
        return PassRate(column=column, of=direction, is_counts=True)
    found = _SCALE.fullmatch(scale)
    if found is None or not float(found[1]) < float(found[2]):
        raise ValueError(f"--pass-rate-scale {scale}: expected LOW..HIGH, such as 0..1 or 0..16, or {COUNTS}")
    return PassRate(column=column, of=direction, low=float(found[1]), high=float(found[2]))


def likely_pass_rates(columns: Iterable[str]) -> list[str]:
    """The columns whose names look like rates or difficulties."""
    return sorted(column for column in columns if _LOOKS_LIKE_A_RATE.search(column))
