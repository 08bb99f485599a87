"""Estimators that remember each problem by itself: its last group, or all its groups, fading. Pure numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from curator.estimators.belief import Beta, Point


class LastMean:
    """The mean reward of the newest group of each problem; `unseen_rate` before there is one."""

    folded = ("_mean_P", "_step_P")

    def __init__(self, num_problems: int, *, unseen_rate: float = 0.5) -> None:
        """Raises ValueError for a rate outside [0, 1]."""
        if not 0 <= unseen_rate <= 1:
            raise ValueError(f"unseen_rate = {unseen_rate}: expected in [0, 1]")
        self._mean_P = np.full(num_problems, unseen_rate, np.float64)
        self._step_P = np.full(num_problems, -np.inf)

    def observe(self, index: int, num_passed: float, num_scored: int, step: float) -> None:
        """See Estimator. A group that comes after one of a newer policy says nothing of the present."""
        if step >= self._step_P[index]:
            self._mean_P[index], self._step_P[index] = num_passed / num_scored, step

    def advance(self, step: float) -> None:
        """See Estimator. A mean does not age."""

    def predict(self, index_P: NDArray[np.int64] | None = None) -> Point:
        """See Estimator."""
        return Point(self._mean_P.copy() if index_P is None else self._mean_P[index_P])


class DiscountedBeta:
    """A Beta posterior whose evidence fades as the policy moves: a rollout of s steps ago counts keep^s.

        a = prior_a + sum over groups of keep^(now - step) passes,   b likewise with failures

    A group that comes late counts as little as if it had come in time. With keep = 1 this is the conjugate posterior
    of a policy that stands still. Qu et al. 2025 (MoPPS, arXiv 2507.04632) discount by visits instead; a visit says
    nothing of how far the policy has moved since the last one.
    """

    folded = ("_passed_P", "_failed_P", "_step_P", "_now")

    def __init__(self, num_problems: int, *, keep: float = 0.98, prior_a: float = 1.0, prior_b: float = 1.0) -> None:
        """Raises ValueError for `keep` outside (0, 1] or a prior that is not positive."""
        if not 0 < keep <= 1:
            raise ValueError(f"keep = {keep}: expected in (0, 1]")
        if not (prior_a > 0 and prior_b > 0):
            raise ValueError(f"prior_a = {prior_a}, prior_b = {prior_b}: expected above 0")
        self._keep, self._prior_a, self._prior_b = keep, prior_a, prior_b
        self._passed_P = np.zeros(num_problems, np.float64)
        self._failed_P = np.zeros(num_problems, np.float64)
        self._step_P = np.zeros(num_problems, np.float64)
        """Step to which the counts of a problem have faded."""
        self._now = -np.inf

    def observe(self, index: int, num_passed: float, num_scored: int, step: float) -> None:
        """See Estimator."""
        at = max(step, float(self._step_P[index]))
        faded, late = self._keep ** (at - self._step_P[index]), self._keep ** (at - step)
        self._passed_P[index] = faded * self._passed_P[index] + late * num_passed
        self._failed_P[index] = faded * self._failed_P[index] + late * (num_scored - num_passed)
        self._step_P[index] = at
        self._now = max(self._now, step)

    def advance(self, step: float) -> None:
        """See Estimator."""
        self._now = max(self._now, step)

    def predict(self, index_P: NDArray[np.int64] | None = None) -> Beta:
        """See Estimator."""
        chosen = slice(None) if index_P is None else index_P
        # Before the first observation all counts are 0, whatever they fade by.
        now = self._now if np.isfinite(self._now) else 0.0
        faded_P = self._keep ** np.maximum(0.0, now - self._step_P[chosen])
        a_P = self._prior_a + faded_P * self._passed_P[chosen]
        return Beta(a_P, self._prior_b + faded_P * self._failed_P[chosen])
