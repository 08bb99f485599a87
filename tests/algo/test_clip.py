"""The clipped surrogate against a slow loop, and where its gradient stops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.clip import ppo_clip


def slow_loss(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
    surrogate = min(ratio * a, max(1 - low, min(1 + high, ratio)) * a)
    if dual is not None and a < 0:
        surrogate = max(surrogate, dual * a)
    return -surrogate


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=12),
    st.floats(0, 0.9),
    st.floats(0, 3),
    st.none() | st.floats(1.01, 10),
)
def test_the_loss_equals_its_slow_loop(
    tokens: list[tuple[float, float]], low: float, high: float, dual: float | None
) -> None:
    log_ratio = torch.tensor([[x for x, _ in tokens]], dtype=torch.float64)
    advantage = torch.tensor([[a for _, a in tokens]], dtype=torch.float64)
    got = ppo_clip(log_ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    expected = [slow_loss(math.exp(x), a, low, high, dual) for x, a in tokens]
    assert got.loss_BT[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_gradient_stops_outside_the_bounds_and_only_there() -> None:
    # Columns: ratio 1, 1.5, 0.5 with A = 1, then the same and 4 with A = -1. Bounds 0.8 and 1.28, dual clip 3.
    # -d(r A)/d log r = -r A where the gradient lives; a ratio at 0.5 with A = 1 and at 1.5 with A = -1 is free.
    ratio = torch.tensor([[1, 1.5, 0.5, 1, 1.5, 0.5, 4]], dtype=torch.float64)
    advantage = torch.tensor([[1, 1, 1, -1, -1, -1, -1]], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    got = ppo_clip(log_ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    got.loss_BT.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].tolist() == pytest.approx([-1, 0, -0.5, 1, 1.5, 0, 0])
    assert got.clipped_high_BT[0].tolist() == [False, True, False, False, False, False, False]
    assert got.clipped_low_BT[0].tolist() == [False, False, False, False, False, True, False]
    assert got.clipped_dual_BT[0].tolist() == [False, False, False, False, False, False, True]


def test_bad_bounds_are_refused() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="expected 0 or more"):
        ppo_clip(zeros, zeros, clip_low=-0.1, clip_high=0.2)
    with pytest.raises(ValueError, match="expected above 1"):
        ppo_clip(zeros, zeros, clip_low=0.1, clip_high=0.2, dual_clip=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        ppo_clip(zeros, torch.zeros(1, 2), clip_low=0.1, clip_high=0.2)
