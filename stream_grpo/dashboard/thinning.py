"""Figures over a growing axis in bounded memory: rows become buckets, which merge in pairs as they get many. Pure.

F figures, N rows, K buckets.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Number = TypeVar("_Number", np.float64, np.int64)


class Cursor(NamedTuple):
    """What a reader has: buckets before `bucket` of a table whose older buckets have not changed since `generation`."""

    generation: int
    bucket: int


class Thinned:
    """A table of F figures. Each bucket keeps mean, smallest, largest and last value of every figure; NaN: none.

    All buckets but the newest have the same number of rows, a power of two, except where rows were dropped.
    """

    def __init__(self, names: tuple[str, ...], capacity: int = 1000) -> None:
        """`capacity`: buckets at most, at least 2."""
        self.names, self._capacity = names, capacity
        self._reset()
        self._generation = 0

    def _reset(self) -> None:
        self._width = 1
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        # [K] first and last x; [K, F] numbers, sums, smallest, largest, last.
        self._first: Floats = np.zeros(0)
        self._end: Floats = np.zeros(0)
        empty: Floats = np.zeros((0, len(self.names)))
        self._number, self._sum, self._low, self._high, self._last = (empty.copy() for _ in range(5))

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, x_N: Floats, values_NF: Floats) -> None:
        """Append rows; x does not fall. NaN: the row has not this figure."""
        if not len(x_N):
            return
        is_there = ~np.isnan(values_NF)
        rows = np.ones(len(x_N), np.int64)
        filled = np.where(is_there, values_NF, 0.0)
        low, high = np.where(is_there, values_NF, np.inf), np.where(is_there, values_NF, -np.inf)
        self._rows = np.concatenate([self._rows, rows])
        self._first, self._end = np.concatenate([self._first, x_N]), np.concatenate([self._end, x_N])
        self._number = np.concatenate([self._number, is_there.astype(float)])
        self._sum = np.concatenate([self._sum, filled])
        self._low, self._high = np.concatenate([self._low, low]), np.concatenate([self._high, high])
        self._last = np.concatenate([self._last, values_NF])
        self._merge(len(self._rows) - len(x_N))

    def _merge(self, num_before: int) -> None:
        """Bring what was appended after `num_before` buckets into buckets of the width, and the width to the number."""
        # The bucket that was open goes on.
        begin = num_before - int(num_before > 0 and self._rows[num_before - 1] < self._width)
        self._join(begin)
        while len(self) > self._capacity:
            self._width *= 2
            self._generation += 1
            self._join(0)

    def _join(self, begin: int) -> None:
        """Join neighbours from bucket `begin` on, so that each has at most `width` rows."""
        group = (np.cumsum(self._rows[begin:]) - 1) // self._width
        starts = begin + np.flatnonzero(np.diff(group, prepend=-1))
        if len(starts) == len(self) - begin:
            return
        ends = np.append(starts[1:], len(self)) - 1
        self._rows = _joined(np.add, self._rows, begin, starts)
        self._first = np.concatenate([self._first[:begin], self._first[starts]])
        self._end = np.concatenate([self._end[:begin], self._end[ends]])
        self._number = _joined(np.add, self._number, begin, starts)
        self._sum = _joined(np.add, self._sum, begin, starts)
        self._low = _joined(np.minimum, self._low, begin, starts)
        self._high = _joined(np.maximum, self._high, begin, starts)
        self._last = np.concatenate([self._last[:begin], self._last[ends]])

    def drop_from(self, x: float) -> None:
        """Forget the buckets that begin at x or later. One that x lies within stays whole: it cannot be parted."""
        kept = int(np.searchsorted(self._first, x, side="left"))
        if kept == len(self):
            return
        self._generation += 1
        for name in ("_rows", "_first", "_end", "_number", "_sum", "_low", "_high", "_last"):
            setattr(self, name, getattr(self, name)[:kept])

    def with_names(self, names: tuple[str, ...]) -> None:
        """Take further figures, which no earlier row has; `names` are all of them, the earlier ones first."""
        more = len(names) - len(self.names)
        wide = (len(self), more)
        self.names = names
        self._number, self._sum = (np.hstack([a, np.zeros(wide)]) for a in (self._number, self._sum))
        self._low = np.hstack([self._low, np.full(wide, np.inf)])
        self._high = np.hstack([self._high, np.full(wide, -np.inf)])
        self._last = np.hstack([self._last, np.full(wide, np.nan)])
        self._generation += 1

    @property
    def cursor(self) -> Cursor:
        """Of a reader that has all buckets; the newest may still grow, and is not counted."""
        return Cursor(self._generation, max(0, len(self) - 1))

    def start_of(self, cursor: Cursor | None) -> int:
        """The first bucket that a reader has not, or not as it is now."""
        if cursor is None or cursor.generation != self._generation:
            return 0
        return min(max(cursor.bucket, 0), len(self))

    def x(self, start: int = 0) -> Floats:
        """[K] where each bucket ends."""
        return self._end[start:]

    def mean(self, name: str, start: int = 0) -> Floats:
        """[K] over the rows that have the figure."""
        column = self.names.index(name)
        number = self._number[start:, column]
        found: Floats = np.full(len(number), np.nan)
        np.divide(self._sum[start:, column], number, out=found, where=number > 0)
        return found

    def total(self, name: str, start: int = 0) -> Floats:
        """[K] sums."""
        return self._sum[start:, self.names.index(name)]

    def last(self, name: str, start: int = 0) -> Floats:
        """[K] of the last row; what a counter stood at."""
        return self._last[start:, self.names.index(name)]

    def low(self, name: str, start: int = 0) -> Floats:
        """[K] the smallest; NaN where there is none."""
        return _finite(self._low[start:, self.names.index(name)])

    def high(self, name: str, start: int = 0) -> Floats:
        """[K] the largest; NaN where there is none."""
        return _finite(self._high[start:, self.names.index(name)])


def _joined(how: np.ufunc, values: NDArray[_Number], begin: int, starts: NDArray[np.intp]) -> NDArray[_Number]:
    joined: NDArray[_Number] = np.concatenate([values[:begin], how.reduceat(values, starts)])
    return joined


def _finite(values: Floats) -> Floats:
    found: Floats = np.where(np.isfinite(values), values, np.nan)
    return found
