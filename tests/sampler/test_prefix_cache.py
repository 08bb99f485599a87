"""The prefix cache of the real engine: it saves prompt tokens, and never serves keys of older weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sampler.tiny import Setup, assert_logprobs, request, run, tiny_engine, version

pytestmark = pytest.mark.engine

PROMPT = (0, *(2 + i % 50 for i in range(70)))
"""71 tokens: two whole blocks of 32, and 7 more."""
SHARED = 64


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with tiny_engine(tmp_path_factory.mktemp("model"), prefix_cache=True) as made:
        yield made


def group(name: str, num: int = 4, num_tokens: int = 40) -> list[Any]:
    return [request(f"{name}/{i}", seed=i, prompt=PROMPT, num_tokens=num_tokens) for i in range(num)]


def finish(setup: Setup) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while setup.engine.num_unfinished:
        done |= {generation.request_id: generation for generation in setup.engine.step()}
    return done


def test_a_group_computes_its_prompt_once_and_its_logprobs_are_those_without_the_cache(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.apply(0, version(0))
    shared = run(setup, *group("g"))
    # The first computes the prompt, in the very step in which the others read it.
    assert [shared[f"g/{i}"].num_cached_tokens for i in range(4)] == [0, SHARED, SHARED, SHARED]
    assert {generation.num_prompt_tokens for generation in shared.values()} == {71}
    later = run(setup, *group("h"))
    assert {generation.num_cached_tokens for generation in later.values()} == {SHARED}
    monkeypatch.setattr(setup.engine._params, "skip_reading_prefix_cache", True)
    alone = run(setup, *group("a"))
    assert {generation.num_cached_tokens for generation in alone.values()} == {0}
    for i in range(4):
        for found in (shared[f"g/{i}"], later[f"h/{i}"]):
            assert found.token_ids.tolist() == alone[f"a/{i}"].token_ids.tolist()
            assert np.abs(found.logprobs - alone[f"a/{i}"].logprobs).max() < 1e-5
            assert_logprobs(setup, 0, PROMPT, found, 0, len(found.token_ids))


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_nothing_of_older_weights_is_served_to_requests_that_wait_or_come(setup: Setup, recompute_kv: bool) -> None:
    setup.apply(0, version(0))
    # Of 24 requests 16 run, and 4 more in the slots of the probe; the rest waits, with the salt of the old weights.
    requests = group("g", 24)
    for each in requests:
        setup.engine.add(each)
    assert setup.engine.step() == []
    setup.apply(1, version(1), recompute_kv)
    for each in group("new", 2):
        setup.engine.add(each)
    done = finish(setup)
    fresh = [g for g in done.values() if set(g.versions) == {version(1)}]
    assert len(fresh) == 2 + 4
    for generation in fresh:
        assert_logprobs(setup, 1, PROMPT, generation, 0, len(generation.token_ids))
    # One of them has computed the prompt anew, and the others had it from that one.
    assert sorted(g.num_cached_tokens for g in fresh) == [0] + [SHARED] * 5 or recompute_kv


def test_without_leaving_the_old_prefixes_they_would_be_served(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.apply(0, version(0))
    run(setup, *group("g", 1, num_tokens=5))
    monkeypatch.setattr(setup.engine, "_leave_prefixes", lambda: None)
    setup.apply(1, version(1))
    stale = run(setup, *group("h", 1, num_tokens=5))["h/0"]
    assert stale.num_cached_tokens == SHARED
    with pytest.raises(AssertionError):
        assert_logprobs(setup, 1, PROMPT, stale, 0, len(stale.token_ids))


def test_keys_that_a_request_computes_on_a_mixed_context_are_not_served(setup: Setup) -> None:
    setup.apply(0, version(0))
    (seed,) = [seed for seed in range(30) if len(run_one(setup, seed).token_ids) == 40][:1]
    setup.engine.add(request("runs-on", seed=seed, prompt=PROMPT))
    for _ in range(10):
        setup.engine.step()
    setup.apply(1, version(1))
    mixed = finish(setup)["runs-on"]
    assert mixed.mixed_context_from == 10
    # Prompt and response fill a third block, which it has stored under its tokens. Another with these as its prompt
    # may read the two of the prompt, which new weights have computed by then, and no more.
    run(setup, *group("new", 1, num_tokens=1))
    longer = (*PROMPT, *mixed.token_ids[:35].tolist())
    found = run(setup, request("continued", prompt=longer, num_tokens=5))["continued"]
    assert found.num_cached_tokens == SHARED
    assert_logprobs(setup, 1, longer, found, 0, len(found.token_ids))


def run_one(setup: Setup, seed: int) -> Any:
    return run(setup, request("one", seed=seed, prompt=PROMPT))["one"]


def test_a_cleared_cache_serves_nothing(setup: Setup) -> None:
    setup.apply(0, version(0))
    run(setup, *group("g", 1, num_tokens=1))
    setup.engine.clear_kv()
    found = run(setup, *group("h", 1, num_tokens=5))["h/0"]
    assert found.num_cached_tokens == 0
    assert_logprobs(setup, 0, PROMPT, found, 0, len(found.token_ids))


@pytest.mark.slow
def test_the_engine_in_processes_of_its_own_empties_its_cache_too(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, engine="async", prefix_cache=True, kv_after_update="recompute") as setup:
        run(setup, *group("g", 1, num_tokens=1))
        assert run(setup, *group("h", 1, num_tokens=1))["h/0"].num_cached_tokens == SHARED
        setup.engine.add(request("runs-on", prompt=PROMPT))
        setup.apply(1, version(1), recompute_kv=True)
        done = run(setup, *group("new", 1, num_tokens=5))
        assert_logprobs(setup, 1, PROMPT, done["new/0"], 0, len(done["new/0"].token_ids))
        setup.engine.abort(["runs-on"])
        setup.engine.clear_kv()
        found = run(setup, *group("i", 1, num_tokens=5))["i/0"]
        assert found.num_cached_tokens == 0
        assert_logprobs(setup, 1, PROMPT, found, 0, len(found.token_ids))
