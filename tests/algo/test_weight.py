"""Every gradient weight against a slow loop, and w A against autograd of the paper's own objective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stream_grpo.algo.log_ratio import RatioLevel, log_ratio
from stream_grpo.algo.weight import Weighted, WeightKind, gradient_weight

LOW, HIGH, DUAL, CAP = 0.2, 0.28, 3.0, 5.0
SETTINGS: dict[WeightKind, dict[str, Any]] = {
    "ppo": {"clip_low": LOW, "clip_high": HIGH, "dual_clip": DUAL},
    "cispo": {"cap": CAP},
    "soft": {"soft_positive": 1.0, "soft_negative": 1.05},
    "topr": {},
    "gamma": {"gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0)},
    "geometric": {"clip_low": 0.4, "clip_high": 0.3},
    "plain": {},
    "reinforce": {},
}
KINDS = tuple(SETTINGS)
SCORE_FUNCTION: tuple[WeightKind, ...] = ("cispo", "topr", "gamma", "reinforce")
"""Their objective is sg(w) A log pi."""
SEQUENCE = st.lists(st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01)), min_size=1, max_size=6)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow(kind: WeightKind, logs: list[float], t: int, a: float) -> tuple[float, float]:
    """Weight of token t of one sequence with advantage a, and the objective divided by what is detached."""
    r = math.exp(logs[t])
    if kind == "ppo":
        objective = min(r * a, max(1 - LOW, min(1 + HIGH, r)) * a)
        objective = max(objective, DUAL * a) if a < 0 else objective
        stopped = (a > 0 and r > 1 + HIGH) or (a < 0 and (r < 1 - LOW or r > DUAL))
        return (0.0 if stopped else r), objective
    if kind == "soft":
        tau = 1.0 if a > 0 else 1.05
        s = sigmoid(tau * (r - 1))
        return 4 * s * (1 - s) * r, 4 / tau * s * a
    if kind == "geometric":
        clipped = [min(x, 0.3) if a > 0 else max(x, -0.4) if a < 0 else x for x in logs]
        mean = math.prod(math.exp(x) for x in clipped) ** (1 / len(clipped))
        return (mean if clipped[t] == logs[t] else 0.0), mean * a
    weight = slow_detached(kind, r, a)
    return weight, weight * a


def slow_detached(kind: WeightKind, r: float, a: float) -> float:
    if kind == "cispo":
        return min(r, CAP)
    if kind == "topr":
        return 1.0 if a >= 0 else min(r, 1.0)
    if kind == "gamma":
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return math.pow(r, k) * math.exp(rate * (1 - r))
    return r if kind == "plain" else 1.0


def published_objective(kind: WeightKind, policy_T: Tensor, old_T: Tensor, a: float) -> Tensor:
    """The paper's objective of one sequence, to be maximised, as a differentiable sum over its tokens."""
    token_T = (policy_T - old_T).exp()
    whole = (policy_T - old_T).sum().exp()
    if kind == "ppo":
        objective_T = torch.minimum(token_T * a, token_T.clamp(1 - LOW, 1 + HIGH) * a)
        return (torch.maximum(objective_T, torch.tensor(DUAL * a)) if a < 0 else objective_T).sum()
    if kind == "cispo":
        return (token_T.clamp(max=CAP).detach() * a * policy_T).sum()
    if kind == "soft":
        tau = 1.0 if a > 0 else 1.05
        return (torch.sigmoid(tau * (token_T - 1)) * 4 / tau * a).sum()
    if kind == "topr":
        return policy_T.sum() * a if a >= 0 else whole.clamp(0, 1).detach() * a * policy_T.sum()
    if kind == "gamma":
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return (whole**k * (rate * (1 - whole)).exp()).detach() * a * policy_T.sum()
    if kind == "geometric":
        # GMPO's product of min(r A, clip(r) A), whose sign is taken out, to the power 1 / T; times T for the sum over
        # tokens that the aggregation `sequences` divides by.
        bounded_T = token_T.clamp(math.exp(-0.4), math.exp(0.3))
        chosen_T = torch.minimum(token_T, bounded_T) if a > 0 else torch.maximum(token_T, bounded_T)
        return len(policy_T) * chosen_T.prod() ** (1 / len(policy_T)) * a
    return (token_T * a).sum() if kind == "plain" else (policy_T * a).sum()


def weighted(kind: WeightKind, policy: Tensor, old: Tensor, a: float) -> Weighted:
    """The weight of one sequence, at the level of its paper."""
    mask = torch.ones_like(policy, dtype=torch.bool)
    level: RatioLevel = "sequence_sum" if kind in ("topr", "gamma") else "token"
    update = log_ratio(level, policy, old, mask).log_ratio_BT
    given_logprobs = policy if kind in SCORE_FUNCTION else None
    advantage = torch.full_like(policy, a)
    return gradient_weight(kind, update, advantage, mask, policy_logprobs_BT=given_logprobs, **SETTINGS[kind])


