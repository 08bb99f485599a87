"""How hard each problem is for the present policy: the sliding success rate, and the signal expected of a group.

Pure numpy. P: problems, by index.
"""

from __future__ import annotations

import math
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """The sliding success rate of every problem: p <- (1 - a) p + a mean(rewards), from `unseen_rate`.

    A fold over outcomes: the same outcomes in the same order give the same state, bit for bit. The first outcome of a
    problem moves its rate from `unseen_rate` by the same formula, so one lucky group of a new problem does not make
    it look solved.
    """

    def __init__(self, num_problems: int, rate_step: float, unseen_rate: float) -> None:
        """`rate_step` is a in (0, 1]; `unseen_rate` in [0, 1]. Raises ValueError for others."""
        if not 0 < rate_step <= 1:
            raise ValueError(f"rate_step = {rate_step}: expected in (0, 1]")
        if not 0 <= unseen_rate <= 1:
            raise ValueError(f"unseen_rate = {unseen_rate}: expected in [0, 1]")
        self.rate_step = rate_step
        self.rate_P = np.full(num_problems, unseen_rate, np.float64)
        self.num_groups_P = np.zeros(num_problems, np.int64)
        """Groups that moved the rate."""
        self.num_scored_P = np.zeros(num_problems, np.int64)
        """Scored rollouts of those groups: the attempts."""
        self.last_step_P = np.full(num_problems, -1, np.int64)
        """Newest policy step of the last such group; -1 where there is none."""
        self.num_clipped = 0
        """Groups whose mean reward lay outside [0, 1] and was taken as the nearer end."""

    def update(self, index: int, mean_reward: float, *, num_scored: int = 1, step: int = -1) -> None:
        """Move one problem's rate by the mean reward of `num_scored` rollouts. Raises ValueError for NaN."""
        if math.isnan(mean_reward):
            raise ValueError("mean_reward is NaN: a group without a scored rollout says nothing")
        mean = min(1.0, max(0.0, mean_reward))
        self.num_clipped += mean != mean_reward
        self.rate_P[index] = (1.0 - self.rate_step) * self.rate_P[index] + self.rate_step * mean
        self.num_groups_P[index] += 1
        self.num_scored_P[index] += num_scored
        self.last_step_P[index] = step

    def apply(self, index: int, outcome: Outcome) -> bool:
        """Learn from one outcome of the problem at `index`; False where it says nothing of the problem."""
        if not counts(outcome):
            return False
        num_scored = outcome.num_passed + outcome.num_failed
        self.update(index, outcome.mean_reward, num_scored=num_scored, step=outcome.max_step)
        return True


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
