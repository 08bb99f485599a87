"""The figures of groups and batches, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.learner.batching import Scored, make_train_batch
from stream_grpo.learner.figures import (
    CameIn,
    came_in,
    centered,
    columns,
    correlation,
    effective_number,
    figures_of_batch,
    figures_of_groups,
    percentiles,
    shares_between,
)
from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup
from tests.fakes import make_group, make_rollout


def rollout(reward: float | None, num_response: int, *, evidence: str = "", **components: float) -> Rollout:
    made = make_rollout(reward, num_response=num_response)
    result = replace(made.reward, evidence=evidence, components=components)
    return replace(made, reward=result, end_reason=EndReason.LENGTH if num_response == 4 else EndReason.EOS)


def group(name: str, domain: str, *rollouts: Rollout) -> RolloutGroup:
    return replace(make_group(name), domain=domain, rollouts=rollouts)


EASY = group("a", "add-2", rollout(1.0, 2, evidence="5"), rollout(0.0, 4, evidence="6"), rollout(1.0, 2, evidence="5"))
HARD = group("b", "add-9", rollout(0.0, 4, evidence="1", style=0.5), rollout(1.0, 6, style=1.0), rollout(None, 3))


def test_rewards_lengths_and_ends_by_hand() -> None:
    found = figures_of_groups([EASY, HARD])
    # Rewards 1 0 1 0 1: mean 0.6, variance 0.24; sorted 0 0 1 1 1.
    assert found["reward_std"] == pytest.approx(0.24**0.5)
    assert (found["reward_p10"], found["reward_p50"], found["reward_p90"]) == (0.0, 1.0, 1.0)
    assert found["pass_share"] == 3 / 5
    assert found["reward_components"] == {"style": 0.75}
    # Lengths 2 2 3 4 4 6: the median is halfway between 3 and 4.
    assert found["response_tokens_p50"] == 3.5
    right, wrong = found["by_decision"]["right"], found["by_decision"]["wrong"]
    assert (right["num_rollouts"], right["response_tokens_p50"]) == (3, 2.0)  # 2 2 6
    assert (wrong["num_rollouts"], wrong["response_tokens_p50"]) == (2, 4.0)  # 4 4
    assert (found["end_share"]["length"], found["end_share"]["eos"]) == (2 / 6, 4 / 6)
    assert found["by_domain"] == {
        "add-2": {"num_groups": 1, "reward_mean": pytest.approx(2 / 3)},
        "add-9": {"num_groups": 1, "reward_mean": 0.5},
    }


def test_answers_differ_by_evidence_and_responses_by_tokens() -> None:
    found = figures_of_groups([EASY, HARD])
    # Ids count up from one start: lengths are responses. 2 4 2 and 4 6 3; answers 5 6 5, and three in the other.
    assert found["unique_responses_mean"] == (2 + 3) / 2
    assert found["unique_answers_mean"] == (2 + 3) / 2


def test_length_and_reward_within_groups_leave_out_what_groups_differ_in() -> None:
    # Long problems fail, short ones pass: -1 over all; within each group the longer answer gets more: +1.
    short = group("a", "d", rollout(0.9, 1), rollout(1.0, 2))
    long = group("b", "d", rollout(0.0, 11), rollout(0.1, 12))
    found = figures_of_groups([short, long])
    assert found["reward_length_correlation"] < -0.9
    assert found["reward_length_correlation_within"] == pytest.approx(1.0)


def test_what_nothing_is_there_for_is_none() -> None:
    found = figures_of_groups([group("a", "d", rollout(None, 3), rollout(None, 3))])
    names = ("reward_std", "reward_p50", "pass_share", "reward_length_correlation", "reward_length_correlation_within")
    assert [found[name] for name in names] == [None] * 5
    assert found["by_decision"]["right"]["response_tokens_p50"] is None
    assert found["by_domain"] == {"d": {"num_groups": 1, "reward_mean": None}}


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=40))
def test_the_correlation_is_that_of_numpy_and_centering_that_of_a_loop(rows: list[tuple[int, float, float]]) -> None:
    group_B, x_B, y_B = (np.array(column) for column in zip(*rows, strict=True))
    for at, value in enumerate(centered(x_B, group_B)):
        assert value == pytest.approx(x_B[at] - x_B[group_B == group_B[at]].mean())
    if x_B.std() > 1e-3 and y_B.std() > 1e-3:
        assert correlation(x_B, y_B) == pytest.approx(np.corrcoef(x_B, y_B)[0, 1])


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.lists(st.integers(0, 100), min_size=1, unique=True))
def test_percentiles_are_those_of_numpy(values: list[float], of: list[int]) -> None:
    found = percentiles("x", np.array(values), of)
    assert list(found.values())[-1] == pytest.approx(np.percentile(values, of[-1]))


@given(st.lists(st.floats(0, 100), max_size=20))
def test_the_effective_number_lies_between_0_and_the_groups_with_weight(weights: list[float]) -> None:
    heavy = [weight if weight > 1e-3 else 0.0 for weight in weights]
    found = effective_number(np.array(heavy))
    assert (found == 0.0) if not any(heavy) else 1 - 1e-9 <= found <= sum(map(bool, heavy)) + 1e-9


def test_advantages_of_a_batch_by_hand() -> None:
    def advantages(rewards_B: np.ndarray, *_: object) -> Scored:
        return Scored(np.array([3.0, -3.0, 1.0, -1.0]), np.ones(4, bool))

    batch = make_train_batch(
        [make_group("a"), make_group("b")], advantages, vocab_size=100, microbatch_tokens=100
    )  # fmt: skip
    found = figures_of_batch(batch)
    # Variance (9 + 9 + 1 + 1) / 4; weights 6 and 2: (6 + 2)^2 / (36 + 4).
    assert found["advantage_std"] == pytest.approx(5**0.5)
    assert found["advantage_p50"] == 0.0
    assert found["effective_groups"] == pytest.approx(1.6)


def test_the_tokens_of_prompts_that_are_shared_are_counted_once_less() -> None:
    def advantages(rewards_B: np.ndarray, *_: object) -> Scored:
        return Scored(np.zeros(4), np.ones(4, bool))

    groups = [make_group("a"), make_group("b")]
    num_prompt = groups[0].rollouts[0].num_prompt_tokens
    for attention_cost, times in ((None, 0), (0.0, 3)):  # four rollouts of one prompt: it stands once
        batch = make_train_batch(
            groups, advantages, vocab_size=100, microbatch_tokens=100, attention_cost=attention_cost
        )
        assert figures_of_batch(batch)["prompt_tokens_shared"] == times * num_prompt


def test_what_came_in_between_two_looks() -> None:
    before = came_in({"trained": 4, "accepted": 1}, {"no_signal: all_right": 2})
    after = came_in(
        {"trained": 8, "accepted": 2, "leased": 1},
        {"no_signal: all_right": 5, "no_signal: all_wrong": 1, "stale: age": 1, "stale: deadline": 7, "invalid: x": 1},
    )
    # Mixed 12 - 5 = 7, of which one ended as too old; a deadline passed before anything came in.
    assert after == CameIn(all_right=5, all_wrong=1, same_reward=0, mixed=12, unscored=1)
    shares = shares_between(before, after)
    assert shares["num_groups"] == 12
    assert shares["mixed"] == pytest.approx(7 / 12)
    assert sum(value or 0 for name, value in shares.items() if name != "num_groups") == pytest.approx(1.0)
    assert shares_between(after, after) == {"num_groups": 0, **dict.fromkeys(CameIn._fields)}


def test_columns_keep_the_order_of_the_groups() -> None:
    b = columns([EASY, HARD])
    assert b.group_B.tolist() == [0, 0, 0, 1, 1, 1]
    assert b.length_B.tolist() == [2, 4, 2, 4, 6, 3]
    assert b.decision_B.tolist()[-1] == Decision.UNKNOWN
    assert isinstance(EASY.rollouts[0].reward, RewardResult)
