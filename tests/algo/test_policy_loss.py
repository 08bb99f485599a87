"""The composed policy loss against one slow loop over all its choices."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from stream_grpo.algo.policy_loss import policy_loss

NAN = float("nan")
PLAIN: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "correction": "none",
    "correction_low": 0.5,
    "correction_high": 2.0,
    "aggregation": "token_mean",
    "denominator": 1.0,
}
METHODS = list(itertools.product(["none", "tis", "icepop"], [None, 3.0], ["token_mean", "sequence_mean"]))


def slow_policy_loss(
    policy: list[list[float]],
    proximal: list[list[float]],
    behavior: list[list[float]],
    advantage: list[float],
    mask: list[list[bool]],
    choices: dict[str, Any],
) -> float:
    total = 0.0
    for b, row in enumerate(mask):
        for t in [t for t, trained in enumerate(row) if trained]:
            base = behavior if choices["correction"] == "none" else proximal
            ratio = math.exp(policy[b][t] - base[b][t])
            rho = math.exp(base[b][t] - behavior[b][t])
            clipped = max(1 - choices["clip_low"], min(1 + choices["clip_high"], ratio))
            surrogate = min(ratio * advantage[b], clipped * advantage[b])
            if choices["dual_clip"] is not None and advantage[b] < 0:
                surrogate = max(surrogate, choices["dual_clip"] * advantage[b])
            if choices["correction"] == "tis":
                surrogate *= min(rho, choices["correction_high"])
            if choices["correction"] == "icepop":
                surrogate *= rho if choices["correction_low"] <= rho <= choices["correction_high"] else 0.0
            if choices["aggregation"] == "sequence_mean":
                surrogate /= sum(row)
            total -= surrogate
    return total / float(choices["denominator"])


@pytest.mark.parametrize(("correction", "dual", "aggregation"), METHODS)
def test_every_combination_equals_its_slow_loop(correction: str, dual: float | None, aggregation: str) -> None:
    rng = random.Random(f"{correction}{dual}{aggregation}")
    shape = (5, 7)
    policy, proximal, behavior = (
        [[-rng.expovariate(0.7) for _ in range(shape[1])] for _ in range(shape[0])] for _ in range(3)
    )
    mask = [[rng.random() < 0.6 for _ in range(shape[1])] for _ in range(shape[0])]
    advantage = [rng.uniform(-2, 2) for _ in range(shape[0])]
    choices = PLAIN | {"correction": correction, "dual_clip": dual, "aggregation": aggregation, "denominator": 4.0}
    loss, _ = policy_loss(
        torch.tensor(policy, dtype=torch.float64),
        None if correction == "none" else torch.tensor(proximal, dtype=torch.float64),
        torch.tensor(behavior, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(mask),
        **choices,
    )
    expected = slow_policy_loss(policy, proximal, behavior, advantage, mask, choices)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_nan_under_the_mask_leaves_loss_and_gradient_finite() -> None:
    # One trained token, ratio exp(0 - 0) = 1, advantage 1: loss -1, gradient -1.
    policy = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss, stats = policy_loss(
        policy, None, torch.tensor([[0.0, NAN]]), torch.ones(1), torch.tensor([[True, False]]), **PLAIN
    )
    loss.backward()
    assert loss.item() == -1.0
    assert policy.grad is not None
    assert policy.grad.tolist() == [[-1.0, 0.0]]
    assert all(math.isfinite(value) for value in stats.metrics().values())


def test_statistics_are_those_of_the_trained_tokens() -> None:
    # R = 2 with A = 1 (clipped high), R = 0.5 with A = -1 (clipped low), one token under the mask.
    # k1 = mean(-ln 2, ln 2) = 0. k3 = mean(2 - 1 - ln 2, 0.5 - 1 + ln 2) = 0.25. ess = 2.5^2 / (2 x 4.25) = 0.7353.
    log2 = math.log(2)
    policy = torch.tensor([[-1.0, -5.0], [-1.0 - log2, NAN]], dtype=torch.float64)
    behavior = torch.tensor([[-1.0 - log2, NAN], [-1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, False]])
    _, stats = policy_loss(policy, None, behavior, torch.tensor([1.0, -1.0]), mask, **PLAIN)
    assert stats.metrics() == pytest.approx(
        {
            "clip_share_low": 0.5,
            "clip_share_high": 0.5,
            "clip_share_dual": 0.0,
            "ratio_mean": 1.25,
            "ratio_max": 2.0,
            "k1": 0.0,
            "k3": 0.25,
            "ess": 6.25 / 8.5,
            "num_clamped": 0.0,
        },
        abs=1e-12,
    )


def test_statistics_of_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    policy, behavior = (-torch.rand(6, 5, generator=generator, dtype=torch.float64) * 4 for _ in range(2))
    advantage, mask = torch.tensor([1.0, -1, 1, -1, 1, -1]), torch.rand(6, 5, generator=generator) < 0.7
    _, whole = policy_loss(policy, None, behavior, advantage, mask, **PLAIN)
    (_, first), (_, second) = (
        policy_loss(policy[s], None, behavior[s], advantage[s], mask[s], **PLAIN) for s in (slice(0, 2), slice(2, 6))
    )
    assert (first + second).metrics() == pytest.approx(whole.metrics(), rel=1e-12)


def test_only_the_policy_gets_a_gradient() -> None:
    policy, proximal, behavior = (torch.full((1, 2), -1.0, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, stats = policy_loss(
        policy, proximal, behavior, torch.ones(1), mask, **(PLAIN | {"correction": "tis", "denominator": 2.0})
    )
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [[-0.5, -0.5]]
    assert proximal.grad is None
    assert behavior.grad is None
    assert not stats.k3_sum.requires_grad


def test_a_correction_that_cannot_act_is_refused() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="proximal logprobs are needed"):
        policy_loss(zeros, None, zeros, torch.ones(1), mask, **(PLAIN | {"correction": "tis"}))
    with pytest.raises(ValueError, match="all corrections but 'none'"):
        policy_loss(zeros, zeros, zeros, torch.ones(1), mask, **PLAIN)
    with pytest.raises(ValueError, match="2 advantages for 1 sequences"):
        policy_loss(zeros, None, zeros, torch.ones(2), mask, **PLAIN)
