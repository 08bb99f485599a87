"""What is kept of a trajectory that waits, on the real engine: read again or computed again, with the same logprobs."""

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

PROMPT = (0, *(2 + i % 50 for i in range(70)))
"""71 tokens: two whole blocks of 32, and 7 more."""
OBSERVED = (7, 13, 21)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with tiny_engine(tmp_path_factory.mktemp("model"), prefix_cache=True) as made:
        yield made


class Telling(Inside):
    """Tells the same whatever is done, once it may."""

    may_answer = True

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reply]]:
        return super().poll(timeout_s) if self.may_answer else []

    def _answer(self, call: Call) -> Reply:
        return Reply(step=Step(observation="told")) if call.actions else Reply(start=Start(snapshot=b"s"))


class Fixed:
    def token_ids(self, text: str, after: Sequence[int] = ()) -> tuple[int, ...]:
        return OBSERVED


def around(setup: Setup, waiting_kv: Any, environments: Telling) -> TrajectoryEngine:
    settings = Environment(name="calculator", max_steps=3, max_turn_tokens=12, waiting_kv=waiting_kv)
    return TrajectoryEngine(setup.engine, environments, Fixed(), lambda ids: "act", settings)


def asked(name: str, num: int = 4) -> list[Any]:
    episode = Episode(group=name, seed=1, problem=PROBLEM)
    made = [request(f"{name}/{i}", seed=i, prompt=PROMPT, num_tokens=40) for i in range(num)]
    return [replace(one, episode=episode) for one in made]


def finish(engine: TrajectoryEngine) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while engine.num_unfinished:
        done |= {generation.request_id: generation for generation in engine.step()}
    return done


def assert_fresh(setup: Setup, generation: Any) -> None:
    """Every sampled token has the logprob of its own weights over the whole history."""
    ids = generation.token_ids.tolist()
    gaps = []
    for at in range(len(ids)):
        if not generation.trajectory.observed[at]:
            index = generation.versions[at].step
            fresh = setup.logprobs(index, [*PROMPT, *ids[: at + 1]], TEMPERATURE)[-1]
            gaps.append(abs(float(generation.logprobs[at]) - float(fresh)))
    assert max(gaps) < 1e-4
    assert sum(gaps) / len(gaps) < 1e-5


def test_histories_are_read_where_they_are_kept_and_computed_where_they_are_dropped(setup: Setup) -> None:
    setup.apply(0, version(0))
    found: dict[str, dict[str, Any]] = {}
    shares: dict[str, tuple[int, int]] = {}
    for waiting_kv in ("drop", "keep"):
        engine = around(setup, waiting_kv, Telling())
        for one in asked("g"):
            engine.add(one)
        found[waiting_kv] = finish(engine)
        status = engine.status()
        shares[waiting_kv] = status["num_history_tokens"], status["num_history_cached"]
        setup.engine.clear_kv()
    num_history, num_cached = shares["drop"]
    assert num_history > 4 * 2 * len(PROMPT)
    assert num_cached == 0
    assert shares["keep"][0] == num_history
    # Of second actions two whole blocks, of third ones up to 71 + 2 x (12 + 3) = 101 tokens: two or three.
    assert 4 * 2 * 64 <= shares["keep"][1] <= 4 * (64 + 96)
    for name, dropped in found["drop"].items():
        kept = found["keep"][name]
        assert dropped.end_reason is EndReason.MAX_STEPS
        assert kept.token_ids.tolist() == dropped.token_ids.tolist()
        assert abs(kept.logprobs - dropped.logprobs).max() < 1e-5
        assert_fresh(setup, kept)
        assert_fresh(setup, dropped)
    # The first actions share the prompt of the group either way.
    assert sum(each.num_cached_tokens for each in found["drop"].values()) == 3 * 64


def test_nothing_that_older_weights_have_kept_is_read(setup: Setup) -> None:
    setup.apply(0, version(0))
    environments = Telling()
    engine = around(setup, "keep", environments)
    for one in asked("w", 1):
        engine.add(one)
    engine.step()
    environments.may_answer = False
    while not engine.only_waits:
        engine.step()
    setup.apply(1, version(1))  # between two actions
    environments.may_answer = True
    (done,) = finish(engine).values()
    turns = done.trajectory.turn[~done.trajectory.observed]
    versions = [v.step for v, observed in zip(done.versions, done.trajectory.observed, strict=True) if not observed]
    assert versions == [0 if turn == 0 else 1 for turn in turns]
    assert done.mixed_context_from is None
    # The second action had nothing to read, the third what the second has left: two blocks or three.
    assert engine.status()["num_history_cached"] in (64, 96)
    assert_fresh(setup, done)
