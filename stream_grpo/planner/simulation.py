"""The model itself: samplers, stream and learner as events in virtual time. Deterministic by seed. Pure.

A sampler has an event when a rollout ends, when new weights or tickets can be taken up, and when a group is due: always
at the end of an engine step. Up to `EXACT` samplers each is followed alone; above, cohorts are advanced together.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stream_grpo.planner.account import Account
from stream_grpo.planner.cohort import Cohort
from stream_grpo.planner.group import Group, draw_groups
from stream_grpo.planner.prediction import Prediction, predict
from stream_grpo.planner.stream import Stream
from stream_grpo.planner.world import Rollouts, Settings, World

EXACT = 200
"""Samplers that are each followed alone."""
NUM_COHORTS = 40
"""Cohorts of more samplers than that."""

STRIDES = 200
"""Moves that a cohort needs at least for a rollout of mean length: lengths are rounded to that."""

LearnerState = Literal["waits", "steps", "publishes", "checkpoints"]


def cohort_size(settings: Settings) -> int:
    """Samplers that are advanced together."""
    if settings.num_samplers <= EXACT or settings.max_policy_age == 0:
        return 1
    return math.ceil(settings.num_samplers / NUM_COHORTS)


def stride_of(rollouts: Rollouts) -> int:
    """Engine steps that a cohort makes in one move."""
    return max(1, int(rollouts.length_RG.mean()) // STRIDES)


def simulate(
    world: World,
    settings: Settings,
    *,
    seed: int = 0,
    num_steps: int,
    warmup_steps: int = 0,
    duration_s: float = math.inf,
    samplers_per_cohort: int | None = None,
) -> Prediction:
    """What a run would come to over `num_steps` learner steps, or `duration_s` of virtual time, whichever is less.

    Rates, shares and ages are those from the end of step `warmup_steps` on; the account of tokens is of the whole run.
    Raises ValueError where the stream stands still: nothing has signal, or nothing arrives before its deadline.
    """
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(f"warmup_steps = {warmup_steps}: expected 0 to num_steps - 1 = {num_steps - 1}")
    size = samplers_per_cohort or cohort_size(settings)
    with _without_collections():
        return Simulation(world, settings, seed, size).run(num_steps, warmup_steps, duration_s)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Nothing of the model holds itself: looking for cycles among a hundred thousand groups finds none, for a quarter
    of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class _Plan:
    """What a cohort does until its next event."""

    at_s: float = 0.0
    engine_s: float = 0.0
    """Of one engine step."""
    wall_s: float = 0.0
    """The same with what is done before the next."""
    num_steps: int = 0
    serial: int = 0
    """Events of an earlier plan are void."""
    is_set: bool = False


class Simulation:
    """One run in virtual time."""

    def __init__(self, world: World, settings: Settings, seed: int, samplers_per_cohort: int) -> None:
        """All samplers begin at once, with the weights of step 0."""
        self._world, self._settings = world, settings
        rng = np.random.default_rng(seed)
        # Streams of their own: what one draws does not shift the other.
        groups_rng, self._rng = rng.spawn(2)
        self._account = Account()
        stride = 1 if samplers_per_cohort == 1 else stride_of(world.rollouts)
        draw = draw_groups(world.rollouts.rounded(stride), settings.group_size, groups_rng)
        self._stream = Stream(settings, draw, self._account)
        sizes = [samplers_per_cohort] * (settings.num_samplers // samplers_per_cohort)
        if rest := settings.num_samplers % samplers_per_cohort:
            sizes.append(rest)
        self._cohorts = [Cohort(index, size, settings, stride=stride) for index, size in enumerate(sizes)]
        self._plans = [_Plan() for _ in sizes]
        self._waiters: dict[int, Cohort] = {}
        """Cohorts that had fewer tickets than they asked for, in the order of asking."""
        self._events: list[tuple[float, int, Cohort | list[Group] | None, int]] = []
        self._num_events = 0
        self._now = 0.0
        self._published = 0
        self._state: LearnerState = "waits"
        self._state_since = 0.0
        self._learner_ends = math.inf
        self._learner_serial = 0
        self._slowdown = 1.0

    def run(self, num_steps: int, warmup_steps: int, duration_s: float) -> Prediction:
        """Go on until the last step or the end of time."""
        begun_s, before, sampled = 0.0, self._account.copy(), 0
        for cohort in self._cohorts:
            cohort.version = 0
            self._schedule_turn(cohort, 0.0)
        while self._stream.step < num_steps and self._events:
            at_s, _, what, serial = heapq.heappop(self._events)
            if at_s > duration_s:
                self._now = duration_s
                break
            self._now = at_s
            step = self._stream.step
            self._handle(what, serial)
            if step < warmup_steps == self._stream.step:
                begun_s, before, sampled = self._now, self._account.copy(), self._sampled_tokens()
        if self._stream.step < num_steps and self._now < duration_s:
            raise ValueError(f"after step {self._stream.step} the stream stands still: nothing is on its way")
        self._leave_state("waits")
        return predict(
            self._account.since(before),
            self._account,
            self._settings,
            duration_s=self._now - begun_s,
            num_steps=self._stream.step - (warmup_steps if self._stream.step >= warmup_steps else 0),
            sampled_tokens=self._sampled_tokens() - sampled,
            open_tokens=self._open_tokens(),
            all_sampled_tokens=self._sampled_tokens(),
        )

    def _sampled_tokens(self) -> int:
        return sum(cohort.sampled_tokens for cohort in self._cohorts)

    def _open_tokens(self) -> dict[str, int]:
        """Tokens of groups without an end: sampled so far, on their way to the buffer, in it."""
        sent = (group for _, _, what, _ in self._events if isinstance(what, list) for group in what)
        return {
            "in_flight": sum(cohort.unfinished_tokens() for cohort in self._cohorts)
            + sum(group.num_sampled for group in sent),
            "buffered": self._stream.buffered_tokens(),
        }

    # -- events -------------------------------------------------------------------------------------------------------

    def _push(self, at_s: float, what: Cohort | list[Group] | None, serial: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, what, serial))

    def _handle(self, what: Cohort | list[Group] | None, serial: int) -> None:
        if isinstance(what, Cohort):
            if serial == self._plans[what.index].serial:
                self._turn(what)
        elif isinstance(what, list):
            for group in what:
                self._stream.insert(group)
            self._try_lease()
            self._serve()
        elif serial == self._learner_serial:
            self._learner_done()

    # -- samplers -----------------------------------------------------------------------------------------------------

    def _schedule_turn(self, cohort: Cohort, at_s: float) -> None:
        plan = self._plans[cohort.index]
        plan.serial += 1
        plan.is_set = True
        self._push(at_s, cohort, plan.serial)

    def _turn(self, cohort: Cohort) -> None:
        """The end of an engine step, or of idleness: hand over, take up weights and tickets, go on."""
        plan = self._plans[cohort.index]
        plan.is_set = False
        done: list[Group] = []
        if plan.num_steps:
            self._account.seconds["sampling"] += plan.num_steps * plan.engine_s * cohort.size
            self._account.seconds["between"] += plan.num_steps * (plan.wall_s - plan.engine_s) * cohort.size
            done += cohort.make_steps(plan.num_steps)
            plan.num_steps = 0
        done += cohort.cut(self._now)
        if done:
            times = self._world.sampler
            self._push(self._now + times.score_s + times.insert_s, done)
        begin_s = self._now + self._take_up(cohort)
        self._ask(cohort)
        cohort.start()
        self._notice_speed()
        if not cohort.is_idle:
            self._plan(cohort, begin_s)

    def _take_up(self, cohort: Cohort) -> float:
        """Take up the newest weights; the seconds that this keeps the engine from sampling."""
        if cohort.version == self._published:
            return 0.0
        cohort.version = self._published
        self._account.seconds["updating"] += self._world.sampler.update_s * cohort.size
        return self._world.sampler.update_s

    def _ask(self, cohort: Cohort) -> int:
        """Ask for tickets; how many there were. What there is no room for is asked for as soon as there is."""
        wanted = cohort.num_wanted()
        issued = self._stream.issue(cohort, wanted, self._now) if wanted else 0
        if issued < wanted and not (issued and self._settings.max_policy_age == 0):
            self._waiters.setdefault(cohort.index, cohort)
        else:
            self._waiters.pop(cohort.index, None)
        return issued

    def _plan(self, cohort: Cohort, begin_s: float) -> None:
        """Engine steps until something can change."""
        plan, times = self._plans[cohort.index], self._world.sampler
        plan.at_s = begin_s
        num_running = cohort.num_running / cohort.size
        plan.wall_s = cohort.cycle_s(times.cycle_s) * self._slowdown
        plan.engine_s = plan.wall_s * times.step_s(num_running) / times.cycle_s(num_running)
        plan.num_steps = cohort.steps_to_next_end()
        if (due_s := cohort.next_due_s) < begin_s + plan.num_steps * plan.wall_s:
            plan.num_steps = cohort.whole_strides((due_s - begin_s) / plan.wall_s)
        self._schedule_turn(cohort, begin_s + plan.num_steps * plan.wall_s)

    def _interrupt(self, cohort: Cohort) -> None:
        """Let a running cohort look around after the engine step that it is in; an idle one at once."""
        plan = self._plans[cohort.index]
        if plan.num_steps:
            num_steps = cohort.whole_strides((self._now - plan.at_s) / plan.wall_s)
            if num_steps < plan.num_steps:
                plan.num_steps = num_steps
                self._schedule_turn(cohort, plan.at_s + num_steps * plan.wall_s)
        elif not plan.is_set:
            self._schedule_turn(cohort, self._now)

    def _serve(self) -> None:
        """Give what room there is to those who wait for tickets, in the order of asking."""
        for cohort in list(self._waiters.values()):
            if not self._stream.room(self._published):
                return
            if self._plans[cohort.index].num_steps == 0:
                # Idle samplers took up the weights when they came.
                self._take_up(cohort)
            if self._ask(cohort) and cohort.num_running < cohort.num_slots:
                self._interrupt(cohort)

    # -- the learner --------------------------------------------------------------------------------------------------

    def _enter(self, state: LearnerState, work_s: float) -> None:
        self._leave_state(state)
        self._notice_speed()
        self._learner_serial += 1
        self._learner_ends = self._now + work_s * self._slowdown
        self._push(self._learner_ends, None, self._learner_serial)

    def _leave_state(self, state: LearnerState) -> None:
        self._account.seconds[self._state] += self._now - self._state_since
        self._state, self._state_since = state, self._now

    def _try_lease(self) -> None:
        if self._state != "waits":
            return
        groups = self._stream.lease()
        if groups is None:
            return
        for group in groups:
            self._account.leased(group, self._stream.step)
        times = self._world.learner
        num_tokens = sum(group.num_sampled for group in groups) * self._settings.num_epochs
        self._enter("steps", times.step_s(num_tokens) * float(self._rng.choice(times.spread)))

    def _learner_done(self) -> None:
        """The end of a step, a publish or a checkpoint."""
        settings, times, state = self._settings, self._world.learner, self._state
        if state == "steps":
            self._stream.trained()
        if state == "publishes":
            self._published = self._stream.step
        step = self._stream.step
        if state == "steps" and step % settings.publish_interval == 0:
            self._enter("publishes", times.publish_s)
        elif state != "checkpoints" and step % settings.checkpoint_interval == 0:
            self._enter("checkpoints", times.checkpoint_s)
        else:
            self._leave_state("waits")
            self._notice_speed()
            self._try_lease()
        if state == "publishes":
            for cohort in self._cohorts:
                if self._plans[cohort.index].num_steps:
                    self._interrupt(cohort)
        self._serve()

    # -- cores --------------------------------------------------------------------------------------------------------

    def _notice_speed(self) -> None:
        """Where samplers and learner share cores, each gets its part of them; a change acts after an engine step."""
        if not self._settings.cores:
            return
        num_active = sum(cohort.size for cohort in self._cohorts if not cohort.is_idle) + (self._state != "waits")
        slowdown = max(1.0, num_active / self._settings.cores)
        if slowdown == self._slowdown:
            return
        if self._learner_ends > self._now and self._state != "waits":
            left_s = (self._learner_ends - self._now) * slowdown / self._slowdown
            self._learner_serial += 1
            self._learner_ends = self._now + left_s
            self._push(self._learner_ends, None, self._learner_serial)
        self._slowdown = slowdown
        for cohort in self._cohorts:
            if self._plans[cohort.index].num_steps:
                self._interrupt(cohort)
