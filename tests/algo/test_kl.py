"""KL estimators against slow loops, and their gradients against exact sums over a small vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stream_grpo.algo.kl import (
    KLEstimate,
    check_kl_place,
    ema_update,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_off_policy,
    kl_loss,
    kl_to_advantage,
    kl_to_reward,
    steer_weight,
)

NAN = float("nan")
TOKENS = st.lists(
    st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=12
)


def bounded(x: float) -> float:
    return max(-20.0, min(20.0, x))


@given(TOKENS)
def test_every_estimator_equals_its_slow_loop(tokens: list[tuple[float, float, float, bool]]) -> None:
    policy, proximal, reference = (
        torch.tensor([[t[i] if t[3] else NAN for t in tokens]], dtype=torch.float64) for i in range(3)
    )
    mask = torch.tensor([[t[3] for t in tokens]])
    kept = [t for t in tokens if t[3]]
    x = [bounded(p - ref) for p, _, ref, _ in kept]
    r = [math.exp(bounded(p - prox)) for p, prox, _, _ in kept]
    k3 = [math.expm1(-v) + v for v in x]
    far = sum(abs(p - ref) > 20 for p, _, ref, _ in kept)
    moved = sum(abs(p - prox) > 20 for p, prox, _, _ in kept)
    cases: list[tuple[KLEstimate, list[float], int]] = [
        (kl_k1(policy, reference, mask), x, far),
        (kl_k2(policy, reference, mask), [v * v / 2 for v in x], far),
        (kl_k3(policy, reference, mask), k3, far),
        (
            kl_k3_off_policy(policy, proximal, reference, mask),
            [a * b for a, b in zip(r, k3, strict=True)],
            far + moved,
        ),
        (kl_to_advantage(policy, reference, mask, weight=0.3), [-0.3 * v for v in x], far),
    ]
    for got, expected, num_clamped in cases:
        assert got.kl_BT[mask].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert got.kl_BT[~mask].tolist() == [0.0] * (len(tokens) - len(kept))
        assert int(got.num_clamped) == num_clamped
    term, num_clamped_too = kl_to_reward(policy, reference, mask, weight=0.3)
    assert term.tolist() == pytest.approx([-0.3 * math.fsum(x)], rel=1e-9, abs=1e-9)
    assert int(num_clamped_too) == far


# A policy over five tokens, softmax of logits; the vocabulary is laid out as one row of five tokens, so that an
# expectation is a sum with the probabilities as weights, exactly.
LOGITS = torch.tensor([[0.3, -1.2, 0.8, 0.0, -0.4]], dtype=torch.float64)
REFERENCE = torch.tensor([[-0.5, 0.1, 0.4, 1.0, -2.0]], dtype=torch.float64).log_softmax(1)
BEHAVIOR = torch.tensor([[0.9, -0.2, 0.1, -0.6, 0.5]], dtype=torch.float64).log_softmax(1)
ALL = torch.ones(1, 5, dtype=torch.bool)


def gradient(objective: Callable[[Tensor], Tensor]) -> list[float]:
    """d objective(logprobs) / d logits."""
    logits = LOGITS.clone().requires_grad_()
    (result,) = torch.autograd.grad(objective(logits.log_softmax(1)), logits)
    return [float(g) for g in result[0]]


def expected_gradient(estimate: Callable[[Tensor], KLEstimate], sampler: Tensor | None = None) -> list[float]:
    """E[d estimate / d logits] over tokens sampled from `sampler`, by default from the policy itself."""
    weights = (LOGITS.log_softmax(1) if sampler is None else sampler).exp()
    return gradient(lambda logprobs: (weights * estimate(logprobs).kl_BT).sum())


def reverse_kl(logprobs: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def forward_kl(logprobs: Tensor) -> Tensor:
    return (REFERENCE.exp() * (REFERENCE - logprobs)).sum()


def test_k1_as_a_loss_has_no_expected_gradient() -> None:
    # sum p d log p = d sum p = 0.
    got = expected_gradient(lambda p: kl_k1(p, REFERENCE, ALL))
    assert got == pytest.approx([0.0] * 5, abs=1e-12)


def test_k2_has_the_gradient_of_the_kl_to_the_reference() -> None:
    # sum p x d log p = d sum p log(p / ref), as sum p d x = 0.
    got = expected_gradient(lambda p: kl_k2(p, REFERENCE, ALL))
    assert got == pytest.approx(gradient(reverse_kl), rel=1e-12)


def test_k3_has_the_gradient_of_the_other_direction() -> None:
    # sum p (1 - ref / p) d log p = -sum ref d log p = d KL(ref || p), which is not d KL(p || ref): that is its bias.
    got = expected_gradient(lambda p: kl_k3(p, REFERENCE, ALL))
    assert got == pytest.approx(gradient(forward_kl), rel=1e-12)
    assert max(abs(a - b) for a, b in zip(got, gradient(reverse_kl), strict=True)) > 0.05


@pytest.mark.parametrize("sampler", [None, BEHAVIOR], ids=["on-policy", "off-policy"])
def test_the_ratio_makes_the_gradient_of_k3_that_of_the_kl(sampler: Tensor | None) -> None:
    # sum mu (p / mu) k3 = sum (ref - p + p log(p / ref)) = KL(p || ref), for every sampler mu.
    proximal = LOGITS.log_softmax(1) if sampler is None else sampler
    got = expected_gradient(lambda p: kl_k3_off_policy(p, proximal, REFERENCE, ALL), sampler)
    assert got == pytest.approx(gradient(reverse_kl), rel=1e-12)


def test_the_values_of_k1_and_k3_are_those_of_the_kl() -> None:
    policy = LOGITS.log_softmax(1)
    for estimate in (kl_k1, kl_k3):
        value = float((policy.exp() * estimate(policy, REFERENCE, ALL).kl_BT).sum())
        assert value == pytest.approx(float(reverse_kl(policy)), rel=1e-12)


def test_k1_in_the_advantage_has_the_gradient_of_the_kl() -> None:
    # The policy gradient with advantage -0.5 x: sum p (-0.5 x) d log p = -0.5 d KL(p || ref).
    policy = LOGITS.log_softmax(1)
    term = kl_to_advantage(policy, REFERENCE, ALL, weight=0.5).kl_BT
    got = gradient(lambda logprobs: (policy.exp() * term * logprobs).sum())
    assert got == pytest.approx([-0.5 * g for g in gradient(reverse_kl)], rel=1e-12)


def test_nan_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    mask = torch.tensor([[True, False]])
    for kl in ("k2", "k3", "k3_off_policy"):
        policy = torch.tensor([[-1.0, NAN]], requires_grad=True)
        other = torch.tensor([[-2.0, NAN]])
        got = kl_loss(kl, policy, other, other, mask)  # type: ignore[arg-type]
        got.kl_BT.sum().backward()
        assert policy.grad is not None
        assert bool(policy.grad.isfinite().all())
        assert policy.grad[0, 1] == 0


def test_only_the_policy_gets_a_gradient_and_an_advantage_carries_none() -> None:
    policy, proximal, reference = (torch.full((1, 2), -1.0 - i, requires_grad=True) for i in range(3))
    mask = torch.ones(1, 2, dtype=torch.bool)
    kl_k3_off_policy(policy, proximal, reference, mask).kl_BT.sum().backward()
    assert policy.grad is not None
    assert proximal.grad is None
    assert reference.grad is None
    assert not kl_to_advantage(policy, reference, mask, weight=1.0).kl_BT.requires_grad
    assert not kl_to_reward(policy, reference, mask, weight=1.0)[0].requires_grad


def test_an_estimator_stands_only_where_it_does_what_it_says() -> None:
    with pytest.raises(ValueError, match="its expected gradient on-policy is 0"):
        check_kl_place("k1", "loss")
    for place in ("reward", "advantage"):
        with pytest.raises(ValueError, match=f"kl 'k3' in the {place}"):
            check_kl_place("k3", place)  # type: ignore[arg-type]
        check_kl_place("k1", place)  # type: ignore[arg-type]
    for kl in ("none", "k2", "k3", "k3_off_policy"):
        check_kl_place(kl, "loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kl 'k4': expected none, k1"):
        check_kl_place("k4", "loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="place 'nowhere': expected reward"):
        check_kl_place("k2", "nowhere")  # type: ignore[arg-type]
    zeros, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="kl 'none' has no loss"):
        kl_loss("none", zeros, zeros, zeros, mask)


@given(st.floats(1e-3, 10), st.floats(-1, 50), st.floats(0.1, 10), st.integers(0, 100))
def test_the_steered_weight_equals_its_slow_loop(weight: float, observed: float, target: float, n: int) -> None:
    error = (observed - target) / target
    error = -0.2 if error < -0.2 else min(error, 0.2)
    got = steer_weight(weight, observed, target, horizon=100.0, num_sequences=n)
    assert got == pytest.approx(weight * (1 + error * n / 100), rel=1e-9)


def test_the_weight_rises_above_its_target_and_falls_below() -> None:
    # 10 % too much over a tenth of the horizon: 1.01. Twice too much is held to 20 %: 1.02. None at all: 0.98.
    weights = [steer_weight(1.0, kl, 6.0, horizon=1000.0, num_sequences=100) for kl in (6.6, 12.0, 0.0, 6.0)]
    assert weights == pytest.approx([1.01, 1.02, 0.98, 1.0])
    with pytest.raises(ValueError, match=r"target 0\.0, horizon 1000\.0: expected above 0"):
        steer_weight(1.0, 1.0, 0.0, horizon=1000.0, num_sequences=1)
    with pytest.raises(ValueError, match="num_sequences 2000: expected 0 or more and at most horizon"):
        steer_weight(1.0, 1.0, 1.0, horizon=1000.0, num_sequences=2000)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=6), st.floats(0, 1))
def test_the_moving_average_equals_its_slow_loop(pairs: list[tuple[float, float]], decay: float) -> None:
    reference = [torch.tensor([held], dtype=torch.float64) for held, _ in pairs]
    policy = [torch.tensor([current], dtype=torch.float64, requires_grad=True) for _, current in pairs]
    ema_update(reference, policy, decay=decay)
    expected = [decay * held + (1 - decay) * current for held, current in pairs]
    assert [float(x) for x in reference] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not any(x.requires_grad for x in reference)


def test_a_float32_reference_follows_a_bfloat16_policy() -> None:
    # 0.999 x 1 + 0.001 x 2 = 1.001, which bfloat16 could not hold.
    reference = [torch.ones(1)]
    ema_update(reference, [torch.full((1,), 2.0, dtype=torch.bfloat16)], decay=0.999)
    assert reference[0].item() == pytest.approx(1.001, abs=1e-6)
    with pytest.raises(ValueError, match=r"decay 1\.5: expected from 0 to 1"):
        ema_update(reference, reference, decay=1.5)
    with pytest.raises(ValueError, match="shorter"):
        ema_update(reference, [], decay=0.5)
