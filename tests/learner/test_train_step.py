"""A learner step through a table model in float64: a loss that no cut changes, and what goes from step to step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stream_grpo.algo.aggregate import BatchCounts, denominator
from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Microbatch, Minibatch, Sampled, TrainBatch, make_train_batch
from stream_grpo.learner.first_pass import first_pass, tensors_of
from stream_grpo.learner.forward import Entropy, Targets
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import EndReason, PolicyVersion, Rollout, RolloutGroup
from tests.learner.conftest import make_group, make_rollout
from tests.learner.table_model import TableModel

VOCAB, MAX_NEW = 12, 60
WHOLE = 10**6
CUT = ("grpo", "decoupled", "m2po", "vespo", "vcpo", "scalerl")
AGGREGATIONS = ("tokens", "sequences", "problems", "constant")
Groups = Callable[[int, int, int, int], list[RolloutGroup]]


def ragged_groups(seed: int) -> list[RolloutGroup]:
    """Two groups of five, answers of 1 to 60 tokens; in one a rollout is aborted, in one all is context."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(2):
        rollouts: list[Rollout] = []
        for i in range(5):
            num_response = (1, 60)[i] if i < 2 else int(rng.integers(2, 60))
            logprobs = np.minimum(-math.log(VOCAB) + rng.normal(0, 0.3, num_response), 0)
            response = rng.integers(0, VOCAB, num_response).tolist()
            rollouts.append(make_rollout([1, 2], response, float(i % 2), logprobs.tolist()))
        left_out = (
            {"end_reason": EndReason.ABORT} if g == 0 else {"loss_mask": np.zeros(len(rollouts[2].token_ids), bool)}
        )
        rollouts[2] = dataclasses.replace(rollouts[2], **left_out)
        groups.append(make_group(f"g{g}", rollouts))
    return groups


def batch_of(
    recipe: Recipe, groups: Sequence[RolloutGroup], microbatch_tokens: int = WHOLE, **settings: Any
) -> TrainBatch:
    return make_train_batch(
        groups, AdvantageMaker(recipe), vocab_size=VOCAB, microbatch_tokens=microbatch_tokens,
        sampled_by=lambda version: Sampled(version.step % 3), **settings,
    )  # fmt: skip


def step_of(model: TableModel, recipe: Recipe, **learner: Any) -> TrainStep:
    return TrainStep(
        model, recipe, Learner(**({"learning_rate": 0.0, "warmup_steps": 0} | learner)),
        max_new_tokens=MAX_NEW,
    )  # fmt: skip


def cuts(recipe: Recipe, groups: Sequence[RolloutGroup]) -> dict[int, TrainBatch]:
    """The same batch in 1, 2, 3 and 8 microbatches."""
    found: dict[int, TrainBatch] = {}
    budgets = iter((WHOLE, *range(520, 0, -8), 1))
    while not found.keys() >= {1, 2, 3, 8}:
        batch = batch_of(recipe, groups, next(budgets))
        found.setdefault(len(batch.minibatches[0].microbatches), batch)
    return {count: found[count] for count in (1, 2, 3, 8)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", CUT)
def test_loss_and_gradient_do_not_depend_on_the_microbatches(preset: str, aggregation: str) -> None:
    recipe = Recipe.model_validate(PRESETS[preset].recipe.model_dump() | {"aggregation": aggregation})
    results = []
    for count, batch in cuts(recipe, ragged_groups(5)).items():
        model = TableModel(VOCAB)
        metrics = step_of(model, recipe).run(batch)
        assert model.num_backward == count
        results.append((metrics, model.gradients[0]))
    (whole, gradient), *others = results
    assert float(gradient.abs().max()) > 0
    for metrics, other in others:
        assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-12)
        assert torch.allclose(other, gradient, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))
        for name in ("entropy", "ess", "k1", "k3", "ratio_max", "num_tokens", "learning_rate"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", CUT)
def test_the_gradients_of_two_ranks_add_up_to_that_of_one(preset: str, aggregation: str) -> None:
    recipe = Recipe.model_validate(PRESETS[preset].recipe.model_dump() | {"aggregation": aggregation})
    groups = ragged_groups(6)
    one, eight = (batch_of(recipe, groups, budget) for budget in (WHOLE, 1))
    (minibatch,) = eight.minibatches
    bound = first_pass(TableModel(VOCAB), recipe, eight, num_updates=1, kl_weight=0.0).second_moment_bound
    loss, gradient = rank(recipe, one.minibatches[0], one.minibatches[0].microbatches, bound)
    ranks = [rank(recipe, minibatch, minibatch.microbatches[i::2], bound) for i in range(2)]
    assert sum(part for part, _ in ranks) == pytest.approx(loss, rel=1e-12)
    total = ranks[0][1] + ranks[1][1]
    assert torch.allclose(total, gradient, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))


