"""The sampler's loop: apply weights, take tickets, sample, give out to be scored, hand groups over. Knows no Ray."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from curator.client import Curator
from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.environments.outcome import scored
from stream_grpo.errors import StallError
from stream_grpo.failpoints import failpoint
from stream_grpo.rewards.gathering import Place
from stream_grpo.rewards.scoring import Scoring, scoring_version
from stream_grpo.rewards.shaping import shaped_group
from stream_grpo.sampler.alarms import Alarms
from stream_grpo.sampler.branching import num_trunk_actions
from stream_grpo.sampler.continuation import continued_group
from stream_grpo.sampler.generation import Engine
from stream_grpo.sampler.heldout import HeldoutEvaluation
from stream_grpo.sampler.midflight import MidFlight
from stream_grpo.sampler.progress import Progress
from stream_grpo.sampler.prompts import PromptRefused, Prompts
from stream_grpo.sampler.questions import Questions
from stream_grpo.sampler.rollout import (
    GroupInProgress,
    config_hash,
    group_of,
    make_requests,
    refused_group,
    request_of,
    scored_as,
    task_id_of,
    unknown_problem,
    with_episodes,
)
from stream_grpo.sampler.seconds import Seconds
from stream_grpo.sampler.tallies import Tallies
from stream_grpo.sampler.trajectories import TrajectoryEngine
from stream_grpo.sampler.update import Updater
from stream_grpo.transport.channels import SamplerChannel
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import Decision, EndReason, Generation, PolicyVersion, RewardResult, RolloutGroup, Ticket
from stream_grpo.weights.nccl_subscriber import NcclSubscriber
from stream_grpo.weights.subscriber import Subscriber

_IDLE_WAIT_S = 0.005
_LAST_INSERTS_S = 2.0
# What a late group gets to reach the buffer before its ticket ends there: seconds, but at most a share of the deadline.
_HAND_OVER_S, _HAND_OVER_SHARE = 1.0, 0.1
# At age 0 tickets come in blocks that the buffer sizes: it is asked for as many as it has.
_WHOLE_BLOCK = 1 << 16
# Groups under way to a full engine: a ticket and a problem take two or three engine steps to come.
_NUM_AHEAD = 2


class SamplerProcess:
    """One sampler. `run` belongs to one thread, `status` may be called from any."""

    def __init__(
        self,
        config: Config,
        sampler_id: str,
        engine: Engine,
        buffer: SamplerChannel,
        curator: Curator,
        subscriber: Subscriber | NcclSubscriber,
        prompts: Prompts,
        scoring: Scoring,
        heldout: HeldoutEvaluation,
        alarms: Alarms,
        *,
        pull_trouble: Callable[[], str] = str,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pull_trouble`: why weights cannot be pulled; `clock`: unix seconds; `timer`: seconds for durations."""
        self._config, self._sampler_id = config, sampler_id
        self._config_hash = config_hash(config, prompts.fingerprint, scoring_version(config.rewards))
        self._engine, self._buffer, self._questions = engine, buffer, Questions(curator)
        self._subscriber, self._prompts, self._scoring = subscriber, prompts, scoring
        self._heldout, self._alarms = heldout, alarms
        self._pull_trouble, self._clock, self._timer = pull_trouble, clock, timer
        self._updater = Updater(config, engine, timer, clock)
        self._trajectories = engine if isinstance(engine, TrajectoryEngine) else None
        self._progress = Progress(
            config.stream, engine, buffer, self._held, self._so_far, timer, keeps_partials=self._trajectories is None
        )
        self._next_look_at = 0.0
        self._mid_flight = MidFlight(config.weights.on_update, engine)
        # A group's way: ticket, asked of the curator, in progress (sampled, scored), finished, handed over.
        self._tickets: dict[str, Ticket] = {}
        self._groups: dict[str, GroupInProgress] = {}
        # Of those in progress the ones that came with all their tokens, to be scored again.
        self._only_scored: set[str] = set()
        self._finished: deque[RolloutGroup] = deque()
        # Of groups begun since the buffer was last asked: their problems, and how many rollouts they are to have.
        self._newly_bound: dict[str, str] = {}
        self._new_sizes: dict[str, int] = {}
        # Since when something outside is waited for, by name.
        self._waits: dict[str, float] = {}
        self._seconds = Seconds(timer)
        # When it is to be gone, by the timer; None: it stays.
        self._leaves_at: float | None = None
        self._num_tokens, self._num_expired, self._num_refused, self._num_continued = 0, 0, 0, 0
        self._num_prompt_tokens, self._num_cached_tokens = 0, 0
        self._fates: Counter[str] = Counter()
        self._tallies = Tallies()

    def run(self, stop: threading.Event) -> None:
        """Sample until `stop` is set, or until it has left after `leave`.

        Raises StallError naming who did not answer within `stream.stall_timeout_s`, ProbeError for weights that do not
        give the learner's logprobs, WeightsError for damaged ones, RemoteError where buffer or curator refuse,
        EvaluationError where an evaluation has samples of two versions, RewardError where responses cannot be scored.
        """
        with self._scoring:
            self._run(stop)

    def _run(self, stop: threading.Event) -> None:
        self._buffer.hello()
        while not stop.is_set() and not self._may_go():
            self._update_weights()
            if self._updater.version is None:
                with self._seconds.idle("policy"):
                    stop.wait(self._config.weights.poll_interval_s)
                continue
            self._ask_tickets()
            self._take_tickets()
            self._start_groups()
            self._abort_late_groups()
            self._sample()
            self._take_scores()
            self._hand_over()
            self._progress.turn(self._groups)
            self._heldout.turn()
        self._wind_down()
        if self._leaves_at is not None and not stop.is_set():
            self._buffer.goodbye()

    def leave(self, within_s: float) -> None:
        """Take no more tickets; `run` returns once all groups are handed over, or after `within_s` what there is of
        them, which others go on from where there is no environment. May be called from any thread."""
        self._leaves_at = self._timer() + within_s

    def _may_go(self) -> bool:
        if self._leaves_at is None:
            return False
        is_done = not (self._tickets or self._heldout.is_running or self._is_owed())
        return is_done or self._timer() >= self._leaves_at

    def status(self) -> dict[str, Any]:
        """How it is going, in plain values."""
        updater, busy_s = self._updater, self._seconds.busy_s
        return {
            "sampler_id": self._sampler_id,
            "version": None if updater.version is None else list(updater.version),
            "apply_s": updater.apply_s,
            "prove_s": updater.prove_s,
            "publish_lag_s": updater.lag_s,
            "weights_sha256": updater.sha256,
            **self._seconds.as_fields(),
            "rewards": self._scoring.status(),
            "num_updates": updater.num_updates,
            "num_failed_proofs": updater.num_failed_proofs,
            "probe_gap": None if updater.gap is None else updater.gap._asdict(),
            "num_running": self._engine.num_unfinished,
            "num_tokens": self._num_tokens,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_cached_tokens": self._num_cached_tokens,
            "num_tokens_restarted": self._mid_flight.num_tokens_restarted,
            "num_groups_done": sum(self._fates.values()),
            "groups_by_fate": dict(self._fates),
            "num_groups_in_progress": len(self._groups),
            "num_groups_expired": self._num_expired,
            "num_prompts_refused": self._num_refused,
            "waits_for": self._waits_for(),
            "num_groups_continued": self._num_continued,
            "num_partials": self._progress.num_partials,
            "num_partials_not_kept": self._progress.num_not_kept,
            "num_slots": self._engine.num_slots,
            "tokens_paused": self._num_tokens / busy_s * updater.apply_s if busy_s else 0.0,
            **self._environment_status(),
        }

    def _environment_status(self) -> dict[str, Any]:
        if self._trajectories is None:
            return {}
        return {"environment": {**self._trajectories.status(), **self._tallies.as_fields()}}

    def _waits_for(self) -> list[str]:
        now = self._timer()
        waits = [f"{whom} ({now - since:.0f} s)" for whom, since in self._waits.copy().items()]
        if trouble := self._pull_trouble():
            waits.append(f"weights, which cannot be pulled: {trouble}")
        return [*waits, f"tickets: {self._buffer.cause}"] if self._buffer.cause else waits

    # -- weights ------------------------------------------------------------------------------------------------------

    def _update_weights(self) -> None:
        """Look for new weights now and then; apply and prove them before anything else is sampled.

        While an evaluation runs they wait.
        """
        started = self._timer()
        if started < self._next_look_at:
            return
        newest = self._subscriber.newest()
        self._watch("the learner to publish weights", newest is None)
        if newest is not None and self._heldout.is_running:
            self._heldout.published(newest)
        elif newest is not None and newest != self._updater.version and self._mid_flight.may_apply():
            self._apply(newest, started)
        self._next_look_at = self._timer() + self._config.weights.poll_interval_s

    def _apply(self, newest: PolicyVersion, started: float) -> None:
        published = self._subscriber.read(newest, self._engine.expected_tensors())
        failpoint("sampler.weights_read")
        before = list(self._groups.values())
        in_flight, again = self._mid_flight.requests(self._groups)
        for group in before:
            if self._groups[group.ticket.group_id] is not group:
                self._scoring.forget(scored_as(group.ticket, group.attempt))
        proved_s = self._updater.prove_s
        self._updater.update(published, in_flight)
        for request in again:
            self._engine.add(request)
        self._seconds.stall_s += self._timer() - started
        if in_flight:
            # The probe's engine steps sample a token of every running sequence, as any step does.
            self._seconds.busy_s += self._updater.prove_s - proved_s
        self._heldout.applied(published.manifest.version, published.manifest.forks)

    # -- tickets and problems -----------------------------------------------------------------------------------------

    def _ask_tickets(self) -> None:
        """Ask for what there is room for; with none, still tell at once which problems were picked for which group."""
        is_full = self._finished or self._mid_flight.is_finishing or self._leaves_at is not None
        version, num_wanted = self._updater.version, 0 if is_full else max(0, self._num_wanted())
        if version is None or not (num_wanted or self._newly_bound):
            return
        if self._heldout.is_running and self._config.stream.max_policy_age == 0:
            return  # it has the engine to itself, between two steps
        if self._buffer.waits_for_tickets or not self._buffer.has_credit:
            return
        self._buffer.ask_tickets(version, num_wanted, self._newly_bound, self._new_sizes)
        self._newly_bound, self._new_sizes = {}, {}

    def _num_wanted(self) -> int:
        """Groups that fit the free slots, and a few ahead, were all of the largest size there is.

        Tickets without a problem yet count as running. So do groups that are only scored: a buffer full of them would
        come at once, and their scores after their deadlines.
        """
        if self._config.stream.max_policy_age == 0:
            return 0 if self._tickets or self._groups else _WHOLE_BLOCK
        group_size = max(self._config.group_sizes)
        num_taken = self._engine.num_unfinished + group_size * (len(self._tickets) + len(self._only_scored))
        return (self._engine.num_slots - num_taken) // group_size + _NUM_AHEAD

    def _take_tickets(self) -> None:
        """What the buffer says; the tickets of one answer ask the curator for their problems in one question."""
        idle = self._engine.num_unfinished == 0 and not self._questions.is_open
        # With responses out the slots are empty because of their scores: their groups hold the tickets.
        cause = "rewards" if self._scoring.num_open else "buffer"
        with self._seconds.idle(cause if idle else ""):
            tickets, taken = self._buffer.poll(_IDLE_WAIT_S if idle else 0.0)
        is_owed = self._buffer.waits_for_tickets or self._buffer.num_unacknowledged > 0
        self._watch("the buffer to answer", is_owed and not tickets and not taken)
        self._fates.update(answer.fate.value for answer in taken)
        if self._leaves_at is not None:
            tickets = []  # asked for before: issued to others as soon as this one says goodbye
        for ticket in tickets:
            self._forget(ticket.group_id)
            self._tickets[ticket.group_id] = ticket
        self._questions.ask(self._tickets.values())

    def _forget(self, group_id: str) -> None:
        """Drop what is under way for a group whose ticket is issued again."""
        self._only_scored.discard(group_id)
        self._seconds.forget(group_id)
        if (group := self._groups.pop(group_id, None)) is not None:
            self._engine.abort([request.request_id for request in group.unfinished])
            self._scoring.forget(scored_as(group.ticket, group.attempt))

    def _start_groups(self) -> None:
        """Begin groups whose problems are known, in the order of their ids: equal tickets make equal batches."""
        if self._mid_flight.is_finishing:
            self._watch("the curator to choose problems", False)
            return
        is_idle = self._questions.is_open and self._engine.num_unfinished == 0
        with self._seconds.idle("curator" if is_idle else ""):
            answers = self._questions.answers(_IDLE_WAIT_S if is_idle else 0.0)
        self._watch("the curator to choose problems", self._questions.is_open and not answers)
        for ticket, problem, asked_size in answers:
            # The ticket may have ended since, or been issued again.
            if self._tickets.get(ticket.group_id) is ticket:
                del self._tickets[ticket.group_id]
                size = self._size(asked_size)
                if problem is None:
                    reason = "the problem has left the curator's pool"
                    self._refuse(ticket, unknown_problem(ticket.problem_id), reason, size)
                elif ticket.prefix:
                    self._continue_group(ticket, problem, size)
                else:
                    self._start_group(ticket, problem, size)

    def _size(self, asked: int) -> int:
        """Rollouts of a group: as asked, where the configuration that it is to carry has that size."""
        return asked if asked in self._config.group_sizes else self._config.sampler.group_size

    def _start_group(self, ticket: Ticket, problem: Problem, size: int) -> None:
        self._newly_bound[ticket.group_id], self._new_sizes[ticket.group_id] = problem.problem_id, size
        try:
            requests = make_requests(ticket, self._prompts.token_ids(problem), self._config, size)
            if self._trajectories is not None:
                num_before = num_trunk_actions(ticket.seed, self._config.environment)
                requests = with_episodes(requests, ticket, problem, num_before)
        except PromptRefused as error:
            self._refuse(ticket, problem, str(error), size)
            return
        self._begin(GroupInProgress(ticket, problem, requests, self._clock()))

    def _refuse(self, ticket: Ticket, problem: Problem, reason: str, size: int) -> None:
        self._num_refused += 1
        self._finish(refused_group(ticket, problem, reason, self._config, self._clock(), size))

    def _continue_group(self, ticket: Ticket, problem: Problem, size: int) -> None:
        """Go on with a group that an earlier owner of its ticket has begun."""
        prefix = decode_group(ticket.prefix)
        has_begun = any(rollout.end_reason is EndReason.PARTIAL for rollout in prefix.rollouts)
        is_mixed = len({*prefix.versions(), self._updater.version}) > 1
        if has_begun and is_mixed and self._config.weights.on_update != "keep":
            self._start_group(ticket, problem, size)  # no group gets tokens of two versions
            return
        if self._trajectories is not None:
            self._start_group(ticket, problem, size)  # a record does not hold what an environment said
            return
        group = continued_group(ticket, problem, prefix, self._config)
        self._num_continued += 1
        self._begin(group)
        if not group.unfinished:
            self._only_scored.add(ticket.group_id)
        for generation in group.unscored:
            self._submit(group, generation)
        if group.is_complete:
            self._complete(group)

    def _begin(self, group: GroupInProgress) -> None:
        self._groups[group.ticket.group_id] = group
        self._progress.begin(group)
        for request in group.unfinished:
            self._engine.add(request)

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """One engine step where something runs; what finishes is given out to be scored."""
        if self._engine.num_unfinished == 0:
            return
        self._seconds.first_busy_at = self._seconds.first_busy_at or self._clock()
        if self._trajectories is not None and self._trajectories.only_waits:
            with self._seconds.idle("environment"):
                generations = self._engine.step()
            self._collect(generations)
            return
        started = self._timer()
        generations = self._engine.step()
        self._seconds.busy_s += self._timer() - started
        self._seconds.num_engine_steps += 1
        self._collect(generations)

    def _collect(self, generations: Iterable[Generation]) -> None:
        started = self._timer()
        for generation in self._heldout.take(generations):
            group = self._groups[group_of(generation.request_id)]
            self._submit(group, group.take(generation))
            self._num_tokens += generation.num_sampled
            self._num_prompt_tokens += generation.num_prompt_tokens
            self._num_cached_tokens += generation.num_cached_tokens
            self._alarms.ended(generation.end_reason)
        self._seconds.score_s += self._timer() - started

    def _submit(self, group: GroupInProgress, generation: Generation) -> None:
        """Give a whole response out to be scored."""
        self._seconds.given_out(group.ticket.group_id)
        problem, text = scored(group.problem, generation, self._prompts.decode)
        task_id = task_id_of(group.ticket, generation.request_id, group.attempt)
        place = Place(scored_as(group.ticket, group.attempt), group.size)
        num_tokens = generation.num_action_tokens
        self._scoring.submit(
            task_id, problem, text, generation.end_reason, place, num_tokens=num_tokens, may_be_trained=True
        )

    def _take_scores(self) -> None:
        """Give rewards to the generations that wait for them; complete groups are finished."""
        if not self._scoring.num_open:
            return
        is_idle = self._engine.num_unfinished == 0
        started = self._timer()
        with self._seconds.idle("rewards" if is_idle else ""):
            results = self._scoring.poll(_IDLE_WAIT_S if is_idle else 0.0)
        for task_id, reward in self._heldout.take_scores(results):
            request_id = request_of(task_id)
            group = self._groups.get(group_of(request_id))
            # The group may have ended since, at its deadline or because its ticket was issued again, or begun anew.
            if group is not None and task_id == task_id_of(group.ticket, request_id, group.attempt):
                self._score(group, request_id, reward)
        if results:
            self._alarms.scored(self._scoring, len(results))
            self._alarms.compared(self._scoring)
        if not is_idle:  # else it is time spent waiting
            self._seconds.score_s += self._timer() - started

    def _score(self, group: GroupInProgress, request_id: str, reward: RewardResult) -> None:
        group.score(request_id, reward, self._prompts.decode)
        if group.is_complete:
            self._complete(group)

    def _complete(self, group: GroupInProgress) -> None:
        group_id = group.ticket.group_id
        del self._groups[group_id]
        self._only_scored.discard(group_id)
        self._seconds.scored(group_id)
        self._finish(group)

    def _abort_late_groups(self) -> None:
        """Hand over what a group has in time before its ticket's deadline; a ticket alone is the buffer's to end."""
        now = self._clock() + min(_HAND_OVER_S, _HAND_OVER_SHARE * self._config.stream.sample_deadline_s)
        for group_id in [name for name, ticket in self._tickets.items() if now >= ticket.deadline_s]:
            del self._tickets[group_id]
        for group in [group for group in self._groups.values() if now >= group.ticket.deadline_s]:
            if group.is_complete:
                continue  # a score that came with those of another
            self._num_expired += 1
            self._collect(self._engine.abort([request.request_id for request in group.unfinished]))
            self._take_scores()
            for generation in group.unscored:
                self._score(group, generation.request_id, _too_late(group))
            self._scoring.forget(scored_as(group.ticket, group.attempt))

    # -- handing over -------------------------------------------------------------------------------------------------

    def _finish(self, group: GroupInProgress) -> None:
        made = group.finish(sampler_id=self._sampler_id, config_hash=self._config_hash, finished_at_s=self._clock())
        if self._trajectories is not None:
            self._tallies.add(made)
        max_new_tokens = self._config.sampler.max_new_tokens
        self._finished.append(shaped_group(made, self._config.rewards.shaping, max_new_tokens=max_new_tokens))

    def _held(self) -> list[str]:
        """Ids of the groups that are this sampler's until the buffer has taken them."""
        finished = [group.group_id for group in self._finished]
        return [*self._tickets, *self._groups, *finished, *self._buffer.unacknowledged_groups]

    def _so_far(self, group: GroupInProgress, running: Sequence[Generation]) -> RolloutGroup:
        return group.so_far(running, sampler_id=self._sampler_id, config_hash=self._config_hash, now_s=self._clock())

    def _hand_over(self) -> None:
        while self._finished and self._buffer.has_credit:
            self._buffer.insert(self._finished.popleft())

    def _wind_down(self) -> None:
        """End what runs, and give the buffer a moment to take what is finished, and of the rest what there is."""
        self._heldout.stop()
        self._progress.last_turn(self._groups)
        self._engine.abort([r.request_id for group in self._groups.values() for r in group.unfinished])
        self._groups = {name: group for name, group in self._groups.items() if not group.unfinished}
        deadline = self._timer() + _LAST_INSERTS_S
        while self._is_owed() and self._timer() < deadline:
            self._take_scores()
            self._hand_over()
            _, taken = self._buffer.poll(_IDLE_WAIT_S)
            self._fates.update(answer.fate.value for answer in taken)
            self._heldout.turn()

    def _is_owed(self) -> bool:
        buffer = self._buffer
        return bool(self._groups or self._finished or buffer.num_unacknowledged or buffer.num_partials_on_their_way)

    def _watch(self, whom: str, waits: bool) -> None:
        """Raise StallError where one wait has lasted beyond `stream.stall_timeout_s`."""
        if not waits:
            self._waits.pop(whom, None)
            return
        waited_s = self._timer() - self._waits.setdefault(whom, self._timer())
        if waited_s > self._config.stream.stall_timeout_s:
            raise StallError(f"{self._sampler_id} waited {waited_s:.0f} s for {whom}")


def _too_late(group: GroupInProgress) -> RewardResult:
    return RewardResult(
        decision=Decision.ENV_ERROR,
        reward=None,
        verifier=group.problem.verifier,
        verifier_version="",
        evidence="not scored by the deadline of its group",
    )
