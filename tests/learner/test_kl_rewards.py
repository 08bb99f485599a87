"""k1 through the reward and through the advantage, against the float64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import EndReason, RolloutGroup
from tests.learner.conftest import make_group
from tests.learner.table_model import TableModel
from tests.learner.test_step_rewards import VOCAB, slow_gradient, stepped_group

WEIGHT = 0.3


def recipe(place: str, **choices: Any) -> Recipe:
    return Recipe(
        **{
            "ratio_to": "behavior", "weight": "plain", "baseline": "leave_one_out", "kl": "k1", "kl_place": place,
            "kl_weight": WEIGHT, "kl_reference": "fixed", "regularize_without_signal": False, **choices,
        }
    )  # fmt: skip


def step_of(model: TableModel, of: Recipe) -> TrainStep:
    return TrainStep(model, of, Learner(learning_rate=0.0), max_new_tokens=8)


def log_ratios(group: RolloutGroup) -> list[list[float]]:
    """log (policy / reference) of every token of every rollout."""
    model = TableModel(VOCAB)
    policy, reference = ((table / 0.7).log_softmax(-1) for table in (model.weights.detach(), model.reference))
    return [
        [
            float(policy[r.token_ids[t - 1], r.token_ids[t]] - reference[r.token_ids[t - 1], r.token_ids[t]])
            for t in range(r.num_prompt_tokens, len(r.token_ids))
        ]
        for r in group.rollouts
    ]


def run(of: Recipe, group: RolloutGroup, microbatch_tokens: int = 1000) -> tuple[float, torch.Tensor]:
    model = TableModel(VOCAB)
    step = step_of(model, of)
    rewarded = step.rewarded([group], vocab_size=VOCAB, microbatch_tokens=microbatch_tokens)
    batch = make_train_batch(rewarded, step.advantages, vocab_size=VOCAB, microbatch_tokens=microbatch_tokens)
    return step.run(batch)["loss"], model.gradients[0]


@pytest.mark.parametrize("microbatch_tokens", [1, 1000])
def test_k1_through_the_reward_equals_the_oracle(microbatch_tokens: int) -> None:
    group = stepped_group()
    # r - 0.3 sum x of each; leave-one-out of two is the other one.
    rewards = [1.0 - WEIGHT * sum(x) if i == 0 else -WEIGHT * sum(x) for i, x in enumerate(log_ratios(group))]
    difference = rewards[0] - rewards[1]
    value, gradient = slow_gradient(recipe("reward"), group, [[difference] * 4, [-difference] * 3])
    loss, got = run(recipe("reward"), group, microbatch_tokens)
    assert loss == pytest.approx(value, rel=1e-12)
    assert torch.allclose(got, gradient, rtol=1e-9, atol=1e-15)
    assert abs(difference - 1.0) > 1e-3  # it acts


def test_k1_through_the_advantage_equals_the_oracle() -> None:
    group = stepped_group()
    ratios = log_ratios(group)
    advantages = [[(1.0, -1.0)[i] - WEIGHT * x for x in row] for i, row in enumerate(ratios)]
    value, gradient = slow_gradient(recipe("advantage"), group, advantages)
    loss, got = run(recipe("advantage"), group)
    assert loss == pytest.approx(value, rel=1e-12)
    assert torch.allclose(got, gradient, rtol=1e-9, atol=1e-15)


def rewards_of(of: Recipe, group: RolloutGroup) -> list[float | None]:
    (rewarded,) = step_of(TableModel(VOCAB), of).rewarded([group], vocab_size=VOCAB, microbatch_tokens=1000)
    return [rollout.reward.reward for rollout in rewarded.rollouts]


def test_a_rollout_that_is_left_out_keeps_what_it_has() -> None:
    first, second = stepped_group().rollouts
    aborted = dataclasses.replace(first, end_reason=EndReason.ABORT)
    group = make_group("g1", [aborted, first, second])
    got, ratios = rewards_of(recipe("reward"), group), log_ratios(group)
    assert got == [1.0, pytest.approx(1.0 - WEIGHT * sum(ratios[1])), pytest.approx(-WEIGHT * sum(ratios[2]))]


@pytest.mark.parametrize("without_signal", [False, True])
def test_in_a_group_without_signal_it_acts_or_not(without_signal: bool) -> None:
    same = [dataclasses.replace(r, reward=dataclasses.replace(r.reward, reward=1.0)) for r in stepped_group().rollouts]
    chosen = recipe("reward", regularize_without_signal=without_signal)
    got = rewards_of(chosen, make_group("g2", same))
    assert (got != [1.0, 1.0]) is without_signal
    # What acts without signal must see such groups.
    assert chosen.needs_spread is not without_signal


def test_without_it_the_groups_are_as_they_were() -> None:
    groups = [stepped_group()]
    step = step_of(TableModel(VOCAB), recipe("advantage"))
    assert step.rewarded(groups, vocab_size=VOCAB, microbatch_tokens=1000) is groups