def unequal_groups(*sizes: int) -> list[RolloutGroup]:
    """Groups of so many rollouts, the first and the last of each of which differ."""
    rng = np.random.default_rng(8)
    groups = []
    for number, size in enumerate(sizes):
        responses = [rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist() for _ in range(size)]
        rollouts = [
            make_rollout([1, 2], response, float(i == 0), [-math.log(VOCAB)] * len(response))
            for i, response in enumerate(responses)
        ]
        groups.append(make_group(f"g{number}", rollouts))
    return groups


def test_groups_of_unequal_sizes_have_one_denominator_by_what_was_sampled() -> None:
    groups = unequal_groups(2, 5, 3, 4)
    num_tokens = sum(rollout.num_target_tokens for group in groups for rollout in group.rollouts)
    losses, gradients = {}, {}
    for aggregation in AGGREGATIONS:
        recipe = Recipe.model_validate(PRESETS["grpo"].recipe.model_dump() | {"aggregation": aggregation})
        for budget in (WHOLE, 1):
            model = TableModel(VOCAB)
            batch = batch_of(recipe, groups, budget)
            losses[aggregation, budget] = step_of(model, recipe).run(batch)["loss"]
            gradients[aggregation, budget] = model.gradients[0]
        whole, cut = (gradients[aggregation, budget] for budget in (WHOLE, 1))
        assert torch.allclose(cut, whole, rtol=1e-12, atol=1e-12 * float(whole.abs().max()))
        assert losses[aggregation, 1] == pytest.approx(losses[aggregation, WHOLE], rel=1e-12)
    # `tokens` and `constant` sum the same over tokens, and divide by these or by 2 + 5 + 3 + 4 rollouts at their limit.
    in_sum = gradients["tokens", WHOLE] * num_tokens
    assert torch.allclose(in_sum, gradients["constant", WHOLE] * (14 * MAX_NEW), rtol=1e-12)
    # Each of two updates counts its own: of the first and third group, and of the second and fourth.
    two = batch_of(recipe, groups, num_minibatches=2)
    assert [minibatch.num_rollouts for minibatch in two.minibatches] == [2 + 3, 5 + 4]
    assert [minibatch.num_sequences for minibatch in two.minibatches] == [2 + 3, 5 + 4]


