"""Behavior weights against a slow loop, and the guard against counting the same ratio twice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.algo.behavior import Correction, behavior_weight

KINDS: tuple[Correction, ...] = ("none", "truncated", "masked", "both")
LOW, HIGH = 0.5, 2.0


def slow(kind: Correction, rho: float) -> float:
    if kind == "none":
        return 1.0
    if kind == "truncated":
        return min(rho, HIGH)
    if kind == "masked":
        return rho if LOW <= rho <= HIGH else 0.0
    return min(rho, HIGH) if rho >= LOW else 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=8), st.sampled_from(KINDS))
def test_every_weight_equals_its_slow_loop(row: list[tuple[float, bool]], kind: Correction) -> None:
    mask = torch.tensor([[m for _, m in row]])
    log_rho = torch.tensor([[x for x, _ in row]], dtype=torch.float64).masked_fill(~mask, 0.0)
    got = behavior_weight(kind, log_rho.requires_grad_(), mask, low=LOW, high=HIGH)
    expected = [slow(kind, math.exp(x)) if m else 0.0 for x, m in row]
    assert got[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not got.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_matched_policies_have_weight_exactly_1(kind: Correction) -> None:
    ones = behavior_weight(kind, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), low=1.0, high=1.0)
    assert ones.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_at_the_bound_of_log_ratio_stay_finite(kind: Correction, dtype: torch.dtype) -> None:
    # exp(20) = 4.9e8 is above and exp(-20) = 2e-9 below every band.
    log_rho = torch.tensor([[20.0, -20.0]], dtype=dtype)
    got = behavior_weight(kind, log_rho, torch.ones(1, 2, dtype=torch.bool), low=LOW, high=HIGH)
    above = {"none": 1.0, "truncated": HIGH, "masked": 0.0, "both": HIGH}[kind]
    below = {"none": 1.0, "truncated": math.exp(-20), "masked": 0.0, "both": 0.0}[kind]
    assert got.dtype == dtype
    assert got[0].tolist() == pytest.approx([above, below], rel=1e-6)


def test_bad_settings_are_refused() -> None:
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"correction_high 0.9: expected 1 or more"):
        behavior_weight("truncated", x, mask, high=0.9)
    with pytest.raises(ValueError, match=r"correction_low None: expected within \[0, 1\]"):
        behavior_weight("masked", x, mask, high=2.0)
    with pytest.raises(ValueError, match="correction 'tis': expected none, truncated"):
        behavior_weight("tis", x, mask)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shapes differ"):
        behavior_weight("none", torch.zeros(1, 2), mask)