def pair(row: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    policy = torch.tensor([[p for p, _ in row]], dtype=torch.float64)
    return policy, torch.tensor([[q for _, q in row]], dtype=torch.float64)


@settings(deadline=None)
@given(SEQUENCE, st.floats(-2, 2), st.sampled_from(KINDS))
def test_every_weight_equals_its_slow_loop(row: list[tuple[float, float]], a: float, kind: WeightKind) -> None:
    logs = [p - q for p, q in row]
    logs = [sum(logs)] * len(logs) if kind in ("topr", "gamma") else logs
    logs = [max(-20.0, min(20.0, x)) for x in logs]
    policy, old = pair(row)
    got = weighted(kind, policy, old, a)
    slow_weights, slow_objectives = zip(*(slow(kind, logs, t, a) for t in range(len(row))), strict=True)
    if kind in SCORE_FUNCTION:
        slow_objectives = tuple(x * p for x, (p, _) in zip(slow_objectives, row, strict=True))
    assert got.weight_BT[0].tolist() == pytest.approx(slow_weights, rel=1e-9, abs=1e-9)
    assert got.surrogate_BT[0].tolist() == pytest.approx(slow_objectives, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(SEQUENCE, st.floats(-2, 2).filter(lambda a: a != 0), st.sampled_from(KINDS))
def test_weight_times_advantage_is_the_gradient_of_the_published_objective(
    row: list[tuple[float, float]], a: float, kind: WeightKind
) -> None:
    policy, old = pair(row)
    policy.requires_grad_()
    (gradient,) = torch.autograd.grad(published_objective(kind, policy[0], old[0], a), policy)
    got = weighted(kind, policy, old, a).weight_BT * a
    assert got[0].tolist() == pytest.approx(gradient[0].tolist(), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(SEQUENCE, st.floats(-2, 2).filter(lambda a: a != 0))
def test_ppo_on_the_sequence_mean_is_gspo(row: list[tuple[float, float]], a: float) -> None:
    policy, old = pair(row)
    policy.requires_grad_()
    # GSPO, eq. 5: min(s A, clip(s) A) with s = exp(mean_t log r_t). T times it, as its mean over tokens is taken later.
    s = (policy - old).mean().exp()
    objective = torch.minimum(s * a, s.clamp(1 - LOW, 1 + HIGH) * a)
    (gradient,) = torch.autograd.grad(len(row) * objective, policy)
    mask = torch.ones_like(policy, dtype=torch.bool)
    update = log_ratio("sequence_mean", policy, old, mask).log_ratio_BT
    got = gradient_weight("ppo", update, torch.full_like(policy, a), mask, clip_low=LOW, clip_high=HIGH)
    assert (got.weight_BT * a)[0].tolist() == pytest.approx(gradient[0].tolist(), rel=1e-9, abs=1e-9)
    assert got.surrogate_BT[0].tolist() == pytest.approx([objective.item()] * len(row), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_1_every_gradient_is_that_of_reinforce(kind: WeightKind) -> None:
    policy = torch.tensor([[-1.0, -0.2, -3.0]], dtype=torch.float64)
    for a in (1.5, -0.5, 0.0):
        got = weighted(kind, policy, policy, a)
        assert got.weight_BT[0].tolist() == [1.0, 1.0, 1.0]
        assert not bool(got.clipped_low_BT.any() | got.clipped_high_BT.any() | got.clipped_dual_BT.any())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(kind: WeightKind, dtype: torch.dtype) -> None:
    for far in (1e4, -1e4):
        for a in (1.0, -1.0):
            got = weighted(kind, torch.tensor([[far, 0.0]], dtype=dtype), torch.zeros(1, 2, dtype=dtype), a)
            assert bool(got.weight_BT.isfinite().all())
            assert bool(got.surrogate_BT.isfinite().all())
            assert got.weight_BT.dtype == got.surrogate_BT.dtype == dtype


@pytest.mark.parametrize("kind", ["ppo", "plain"])
def test_a_log_ratio_at_its_bound_has_no_gradient(kind: WeightKind) -> None:
    # As by autograd of exp(clamp(log r, -20, 20)) A: 0 beyond the bound. The value stays, exp(20) A.
    policy = torch.tensor([[25.0, 0.5]], dtype=torch.float64)
    got = weighted(kind, policy, torch.zeros_like(policy), -1.0)
    assert float(got.weight_BT[0, 0]) == 0.0
    assert float(got.weight_BT[0, 1]) == pytest.approx(math.exp(0.5))
    value = -DUAL if kind == "ppo" else -math.exp(20)
    assert float(got.surrogate_BT[0, 0]) == pytest.approx(value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_under_the_mask_changes_nothing(kind: WeightKind) -> None:
    # Log ratios and advantages are 0 there, logprobs NaN: the two trained tokens get what they get alone, the others 0.
    mask = torch.tensor([[True, False, True, False]])
    nan = torch.nan
    logs = torch.tensor([[0.2, 0.0, -0.6, 0.0]], dtype=torch.float64, requires_grad=True)
    logprobs = torch.tensor([[-0.5, nan, -1.5, nan]], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    got = gradient_weight(kind, logs, advantage, mask, policy_logprobs_BT=logprobs, **SETTINGS[kind])
    kept = torch.tensor([[True, True]])
    alone = gradient_weight(
        kind,
        logs[mask][None],
        advantage[mask][None],
        kept,
        policy_logprobs_BT=logprobs[mask][None],
        **SETTINGS[kind],
    )
    for tensor, expected in zip(got, alone, strict=True):
        assert not tensor.requires_grad
        assert tensor[mask].tolist() == expected[0].tolist()
    assert all(tensor[~mask].tolist() == [0, 0] for tensor in (got.weight_BT * advantage, *got[1:]))


def test_where_the_bounds_act() -> None:
    # Ratios 1, 1.5, 0.5 with A = 1, then the same and 4 with A = -1; bounds 0.8 and 1.28, dual clip 3.
    ratio = torch.tensor([[1, 1.5, 0.5, 1, 1.5, 0.5, 4]], dtype=torch.float64)
    advantage = torch.tensor([[1, 1, 1, -1, -1, -1, -1]], dtype=torch.float64)
    mask = torch.ones_like(ratio, dtype=torch.bool)
    got = gradient_weight("ppo", ratio.log(), advantage, mask, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL)
    assert got.weight_BT[0].tolist() == pytest.approx([1, 0, 0.5, 1, 1.5, 0, 0])
    assert got.surrogate_BT[0].tolist() == pytest.approx([1, 1.28, 0.5, -1, -1.5, -0.8, -3])
    assert got.clipped_high_BT[0].tolist() == [False, True, False, False, False, False, False]
    assert got.clipped_low_BT[0].tolist() == [False, False, False, False, False, True, False]
    assert got.clipped_dual_BT[0].tolist() == [False, False, False, False, False, False, True]


def test_a_capped_token_keeps_its_gradient() -> None:
    ratio = torch.tensor([[2.0, 7.0, 7.0]], dtype=torch.float64)
    advantage = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64)
    got = gradient_weight("cispo", ratio.log(), advantage, torch.ones(1, 3, dtype=torch.bool), cap=CAP)
    assert got.weight_BT[0].tolist() == pytest.approx([2, 5, 5])
    assert got.clipped_high_BT[0].tolist() == [False, True, True]
    # Without logprobs the value is w A.
    assert got.surrogate_BT[0].tolist() == pytest.approx([2, 5, -5])


def test_nan_under_the_mask_does_not_reach_the_loss() -> None:
    # Report C10: the ratio is 1, so the loss over the one trained token is -A = -1 and its gradient -A.
    logp = torch.tensor([[0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([[0.0, torch.nan]], dtype=torch.float64)
    advantage = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False]])
    update = log_ratio("token", logp, sampler, mask).log_ratio_BT
    got = gradient_weight("ppo", update, advantage, mask, clip_low=LOW, clip_high=HIGH)
    assert -float(got.surrogate_BT.sum() / mask.sum()) == -1.0
    linear = -(got.weight_BT * advantage * torch.where(mask, logp, 0.0)).sum() / mask.sum()
    linear.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("ppo", {"clip_low": -0.1, "clip_high": 0.2}, "weight 'ppo' needs both, 0 or more"),
        ("geometric", {"clip_low": 0.4}, "weight 'geometric' needs both"),
        ("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, "dual_clip 1.0: expected above 1"),
        ("cispo", {}, "cap None: weight 'cispo' needs the largest ratio"),
        ("soft", {"soft_positive": 1.0, "soft_negative": 0.0}, "temperatures, expected above 0"),
        ("gamma", {"gamma_positive": (2.0, -1.0), "gamma_negative": (3.0, 2.0)}, "expected above 0"),
        ("bnpo", {}, "weight 'bnpo': expected ppo, cispo"),
    ],
)
def test_bad_settings_are_refused(kind: WeightKind, settings: dict[str, Any], message: str) -> None:
    zeros, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        gradient_weight(kind, zeros, zeros, mask, **settings)
