"""One sampler of the model, or a cohort of samplers advanced together. Knows no clock of its own.

Time is counted in engine steps: a rollout of L tokens that starts before step i ends with step i + L - 1, so that
between two ends nothing changes and any number of steps is one move. Samplers of a cohort make their engine steps
together. Each has slots and a queue of its own: where tickets are few some are full while others run empty, and a group
starts as the rollouts of its own sampler end. Each group is followed by itself, with lengths of its own, so that the
slowest of many is as slow as it is.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from stream_grpo.planner.group import Group
from stream_grpo.planner.world import Settings

NUM_AHEAD = 2
"""Groups under way to a full engine, as the sampler asks for them."""
TURN = 4
"""So many rollouts of a group start at once in a cohort: in its samplers half of them sooner, half of them later."""
_WHOLE_BLOCK = 1 << 16
"""At age 0 tickets come in blocks that the buffer sizes."""


class Cohort:
    """`size` samplers with one count of engine steps."""

    def __init__(self, index: int, size: int, settings: Settings, *, stride: int = 1) -> None:
        """Nothing runs; no weights yet. All lengths are multiples of `stride`, and so are all moves."""
        self._stride = stride
        self.index, self.size = index, size
        self.num_slots, self._group_size = size * settings.max_num_seqs, settings.group_size
        self._max_num_seqs = settings.max_num_seqs
        self._is_synchronous = settings.max_policy_age == 0
        self.version = -1
        """Of the weights in use."""
        self.num_running = 0
        self.steps = 0
        """Engine steps made."""
        self._turn = 1 if size == 1 else min(TURN, settings.group_size)
        self._at_least = (self._turn + 2) // 2
        """Free slots from which on a turn begins."""
        self._num_free = [settings.max_num_seqs] * size
        """Slots of each sampler; below 0 where a turn has taken more than there were."""
        self._num_spare = [settings.max_num_seqs] * size
        """Slots of each less the rollouts that it has, those that wait for one included."""
        first_asked = settings.max_num_seqs // settings.group_size + NUM_AHEAD
        self._asked = dict.fromkeys(range(size), first_asked)
        """Tickets that samplers ask for, in the order of asking."""
        self._num_asked = size * first_asked
        self._waiting: list[deque[Group]] = [deque() for _ in range(size)]
        """Groups of each with rollouts that have not started."""
        self._ready: list[int] = []
        """Samplers that may have something to start."""
        self._ending: defaultdict[int, list[int]] = defaultdict(list)
        """By engine step, the samplers of the rollouts whose last it is."""
        self._whole: defaultdict[int, list[Group]] = defaultdict(list)
        """Groups by the engine step with which they are whole."""
        self._groups: dict[Group, None] = {}
        """Groups in progress, oldest first."""
        self.sampled_tokens = 0

    # -- tickets ------------------------------------------------------------------------------------------------------

    def num_wanted(self) -> int:
        """Groups that are asked for: as many as fit each sampler's free slots, and a few ahead."""
        if self._is_synchronous:
            return 0 if self._groups else _WHOLE_BLOCK
        return self._num_asked

    def add(self, group: Group) -> None:
        """Take a group, for the sampler that asked first; rollouts start in the order of tickets."""
        if self._asked:
            group.sampler, count = next(iter(self._asked.items()))
            self._num_asked -= 1
            if count > 1:
                self._asked[group.sampler] = count - 1
            else:
                del self._asked[group.sampler]
        self._groups[group] = None
        self._waiting[group.sampler].append(group)
        self._num_spare[group.sampler] -= len(group.lengths)
        self._ready.append(group.sampler)

    def _spare(self, samplers: Iterable[int]) -> None:
        """One rollout less for each: a sampler asks for another group whenever it has room for one more."""
        num_spare, size, bound = self._num_spare, self._group_size, (1 - NUM_AHEAD) * self._group_size
        for sampler in samplers:
            num_spare[sampler] = spare = num_spare[sampler] + 1
            if not spare % size and spare >= bound:
                self._asked[sampler] = self._asked.get(sampler, 0) + 1
                self._num_asked += 1

    # -- engine steps -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start waiting rollouts where slots are free."""
        ready, self._ready = self._ready, []
        at_least = self._at_least
        for sampler in ready:
            waiting, num_free = self._waiting[sampler], self._num_free[sampler]
            while waiting and num_free >= at_least:
                group = waiting[0]
                num_started = min(max(num_free, self._turn), len(group.lengths) - group.num_started)
                self._start(group, num_started)
                num_free -= num_started
                if group.num_started == len(group.lengths):
                    waiting.popleft()
                    self._whole[group.last_step].append(group)
            self._num_free[sampler] = num_free

    def _start(self, group: Group, count: int) -> None:
        if group.oldest < 0:
            group.oldest = self.version
        group.starts.append((self.steps, count))
        ends = [self.steps + length for length in group.lengths[group.num_started : group.num_started + count]]
        for end in ends:
            self._ending[end].append(group.sampler)
        group.last_step = max(group.last_step, *ends)
        group.num_started += count
        self.num_running += count

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self.num_running

    def cycle_s(self, of_sampler: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> float:
        """Seconds of an engine step of all, where one of a sampler with k running takes `of_sampler` of k.

        That in which as many tokens are sampled as if each sampler made steps of its own: the harmonic mean over
        sequences, K / sum(k / seconds(k)) with K = sum(k). By their mean load samplers would be faster than they are:
        the more run in one, the less it makes of each.
        """
        if self.size == 1:
            return float(of_sampler(np.array([self.num_running]))[0])
        running = self._max_num_seqs - np.array(self._num_free)
        running = running[running > 0]
        return float(running.sum() / (running / of_sampler(running)).sum())

    def steps_to_next_end(self) -> int:
        """Engine steps until the next rollout ends, where something runs."""
        step = self.steps + self._stride
        while step not in self._ending:
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
        ended = self._ending.pop(self.steps, [])
        self.num_running -= len(ended)
        num_free, waiting = self._num_free, self._waiting
        at_least = self._at_least
        for sampler in ended:
            num_free[sampler] += 1
            if num_free[sampler] >= at_least and waiting[sampler]:
                self._ready.append(sampler)
        self._spare(ended)
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
                self._ending[last].remove(group.sampler)  # the step stays an end, maybe of nobody
                self.num_running -= 1
                self._num_free[group.sampler] += 1
                self._spare([group.sampler])
                group.num_aborted_tokens += length - (last - self.steps)
            ended = group.ended(self.steps)
            group.num_ended, group.num_tokens = len(ended), sum(ended)
            if group.num_started == len(group.lengths):
                self._whole[group.last_step].remove(group)
            else:
                self._waiting[group.sampler].remove(group)
                self._spare(repeat(group.sampler, len(group.lengths) - group.num_started))
            self._ready.append(group.sampler)
            yield group

    def unfinished_tokens(self) -> int:
        """Tokens so far of the groups in progress."""
        total = 0
        for group in self._groups:
            total += sum(group.ended(self.steps))
            total += sum(length - (last - self.steps) for last, length in group.running(self.steps))
        return total
