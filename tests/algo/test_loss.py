"""The composed loss against its slow oracle, and the identities that every recipe must keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stream_grpo.algo.aggregate import BatchCounts, denominator
from stream_grpo.algo.log_ratio import log_ratio
from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.mask import outward, second_moment_bound
from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from tests.algo import oracle

UPDATE: dict[str, Any] = {
    "ratio_to": "proximal",
    "proximal": "recomputed",
    "weight": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.3,
}
KL: dict[str, Any] = {"kl_place": "loss", "kl_weight": 0.1, "regularize_without_signal": False}
OTHERS = {
    "band masks and both": Recipe(
        **UPDATE, dual_clip=1.5, mask_ratio=(0.8, 1.3), mask_sequence_k3=0.02, mask_veto=(0.5, 2.0),
        correction="both", correction_level="sequence_mean", correction_low=0.9, correction_high=1.1,
    ),
    "probability masks": Recipe(
        ratio_to="behavior", weight="plain", mask_tv=0.05, mask_binary_kl=0.01, mask_negative_kl=0.02,
        aggregation="problems",
    ),
    "sequence mask": Recipe(**UPDATE, mask_sequence=(0.95, 1.05), aggregation="constant"),
    "prefix minimum": Recipe(ratio_to="behavior", ratio_level="prefix_min", weight="cispo", cap=1.2),
    "k2 to a fixed reference": Recipe(**UPDATE, kl="k2", kl_reference="fixed", **KL),
    "k3 to the sampler": Recipe(**UPDATE, kl="k3", kl_reference="behavior", **KL, aggregation="sequences"),
    "k3 off policy": Recipe(**UPDATE, kl="k3_off_policy", kl_reference="fixed", **KL, aggregation="problems"),
    "k3 off policy to the sampler": Recipe(**UPDATE, kl="k3_off_policy", kl_reference="behavior", **KL),
    "entropy": Recipe(**UPDATE, entropy_weight=0.01, regularize_without_signal=False),
}  # fmt: skip
RECIPES = {name: preset.recipe for name, preset in PRESETS.items()} | OTHERS


def draw(
    seed: int, *, matched: bool = False, far: bool = False, second_pass: bool = True, dtype: torch.dtype = torch.float64
) -> LossInputs:
    """Two groups of three ragged sequences, one of them without a trained token, the last group without signal.

    `matched`: all three policies are one. `far`: some log ratios beyond their bound. `second_pass`: the policy has
    left the start of the step.
    """
    torch.manual_seed(seed)
    shape = (6, int(torch.randint(1, 9, ())))
    mask_BT = torch.rand(shape) < 0.7
    mask_BT[int(torch.randint(0, 6, ()))] = False
    spread = 0.0 if matched else float(torch.tensor([0.02, 0.2, 0.6])[seed % 3])

    def near(logprobs_BT: Tensor) -> Tensor:
        return (logprobs_BT + spread * torch.randn(shape, dtype=dtype)).clamp(max=0)

    behavior_BT = torch.randn(shape, dtype=dtype).exp().neg()
    start_BT = near(behavior_BT)
    policy_BT = near(start_BT) if second_pass else start_BT.clone()
    if far:
        policy_BT = policy_BT - torch.where(torch.rand(shape) < 0.1, 25.0, 0.0)
        behavior_BT = behavior_BT - torch.where(torch.rand(shape) < 0.1, 25.0, 0.0)
    advantage_BT = torch.randn(6, 1, dtype=dtype).expand(shape).clone()
    advantage_BT[3:] = 0
    tokens_B = mask_BT.sum(dim=1)
    problem_tokens_B = tokens_B.view(2, 3).sum(dim=1).repeat_interleave(3)
    return LossInputs(
        policy_logprobs_BT=policy_BT.requires_grad_(),
        behavior_logprobs_BT=behavior_BT,
        advantage_BT=advantage_BT,
        mask_BT=mask_BT,
        tokens_B=tokens_B,
        problem_tokens_B=problem_tokens_B,
        age_BT=torch.where(mask_BT, torch.randint(0, 6, shape), 0),
        regularized_B=torch.tensor([True, True, True, False, False, False]),
        start_logprobs_BT=start_BT if second_pass else None,
        reference_logprobs_BT=near(behavior_BT),
        entropy_BT=torch.rand(shape, dtype=dtype),
        differs_BT=torch.rand(shape) < 0.5,
    )


def denominator_of(recipe: Recipe, inputs: LossInputs) -> float:
    tokens_P = inputs.tokens_B.view(2, 3).sum(dim=1)
    counts = BatchCounts(
        int(tokens_P.sum()), int(torch.count_nonzero(inputs.tokens_B)), int(torch.count_nonzero(tokens_P)), 2 * 3 * 8
    )
    return denominator(recipe.aggregation, counts)


def arguments(recipe: Recipe, inputs: LossInputs) -> dict[str, Any]:
    """What the batch around the microbatch gives."""
    bound = None
    if recipe.mask_second_moment is not None:
        log_R_BT = log_ratio(
            "token", inputs.policy_logprobs_BT, inputs.behavior_logprobs_BT, inputs.mask_BT
        ).log_ratio_BT.detach()
        moved = log_R_BT[inputs.mask_BT & outward(log_R_BT, inputs.advantage_BT)]
        bound = float(second_moment_bound(moved, tau=recipe.mask_second_moment))
    return {"denominator": denominator_of(recipe, inputs), "kl_weight": 0.1, "second_moment_bound": bound}


def gradient(recipe: Recipe, inputs: LossInputs, **given: Any) -> tuple[float, Tensor]:
    """Loss and d loss / d logprob."""
    loss, _ = policy_loss(recipe, inputs, **(arguments(recipe, inputs) | given))
    (gradient_BT,) = torch.autograd.grad(loss, inputs.policy_logprobs_BT)
    return float(loss.detach()), gradient_BT


@pytest.mark.parametrize("name", RECIPES)
@given(seed=st.integers(0, 10**6), far=st.booleans(), second_pass=st.booleans())
@settings(max_examples=12, deadline=None)
def test_value_and_gradient_are_those_of_the_slow_loop(name: str, seed: int, far: bool, second_pass: bool) -> None:
    recipe, inputs = RECIPES[name], draw(seed, far=far, second_pass=second_pass)
    value, gradient_BT = gradient(recipe, inputs)
    expected = oracle.loss(recipe, inputs, **arguments(recipe, inputs))
    assert value == pytest.approx(expected.value, rel=1e-9, abs=1e-9 * expected.size)
    assert gradient_BT.dtype == torch.float64
    for got, wanted in zip(gradient_BT.tolist(), expected.gradient, strict=True):
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", RECIPES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_with_matched_policies_every_recipe_is_reinforce(name: str, seed: int) -> None:
    # All ratios are 1: every weight is 1, every correction 1, no mask rejects; a KL is at its minimum.
    recipe, inputs = RECIPES[name], draw(seed, matched=True)
    assume(bool(inputs.mask_BT.any()))
    inputs = inputs._replace(entropy_BT=torch.zeros_like(inputs.behavior_logprobs_BT))
    if recipe.kl != "none":
        inputs = inputs._replace(reference_logprobs_BT=inputs.behavior_logprobs_BT)
    loss, statistics = policy_loss(recipe, inputs, **arguments(recipe, inputs))
    (got_BT,) = torch.autograd.grad(loss, inputs.policy_logprobs_BT)
    counts_B = {"sequences": inputs.tokens_B, "problems": inputs.problem_tokens_B}.get(
        recipe.aggregation, torch.ones(6)
    )
    divisor_B1 = denominator_of(recipe, inputs) * counts_B.clamp(min=1).unsqueeze(1)
    expected_BT = torch.where(inputs.mask_BT, -inputs.advantage_BT / divisor_B1, 0.0)
    assert torch.allclose(got_BT, expected_BT, rtol=1e-12, atol=0)
    metrics = statistics.metrics()
    assert (metrics["ratio_mean"], metrics["ess"], metrics["k3"], metrics["chi_square"]) == (1, 1, 0, 0)
    assert all(value == 0 for key, value in metrics.items() if key.startswith(("mask_share", "clip_share")))
    assert metrics.get("correction_mean", 1) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_without_signal_nothing_moves(name: str) -> None:
    # Under a group baseline a group without spread has advantages of exactly 0, and no preset has KL or entropy.
    recipe, inputs = RECIPES[name], draw(1)
    inputs = inputs._replace(advantage_BT=torch.zeros_like(inputs.advantage_BT))
    value, gradient_BT = gradient(recipe, inputs)
    assert value == 0
    assert torch.equal(gradient_BT, torch.zeros_like(gradient_BT))


@pytest.mark.parametrize("name", RECIPES)
def test_what_lies_under_the_mask_reaches_nothing(name: str) -> None:
    recipe, inputs = RECIPES[name], draw(2)
    value, gradient_BT = gradient(recipe, inputs)
    statistics = policy_loss(recipe, inputs, **arguments(recipe, inputs))[1].metrics()
    hidden = {
        field: torch.where(inputs.mask_BT, tensor.detach(), math.nan)
        for field, tensor in inputs._asdict().items()
        if field.endswith("_BT") and tensor.is_floating_point()
    }
    hidden["policy_logprobs_BT"].requires_grad_()
    dirty = inputs._replace(**hidden)
    dirty_value, dirty_gradient_BT = gradient(recipe, dirty, **arguments(recipe, inputs))
    assert dirty_value == value
    assert torch.equal(dirty_gradient_BT, gradient_BT)
    assert policy_loss(recipe, dirty, **arguments(recipe, inputs))[1].metrics() == statistics


def test_a_nan_of_the_sampler_under_the_mask() -> None:
    # Report C10: one trained token, ratio 1, advantage 1: loss -1, gradient -1 there and 0 beside it.
    inputs = LossInputs(
        policy_logprobs_BT=torch.zeros(1, 2, dtype=torch.float64, requires_grad=True),
        behavior_logprobs_BT=torch.tensor([[0.0, math.nan]], dtype=torch.float64),
        advantage_BT=torch.ones(1, 2, dtype=torch.float64),
        mask_BT=torch.tensor([[True, False]]),
        tokens_B=torch.tensor([1]),
        problem_tokens_B=torch.tensor([1]),
        age_BT=torch.zeros(1, 2, dtype=torch.int64),
        regularized_B=torch.tensor([True]),
    )
    loss, _ = policy_loss(PRESETS["grpo"].recipe, inputs, denominator=1.0)
    value = float(loss.detach())
    (gradient_BT,) = torch.autograd.grad(loss, inputs.policy_logprobs_BT)
    assert (value, gradient_BT.tolist()) == (-1.0, [[-1.0, 0.0]])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_token_that_the_policy_cannot_draw_has_no_gradient(name: str, seed: int) -> None:
    # Filtered logits give it a logprob of -inf. Its ratio is 0; nothing can raise it, and no NaN comes of it.
    recipe, inputs = RECIPES[name], draw(seed, second_pass=seed != 4)
    at = (inputs.mask_BT & (torch.rand(inputs.mask_BT.shape) < 0.3)).detach()
    filtered = torch.where(at, -math.inf, inputs.policy_logprobs_BT.detach())
    inputs = inputs._replace(policy_logprobs_BT=filtered.requires_grad_())
    if inputs.start_logprobs_BT is None:
        inputs = inputs._replace(age_BT=torch.zeros_like(inputs.age_BT))
    loss, statistics = policy_loss(recipe, inputs, **arguments(recipe, inputs))
    (gradient_BT,) = torch.autograd.grad(loss, inputs.policy_logprobs_BT)
    assert abs(float(loss.detach())) < 1e3
    assert torch.isfinite(gradient_BT).all()
    assert (gradient_BT[at] == 0).all()
    assert all(math.isfinite(value) for value in statistics.metrics().values())


@pytest.mark.parametrize("level", ["none", "kl", "entropy"])
def test_where_kl_and_entropy_act(level: str) -> None:
    # Advantages of 0 everywhere: what gradient there is comes from the regularizer, in the first group alone, and in
    # the second as well once it is regularized.
    entropy = {"entropy_weight": 0.5, "regularize_without_signal": False}
    choices = {"kl": {"kl": "k2", "kl_reference": "fixed", **KL}, "entropy": entropy}.get(level, {})
    recipe, drawn = Recipe(**UPDATE, **choices), draw(6)
    logprobs_BT = drawn.policy_logprobs_BT
    inputs = drawn._replace(
        advantage_BT=torch.zeros_like(drawn.advantage_BT),
        entropy_BT=logprobs_BT.square(),
        mask_BT=torch.ones_like(drawn.mask_BT),
        tokens_B=torch.full((6,), drawn.mask_BT.shape[1]),
    )
    _, gradient_BT = gradient(recipe, inputs)
    assert (gradient_BT[3:] == 0).all()
    assert bool((gradient_BT[:3] != 0).all()) == (level != "none")
    everywhere = inputs._replace(regularized_B=torch.ones(6, dtype=torch.bool), entropy_BT=logprobs_BT.square())
    _, gradient_BT = gradient(recipe, everywhere)
    assert bool((gradient_BT != 0).all()) == (level != "none")


def test_entropy_gives_its_own_gradient() -> None:
    # L = ... - c mean H over the trained tokens of regularized sequences: d L / d H = -c / D there.
    recipe, inputs = OTHERS["entropy"], draw(7)
    assert inputs.entropy_BT is not None
    entropy_BT = inputs.entropy_BT.requires_grad_()
    loss, _ = policy_loss(recipe, inputs, **arguments(recipe, inputs))
    (got_BT,) = torch.autograd.grad(loss, entropy_BT)
    acts_BT = inputs.mask_BT & inputs.regularized_B.unsqueeze(1)
    expected_BT = acts_BT.double() * -0.01 / denominator_of(recipe, inputs)
    assert torch.allclose(got_BT, expected_BT, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_float32_agrees_with_float64(name: str) -> None:
    recipe, exact = RECIPES[name], draw(8)
    rounded = LossInputs(*(x.float() if x is not None and x.is_floating_point() else x for x in exact))
    rounded = rounded._replace(policy_logprobs_BT=rounded.policy_logprobs_BT.detach().requires_grad_())
    value, gradient_BT = gradient(recipe, exact)
    got, got_BT = gradient(recipe, rounded)
    assert got_BT.dtype == torch.float32
    assert got == pytest.approx(value, abs=1e-5)
    assert torch.allclose(got_BT.double(), gradient_BT, rtol=1e-4, atol=1e-6)


def test_rows_are_weighed_some_at_a_time_and_the_cut_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, inputs = RECIPES["decoupled"], draw(9)
    value, gradient_BT = gradient(recipe, inputs)
    metrics = policy_loss(recipe, inputs, **arguments(recipe, inputs))[1].metrics()
    monkeypatch.setattr("stream_grpo.algo.loss.CHUNK_TOKENS", 1)
    cut_value, cut_gradient_BT = gradient(recipe, inputs)
    assert cut_value == pytest.approx(value, rel=1e-14)
    assert torch.equal(cut_gradient_BT, gradient_BT)
    assert policy_loss(recipe, inputs, **arguments(recipe, inputs))[1].metrics() == pytest.approx(metrics, rel=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    recipe, inputs = RECIPES["grpo"], draw(1)
    given = arguments(recipe, inputs)
    with pytest.raises(ValueError, match="shapes differ"):
        policy_loss(recipe, inputs._replace(mask_BT=inputs.mask_BT[:, :0]), **given)
    with pytest.raises(ValueError, match="shapes differ: tokens_B"):
        policy_loss(recipe, inputs._replace(tokens_B=inputs.tokens_B[:1]), **given)
    with pytest.raises(ValueError, match="with mask_second_moment None"):
        policy_loss(recipe, inputs, **(given | {"second_moment_bound": 1.0}))
    with pytest.raises(ValueError, match="second_moment_bound None with mask_second_moment"):
        policy_loss(RECIPES["m2po"], inputs, **given)
    with pytest.raises(ValueError, match="entropy_BT is missing"):
        policy_loss(OTHERS["entropy"], inputs._replace(entropy_BT=None), **given)
    with pytest.raises(ValueError, match="to a fixed reference: its logprobs are missing"):
        policy_loss(OTHERS["k2 to a fixed reference"], inputs._replace(reference_logprobs_BT=None), **given)
    with pytest.raises(ValueError, match="a microbatch without sequences"):
        policy_loss(recipe, LossInputs(*(x if x is None else x[:0] for x in inputs)), **given)
