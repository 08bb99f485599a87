"""One sampler of the model, or a cohort of samplers that do the same at the same time. Knows no clock of its own.

Time is counted in engine steps: a rollout of L tokens that starts before step i ends with step i + L - 1, so that between
two ends nothing changes and any number of steps is one move.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator

from stream_grpo.planner.group import Group
from stream_grpo.planner.world import Settings

NUM_AHEAD = 2
"""Groups under way to a full engine, as the sampler asks for them."""
_WHOLE_BLOCK = 1 << 16
"""At age 0 tickets come in blocks that the buffer sizes."""
_ROUNDING = 1e-9


class Cohort:
    """`size` samplers. A group that only some of them have counts as that share of its sequences in each."""

    def __init__(self, index: int, size: int, settings: Settings) -> None:
        """Nothing runs; no weights yet."""
        self.index, self.size = index, size
        self._slots, self._group_size = settings.max_num_seqs, settings.group_size
        self._is_synchronous = settings.max_policy_age == 0
        self.version = -1
        """Of the weights in use."""
        self.running = 0.0
        """Sequences that run in each sampler."""
        self._queued = 0.0
        self.steps = 0
        """Engine steps made."""
        self._waiting: deque[Group] = deque()
        """Groups with rollouts that have not started."""
        self._num_started: dict[Group, int] = {}
        self._ends: list[tuple[int, int, Group, int]] = []
        """Of running rollouts: the engine step that is their last, order, group, tokens."""
        self._groups: dict[Group, None] = {}
        """Groups in progress, oldest first."""
        self._num_pushed = 0
        self.sampled_tokens = 0.0
        """By all samplers of the cohort."""

    # -- tickets ------------------------------------------------------------------------------------------------------

    def num_wanted(self) -> int:
        """Groups that the cohort asks for: as many as fit the free slots, and a few ahead."""
        if self._is_synchronous:
            return 0 if self._groups else _WHOLE_BLOCK
        free = self._slots - self.running - self._queued
        return max(0, math.floor(free / self._group_size + _ROUNDING) + NUM_AHEAD) * self.size

    def add(self, group: Group) -> None:
        """Take a group; its rollouts start in the order of tickets."""
        self._groups[group] = None
        self._waiting.append(group)
        self._num_started[group] = 0
        self._queued += len(group.lengths) * group.mass / self.size

    # -- engine steps -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start waiting rollouts while slots are free."""
        while self._waiting:
            group = self._waiting[0]
            share = group.mass / self.size
            while self._num_started[group] < len(group.lengths):
                if self.running + share > self._slots + _ROUNDING and self.running > 0:
                    return
                self._start(group, share)
            self._waiting.popleft()
            del self._num_started[group]

    def _start(self, group: Group, share: float) -> None:
        length = group.lengths[self._num_started[group]]
        self._num_started[group] += 1
        self._num_pushed += 1
        heapq.heappush(self._ends, (self.steps + length, self._num_pushed, group, length))
        self.running += share
        self._queued -= share
        if group.oldest < 0:
            group.oldest = self.version

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self._ends

    @property
    def steps_to_next_end(self) -> int:
        """Engine steps until the next rollout ends, where something runs."""
        return self._ends[0][0] - self.steps

    @property
    def next_due_s(self) -> float:
        """When the oldest group is to be handed over as it is."""
        return next((group.due_s for group in self._groups), math.inf)

    def make_steps(self, num_steps: int) -> list[Group]:
        """Make engine steps, no more than to the next end; the groups that are whole with the last of them."""
        self.steps += num_steps
        self.sampled_tokens += num_steps * self.running * self.size
        whole: list[Group] = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, group, length = heapq.heappop(self._ends)
            self.running -= group.mass / self.size
            group.num_ended += 1
            group.num_tokens += length
            if group.num_ended == len(group.lengths):
                self._leave(group)
                whole.append(group)
        if not self._ends:
            self.running = 0.0  # no rounding is carried on
        return whole

    def cut(self, now_s: float) -> Iterator[Group]:
        """Groups that are due, with what there is of them."""
        while self.next_due_s <= now_s:
            group = next(iter(self._groups))
            mine = [end for end in self._ends if end[2] is group]
            self._ends = [end for end in self._ends if end[2] is not group]
            heapq.heapify(self._ends)
            group.num_aborted_tokens = sum(_sampled(end, self.steps) for end in mine)
            self.running -= len(mine) * group.mass / self.size
            if group in self._num_started:
                self._waiting.remove(group)
                num_left = len(group.lengths) - self._num_started.pop(group)
                self._queued -= num_left * group.mass / self.size
            self._leave(group)
            yield group

    def _leave(self, group: Group) -> None:
        del self._groups[group]
        group.is_over = True

    def unfinished_tokens(self) -> int:
        """Tokens so far of the groups in progress, of all samplers."""
        ended = sum(group.num_tokens * group.mass for group in self._groups)
        return ended + sum(_sampled(end, self.steps) * end[2].mass for end in self._ends)


def _sampled(end: tuple[int, int, Group, int], steps: int) -> int:
    """Tokens so far of a running rollout."""
    last, _, _, length = end
    return length - (last - steps)
