"""The sampler's loop: apply weights, take tickets, sample, give out to be scored, hand groups over. Knows no Ray."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from curator.client import Curator, Picked, Refused
from curator.schema import Pick
from curator.wire import RemoteError
from stream_grpo.config import Config
from stream_grpo.errors import StallError
from stream_grpo.rewards.scoring import Scoring, scoring_version
from stream_grpo.sampler.alarms import Alarms
from stream_grpo.sampler.generation import Engine
from stream_grpo.sampler.heldout import HeldoutEvaluation
from stream_grpo.sampler.midflight import MidFlight
from stream_grpo.sampler.prompts import PromptRefused, Prompts
from stream_grpo.sampler.rollout import (
    GroupInProgress,
    config_hash,
    group_of,
    make_requests,
    refused_group,
    request_of,
    task_id_of,
)
from stream_grpo.sampler.update import Updater
from stream_grpo.transport.channels import SamplerChannel
from stream_grpo.types import Decision, Generation, PolicyVersion, RewardResult, RolloutGroup, Ticket
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
        subscriber: Subscriber,
        prompts: Prompts,
        scoring: Scoring,
        heldout: HeldoutEvaluation,
        alarms: Alarms,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: unix seconds; `timer`: seconds for durations."""
        self._config, self._sampler_id = config, sampler_id
        self._config_hash = config_hash(config, prompts.fingerprint, scoring_version(config.rewards))
        self._engine, self._buffer, self._curator = engine, buffer, curator
        self._subscriber, self._prompts, self._scoring = subscriber, prompts, scoring
        self._heldout, self._alarms = heldout, alarms
        self._clock, self._timer = clock, timer
        self._updater = Updater(config, engine, timer, clock)
        self._next_look_at = 0.0
        self._mid_flight = MidFlight(config.weights.on_update, engine)
        # A group's way: ticket, asked of the curator, in progress (sampled, scored), finished, handed over.
        self._tickets: dict[str, Ticket] = {}
        self._asked: dict[str, list[str]] = {}
        self._groups: dict[str, GroupInProgress] = {}
        self._finished: deque[RolloutGroup] = deque()
        self._newly_bound: dict[str, str] = {}
        # Since when something outside is waited for, by name.
        self._waits: dict[str, float] = {}
        self._busy_s, self._stall_s, self._score_s = 0.0, 0.0, 0.0
        self._first_busy_at: float | None = None
        self._num_tokens, self._num_expired, self._num_refused = 0, 0, 0
        self._fates: Counter[str] = Counter()

    def run(self, stop: threading.Event) -> None:
        """Sample until `stop` is set.

        Raises StallError naming who did not answer within `stream.stall_timeout_s`, ProbeError for weights that do not
        give the learner's logprobs, WeightsError for damaged ones, RemoteError where buffer or curator refuse,
        EvaluationError where an evaluation has samples of two versions, RewardError where responses cannot be scored.
        """
        with self._scoring:
            self._run(stop)

    def _run(self, stop: threading.Event) -> None:
        self._buffer.hello()
        while not stop.is_set():
            self._update_weights()
            if self._updater.version is None:
                stop.wait(self._config.weights.poll_interval_s)
                continue
            self._ask_tickets()
            self._take_tickets()
            self._take_picks()
            self._abort_late_groups()
            self._sample()
            self._take_scores()
            self._hand_over()
            self._heldout.turn()
        self._wind_down()

    def status(self) -> dict[str, Any]:
        """How it is going, in plain values."""
        updater = self._updater
        return {
            "sampler_id": self._sampler_id,
            "version": None if updater.version is None else list(updater.version),
            "busy_s": self._busy_s,
            "first_busy_at": self._first_busy_at,
            "stall_s": self._stall_s,
            "apply_s": updater.apply_s,
            "prove_s": updater.prove_s,
            "publish_lag_s": updater.lag_s,
            "weights_sha256": updater.sha256,
            "score_s": self._score_s,
            "rewards": self._scoring.status(),
            "num_updates": updater.num_updates,
            "num_failed_proofs": updater.num_failed_proofs,
            "probe_gap": None if updater.gap is None else updater.gap._asdict(),
            "num_running": self._engine.num_unfinished,
            "num_tokens": self._num_tokens,
            "num_tokens_restarted": self._mid_flight.num_tokens_restarted,
            "num_groups_done": sum(self._fates.values()),
            "groups_by_fate": dict(self._fates),
            "num_groups_in_progress": len(self._groups),
            "num_groups_expired": self._num_expired,
            "num_prompts_refused": self._num_refused,
        }

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
        in_flight, again = self._mid_flight.requests(self._groups)
        proved_s = self._updater.prove_s
        self._updater.update(published, in_flight)
        for request in again:
            self._engine.add(request)
        self._stall_s += self._timer() - started
        if in_flight:
            # The probe's engine steps sample a token of every running sequence, as any step does.
            self._busy_s += self._updater.prove_s - proved_s
        self._heldout.applied(published.manifest.version, published.manifest.forks)

    # -- tickets and problems -----------------------------------------------------------------------------------------

    def _ask_tickets(self) -> None:
        """Ask for what there is room for; with none, still tell at once which problems were picked for which group."""
        is_full = self._finished or self._mid_flight.is_finishing
        version, num_wanted = self._updater.version, 0 if is_full else max(0, self._num_wanted())
        if version is None or not (num_wanted or self._newly_bound):
            return
        if self._heldout.is_running and self._config.stream.max_policy_age == 0:
            return  # it has the engine to itself, between two steps
        if self._buffer.waits_for_tickets or not self._buffer.has_credit:
            return
        self._buffer.ask_tickets(version, num_wanted, self._newly_bound)
        self._newly_bound = {}

    def _num_wanted(self) -> int:
        """Groups that fit the free slots, and a few ahead; tickets without a problem yet count as running."""
        if self._config.stream.max_policy_age == 0:
            return 0 if self._tickets or self._groups else _WHOLE_BLOCK
        group_size = self._config.sampler.group_size
        num_taken = self._engine.num_unfinished + group_size * len(self._tickets)
        return (self._engine.num_slots - num_taken) // group_size + _NUM_AHEAD

    def _take_tickets(self) -> None:
        """What the buffer says; each new ticket asks the curator for a problem, all of one answer in one question."""
        idle = self._engine.num_unfinished == 0 and not self._asked
        tickets, taken = self._buffer.poll(_IDLE_WAIT_S if idle else 0.0)
        is_owed = self._buffer.waits_for_tickets or self._buffer.num_unacknowledged > 0
        self._watch("the buffer to answer", is_owed and not tickets and not taken)
        self._fates.update(answer.fate.value for answer in taken)
        for ticket in tickets:
            self._forget(ticket.group_id)
            self._tickets[ticket.group_id] = ticket
        asked = {group_id for group_ids in self._asked.values() for group_id in group_ids}
        unasked = [group_id for group_id in self._tickets if group_id not in asked]
        if unasked and self._curator.has_credit:
            self._asked[self._curator.post_next(unasked)] = unasked

    def _forget(self, group_id: str) -> None:
        """Drop what is under way for a group whose ticket is issued again."""
        if (group := self._groups.pop(group_id, None)) is not None:
            self._engine.abort([request.request_id for request in group.unfinished])

    def _take_picks(self) -> None:
        if self._mid_flight.is_finishing:
            self._watch("the curator to choose problems", False)
            return
        answers = self._curator.poll(_IDLE_WAIT_S if self._asked and self._engine.num_unfinished == 0 else 0.0)
        self._watch("the curator to choose problems", bool(self._asked) and not answers)
        for answer in answers:
            if isinstance(answer, Refused):
                raise RemoteError(f"curator: {answer.reason}")
            if isinstance(answer, Picked):
                self._asked.pop(answer.id, None)
                self._start_groups(answer.picks)

    def _start_groups(self, picks: Iterable[Pick]) -> None:
        """Add whole groups in the order of their ids, so that equal tickets make equal batches."""
        for pick in sorted(picks, key=lambda pick: pick.group_id):
            ticket = self._tickets.pop(pick.group_id, None)
            if ticket is None:
                continue
            self._newly_bound[pick.group_id] = pick.problem.problem_id
            try:
                requests = make_requests(ticket, self._prompts.token_ids(pick.problem), self._config)
            except PromptRefused as error:
                self._num_refused += 1
                self._finish(refused_group(ticket, pick.problem, str(error), self._config, self._clock()))
                continue
            self._groups[pick.group_id] = GroupInProgress(ticket, pick.problem, requests, self._clock())
            for request in requests:
                self._engine.add(request)

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """One engine step where something runs; what finishes is given out to be scored."""
        if self._engine.num_unfinished == 0:
            return
        self._first_busy_at = self._first_busy_at or self._clock()
        started = self._timer()
        generations = self._engine.step()
        self._busy_s += self._timer() - started
        self._collect(generations)

    def _collect(self, generations: Iterable[Generation]) -> None:
        started = self._timer()
        for generation in self._heldout.take(generations):
            group = self._groups[group_of(generation.request_id)]
            group.take(generation)
            text = self._prompts.decode(generation.token_ids.tolist())
            task_id = task_id_of(group.ticket, generation.request_id, group.attempt)
            self._scoring.submit(task_id, group.problem, text, generation.end_reason)
            self._num_tokens += len(generation.token_ids)
            self._alarms.ended(generation.end_reason)
        self._score_s += self._timer() - started

    def _take_scores(self) -> None:
        """Give rewards to the generations that wait for them; complete groups are finished."""
        if not self._scoring.num_open:
            return
        is_idle = self._engine.num_unfinished == 0
        started = self._timer()
        results = self._scoring.poll(_IDLE_WAIT_S if is_idle else 0.0)
        for task_id, reward in self._heldout.take_scores(results):
            request_id = request_of(task_id)
            group = self._groups.get(group_of(request_id))
            # The group may have ended since, at its deadline or because its ticket was issued again, or begun anew.
            if group is not None and task_id == task_id_of(group.ticket, request_id, group.attempt):
                self._score(group, request_id, reward)
        if results:
            self._alarms.scored(self._scoring, len(results))
        if not is_idle:  # else it is time spent waiting
            self._score_s += self._timer() - started

    def _score(self, group: GroupInProgress, request_id: str, reward: RewardResult) -> None:
        group.score(request_id, reward)
        if group.is_complete:
            del self._groups[group.ticket.group_id]
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
            for request_id in group.unscored:
                self._score(group, request_id, _too_late(group))

    # -- handing over -------------------------------------------------------------------------------------------------

    def _finish(self, group: GroupInProgress) -> None:
        self._finished.append(
            group.finish(sampler_id=self._sampler_id, config_hash=self._config_hash, finished_at_s=self._clock())
        )

    def _hand_over(self) -> None:
        while self._finished and self._buffer.has_credit:
            self._buffer.insert(self._finished.popleft())

    def _wind_down(self) -> None:
        """End what runs, and give the buffer a moment to take what is finished."""
        self._heldout.stop()
        self._engine.abort([r.request_id for group in self._groups.values() for r in group.unfinished])
        self._groups = {name: group for name, group in self._groups.items() if not group.unfinished}
        deadline = self._timer() + _LAST_INSERTS_S
        while (self._groups or self._finished or self._buffer.num_unacknowledged) and self._timer() < deadline:
            self._take_scores()
            self._hand_over()
            _, taken = self._buffer.poll(_IDLE_WAIT_S)
            self._fates.update(answer.fate.value for answer in taken)
            self._heldout.turn()

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
