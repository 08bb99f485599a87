"""How long the checks of one verifier take: a running mean, and percentiles of the newest."""

from __future__ import annotations

from collections import deque

_NUM_KEPT = 1024
_WEIGHT = 0.05
"""Of the newest time in the running mean."""


class Timings:
    """The times of one verifier, in seconds."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num = 0
        self.mean_s = 0.0
        """Running mean in which old times fade."""

    def add(self, seconds: float) -> None:
        """Take one more."""
        self._num += 1
        self._newest.append(seconds)
        # The plain mean of the first few, then an exponential one.
        self.mean_s += (seconds - self.mean_s) * max(1 / self._num, _WEIGHT)

    def percentile_s(self, percent: float) -> float:
        """Nearest rank: the smallest time such that `percent` of the newest are no longer; 0 where there is none."""
        times = sorted(self._newest)
        return times[max(0, -int(-percent * len(times) // 100) - 1)] if times else 0.0

    def status(self) -> dict[str, float | int]:
        """Number, median and 99th percentile."""
        return {"num": self._num, "p50_s": self.percentile_s(50), "p99_s": self.percentile_s(99)}
