"""An engine that acts by a script, and environments without processes, for tests of trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from stream_grpo.config_environment import Environment
from stream_grpo.environments.instance import Call, Instances, Reply
from stream_grpo.environments.loading import load
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.sampler.trajectories import TrajectoryEngine
from stream_grpo.types import EndReason, Episode, Generation, GenerationRequest, PolicyVersion
from tests.fakes import FakeEngine

END = 0
"""The id that ends an action."""
WORLDS = "python:tests.environments.worlds"
PROBLEM = ProblemRow(problem_id="p", answer="", verifier="environment")


def encode(text: str) -> tuple[int, ...]:
    """An id a character, from 1000 on."""
    return tuple(1000 + ord(character) for character in text)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(i - 1000) for i in token_ids if i >= 1000)


class Encoder:
    """Observations between two marks, `<` and `>`."""

    def token_ids(self, text: str, after: Sequence[int] = ()) -> tuple[int, ...]:
        return encode(f"<{text}>")


class Acting(FakeEngine):
    """Says what `policy` answers to the history, a token a step, and ends; at most `num_slots` run at once."""

    def __init__(self, policy: Callable[[str], str], num_slots: int = 64) -> None:
        super().__init__(num_slots)
        self.policy = policy
        self.requests: list[GenerationRequest] = []
        self.num_busy = 0
        """Tokens sampled, in all."""

    def add(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        super().add(request)

    def step(self) -> list[Generation]:
        running = list(self._running.items())[: self.num_slots]
        self.num_busy += len(running)
        for _, (_, versions) in running:
            versions.append(self.version)
        done = [name for name, (request, versions) in running if len(versions) >= self._length(request)]
        return [self._end(name, EndReason.EOS) for name in done]

    def _length(self, request: GenerationRequest) -> int:
        return min(len(self._ids(request)), request.max_new_tokens)

    def _ids(self, request: GenerationRequest) -> tuple[int, ...]:
        return (*encode(self.policy(decode(request.prompt_ids))), END)

    def _generation(self, name: str, reason: EndReason) -> Generation:
        request, versions = self._running[name]
        ids = self._ids(request)[: len(versions)]
        if reason is EndReason.EOS and ids[-1:] != (END,):
            reason = EndReason.LENGTH
        return Generation(
            request_id=name,
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([-0.5 - i for i in range(len(ids))], np.float32),
            versions=tuple(versions),
            end_reason=reason,
        )


class Inside:
    """Environments in this process; replies come at the next poll, or when `holds` lets them."""

    def __init__(self, name: str = f"{WORLDS}.Counter", holds: Callable[[Call], bool] = lambda call: False) -> None:
        self._instances, self._holds = Instances(load(name, {})), holds
        self.calls: list[Call] = []
        self._open: list[Call] = []
        self.forgotten: list[str] = []

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self._open.append(call)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        due = [call for call in self._open if not self._holds(call)]
        self._open = [call for call in self._open if call not in due]
        return [(call.trajectory, self._answer(call)) for call in due]

    def _answer(self, call: Call) -> Reply:
        try:
            return self._instances.answer(call)
        except Exception as error:
            return Reply(error=repr(error))

    def forget(self, trajectory: str) -> None:
        self.forgotten.append(trajectory)
        self._open = [call for call in self._open if call.trajectory != trajectory]

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def request(name: str = "g/0", max_new_tokens: int = 100, seed: int = 3) -> GenerationRequest:
    episode = Episode(group=name.rpartition("/")[0], seed=seed, problem=PROBLEM)
    return GenerationRequest(
        request_id=name, prompt_ids=encode("?"), seed=11, max_new_tokens=max_new_tokens, episode=episode
    )


def around(
    engine: FakeEngine, environments: Inside | None = None, grammar: str | None = None, **settings: Any
) -> TrajectoryEngine:
    named = Environment(name="calculator", **settings)
    return TrajectoryEngine(engine, environments or Inside(), Encoder(), decode, named, grammar)


def all_of(engine: TrajectoryEngine, requests: Iterable[GenerationRequest], max_steps: int = 1000) -> list[Generation]:
    """Sample the requests to their ends."""
    for one in requests:
        engine.add(one)
    found: list[Generation] = []
    for _ in range(max_steps):
        if not engine.num_unfinished:
            break
        found += engine.step()
    return found


VERSIONS = [PolicyVersion(0, 0), PolicyVersion(0, 1)]
