"""An engine whose requests may be trajectories: what is sampled goes to an environment, and its answer back.

    add -> its environment begins -> an action is sampled -> its environment answers -> ... -> one generation
             (waits, no slot)          (a slot)               (waits, no slot)

To whoever uses it a trajectory is one request with one generation, of all turns. One that waits holds no slot of the
engine; its next action is a request of the whole history, whose KV cache is computed again, or what the prefix cache
still has of it is read (`environment.waiting_kv`). Of a group that branches one rollout plays the first actions for all
(`branching`). All other requests pass through untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from stream_grpo.config_environment import Environment
from stream_grpo.environments.instance import Call, Reply
from stream_grpo.environments.protocol import End, Start, Step
from stream_grpo.sampler.branching import Branches
from stream_grpo.sampler.generation import Engine
from stream_grpo.sampler.underway import Underway
from stream_grpo.types import EndReason, Generation, GenerationRequest, PolicyVersion
from stream_grpo.weights.manifest import Fingerprint, TensorSpec

# With nothing to sample a step waits so long for an environment.
_WAIT_S = 0.005
# Ends that the last action made by itself, so that its text may be scored too.
_BY_ACTION = (EndReason.SUCCESS, EndReason.POLICY_FAILURE)
# Ends that no action made: a trunk that ends so has failed.
_FAILED = (EndReason.ABORT, EndReason.ERROR, EndReason.ENV_ERROR)


class Environments(Protocol):
    """What trajectories need of an EnvironmentPool."""

    def submit(self, call: Call) -> None:
        """Ask an environment."""

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        """Replies not yet returned."""

    def forget(self, trajectory: str) -> None:
        """No more calls come for it."""

    def status(self) -> dict[str, Any]:
        """Plain values."""

    def close(self) -> None:
        """End all workers."""


class Encoder(Protocol):
    """What trajectories need of `observations.Observations`."""

    def token_ids(self, text: str, after: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids of an observation behind those of an action."""


