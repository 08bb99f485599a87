"""Groups on their way, and where they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stream_grpo.planner.world import Rollouts

_AT_ONCE = 1024
"""Rows drawn in one go."""


@dataclass(slots=True, eq=False)
class Group:
    """`mass` groups that go the same way: one, or one of each sampler of a cohort."""

    number: int
    """In the order of dispatch."""
    mass: int
    lengths: list[int]
    """Tokens that its rollouts will have."""
    has_signal: bool
    version: int
    """Of the weights of its sampler when its ticket was issued."""
    issued_at: int
    """The learner's step then."""
    due_s: float
    """When its sampler hands over what there is of it."""
    oldest: int = -1
    """Version of its oldest token; -1 before the first."""
    num_ended: int = 0
    """Rollouts that have ended."""
    num_tokens: int = 0
    """Of those that have ended; of one group, not of all `mass`."""
    num_aborted_tokens: int = 0
    """Of those cut at the deadline."""
    inserted_at: int = 0
    """The learner's step when it came in."""
    is_over: bool = False
    """Whether nothing more is sampled for it."""

    @property
    def num_sampled(self) -> int:
        """Tokens of all its rollouts that have ended or were cut."""
        return self.num_tokens + self.num_aborted_tokens


def draw_groups(rollouts: Rollouts, group_size: int, rng: np.random.Generator) -> Iterator[tuple[list[int], bool]]:
    """Lengths and signal of one group after the other, without end.

    A row is drawn, and of it `group_size` rollouts: all, or some of them without repetition. A larger group takes the
    row and goes on with Polya's urn that begins with half a rollout of each outcome, which is the posterior prediction
    of a pass rate under Jeffreys' prior: a problem that was always right may still show a wrong answer.
    """
    length_RG, reward_RG = rollouts.length_RG, rollouts.reward_RG
    num_rows, num_measured = length_RG.shape
    while True:
        for row in rng.integers(0, num_rows, _AT_ONCE).tolist():
            chosen = _choose(num_measured, group_size, rng)
            lengths = length_RG[row, chosen].tolist()
            if reward_RG is None:
                yield lengths, bool(rng.random() < rollouts.signal_share)
            else:
                rewards = reward_RG[row, chosen]
                differs = bool(rewards.max() > rewards.min())
                yield lengths, differs or _urn_differs(num_measured, group_size, rng)


def _choose(num_measured: int, group_size: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    everyone = np.arange(num_measured)
    if group_size == num_measured:
        return everyone
    if group_size < num_measured:
        return rng.permutation(num_measured)[:group_size]
    return np.concatenate([everyone, rng.integers(0, num_measured, group_size - num_measured)])


def _urn_differs(num_equal: int, group_size: int, rng: np.random.Generator) -> bool:
    """Whether a group that begins with so many equal rewards gets another by Polya's urn.

    Each draw goes on equal with probability (m + 1/2) / (m + 1) after m equal ones.
    """
    if group_size <= num_equal:
        return False
    stays_equal = math.prod((m + 0.5) / (m + 1) for m in range(num_equal, group_size))
    return bool(rng.random() >= stays_equal)
