"""Log ratios at every level against slow loops, their bound, and the proximal policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stream_grpo.algo.log_ratio import RatioLevel, log_ratio, proximal_logprobs

BOUND = 20.0
LEVELS: tuple[RatioLevel, ...] = ("token", "sequence_mean", "sequence_sum", "prefix_min")
TOKEN = st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans())
SEQUENCE = st.lists(TOKEN, min_size=1, max_size=8)


def clamp(x: float) -> float:
    return max(-BOUND, min(BOUND, x))


def slow_token(logs: list[float], t: int) -> float:
    return clamp(logs[t])


def slow_sequence_mean(logs: list[float], t: int) -> float:
    # GSPO, eq. 7: s = (pi(y|x) / pi_old(y|x))^(1/|y|) = exp(1/|y| sum_t log r_t).
    return clamp(sum(logs) / len(logs))


def slow_sequence_sum(logs: list[float], t: int) -> float:
    # log of prod_t r_t.
    return clamp(sum(logs))


def slow_prefix_min(logs: list[float], t: int) -> float:
    # MinPRO: the token's ratio times the smallest ratio strictly before it, 1 for the first token.
    smallest = min((math.exp(clamp(x)) for x in logs[:t]), default=1.0)
    return clamp(math.log(smallest * math.exp(clamp(logs[t]))))


SLOW: dict[RatioLevel, Callable[[list[float], int], float]] = {
    "token": slow_token,
    "sequence_mean": slow_sequence_mean,
    "sequence_sum": slow_sequence_sum,
    "prefix_min": slow_prefix_min,
}


def slow_row(level: RatioLevel, row: list[tuple[float, float, bool]]) -> list[float]:
    logs = [p - q for p, q, trained in row if trained]
    result, t = [], 0
    for _, _, trained in row:
        result.append(SLOW[level](logs, t) if trained else 0.0)
        t += trained
    return result


def tensors(row: list[tuple[float, float, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator, denominator and mask; NaN under the mask."""
    mask = torch.tensor([[m for _, _, m in row]])
    p = torch.tensor([[p for p, _, _ in row]], dtype=torch.float64).masked_fill(~mask, torch.nan)
    q = torch.tensor([[q for _, q, _ in row]], dtype=torch.float64).masked_fill(~mask, torch.nan)
    return p, q, mask


