"""Shaping terms against slow loops and numbers worked out by hand, and when they act."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.config_rewards import Rewards, Shaping
from stream_grpo.rewards.scoring import scoring_version
from stream_grpo.rewards.shaping import overlong, repeated_share, shaped, shaped_group, type_token_ratio
from stream_grpo.types import Decision, EndReason, Rollout
from tests.fakes import make_group, make_rollout

IDS = st.lists(st.integers(0, 4), max_size=30)


def rollout(ids: list[int], reward: float | None = 1.0, **changes: Any) -> Rollout:
    made = make_rollout(reward, num_response=len(ids))
    made.token_ids[made.num_prompt_tokens :] = ids
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(("num_tokens", "expected"), [(16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)])
def test_the_penalty_falls_over_the_cache(num_tokens: int, expected: float) -> None:
    # DAPO's own numbers: limit 20480, cache 4096. Free up to 16384, half way at 18432.
    assert overlong(num_tokens, max_tokens=20480, cache=4096) == expected


@pytest.mark.parametrize("cache", [0, 11])
def test_a_cache_outside_the_limit_is_refused(cache: int) -> None:
    with pytest.raises(ValueError, match=f"cache {cache}: expected above 0 and at most max_tokens 10"):
        overlong(1, max_tokens=10, cache=cache)


def test_what_stood_there_before_is_repeated() -> None:
    # Bigrams of 1 2 1 2 1: 12 21 12 21: two of four are distinct.
    assert repeated_share([1, 2, 1, 2, 1], n=2) == 0.5
    assert repeated_share([1, 2, 3], n=2) == 0.0
    assert repeated_share([1], n=2) == 0.0
    # All the same: one of 5 unigrams is new.
    assert repeated_share([7] * 5, n=1) == pytest.approx(0.8)


@given(IDS, st.integers(1, 5))
def test_the_repeated_share_equals_its_slow_loop(ids: list[int], n: int) -> None:
    grams, seen = [ids[i : i + n] for i in range(len(ids) - n + 1)], list[list[int]]()
    num_repeated = 0
    for gram in grams:
        num_repeated += gram in seen
        seen.append(gram)
    assert repeated_share(ids, n=n) == pytest.approx(num_repeated / len(grams) if grams else 0.0, abs=1e-12)


@given(IDS, st.integers(2, 8))
def test_the_type_token_ratio_equals_its_slow_loop(ids: list[int], window: int) -> None:
    size = min(window, len(ids))
    windows = [ids[i : i + size] for i in range(len(ids) - size + 1)] if ids else []
    expected = sum(len(set(w)) / size for w in windows) / len(windows) if windows else 1.0
    assert type_token_ratio(ids, window=window) == pytest.approx(expected, abs=1e-12)


def test_the_ratio_does_not_fall_with_length_alone() -> None:
    assert type_token_ratio([1, 2, 3, 4] * 2, window=4) == type_token_ratio([1, 2, 3, 4] * 50, window=4) == 1.0


def test_every_term_is_named_and_added() -> None:
    # 8 tokens of at most 10 with a cache of 4: -(8 - 6) / 4 = -1/2, times 2. Of 7 bigrams 2 are distinct: 0.7 x 5/7.
    # Ratio over windows of 4: 1/2, floor 0.8: 1 - 0.625 = 0.375.
    shaping = Shaping(
        overlong_tokens=4, overlong_weight=2.0, repetition_weight=0.7, repetition_ngram=2, type_token_weight=0.8,
        type_token_floor=0.8, type_token_window=4,
    )  # fmt: skip
    got = shaped(rollout([1, 2] * 4), shaping, step=0, max_new_tokens=10)
    assert got.components == pytest.approx(
        {"shaping.overlong": -1.0, "shaping.repetition": -0.5, "shaping.type_token": -0.3}
    )
    assert got.reward == pytest.approx(1.0 - 1.8)
    assert got.decision is Decision.PASS


def test_context_is_not_what_the_policy_wrote() -> None:
    shaping = Shaping(repetition_weight=1.0, repetition_ngram=1)
    made = rollout([1, 1, 1, 2])
    mask = made.loss_mask.copy()
    mask[made.num_prompt_tokens : made.num_prompt_tokens + 2] = False  # an observation
    got = shaped(dataclasses.replace(made, loss_mask=mask), shaping, step=0, max_new_tokens=10)
    assert got.components == {"shaping.repetition": 0.0}


def test_the_trunk_counts_for_the_length_of_all_that_went_on_from_it() -> None:
    shaping = Shaping(overlong_tokens=4)
    mask = np.arange(3 + 8) >= 3 + 2
    first, second = (rollout([1] * 8, 0.0, loss_mask=mask) for _ in range(2))
    nobody = np.where(mask, 0, -1).astype(np.int32)
    second = dataclasses.replace(second, version_step=nobody, version_branch=nobody)
    got = shaped_group(dataclasses.replace(make_group(), rollouts=(first, second)), shaping, max_new_tokens=10)
    # 2 of the trunk and 6 of its own, for both: -(8 - 6) / 4.
    assert [r.reward.reward for r in got.rollouts] == [-0.5, -0.5]


def test_the_step_on_the_ticket_decides_for_all_rollouts_and_for_any_rescoring() -> None:
    shaping = Shaping(repetition_weight=0.5, repetition_ngram=1, repetition_from_step=10)
    group = make_group(rewards=(1.0, 0.0))
    same = tuple(rollout([3, 3, 3, 3], r.reward.reward) for r in group.rollouts)
    for ticket_step, penalty in ((9, 0.0), (10, 0.375), (11, 0.375)):
        ticketed = dataclasses.replace(group, ticket_step=ticket_step, rollouts=same)
        got = shaped_group(ticketed, shaping, max_new_tokens=10)
        # 3 of 4 unigrams stood there before: 0.5 x 0.75.
        assert [r.reward.reward for r in got.rollouts] == [1.0 - penalty, 0.0 - penalty]
        # Scored again later, from the same ticket: the same.
        assert shaped_group(ticketed, shaping, max_new_tokens=10).rollouts[0].reward == got.rollouts[0].reward
    with pytest.raises(ValueError, match="shaped before"):
        shaped_group(got, shaping, max_new_tokens=10)


def test_the_schedule_is_in_the_version_of_the_scoring() -> None:
    def version(**shaping: Any) -> str:
        return scoring_version(Rewards(shaping=Shaping(**shaping)))

    acting = {"repetition_weight": 0.5, "repetition_from_step": 10}
    assert len({version(), version(**acting), version(**acting | {"repetition_from_step": 11})}) == 3


def test_a_truncated_rollout_is_left_out_or_kept() -> None:
    cut = rollout([1, 2], 0.0, end_reason=EndReason.LENGTH)
    assert shaped(cut, Shaping(), step=0, max_new_tokens=2) == cut.reward
    got = shaped(cut, Shaping(truncated="leave_out"), step=0, max_new_tokens=2)
    assert (got.decision, got.reward) == (Decision.UNKNOWN, None)
    assert got.evidence.startswith("left out, cut at 2 tokens; the verifier said fail")
    whole = rollout([1, 2], 0.0)
    assert shaped(whole, Shaping(truncated="leave_out"), step=0, max_new_tokens=2) == whole.reward


def test_a_missing_reward_stays_missing_and_no_term_leaves_the_result_alone() -> None:
    missing = rollout([1, 1, 1], None)
    shaping = Shaping(repetition_weight=1.0, repetition_ngram=1)
    assert shaped(missing, shaping, step=0, max_new_tokens=10) is missing.reward
    group = make_group()
    assert [r.reward for r in shaped_group(group, Shaping(), max_new_tokens=10).rollouts] == [
        r.reward for r in group.rollouts
    ]
    assert np.array_equal(group.rollouts[0].token_ids, make_group().rollouts[0].token_ids)