def rank(
    recipe: Recipe, minibatch: Minibatch, part: Sequence[Microbatch], bound: float | None
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the microbatches of one rank, with the counts of all."""
    model, total = TableModel(VOCAB), 0.0
    counts = BatchCounts(
        minibatch.num_tokens, minibatch.num_sequences, minibatch.num_problems, minibatch.num_rollouts * MAX_NEW
    )
    for microbatch in part:
        tensors = tensors_of(microbatch, model.device)
        logprobs_BT, _ = model.logprobs(tensors.targets)
        inputs = LossInputs(
            policy_logprobs_BT=logprobs_BT,
            behavior_logprobs_BT=tensors.behavior_BK,
            advantage_BT=tensors.advantage_B.unsqueeze(1).expand_as(logprobs_BT),
            mask_BT=tensors.mask_BK,
            tokens_B=tensors.tokens_B,
            problem_tokens_B=tensors.problem_tokens_B,
            age_BT=tensors.age_BK,
            regularized_B=tensors.has_signal_B,
        )
        loss, _ = policy_loss(
            recipe, inputs, denominator=denominator(recipe.aggregation, counts), second_moment_bound=bound
        )
        model.backward(loss)
        total += float(loss.detach())
    model.update(0.0)
    return total, model.gradients[0]


def test_counts_are_those_of_what_is_trained() -> None:
    # Report C03. Of ten rollouts one is aborted and one is all context: eight sequences in two problems.
    groups = ragged_groups(7)
    (minibatch,) = batch_of(PRESETS["grpo"].recipe, groups).minibatches
    tokens = sum(r.num_sampled_tokens for group in groups for r in group.rollouts if r.valid)
    assert (minibatch.num_tokens, minibatch.num_sequences, minibatch.num_problems) == (tokens, 8, 2)


def test_a_batch_without_a_trained_token_makes_no_update() -> None:
    # Report C03: every completion left out: no update, no NaN, and the metrics say so.
    aborted = [dataclasses.replace(make_rollout([1], [2], 1.0), end_reason=EndReason.ABORT) for _ in range(2)]
    model = TableModel(VOCAB)
    recipe = PRESETS["decoupled"].recipe
    metrics = step_of(model, recipe).run(batch_of(recipe, [make_group("g0", aborted)]))
    assert (metrics["num_updates"], metrics["num_tokens"], metrics["num_left_out"]) == (0, 0, 2)
    assert model.gradients == []
    assert model.ended_steps == [1]


def test_every_minibatch_of_every_epoch_is_an_update(random_groups: Groups) -> None:
    recipe, model = PRESETS["decoupled"].recipe, TableModel(VOCAB)
    batch = batch_of(recipe, random_groups(4, 4, VOCAB, 1), num_minibatches=2)
    step = step_of(model, recipe, learning_rate=0.5, num_epochs=3, num_minibatches=2)
    metrics = step.run(batch)
    assert metrics["num_updates"] == len(model.gradients) == 6
    assert (step.step, model.ended_steps) == (1, [1])
    # The policy has left the start of the step, which the proximal policy is kept at.
    assert metrics["k3_proximal"] > 0
    assert metrics["ratio_max"] > 1


def test_warmup_is_linear_and_the_effective_share_scales_it(random_groups: Groups) -> None:
    recipe, model = PRESETS["vcpo"].recipe, TableModel(VOCAB)
    step = step_of(model, recipe, learning_rate=1e-3, warmup_steps=2)
    metrics = [step.run(batch_of(recipe, random_groups(2, 4, VOCAB, seed))) for seed in range(3)]
    for values, warmth in zip(metrics, (0.5, 1.0, 1.0), strict=True):
        # learning rate x min(1, root of the effective share over its base of 1)
        assert values["learning_rate"] == pytest.approx(warmth * 1e-3 * math.sqrt(values["effective_share"]))
        assert 0 < values["effective_share"] < 1
    assert model.learning_rates == [values["learning_rate"] for values in metrics]


def test_the_coefficient_follows_its_target_and_a_restored_step_goes_on_from_it(random_groups: Groups) -> None:
    steered = Recipe.model_validate(
        PRESETS["rloo"].recipe.model_dump()
        | {"kl": "k2", "kl_place": "loss", "kl_weight": 0.1, "kl_reference": "fixed", "kl_target": 1e-6}
        | {"kl_horizon": 80.0, "regularize_without_signal": True, "baseline": "running_mean", "baseline_decay": 0.5}
    )
    step = step_of(TableModel(VOCAB), steered)
    first = step.run(
        make_train_batch(random_groups(2, 4, VOCAB, 1), step.advantages, vocab_size=VOCAB, microbatch_tokens=99)
    )
    # Far above the target: an error of at most 0.2, eight sequences of a horizon of 80: 0.1 (1 + 0.2 x 8 / 80).
    assert first["kl_weight"] == 0.1
    kept = {"kind": "running_mean", "value": first["baseline"]}
    assert step.state() == {"step": 1, "baseline": kept, "kl_weight": pytest.approx(0.102)}
    # One of four rollouts passes in each group; before the first batch the mean is its own: 0.25.
    assert first["baseline"] == 0.25
    again = step_of(TableModel(VOCAB), steered)
    again.restore(step.state())
    assert again.state() == step.state()
    fixed = step_of(
        TableModel(VOCAB), Recipe.model_validate(steered.model_dump() | {"kl_target": None, "kl_horizon": None})
    )
    kept = {"kind": "running_mean", "value": 0.5}
    fixed.restore({"step": 5, "baseline": kept, "kl_weight": 9.0})
    assert fixed.state() == {"step": 5, "baseline": kept, "kl_weight": 0.1}
    # A baseline of another kind is no start, and neither is the coefficient of a run without KL.
    again.restore({"step": 5, "baseline": {"kind": "running_quantile", "value": 9.0}, "kl_weight": 0.0})
    assert again.state() == step.state() | {"step": 5}


def test_kl_as_a_part_of_the_advantage(random_groups: Groups) -> None:
    # k1 there has the gradient of the KL: without signal, at ratio 1 and weight beta, minus beta x times d log p.
    choices = {"kl": "k1", "kl_place": "advantage", "kl_weight": 0.3, "kl_reference": "fixed"}
    base = PRESETS["reinforce"].recipe.model_dump() | choices | {"baseline": "group_mean", "baseline_decay": None}
    base |= {"ratio_to": "proximal", "proximal": "recomputed"}
    groups = random_groups(1, 4, VOCAB, 2)
    flat = dataclasses.replace(
        groups[0],
        rollouts=tuple(dataclasses.replace(r, reward=groups[0].rollouts[0].reward) for r in groups[0].rollouts),
    )
    for acts in (False, True):
        recipe, model = Recipe.model_validate(base | {"regularize_without_signal": acts}), TableModel(VOCAB)
        step_of(model, recipe).run(batch_of(recipe, [flat]))
        weights = model.weights.detach().clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for r in flat.rollouts:
            ids = torch.from_numpy(r.token_ids.astype(np.int64))
            policy, reference = ((w / 0.7).log_softmax(-1) for w in (weights, model.reference))
            for t in range(r.num_prompt_tokens, len(ids)):
                log_p = policy[ids[t - 1], ids[t]]
                total = total + 0.3 * (log_p - reference[ids[t - 1], ids[t]]).detach() * log_p
        (expected,) = torch.autograd.grad(total / flat.num_sampled_tokens, weights)
        assert torch.allclose(model.gradients[0], expected * acts, rtol=1e-9, atol=1e-15)


def test_the_entropy_bonus_reaches_the_weights(random_groups: Groups) -> None:
    # With all rewards alike only the bonus acts: the gradient is that of -c mean H.
    recipe = Recipe.model_validate(
        PRESETS["rloo"].recipe.model_dump() | {"entropy_weight": 0.2, "regularize_without_signal": True}
    )
    groups = random_groups(1, 1, VOCAB, 3)
    model = TableModel(VOCAB)
    step_of(model, recipe).run(batch_of(recipe, groups))
    weights = model.weights.detach().clone().requires_grad_()
    r = groups[0].rollouts[0]
    log_p = (weights[torch.from_numpy(r.token_ids.astype(np.int64))] / 0.7).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[r.num_prompt_tokens - 1 : -1].mean()
    (expected,) = torch.autograd.grad(-0.2 * entropy, weights)
    assert float(expected.abs().max()) > 0
    assert torch.allclose(model.gradients[0], expected, rtol=1e-9, atol=1e-15)


def test_what_watches_the_first_update_may_stop_it(random_groups: Groups) -> None:
    recipe, model = PRESETS["rloo"].recipe, TableModel(VOCAB)
    before = model.weights.detach().clone()

    def refuse(first: object) -> None:
        raise RuntimeError("stop")

    step = step_of(model, recipe, learning_rate=1.0)
    with pytest.raises(RuntimeError, match="stop"):
        step.run(batch_of(recipe, random_groups(2, 4, VOCAB, 1)), watch=refuse)
    assert torch.equal(model.weights.detach(), before)
    assert step.step == 0


def test_a_loss_that_is_not_finite_is_named(random_groups: Groups) -> None:
    recipe, model = PRESETS["rloo"].recipe, TableModel(VOCAB)
    batch = batch_of(recipe, random_groups(1, 4, VOCAB, 1))
    batch.minibatches[0].microbatches[0].advantages_B[0] = np.nan
    with pytest.raises(FloatingPointError, match="learner step 1"):
        step_of(model, recipe).run(batch)
    assert model.gradients == []


def test_tokens_that_the_learner_holds_impossible_are_told_with_a_loss_that_is_not_finite(
    random_groups: Groups,
) -> None:
    class Barred(TableModel):
        """The learner bars the first trained token."""

        def logprobs(self, targets: Targets, *, entropy: Entropy = "none") -> tuple[torch.Tensor, torch.Tensor]:
            logprobs, entropy_BK = super().logprobs(targets, entropy=entropy)
            assert targets.wanted_BK is not None
            is_barred = torch.zeros_like(targets.wanted_BK)
            is_barred[tuple(targets.wanted_BK.nonzero()[0])] = True
            return logprobs.masked_fill(is_barred, -torch.inf), entropy_BK

    recipe, model = PRESETS["rloo"].recipe, Barred(VOCAB)
    batch = batch_of(recipe, random_groups(1, 4, VOCAB, 1))
    batch.minibatches[0].microbatches[0].advantages_B[0] = np.nan
    num_tokens = batch.minibatches[0].num_tokens
    with pytest.raises(FloatingPointError, match=f"gives 1 of {num_tokens} trained tokens no probability .* in top_p"):
        step_of(model, recipe).run(batch)
    assert model.gradients == []


def test_metrics_are_told_apart_by_age(rollout: Callable[..., Rollout]) -> None:
    # Two rollouts of versions 0 and 2, which `batch_of` calls ages 0 and 2.
    rollouts = [rollout([1], [2, 3], 1.0), rollout([1], [4], 0.0)]
    rollouts[1] = dataclasses.replace(rollouts[1], version_step=np.array([-1, 2], dtype=np.int32))
    assert rollouts[1].versions() == {PolicyVersion(0, 2)}
    recipe = PRESETS["rloo"].recipe
    by_age = step_of(TableModel(VOCAB), recipe).run(batch_of(recipe, [make_group("g0", rollouts)]))["by_age"]
    assert {age: row["num_tokens"] for age, row in by_age.items()} == {"0": 2, "2": 1}
