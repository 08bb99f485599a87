"""Groups on their way, and where they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stream_grpo.planner.world import Rollouts

_AT_ONCE = 1024
"""Rows drawn in one go."""

Drawn = tuple[Sequence[int], bool]
"""Lengths of the rollouts of a group, and whether it has signal."""


@dataclass(slots=True, eq=False)
class Group:
    """A group from its ticket to its end."""

    number: int
    """In the order of dispatch."""
    lengths: Sequence[int]
    """Tokens that its rollouts will have."""
    has_signal: bool
    version: int
    """Of the weights of its sampler when its ticket was issued."""
    issued_at: int
    """The learner's step then."""
    due_s: float
    """When its sampler hands over what there is of it."""
    sampler: int = 0
    """Which of its cohort's samplers has it."""
    oldest: int = -1
    """Version of its oldest token; -1 before the first."""
    num_started: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)
    """The engine steps of its sampler before which rollouts started, and how many."""
    last_step: int = 0
    """The engine step that ends the last of those started."""
    num_ended: int = 0
    num_tokens: int = 0
    """Of the rollouts that have ended, once the group is handed over."""
    num_aborted_tokens: int = 0
    """Of those cut when it was due."""
    inserted_at: int = 0
    """The learner's step when it came in."""

    @property
    def num_sampled(self) -> int:
        """Tokens of all its rollouts, once it is handed over."""
        return self.num_tokens + self.num_aborted_tokens

    def running(self, steps: int) -> Iterator[tuple[int, int]]:
        """Last engine step and length of the rollouts that run after so many steps."""
        return ((last, length) for last, length in self._started() if last > steps)

    def ended(self, steps: int) -> list[int]:
        """Lengths of the rollouts that have ended after so many steps."""
        return [length for last, length in self._started() if last <= steps]

    def _started(self) -> Iterator[tuple[int, int]]:
        lengths = iter(self.lengths)
        for start, count in self.starts:
            for _ in range(count):
                length = next(lengths)
                yield start + length, length


def draw_groups(rollouts: Rollouts, group_size: int, rng: np.random.Generator) -> Iterator[Drawn]:
    """One group after the other, without end: a row is drawn, and of it `group_size` rollouts.

    They are all of the row, or some of them without repetition. A larger group takes the row and goes on with Polya's
    urn that begins with half a rollout of each outcome, which is the posterior prediction of a pass rate under
    Jeffreys' prior: a problem that was always right may still show a wrong answer.
    """
    num_rows, num_measured = rollouts.length_RG.shape
    length_RG: list[list[int]] = rollouts.length_RG.tolist()
    signal_R = None if rollouts.reward_RG is None else np.ptp(rollouts.reward_RG, axis=1) > 0
    while True:
        rows = rng.integers(0, num_rows, _AT_ONCE)
        chance = rng.random(_AT_ONCE)
        for row, is_lucky in zip(rows.tolist(), (chance < rollouts.signal_share).tolist(), strict=True):
            if group_size == num_measured:
                yield length_RG[row], is_lucky if signal_R is None else bool(signal_R[row])
                continue
            chosen = _choose(num_measured, group_size, rng)
            lengths: list[int] = rollouts.length_RG[row, chosen].tolist()
            if rollouts.reward_RG is None:
                yield lengths, is_lucky
            else:
                differs = bool(np.ptp(rollouts.reward_RG[row, chosen]) > 0)
                yield lengths, differs or _urn_differs(num_measured, group_size, rng)


def _choose(num_measured: int, group_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if group_size < num_measured:
        return rng.permutation(num_measured)[:group_size]
    return np.concatenate([np.arange(num_measured), rng.integers(0, num_measured, group_size - num_measured)])


def _urn_differs(num_equal: int, group_size: int, rng: np.random.Generator) -> bool:
    """Whether a group that begins with so many equal rewards gets another one.

    After m equal ones the urn gives an equal one with probability (m + 1/2) / (m + 1).
    """
    if group_size <= num_equal:
        return False
    stays_equal = math.prod((m + 0.5) / (m + 1) for m in range(num_equal, group_size))
    return bool(rng.random() >= stays_equal)
