"""What is found out before the first gradient, and only where it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import TrainBatch, make_train_batch
from stream_grpo.learner.first_pass import FirstPass, first_pass, tensors_of
from stream_grpo.types import RolloutGroup
from tests.learner.table_model import TableModel

VOCAB = 12
Groups = Callable[[int, int, int, int], list[RolloutGroup]]


def batch_of(recipe: Recipe, groups: list[RolloutGroup], microbatch_tokens: int = 40) -> TrainBatch:
    return make_train_batch(
        groups, AdvantageMaker(recipe), vocab_size=VOCAB, microbatch_tokens=microbatch_tokens, num_minibatches=2
    )


def log_ratios(model: TableModel, groups: list[RolloutGroup]) -> list[tuple[float, list[float]]]:
    """(reward, log policy / behavior of every token) of every rollout."""
    table = (model.weights.detach() / 0.7).log_softmax(-1)
    return [
        (
            float(r.reward.reward or 0.0),
            [
                float(table[r.token_ids[t - 1], r.token_ids[t]]) - float(r.behavior_logprobs[t])
                for t in range(r.num_prompt_tokens, len(r.token_ids))
            ],
        )
        for group in groups
        for r in group.rollouts
    ]


@pytest.mark.parametrize("name", ["grpo", "decoupled", "vespo"])
def test_most_recipes_need_none_for_one_update(name: str, random_groups: Groups) -> None:
    recipe = PRESETS[name].recipe
    batch = batch_of(recipe, random_groups(2, 4, VOCAB, 1))
    assert first_pass(TableModel(VOCAB), recipe, batch, num_updates=1, kl_weight=0.0) == FirstPass()


def test_a_recomputed_proximal_policy_is_kept_for_later_updates(random_groups: Groups) -> None:
    recipe, model = PRESETS["decoupled"].recipe, TableModel(VOCAB)
    batch = batch_of(recipe, random_groups(4, 4, VOCAB, 1))
    facts = first_pass(model, recipe, batch, num_updates=2, kl_weight=0.0)
    microbatches = [m for minibatch in batch.minibatches for m in minibatch.microbatches]
    assert len(facts.start_logprobs) == len(microbatches) > 2
    for microbatch in microbatches:
        tensors = tensors_of(microbatch, model.device)
        expected, _ = model.logprobs(tensors.targets)
        got = facts.start_logprobs[id(microbatch)]
        assert torch.equal(got, expected)
        assert not got.requires_grad
    # With the sampler's logprobs as proximal there is nothing to keep.
    assert first_pass(model, PRESETS["grpo"].recipe, batch, num_updates=2, kl_weight=0.0) == FirstPass()


def test_the_second_moment_is_bounded_over_the_whole_batch(random_groups: Groups) -> None:
    # The largest b such that the mean square of the outward log ratios up to b is below tau.
    recipe, model, groups = PRESETS["m2po"].recipe, TableModel(VOCAB), random_groups(4, 4, VOCAB, 2)
    facts = first_pass(model, recipe, batch_of(recipe, groups), num_updates=1, kl_weight=0.0)
    # One of four passes: its advantage is above 0, that of the others below.
    moved = sorted(abs(x) for reward, logs in log_ratios(model, groups) for x in logs if (reward - 0.25) * x > 0)
    kept = [b for n, b in enumerate(moved, start=1) if sum(x * x for x in moved[:n]) / n < 0.04]
    assert 0 < len(kept) < len(moved)
    assert facts.second_moment_bound == pytest.approx(kept[-1], rel=1e-9)


def test_the_effective_share_is_over_the_sequences_of_the_batch(random_groups: Groups) -> None:
    # (sum w)^2 / (n sum w^2), w = min(product of ratios, 8), over 16 sequences.
    recipe, model, groups = PRESETS["vcpo"].recipe, TableModel(VOCAB), random_groups(4, 4, VOCAB, 3)
    groups[0].rollouts[0].behavior_logprobs[groups[0].rollouts[0].loss_mask] -= 20  # a product far above 8
    facts = first_pass(model, recipe, batch_of(recipe, groups), num_updates=1, kl_weight=0.0)
    weights = [min(math.exp(max(-20.0, sum(logs))), 8.0) for _, logs in log_ratios(model, groups)]
    assert 8.0 in weights
    expected = sum(weights) ** 2 / (16 * sum(w * w for w in weights))
    assert facts.effective_share == pytest.approx(expected, rel=1e-9)


def test_tensors_start_before_the_first_target(random_groups: Groups) -> None:
    recipe = PRESETS["grpo"].recipe
    for minibatch in batch_of(recipe, random_groups(2, 4, VOCAB, 4)).minibatches:
        for microbatch in minibatch.microbatches:
            tensors = tensors_of(microbatch, torch.device("cpu"))
            first = int(np.argmax(microbatch.mask_BT.any(axis=0)))
            assert tensors.num_last == microbatch.mask_BT.shape[1] - first + 1
            assert not tensors.mask_BK[:, 0].any()
            assert tensors.mask_BK[:, 1].any()
            assert int(tensors.mask_BK.sum()) == int(microbatch.mask_BT.sum())


@pytest.mark.parametrize("acts", [False, True])
def test_kl_and_entropy_act_where_there_is_signal_or_everywhere(acts: bool, random_groups: Groups) -> None:
    choices: dict[str, Any] = {"entropy_weight": 0.1, "regularize_without_signal": acts}
    recipe = Recipe.model_validate(PRESETS["rloo"].recipe.model_dump() | choices)
    # A group of one has no signal.
    groups = [*random_groups(1, 1, VOCAB, 1), *random_groups(1, 4, VOCAB, 2)]
    lone, four = (m.microbatches[0] for m in batch_of(recipe, groups, 1000).minibatches)
    device = torch.device("cpu")
    assert tensors_of(lone, device).regularized_B(recipe).tolist() == [acts]
    assert tensors_of(four, device).regularized_B(recipe).tolist() == [True] * 4
