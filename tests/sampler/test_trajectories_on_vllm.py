"""Trajectories on the real engine: every action has the logprobs of a fresh pass over all that came before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stream_grpo.config_environment import Environment
from stream_grpo.environments.instance import Call, Reply
from stream_grpo.environments.protocol import Start, Step
from stream_grpo.sampler.trajectories import TrajectoryEngine
from stream_grpo.types import EndReason, Episode
from tests.sampler.acting import PROBLEM, Inside
from tests.sampler.tiny import TEMPERATURE, Setup, request, tiny_engine, version

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with tiny_engine(tmp_path_factory.mktemp("model")) as made:
        yield made


class Telling(Inside):
    """Tells the same whatever is done, once it may."""

    may_answer = True

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        return super().poll(timeout_s) if self.may_answer else []

    def _answer(self, call: Call) -> Reply:
        return Reply(step=Step(observation="told")) if call.actions else Reply(start=Start(snapshot=b"s"))


class Fixed:
    """The ids of every observation."""

    def token_ids(self, text: str, after: Sequence[int] = ()) -> tuple[int, ...]:
        return (7, 13, 21)


def test_a_branching_group_goes_on_from_one_trunk_with_the_logprobs_of_a_fresh_pass(setup: Setup) -> None:
    setup.apply(0, version(0))
    settings = Environment(name="calculator", max_steps=3, max_turn_tokens=6)
    made = TrajectoryEngine(setup.engine, Telling(), Fixed(), lambda ids: " ".join(map(str, ids)), settings)
    episode = Episode(group="g", seed=1, problem=PROBLEM, num_trunk_actions=2)
    requests = [replace(request(f"g/{i}", seed=i, num_tokens=30), episode=episode) for i in range(8)]
    done: dict[str, Any] = {}
    for one in requests:
        made.add(one)
    while made.num_unfinished:
        done |= {generation.request_id: generation for generation in made.step()}
    first, *others = (done[one.request_id] for one in requests)
    num_trunk = first.trajectory.num_trunk_tokens
    assert 2 * (1 + 3) <= num_trunk <= 2 * (6 + 3)
    assert (first.num_sampled, first.trajectory.num_taken_tokens) == (len(first.token_ids) - 6, 0)
    decisions, gaps = set(), []
    for one in requests:
        generation = done[one.request_id]
        assert generation.end_reason is EndReason.MAX_STEPS
        ids = generation.token_ids.tolist()
        assert ids[:num_trunk] == first.token_ids.tolist()[:num_trunk]
        decisions.add(tuple(ids[num_trunk:]))
        fresh = setup.logprobs(0, [*one.prompt_ids, *ids], TEMPERATURE)[len(one.prompt_ids) - 1 :]
        for at in range(len(ids)):
            if generation.trajectory.observed[at]:
                assert generation.logprobs[at] == 0.0
            else:
                assert generation is first or at >= num_trunk
                gaps.append(abs(float(generation.logprobs[at]) - float(fresh[at])))
    # From one state by seeds of their own: not all say the same.
    assert len(decisions) > 1
    assert all(generation.trajectory.num_taken_tokens == num_trunk - 6 for generation in others)
    assert max(gaps) < 1e-4
    assert sum(gaps) / len(gaps) < 1e-5


def test_actions_have_the_logprobs_of_a_fresh_pass_over_their_whole_history(setup: Setup) -> None:
    setup.apply(0, version(0))
    environments, settings = Telling(), Environment(name="calculator", max_steps=3, max_turn_tokens=6)
    made = TrajectoryEngine(setup.engine, environments, Fixed(), lambda ids: "act", settings)
    episode = Episode(group="g", seed=1, problem=PROBLEM)
    requests = [replace(request(f"g/{i}", seed=i, num_tokens=30), episode=episode) for i in range(8)]
    for one in requests:
        made.add(one)
    made.step()
    environments.may_answer = False
    while not made.only_waits:
        made.step()
    setup.apply(1, version(1))  # between two actions, with nothing in the KV cache
    environments.may_answer = True
    done: dict[str, Any] = {}
    while made.num_unfinished:
        done |= {generation.request_id: generation for generation in made.step()}
    gaps: dict[int, list[float]] = {0: [], 1: []}
    for one in requests:
        generation = done[one.request_id]
        assert generation.end_reason is EndReason.MAX_STEPS
        assert generation.mixed_context_from is None
        trajectory = generation.trajectory
        assert trajectory.turn[-1] == 2
        ids = generation.token_ids.tolist()
        assert [ids[at] for at in range(len(ids)) if trajectory.observed[at]] == [7, 13, 21] * 2
        fresh = [
            setup.logprobs(index, [*one.prompt_ids, *ids], TEMPERATURE)[len(one.prompt_ids) - 1 :] for index in (0, 1)
        ]
        for at in range(len(ids)):
            if trajectory.observed[at]:
                assert generation.logprobs[at] == 0.0
                continue
            index = generation.versions[at].step
            assert index == (0 if trajectory.turn[at] == 0 else 1)
            gaps[index].append(abs(float(generation.logprobs[at]) - float(fresh[index][at])))
    # Two implementations of one model with peaked logits: single tokens lie up to 1e-5 apart, as in a single turn.
    for of_version in gaps.values():
        assert len(of_version) >= 8
        assert max(of_version) < 1e-4
        assert sum(of_version) / len(of_version) < 1e-5
