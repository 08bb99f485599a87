"""How hard each problem is for the present policy: the sliding success rate, and the signal expected of a group.

Pure numpy. P: problems, by index.
"""

from __future__ import annotations

import math
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from curator.estimators.belief import Point
from curator.schema import Outcome

COUNTED_FATES = frozenset({"accepted", "no_signal"})
"""Only whole groups of a known policy say something of a problem; the others are cut off or not its fault."""


def expected_signal(rate: ArrayLike, group_size: int) -> NDArray[np.float64]:
    """Probability that the rewards of a group differ: 1 - p^G - (1 - p)^G.

    For pass-or-fail rewards of G independent rollouts, each passing with probability p. Zero at p = 0 and p = 1,
    largest at p = 1/2. `rate` of any shape, within [0, 1]; the result has its shape.

    Raises ValueError for a rate outside [0, 1] or a group size below 1.
    """
    p = np.asarray(rate, np.float64)
    if group_size < 1:
        raise ValueError(f"group_size = {group_size}: a group has at least one rollout")
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError("a success rate lies within [0, 1]")
    # Rounding can make this a little less than 0 at the ends.
    return np.maximum(0.0, 1.0 - p**group_size - (1.0 - p) ** group_size)


class SlidingRate:
    """The sliding success rate of every problem, p <- (1 - a) p + a mean(rewards), and of every domain alike.

    A problem never seen has the rate of its domain. That one begins as the plain mean of its outcomes, with
    `unseen_rate` as one more, and slides once it has so many that their share is below `domain_step`. A problem's first
    outcome moves it from there by the same formula, so one lucky group of a new problem does not make it look solved.
    In a pool so large that most problems are met once, it is the domain's rate that knows which are worth sampling.

    A fold over outcomes: the same outcomes in the same order give the same state, bit for bit.
    """

    folded = (
        *("_own_rate_P", "domain_rate_D", "_num_groups_D", "num_groups_P"),
        *("num_scored_P", "has_passed_P", "last_step_P", "num_clipped"),
    )

    def __init__(
        self,
        domain_P: NDArray[np.int64],
        *,
        rate_step: float = 0.3,
        domain_step: float = 0.05,
        unseen_rate: float = 0.5,
    ) -> None:
        """`domain_P`: each problem's domain as a number from 0; the steps are a, in (0, 1]; `unseen_rate` in [0, 1].

        Raises ValueError for others.
        """
        for name, step in (("rate_step", rate_step), ("domain_step", domain_step)):
            if not 0 < step <= 1:
                raise ValueError(f"{name} = {step}: expected in (0, 1]")
        if not 0 <= unseen_rate <= 1:
            raise ValueError(f"unseen_rate = {unseen_rate}: expected in [0, 1]")
        num_problems = len(domain_P)
        self._rate_step, self._domain_step = rate_step, domain_step
        self._domain_P = domain_P
        self._own_rate_P = np.zeros(num_problems, np.float64)
        self.domain_rate_D = np.full(int(domain_P.max(initial=-1)) + 1, unseen_rate, np.float64)
        """Rate of each domain D."""
        self._num_groups_D = np.zeros(len(self.domain_rate_D), np.int64)
        self._num_problems_D = np.bincount(domain_P, minlength=len(self.domain_rate_D))
        self.num_groups_P = np.zeros(num_problems, np.int64)
        """Groups that moved the rate."""
        self.num_scored_P = np.zeros(num_problems, np.int64)
        """Scored rollouts of those groups: the attempts."""
        self.has_passed_P = np.zeros(num_problems, np.bool_)
        """Whether any of them earned anything."""
        self.last_step_P = np.full(num_problems, -1, np.int64)
        """Newest policy step of the last such group; -1 where there is none."""
        self.num_clipped = 0
        """Groups whose mean reward lay outside [0, 1] and was taken as the nearer end."""

    @property
    def rate_P(self) -> NDArray[np.float64]:
        """Rate of each problem: its own, or that of its domain before it has one."""
        return np.where(self.num_groups_P > 0, self._own_rate_P, self.domain_rate_D[self._domain_P])

    def seen_and_unseen(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Rates of the problems that have one of their own, and of each domain how many have none.

        What is asked every second must not take as long as the pool is large.
        """
        index = np.flatnonzero(self.num_groups_P)
        seen_D = np.bincount(self._domain_P[index], minlength=len(self.domain_rate_D))
        return self._own_rate_P[index], self._num_problems_D - seen_D

    def update(self, index: int, mean_reward: float, *, num_scored: int = 1, step: int = -1) -> None:
        """Move one problem's rate by the mean reward of `num_scored` rollouts. Raises ValueError for NaN."""
        if math.isnan(mean_reward):
            raise ValueError("mean_reward is NaN: a group without a scored rollout says nothing")
        mean = min(1.0, max(0.0, mean_reward))
        self.num_clipped += mean != mean_reward
        # Plain numbers: each operation on one of numpy's takes as long as all of this.
        domain, num_groups = int(self._domain_P[index]), int(self.num_groups_P[index])
        domain_rate, num_domain = float(self.domain_rate_D[domain]), int(self._num_groups_D[domain])
        rate = float(self._own_rate_P[index]) if num_groups else domain_rate
        self._own_rate_P[index] = (1.0 - self._rate_step) * rate + self._rate_step * mean
        share = max(self._domain_step, 1.0 / (num_domain + 2))
        self.domain_rate_D[domain] = (1.0 - share) * domain_rate + share * mean
        self._num_groups_D[domain] = num_domain + 1
        self.num_groups_P[index] = num_groups + 1
        self.num_scored_P[index] += num_scored
        self.has_passed_P[index] |= mean > 0
        self.last_step_P[index] = step

    def observe(self, index: int, num_passed: float, num_scored: int, step: float) -> None:
        """See Estimator."""
        self.update(index, num_passed / num_scored, num_scored=num_scored, step=int(step))

    def advance(self, step: float) -> None:
        """See Estimator. A rate does not age."""

    def predict(self, index_P: NDArray[np.int64] | None = None) -> Point:
        """See Estimator."""
        if index_P is None:
            return Point(self.rate_P)
        own_P, domain_P = self._own_rate_P[index_P], self.domain_rate_D[self._domain_P[index_P]]
        return Point(np.where(self.num_groups_P[index_P] > 0, own_P, domain_P))

    def apply(self, index: int, outcome: Outcome) -> None:
        """Learn from one outcome, one that `counts`, of the problem at `index`."""
        num_scored = outcome.num_passed + outcome.num_failed
        self.update(index, outcome.mean_reward, num_scored=num_scored, step=outcome.max_step)


def counts(outcome: Outcome) -> bool:
    """Whether an outcome moves the rate. An unscored rollout is missing, not failed: without a scored one, no."""
    scored = outcome.num_passed + outcome.num_failed > 0 and not math.isnan(outcome.mean_reward)
    return scored and outcome.fate in COUNTED_FATES


class NoSignalCause(StrEnum):
    """Why the rewards of a group do not differ."""

    ALL_RIGHT = "all_right"
    ALL_WRONG = "all_wrong"
    TRUNCATED = "truncated"
    SAME_REWARD = "same_reward"


def no_signal_cause(outcome: Outcome) -> NoSignalCause:
    """The cause of a group without signal; `truncated` where none passed and at least half were cut off."""
    num_rollouts = outcome.num_passed + outcome.num_failed + outcome.num_unscored
    if outcome.num_passed and not outcome.num_failed:
        return NoSignalCause.ALL_RIGHT
    if outcome.num_passed or not num_rollouts:
        return NoSignalCause.SAME_REWARD
    if 2 * outcome.num_truncated >= num_rollouts:
        return NoSignalCause.TRUNCATED
    return NoSignalCause.ALL_WRONG
