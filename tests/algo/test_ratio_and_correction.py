"""Log ratios and corrections against slow loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.correction import correction_weight, masked, truncated
from stream_grpo.algo.ratio import token_log_ratio

NAN = float("nan")
ROWS = st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0), st.booleans()), min_size=1, max_size=12)


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@given(ROWS)
def test_the_log_ratio_equals_its_slow_loop(tokens: list[tuple[float, float, bool]]) -> None:
    numerator, denominator, mask = (list(column) for column in zip(*tokens, strict=True))
    got = token_log_ratio(row(numerator), row(denominator), torch.tensor([mask]))
    expected = [max(-20.0, min(20.0, n - d)) if m else 0.0 for n, d, m in tokens]
    assert got.log_ratio_BT[0].tolist() == expected
    assert int(got.num_clamped) == sum(m and abs(n - d) > 20 for n, d, m in tokens)


def test_nan_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    policy = row([-1.0, NAN]).requires_grad_()
    got = token_log_ratio(policy, row([-2.0, NAN]), torch.tensor([[True, False]]))
    got.log_ratio_BT.exp().sum().backward()
    assert got.log_ratio_BT.tolist() == [[1.0, 0.0]]
    # d exp(p - q) / dp = e for the trained token.
    assert policy.grad is not None
    assert policy.grad[0].tolist() == pytest.approx([math.e, 0.0])


def test_a_token_beyond_the_bound_has_no_gradient() -> None:
    policy = row([-1.0, -1.0]).requires_grad_()
    got = token_log_ratio(policy, row([-30.0, -2.0]), torch.ones(1, 2, dtype=torch.bool))
    got.log_ratio_BT.sum().backward()
    assert got.log_ratio_BT.tolist() == [[20.0, 1.0]]
    assert policy.grad is not None
    assert policy.grad.tolist() == [[0.0, 1.0]]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        token_log_ratio(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3, dtype=torch.bool))


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=12), st.floats(0.0, 0.9), st.floats(1.0, 9.0))
def test_every_correction_equals_its_slow_loop(log_rho: list[float], low: float, high: float) -> None:
    rho = [math.exp(x) for x in log_rho]
    tis = [min(r, high) for r in rho]
    icepop = [r if low <= r <= high else 0.0 for r in rho]
    assert correction_weight("none", row(log_rho), low=low, high=high)[0].tolist() == [1.0] * len(rho)
    assert correction_weight("tis", row(log_rho), low=low, high=high)[0].tolist() == pytest.approx(tis, rel=1e-12)
    assert correction_weight("icepop", row(log_rho), low=low, high=high)[0].tolist() == pytest.approx(icepop, rel=1e-12)


def test_hand_computed_corrections() -> None:
    # rho = 0.25, 1, 4.
    log_rho = row([math.log(0.25), 0.0, math.log(4.0)])
    assert truncated(log_rho, high=2.0)[0].tolist() == pytest.approx([0.25, 1, 2])
    assert masked(log_rho, low=0.5, high=2.0)[0].tolist() == pytest.approx([0, 1, 0])


def test_a_weight_carries_no_gradient() -> None:
    assert not truncated(row([0.1]).requires_grad_(), high=2.0).requires_grad
    assert not masked(row([0.1]).requires_grad_(), low=0.5, high=2.0).requires_grad


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected below high"):
        masked(row([0.0]), low=2.0, high=2.0)
    with pytest.raises(ValueError, match="expected above 0"):
        truncated(row([0.0]), high=0.0)
    with pytest.raises(ValueError, match="expected none, tis or icepop"):
        correction_weight("mis", row([0.0]), low=0.0, high=1.0)  # type: ignore[arg-type]
