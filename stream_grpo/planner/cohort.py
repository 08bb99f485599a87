"""One sampler of the model, or a cohort of samplers advanced together. Knows no clock of its own.

Time is counted in engine steps: a rollout of L tokens that starts before step i ends with step i + L - 1, so that
between two ends nothing changes and any number of steps is one move. Samplers of a cohort make their engine steps
together and share their slots; each group is still followed by itself, with lengths of its own, so that the slowest of
many is as slow as it is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from stream_grpo.planner.group import Group
from stream_grpo.planner.world import Settings

NUM_AHEAD = 2
"""Groups under way to a full engine, as the sampler asks for them."""
_WHOLE_BLOCK = 1 << 16
"""At age 0 tickets come in blocks that the buffer sizes."""


class Cohort:
    """`size` samplers with one count of engine steps."""

    def __init__(self, index: int, size: int, settings: Settings, *, stride: int = 1) -> None:
        """Nothing runs; no weights yet. All lengths are multiples of `stride`, and so are all moves."""
        self._stride = stride
        self.index, self.size = index, size
        self.num_slots, self._group_size = size * settings.max_num_seqs, settings.group_size
        self._is_synchronous = settings.max_policy_age == 0
        self.version = -1
        """Of the weights in use."""
        self.num_running = 0
        self._num_queued = 0
        """Rollouts that wait for a slot."""
        self.steps = 0
        """Engine steps made."""
        self._waiting: deque[Group] = deque()
        """Groups with rollouts that have not started."""
        self._num_ending: Counter[int] = Counter()
        """Running rollouts by the engine step that is their last."""
        self._whole: defaultdict[int, list[Group]] = defaultdict(list)
        """Groups by the engine step with which they are whole."""
        self._groups: dict[Group, None] = {}
        """Groups in progress, oldest first."""
        self.sampled_tokens = 0

    # -- tickets ------------------------------------------------------------------------------------------------------

    def num_wanted(self) -> int:
        """Groups that are asked for: as many as fit the free slots, and a few ahead.

        Of a sampler's free slots those that are too few for a group count for none: of a cohort's, half a group's each.
        """
        if self._is_synchronous:
            return 0 if self._groups else _WHOLE_BLOCK
        num_free = self.num_slots - self.num_running - self._num_queued - (self.size - 1) * (self._group_size - 1) / 2
        return max(0, math.floor(num_free / self._group_size) + NUM_AHEAD * self.size)

    def add(self, group: Group) -> None:
        """Take a group; rollouts start in the order of tickets."""
        self._groups[group] = None
        self._waiting.append(group)
        self._num_queued += len(group.lengths)

    # -- engine steps -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start waiting rollouts while slots are free."""
        num_free = self.num_slots - self.num_running
        while self._waiting and num_free:
            group = self._waiting[0]
            num_started = min(num_free, len(group.lengths) - group.num_started)
            self._start(group, num_started)
            num_free -= num_started
            if group.num_started == len(group.lengths):
                self._waiting.popleft()
                self._whole[group.last_step].append(group)

    def _start(self, group: Group, count: int) -> None:
        if group.oldest < 0:
            group.oldest = self.version
        group.starts.append((self.steps, count))
        ends = [self.steps + length for length in group.lengths[group.num_started : group.num_started + count]]
        self._num_ending.update(ends)
        group.last_step = max(group.last_step, *ends)
        group.num_started += count
        self.num_running += count
        self._num_queued -= count

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self.num_running

    def steps_to_next_end(self) -> int:
        """Engine steps until the next rollout ends, where something runs."""
        step = self.steps + self._stride
        while step not in self._num_ending:
            step += self._stride
        return step - self.steps

    def whole_strides(self, num_steps: float) -> int:
        """The least move of at least so many engine steps."""
        return self._stride * max(1, math.ceil(num_steps / self._stride - 1e-9))

    @property
    def next_due_s(self) -> float:
        """When the oldest group is to be handed over as it is."""
        return next(iter(self._groups)).due_s if self._groups else math.inf

    def make_steps(self, num_steps: int) -> list[Group]:
        """Make engine steps, no more than to the next end; the groups that are whole with the last of them."""
        self.steps += num_steps
        self.sampled_tokens += num_steps * self.num_running
        self.num_running -= self._num_ending.pop(self.steps, 0)
        whole = self._whole.pop(self.steps, [])
        for group in whole:
            group.num_ended, group.num_tokens = len(group.lengths), sum(group.lengths)
            del self._groups[group]
        return whole

    def cut(self, now_s: float) -> Iterator[Group]:
        """Groups that are due, with what there is of them."""
        while self.next_due_s <= now_s:
            group = next(iter(self._groups))
            del self._groups[group]
            for last, length in group.running(self.steps):
                self._num_ending[last] -= 1  # the step stays an end, of nobody
                self.num_running -= 1
                group.num_aborted_tokens += length - (last - self.steps)
            ended = group.ended(self.steps)
            group.num_ended, group.num_tokens = len(ended), sum(ended)
            if group.num_started == len(group.lengths):
                self._whole[group.last_step].remove(group)
            else:
                self._waiting.remove(group)
                self._num_queued -= len(group.lengths) - group.num_started
            yield group

    def unfinished_tokens(self) -> int:
        """Tokens so far of the groups in progress."""
        total = 0
        for group in self._groups:
            total += sum(group.ended(self.steps))
            total += sum(length - (last - self.steps) for last, length in group.running(self.steps))
        return total