@settings(deadline=None)
@given(SEQUENCE, st.sampled_from(LEVELS))
def test_every_level_equals_its_slow_loop(row: list[tuple[float, float, bool]], level: RatioLevel) -> None:
    got = log_ratio(level, *tensors(row))
    assert got.log_ratio_BT[0].tolist() == pytest.approx(slow_row(level, row), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_sequences_do_not_see_each_other(level: RatioLevel) -> None:
    # Two sequences of three tokens: together they give what each gives alone.
    p = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -4.0]], dtype=torch.float64)
    q = torch.tensor([[-1.5, -1.0, -0.7], [-2.0, -0.9, -4.5]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    both = log_ratio(level, p, q, mask).log_ratio_BT
    for i in range(2):
        alone = log_ratio(level, p[i : i + 1], q[i : i + 1], mask[i : i + 1]).log_ratio_BT
        torch.testing.assert_close(both[i : i + 1], alone, rtol=0, atol=1e-15)


def test_levels_by_hand() -> None:
    # log ratios 0.3, -0.2, 0.5: mean 0.2, sum 0.6; prefix minima none, 0.3, -0.2, so 0.3, -0.2 + 0.3, 0.5 - 0.2. The
    # second token's 0.1 is above its own ratio: the minimum before it is above 1.
    p = torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64)
    q, mask = torch.zeros_like(p), torch.ones_like(p, dtype=torch.bool)
    expected = {"token": [0.3, -0.2, 0.5], "sequence_mean": [0.2] * 3, "sequence_sum": [0.6] * 3}
    expected["prefix_min"] = [0.3, 0.1, 0.3]
    for level in LEVELS:
        assert log_ratio(level, p, q, mask).log_ratio_BT[0].tolist() == pytest.approx(expected[level])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logprobs_stay_finite_and_are_counted(level: RatioLevel, dtype: torch.dtype) -> None:
    # One token 1e4 away, the others equal, 3 trained tokens. Mean 3333 and sum 1e4 pass the bound for the whole
    # sequence. With prefix_min the token itself; after a -1e4 also the two after it stand exactly at the bound.
    mask = torch.tensor([[True, True, True, False]])
    q = torch.zeros(1, 4, dtype=dtype)
    for far in (1e4, -1e4):
        p = torch.tensor([[far, 0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
        got = log_ratio(level, p, q, mask)
        got.log_ratio_BT.exp().sum().backward()
        assert p.grad is not None
        assert bool(p.grad.isfinite().all())
        assert bool(got.log_ratio_BT.exp().isfinite().all())
        assert got.log_ratio_BT.dtype == dtype
        assert float(got.log_ratio_BT.detach().abs().max()) == BOUND
        assert int(got.num_clamped) == (3 if level.startswith("sequence") else 1)
        assert float(p.grad[0, 0]) == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(level: RatioLevel) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    p = torch.full((2, 3), torch.nan, dtype=torch.float64)
    p[0, 0], p[0, 2] = -1.0, -2.0
    p.requires_grad_()
    q = torch.full((2, 3), torch.inf, dtype=torch.float64)
    q[0, 0], q[0, 2] = -1.1, -1.7
    got = log_ratio(level, p, q, mask)
    got.log_ratio_BT.sum().backward()
    assert p.grad is not None
    assert bool(p.grad.isfinite().all())
    assert float(p.grad[~mask].abs().sum()) == 0.0
    assert bool((got.log_ratio_BT[~mask] == 0).all())
    assert int(got.num_clamped) == 0


def test_the_bound_of_a_product_acts_on_the_product() -> None:
    # +30 and -30 cancel: the product is 1 and nothing is clamped.
    p = torch.tensor([[30.0, -30.0]], dtype=torch.float64)
    got = log_ratio("sequence_sum", p, torch.zeros_like(p), torch.ones_like(p, dtype=torch.bool))
    assert got.log_ratio_BT[0].tolist() == [0.0, 0.0]
    assert int(got.num_clamped) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.integers(0, 40)), min_size=1, max_size=8))
def test_the_interpolated_proximal_policy_equals_its_slow_loop(row: list[tuple[float, float, int]]) -> None:
    policy = torch.tensor([[p for p, _, _ in row]], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([[q for _, q, _ in row]], dtype=torch.float64)
    age = torch.tensor([[d for _, _, d in row]])
    mask = torch.ones_like(age, dtype=torch.bool)
    got = proximal_logprobs("interpolated", behavior_BT=behavior, policy_BT=policy, age_BT=age, mask_BT=mask)
    expected = []
    for log_pi, log_mu, d in row:
        # A-3PO, eq. 4: log prox = alpha log mu + (1 - alpha) log pi with alpha = 1 at d = 0 and 1 / d from d = 1 on.
        alpha = 1.0 if d == 0 else 1.0 / d
        expected.append(alpha * log_mu + (1 - alpha) * log_pi)
    assert got[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not got.requires_grad


def test_the_proximal_policy_is_what_was_asked_for() -> None:
    mask = torch.tensor([[True, False]])
    behavior = torch.tensor([[-1.0, torch.nan]], dtype=torch.float64)
    recomputed = torch.tensor([[-2.0, torch.nan]], dtype=torch.float64, requires_grad=True)
    got = proximal_logprobs("recomputed", recomputed_BT=recomputed, behavior_BT=behavior, mask_BT=mask)
    assert got.tolist() == [[-2.0, 0.0]]
    assert not got.requires_grad
    assert proximal_logprobs("behavior", behavior_BT=behavior, mask_BT=mask).tolist() == [[-1.0, 0.0]]


def test_what_is_missing_or_unknown_is_named() -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="recomputed_BT is None"):
        proximal_logprobs("recomputed", behavior_BT=x, mask_BT=mask)
    with pytest.raises(ValueError, match="age_BT is None"):
        proximal_logprobs("interpolated", behavior_BT=x, policy_BT=x, mask_BT=mask)
    with pytest.raises(ValueError, match="proximal 'old': expected recomputed"):
        proximal_logprobs("old", behavior_BT=x, mask_BT=mask)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ratio_level 'word': expected token"):
        log_ratio("word", x, x, mask)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shapes differ"):
        log_ratio("token", x, torch.zeros(1, 3), mask)
    with pytest.raises(ValueError, match="bound 0: expected above 0"):
        log_ratio("token", x, x, mask, bound=0)
