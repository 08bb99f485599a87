"""A learner step with a critic, through tables in float64: whose gradient is what, and that no cut changes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.learner.forward import Targets
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import RolloutGroup
from tests.learner.table_model import TableModel
from tests.learner.test_train_step import MAX_NEW, VOCAB, WHOLE, batch_of, ragged_groups

PPO = PRESETS["ppo"].recipe


class TableCritic:
    """What a prefix is worth depends on its last token alone. Trained by plain gradient descent."""

    device = torch.device("cpu")
    num_bytes = 1234

    def __init__(self) -> None:
        self.weights = torch.linspace(-0.4, 0.6, VOCAB, dtype=torch.float64).requires_grad_()
        self.gradients: list[Tensor] = []
        self.learning_rates: list[float] = []

    def values(self, targets: Targets) -> Tensor:
        value_BK = self.weights[targets.token_ids_BT][:, -targets.num_last :]
        return torch.nn.functional.pad(value_BK[:, :-1], (1, 0))

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float) -> float:
        assert self.weights.grad is not None
        self.gradients.append(self.weights.grad.clone())
        self.learning_rates.append(learning_rate)
        with torch.no_grad():
            self.weights -= learning_rate * self.weights.grad
        self.weights.grad = None
        return float(self.gradients[-1].norm())


def recipe_of(**choices: Any) -> Recipe:
    return Recipe.model_validate(PPO.model_dump() | choices)


def step_of(model: TableModel, critic: TableCritic | None, recipe: Recipe = PPO, **learner: Any) -> TrainStep:
    return TrainStep(
        model, recipe, Learner(**({"learning_rate": 0.01, "warmup_steps": 0} | learner)),
        max_new_tokens=MAX_NEW, critic=critic,
    )  # fmt: skip


def trained(groups: list[RolloutGroup]) -> list[tuple[list[int], float]]:
    """(token ids, reward) of the rollouts that enter the loss; all have a prompt of two tokens."""
    return [
        (r.token_ids.tolist(), float(r.reward.reward or 0.0))
        for group in groups
        for r in group.rollouts
        if r.valid and r.loss_mask.any()
    ]


def test_the_update_of_critic_and_policy_are_those_of_loops() -> None:
    # gamma = lambda = 1: every token has advantage reward - V(token before), and its value is to become the reward.
    groups, recipe = ragged_groups(3), recipe_of(gae_whiten=False)
    model, critic = TableModel(VOCAB), TableCritic()
    policy, value = (w.detach().clone().requires_grad_() for w in (model.weights, critic.weights))
    metrics = step_of(model, critic, recipe).run(batch_of(recipe, groups))
    policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    log_p = (policy / 0.7).log_softmax(-1)
    for ids, reward in trained(groups):
        behavior = next(
            r.behavior_logprobs for group in groups for r in group.rollouts if r.valid and r.token_ids.tolist() == ids
        )
        for t in range(2, len(ids)):
            num_tokens += 1
            value_loss = value_loss + (value[ids[t - 1]] - reward) ** 2 / 2
            advantage = reward - float(value[ids[t - 1]].detach())
            ratio = (log_p[ids[t - 1], ids[t]] - float(behavior[t])).exp()
            policy_loss = policy_loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    policy_loss, value_loss = policy_loss / num_tokens, value_loss / num_tokens
    (expected,) = torch.autograd.grad(policy_loss, policy)
    assert torch.allclose(model.gradients[0], expected, rtol=1e-9, atol=1e-12)
    (expected,) = torch.autograd.grad(value_loss, value)
    assert torch.allclose(critic.gradients[0], expected, rtol=1e-9, atol=1e-12)
    assert metrics["value_loss"] == pytest.approx(float(value_loss), rel=1e-9)
    assert metrics["value_grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-9)
    assert metrics["critic_bytes"] == 1234
    assert 0 < metrics["critic_s"] < metrics["seconds"]


def test_no_cut_into_microbatches_changes_what_either_learns() -> None:
    groups = ragged_groups(4)
    found = []
    for budget in (WHOLE, 150, 1):
        model, critic = TableModel(VOCAB), TableCritic()
        metrics = step_of(model, critic).run(batch_of(PPO, groups, budget))
        found.append((metrics, model.gradients[0], critic.gradients[0]))
    (whole, policy, value), *others = found
    for metrics, *gradients in others:
        for got, expected in zip(gradients, (policy, value), strict=True):
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
        for name in ("loss", "value_loss", "value_mean", "return_mean", "explained_variance", "advantage_p50"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-10, abs=1e-12)


def test_whitened_advantages_are_those_of_the_whole_batch() -> None:
    metrics = step_of(TableModel(VOCAB), TableCritic()).run(batch_of(PPO, ragged_groups(5)))
    assert metrics["advantage_std"] == pytest.approx(1.0)
    assert metrics["advantage_p10"] < 0 < metrics["advantage_p90"]
    # Groups have no weight where every token has its own advantage.
    assert metrics["effective_groups"] is None


def test_values_are_clipped_around_those_at_the_start_of_the_step() -> None:
    # Two passes with a large step: in the second the values have moved further than 0.01, many of them past their aim.
    recipe = recipe_of(value_clip=0.01, critic_rate=100.0)
    critic = TableCritic()
    step = step_of(TableModel(VOCAB), critic, recipe, num_epochs=2, learning_rate=0.05)
    metrics = step.run(batch_of(recipe, ragged_groups(6)))
    assert len(critic.gradients) == metrics["num_updates"] == 2
    assert 0 < metrics["value_clip_share"] <= 0.5  # of the first pass none
    free = step_of(TableModel(VOCAB), TableCritic(), recipe_of(value_clip=None)).run(batch_of(PPO, ragged_groups(6)))
    assert "value_clip_share" not in free


def test_the_critic_warms_up_with_the_policy_and_keeps_its_rate_where_the_policys_is_scaled() -> None:
    model, critic = TableModel(VOCAB), TableCritic()
    step = step_of(model, critic, warmup_steps=2)
    step.rate_scale = 0.1
    for seed in range(2):
        step.run(batch_of(PPO, ragged_groups(seed)))
    assert model.learning_rates == pytest.approx([0.1 * 0.005, 0.1 * 0.01])
    assert critic.learning_rates == pytest.approx([5 * 0.005, 5 * 0.01])


def test_a_group_without_spread_teaches_both() -> None:
    groups = ragged_groups(7)
    won = groups[0].rollouts[1].reward
    flat = [
        dataclasses.replace(g, rollouts=tuple(dataclasses.replace(r, reward=won) for r in g.rollouts)) for g in groups
    ]
    model, critic = TableModel(VOCAB), TableCritic()
    step_of(model, critic).run(batch_of(PPO, flat))
    assert float(model.gradients[0].abs().max()) > 0
    assert float(critic.gradients[0].abs().max()) > 0


def test_a_critics_loss_that_is_not_finite_stops_before_any_update() -> None:
    model, critic = TableModel(VOCAB), TableCritic()
    with torch.no_grad():
        critic.weights[1:] = 1e200
    with pytest.raises(FloatingPointError, match="of the critic"):
        step_of(model, critic).run(batch_of(PPO, ragged_groups(8)))
    assert model.gradients == critic.gradients == []


def test_a_critic_is_asked_for_by_the_recipe_and_only_by_it() -> None:
    with pytest.raises(ValueError, match="advantage = gae: a critic is expected"):
        step_of(TableModel(VOCAB), None)
    with pytest.raises(ValueError, match="advantage = reward: no critic is expected"):
        step_of(TableModel(VOCAB), TableCritic(), PRESETS["grpo"].recipe)