class TrajectoryEngine:
    """An engine of `generation.Engine` around another one. Belongs to one thread, but for `status` and `num_slots`."""

    def __init__(
        self,
        engine: Engine,
        environments: Environments,
        observations: Encoder,
        decode: Callable[[Sequence[int]], str],
        settings: Environment,
        grammar: str | None = None,
    ) -> None:
        """`decode`: of an action's ids to the text that its environment reads. `grammar`: that all actions keep to."""
        self._engine, self._environments = engine, environments
        self._observations, self._decode, self._settings = observations, decode, settings
        self._grammar = grammar
        # All trajectories by the id of their request, and of these the ones that are being sampled.
        self._underway: dict[str, Underway] = {}
        self._running: set[str] = set()
        # Waiting for their environment, by the name that they have there; those with replicas out stand here too.
        self._waiting: dict[str, Underway] = {}
        self._replicas_out: dict[str, set[str]] = {}
        self._replica_of: dict[str, Underway] = {}
        self._ended: dict[str, tuple[EndReason, str]] = {}
        self._finished: list[Generation] = []
        # Of groups with trajectories under way: how many, and the state in which the first of them began.
        self._num_of_group: Counter[str] = Counter()
        self._starts: dict[str, bytes] = {}
        self._branches = Branches()
        self._num_added = self._num_other_starts = 0
        self._num_history_tokens = self._num_history_cached = 0

    # -- as an engine -------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Trajectories that may be under way: the engine's slots, and those that wait between two actions, up to
        `max_waiting`. One that has not begun yet counts as one that holds a slot, or all would begin at once."""
        num_between = sum(underway.snapshot is not None for underway in list(self._waiting.values()))
        num_between += self._branches.num_held
        return self._engine.num_slots + min(num_between, self._settings.max_waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and neither given back by `step` nor aborted."""
        num_waiting = len(self._waiting) + self._branches.num_held
        return self._engine.num_unfinished + num_waiting + len(self._finished)

    @property
    def only_waits(self) -> bool:
        """Whether all that is unfinished waits for environments, so that a step samples nothing."""
        return self._engine.num_unfinished == 0 and not self._finished and bool(self._waiting)

    def add(self, request: GenerationRequest) -> None:
        """Take a request; of a trajectory the environment begins now. Raises ValueError for an id in use."""
        if request.episode is None:
            self._engine.add(request)
            return
        if request.request_id in self._underway:
            raise ValueError(f"request {request.request_id} is still unfinished")
        underway = Underway(
            request,
            self._new_name(request.request_id),
            max_turn_tokens=self._settings.max_turn_tokens,
            max_observation_bytes=self._settings.max_observation_bytes,
        )
        self._num_of_group[underway.group] += 1
        self._underway[request.request_id] = underway
        does = self._branches.join(underway)
        if does == "begins":
            self._ask(underway)
        elif does == "goes on":
            self._go_on(underway)

    def _new_name(self, request_id: str) -> str:
        self._num_added += 1
        return f"{request_id}#{self._num_added}"

    def step(self) -> list[Generation]:
        """One step of the engine where something runs, and what has come from environments; what has finished."""
        for underway in self._branches.turn():
            self._ask(underway)
        if self._engine.num_unfinished:
            for generation in self._engine.step():
                self._take(generation)
        wait_s = 0.0 if self._engine.num_unfinished or self._finished else _WAIT_S
        for name, reply in self._environments.poll(wait_s):
            self._take_reply(name, reply)
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        """End requests now; what they have so far comes back.

        A trajectory that was being sampled ends as `model_timeout`, one that waited as `env_error`; one that waited for
        the trunk of its group ends as that does.
        """
        names = dict.fromkeys(request_ids)
        held = [generation for generation in self._finished if generation.request_id in names]
        self._finished = [generation for generation in self._finished if generation.request_id not in names]
        waiting = dict.fromkeys(self._waiting_ids(names))
        for name in waiting:
            late = self._underway[name]
            end_reason, evidence = self._why_late(late)
            held.append(self._closed(late, late.generation(end_reason, evidence=evidence), is_aborted=True))
        for generation in self._engine.abort([name for name in names if name not in waiting]):
            if (underway := self._underway.get(generation.request_id)) is None:
                held.append(generation)
                continue
            underway.act(generation, "")
            held.append(self._closed(underway, underway.generation(EndReason.MODEL_TIMEOUT), is_aborted=True))
        return held

    def _waiting_ids(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._underway and name not in self._running]

    def _why_late(self, underway: Underway) -> tuple[EndReason, str]:
        """How a trajectory that waits ends at its deadline, and why."""
        leader = self._branches.leader_of(underway)
        if leader is not None and leader.request.request_id in self._running:
            return EndReason.MODEL_TIMEOUT, ""
        return EndReason.ENV_ERROR, "its environment did not answer in time"

    def progress(self, request_ids: Iterable[str]) -> list[Generation]:
        """What requests have so far, as `partial`; of a trajectory all but the action that is being sampled."""
        names = list(request_ids)
        found = [(name, self._underway.get(name)) for name in names]
        mine = [underway.generation(EndReason.PARTIAL) for _, underway in found if underway is not None]
        return mine + self._engine.progress([name for name, underway in found if underway is None])

    def num_sampled(self, request_ids: Iterable[str]) -> int:
        """Tokens of these requests so far, in all."""
        names = list(request_ids)
        mine = sum(underway.num_sampled for name in names if (underway := self._underway.get(name)) is not None)
        return mine + self._engine.num_sampled(names)

    def expected_tensors(self) -> Mapping[str, TensorSpec]:
        """As the engine's."""
        return self._engine.expected_tensors()

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        """As the engine's. Nothing is read that older weights have kept for what waits: its next action is of the new
        weights throughout."""
        return self._engine.apply_weights(named_tensors, version, recompute_kv=recompute_kv)

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As the engine's."""
        return self._engine.prompt_logprobs(sequences)

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[Fingerprint, ...]:
        """As the engine's."""
        return self._engine.fingerprints(sequences)

    def clear_kv(self) -> None:
        """As the engine's."""
        self._engine.clear_kv()

    def close(self) -> None:
        """Close engine and environments."""
        self._environments.close()
        self._engine.close()

    def status(self) -> dict[str, Any]:
        """What waits, and how the environments do; plain values."""
        return {
            "num_waiting": len(self._waiting),
            "num_sampling": len(self._running),
            "num_other_starts": self._num_other_starts,
            **self._branches.as_fields(),
            "num_history_tokens": self._num_history_tokens,
            "num_history_cached": self._num_history_cached,
            **self._environments.status(),
        }

    # -- turn after turn ----------------------------------------------------------------------------------------------

    def _ask(self, underway: Underway, snapshot: bytes | None = None) -> None:
        self._waiting[underway.name] = underway
        self._environments.submit(underway.call(snapshot=snapshot))

    def _go_on(self, underway: Underway) -> None:
        """Sample the next action, where there are tokens left for one."""
        if underway.num_left < 1:
            self._finish(underway, EndReason.LENGTH)
            return
        if self._branches.leads(underway) and self._branches.is_decision(underway):
            self._decide(underway)
            return
        self._running.add(underway.request.request_id)
        keeps = self._settings.waiting_kv == "keep"
        self._engine.add(underway.next_request(grammar=self._grammar, reuses_history=keeps))

    def _take(self, generation: Generation) -> None:
        """An action is sampled."""
        if generation.request_id not in self._running:
            self._finished.append(generation)
            return
        self._running.remove(generation.request_id)
        underway = self._underway[generation.request_id]
        if underway.num_steps:  # not the first action, whose prompt is that of the group
            self._num_history_tokens += generation.num_prompt_tokens
            self._num_history_cached += generation.num_cached_tokens
        underway.act(generation, self._decode(generation.token_ids.tolist()))
        if generation.end_reason in (EndReason.ABORT, EndReason.ERROR):
            self._finish(underway, generation.end_reason)
        elif generation.end_reason is EndReason.LENGTH and underway.num_left < 1:
            self._finish(underway, EndReason.LENGTH, is_answer=True)
        else:
            self._ask(underway)

    def _take_reply(self, name: str, reply: Reply) -> None:
        """An environment has answered."""
        if (owner := self._replica_of.pop(name, None)) is not None:
            self._replayed(owner, name, reply)
            return
        underway = self._waiting.get(name)
        if underway is None:
            return  # ended since
        if reply.start is not None:
            self._begun(underway, reply.start)
        elif reply.step is not None:
            self._answered(underway, reply.step)
        else:
            self._finish(underway, EndReason.ENV_ERROR, evidence=reply.error)

    def _begun(self, underway: Underway, start: Start) -> None:
        """Go on from the start, which is that of the group: one that began elsewhere begins again from there."""
        known = self._starts.setdefault(underway.group, start.snapshot)
        if known != start.snapshot:
            self._num_other_starts += 1
            self._environments.forget(underway.name)
            self._ask(underway, snapshot=known)
            return
        del self._waiting[underway.name]
        underway.begin(start)
        if start.observation:
            underway.observe(self._observations.token_ids(start.observation))
        self._go_on(underway)

    def _answered(self, underway: Underway, step: Step) -> None:
        underway.answered(step)
        if step.end is End.ANSWERED:
            self._finish(underway, EndReason.EOS, is_answer=True)
        elif step.end is not None:
            underway.scores.append(_score_of(step))
            self._end(underway, EndReason(step.end.value), step.evidence)
        elif underway.num_steps >= self._settings.max_steps:
            underway.scores.append(_score_of(step))
            self._end(underway, EndReason.MAX_STEPS, "all its steps are used up")
        else:
            del self._waiting[underway.name]
            underway.observe(self._observations.token_ids(step.observation, underway.last_ids))
            self._go_on(underway)

    def _end(self, underway: Underway, end_reason: EndReason, evidence: str) -> None:
        """Finish a trajectory that its environment scores, once its replicas have scored it too."""
        calls = [] if self._branches.leads(underway) else underway.replica_calls(self._settings.replicas)
        if not calls:
            self._finish(underway, end_reason, is_answer=end_reason in _BY_ACTION, evidence=evidence)
            return
        self._ended[underway.name] = end_reason, evidence
        self._replicas_out[underway.name] = {call.trajectory for call in calls}
        self._replica_of |= {call.trajectory: underway for call in calls}
        for call in calls:
            self._environments.submit(call)

    def _replayed(self, underway: Underway, name: str, reply: Reply) -> None:
        if reply.step is None:
            self._finish(underway, EndReason.ENV_ERROR, evidence=f"a replica: {reply.error}")
            return
        underway.scores.append(_score_of(reply.step))
        out = self._replicas_out[underway.name]
        out.discard(name)
        if not out:
            end_reason, evidence = self._ended[underway.name]
            self._finish(underway, end_reason, is_answer=end_reason in _BY_ACTION, evidence=evidence)

    def _finish(
        self, underway: Underway, end_reason: EndReason, *, is_answer: bool = False, evidence: str = ""
    ) -> None:
        if self._branches.leads(underway) and end_reason not in _FAILED:
            self._decide(underway)
            return
        generation = underway.generation(end_reason, is_answer=is_answer, evidence=evidence)
        self._finished.append(self._closed(underway, generation))

    def _decide(self, leader: Underway) -> None:
        """All rollouts of a branching group go on from its trunk."""
        num_actions = leader.num_actions
        members = self._branches.decide(leader)
        if num_actions > leader.num_actions:  # its environment has gone further
            self._waiting.pop(leader.name, None)
            self._environments.forget(leader.name)
            leader.name = self._new_name(leader.request.request_id)
        for underway in members:
            self._go_on(underway)

    def _closed(self, underway: Underway, generation: Generation, *, is_aborted: bool = False) -> Generation:
        """Forget a trajectory, whose generation this is."""
        self._branches.leave(underway, is_aborted=is_aborted)
        del self._underway[underway.request.request_id]
        self._running.discard(underway.request.request_id)
        self._waiting.pop(underway.name, None)
        self._ended.pop(underway.name, None)
        for name in (underway.name, *self._replicas_out.pop(underway.name, ())):
            self._environments.forget(name)
            self._replica_of.pop(name, None)
        self._num_of_group[underway.group] -= 1
        if not self._num_of_group[underway.group]:
            del self._num_of_group[underway.group]
            self._starts.pop(underway.group, None)
        return generation


def _score_of(step: Step) -> float:
    """What a step says of the whole: its score, else 1 for success and 0 for any other end and for none."""
    if step.score is not None:
        return step.score
    return float(step.end is End.SUCCESS)
