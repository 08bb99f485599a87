"""The environments that a worker holds, and what becomes of one call: begun, played again, stepped. No process here."""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stream_grpo.environments.protocol import (
    MAX_EVIDENCE_CHARACTERS,
    End,
    Environment,
    Factory,
    Start,
    Step,
    cut,
    digest,
    snapshot_hash,
    sound_start,
    sound_step,
)
from stream_grpo.rewards.messages import ProblemRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked of a trajectory's environment: without an action to begin, else to answer the last of them."""

    trajectory: str
    problem: ProblemRow
    seed: int
    snapshot: bytes | None = None
    actions: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    """Digests of the answers to all actions before the last: a replay must give the same."""
    max_observation_bytes: int = 1 << 16
    """A longer observation is cut, see `protocol.cut`."""
    open_loop: bool = False
    """Play all actions from the start, whatever they are answered, and give the answer to the last, or the end that
    comes before."""
    num_left_out: int = 0
    """Actions before these, which the worker has played already."""

    def newest_alone(self) -> Call:
        """The same for a worker that holds the environment: without the actions that it has played."""
        num_left_out = max(0, len(self.actions) - 1)
        return replace(self, actions=self.actions[num_left_out:], seen=(), num_left_out=num_left_out)

    def as_plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        row = {name: getattr(self.problem, name) for name in ProblemRow.__slots__}
        snapshot = None if self.snapshot is None else base64.b64encode(self.snapshot).decode()
        return {name: getattr(self, name) for name in self.__slots__} | {"problem": row, "snapshot": snapshot}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Call:
        """The inverse of `as_plain`."""
        snapshot = None if plain["snapshot"] is None else base64.b64decode(plain["snapshot"])
        values = {**plain, "problem": ProblemRow(**plain["problem"]), "snapshot": snapshot}
        return cls(**values | {name: tuple(plain[name]) for name in ("actions", "seen")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a call: a start, a step, or what went wrong."""

    start: Start | None = None
    step: Step | None = None
    error: str = ""
    num_replayed: int = 0
    """Actions that were played again before."""

    def as_plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        plain: dict[str, Any] = {"error": self.error, "num_replayed": self.num_replayed}
        if self.start is not None:
            snapshot = base64.b64encode(self.start.snapshot).decode()
            plain["start"] = {"snapshot": snapshot, "observation": self.start.observation}
        if self.step is not None:
            plain["step"] = {name: getattr(self.step, name) for name in Step.__slots__}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Reply:
        """The inverse of `as_plain`."""
        start, step = plain.get("start"), plain.get("step")
        return cls(
            start=start and Start(snapshot=base64.b64decode(start["snapshot"]), observation=start["observation"]),
            step=step and Step(**{**step, "end": None if step["end"] is None else End(step["end"])}),
            error=plain["error"],
            num_replayed=plain["num_replayed"],
        )


@dataclass(slots=True)
class _Held:
    environment: Environment
    start: Start
    num_actions: int = 0


class Instances:
    """Environments by trajectory. Belongs to one thread; what is async runs on an event loop of its own."""

    def __init__(self, make: Factory) -> None:
        """`make`: of a problem its environment."""
        self._make, self._held = make, dict[str, _Held]()
        self._loop = asyncio.new_event_loop()

    def answer(self, call: Call) -> Reply:
        """Play what is missing and answer the call. Whatever the environment raises is raised, and it is dropped."""
        if call.open_loop:
            return self._played(call)
        held = self._held.pop(call.trajectory, None)
        num_before = call.num_left_out + len(call.actions) - 1
        if held is not None and held.num_actions != num_before:
            held = None
        num_replayed = 0
        if held is None:
            if call.num_left_out:
                raise ValueError(f"its worker does not hold what {call.num_left_out} actions have led to")
            held = self._begun(call)
            for action, seen in zip(call.actions[:-1], call.seen, strict=True):
                if digest(self._step(held, action, call)) != seen:
                    raise ValueError(f"not repeatable: action {held.num_actions} has another answer when played again")
                num_replayed += 1
        if not call.actions:
            self._held[call.trajectory] = held
            return Reply(start=held.start)
        step = self._step(held, call.actions[-1], call)
        if step.end is End.ENV_ERROR:
            raise RuntimeError(f"the environment says that it failed: {step.evidence}")
        if step.end is None:
            self._held[call.trajectory] = held
        return Reply(step=step, num_replayed=num_replayed)

    def _played(self, call: Call) -> Reply:
        held, step = self._begun(call), Step()
        for action in call.actions:
            step = self._step(held, action, call)
            if step.end is not None:
                break
        if step.end is End.ENV_ERROR:
            raise RuntimeError(f"the environment says that it failed: {step.evidence}")
        return Reply(step=step, num_replayed=held.num_actions)

    def drop(self, trajectory: str) -> None:
        """No more calls come for it."""
        self._held.pop(trajectory, None)

    def _begun(self, call: Call) -> _Held:
        environment = self._make(call.problem)
        start = sound_start(self._finished(environment.reset(call.seed, call.snapshot)))
        if call.snapshot is not None and start.snapshot != call.snapshot:
            found, asked = snapshot_hash(start.snapshot)[:12], snapshot_hash(call.snapshot)[:12]
            raise ValueError(f"not repeatable: reset with snapshot {asked} began at {found}")
        observation = cut(start.observation, call.max_observation_bytes)
        return _Held(environment, Start(snapshot=start.snapshot, observation=observation))

    def _step(self, held: _Held, action: str, call: Call) -> Step:
        step = sound_step(self._finished(held.environment.step(action)))
        held.num_actions += 1
        return Step(
            **{name: getattr(step, name) for name in Step.__slots__}
            | {
                "observation": cut(step.observation, call.max_observation_bytes),
                "evidence": step.evidence[:MAX_EVIDENCE_CHARACTERS],
            }
        )

    def _finished(self, value: Any) -> Any:
        return self._loop.run_until_complete(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value
