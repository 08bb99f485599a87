"""Advantages of one group against hand-computed numbers and slow loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.advantage import advantage, centered, grpo, rloo

NAN = float("nan")


def slow_advantage(method: str, rewards: list[float], valid: list[bool], tolerance: float, floor: float) -> list[float]:
    kept = [r for r, v in zip(rewards, valid, strict=True) if v]
    if len(kept) < 2 or max(kept) - min(kept) <= tolerance:
        return [0.0] * len(rewards)
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in kept) / len(kept))
    result = []
    for i, (r, v) in enumerate(zip(rewards, valid, strict=True)):
        if not v:
            result.append(0.0)
        elif method == "grpo":
            result.append((r - mean) / max(std, floor))
        elif method == "centered":
            result.append(r - mean)
        else:
            others = [q for j, (q, w) in enumerate(zip(rewards, valid, strict=True)) if w and j != i]
            result.append(r - math.fsum(others) / len(others))
    return result


def tensors(rewards: list[float], valid: list[bool] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([True] * len(rewards) if valid is None else valid, dtype=torch.bool),
    )


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(["grpo", "centered", "rloo"]),
)
def test_every_method_equals_its_slow_loop(pairs: list[tuple[float, bool]], method: str) -> None:
    rewards, valid = [r for r, _ in pairs], [v for _, v in pairs]
    got = advantage(method, *tensors(rewards, valid), signal_tolerance=1e-6, std_floor=0.01)  # type: ignore[arg-type]
    expected = slow_advantage(method, rewards, valid, 1e-6, 0.01)
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert got.dtype == torch.float64


def test_a_group_that_lost_a_rollout_has_its_own_baseline() -> None:
    # A lost one of four: mean 1/3, so 2/3 and -1/3 twice. B: mean 1/2.
    a = centered(*tensors([1, 0, 0, NAN], [True, True, True, False]), signal_tolerance=1e-6)
    b = centered(*tensors([1, 1, 0, 0]), signal_tolerance=1e-6)
    assert a.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])
    assert b.tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_a_missing_reward_is_left_out_and_not_zero() -> None:
    # rloo over [1, 0, 0]: 1 - 0 = 1; 0 - (1 + 0) / 2 = -0.5. With the missing one as 0 the last would be -1/3.
    got = rloo(*tensors([1, NAN, 0, 0], [True, False, True, True]), signal_tolerance=1e-6)
    assert got.tolist() == pytest.approx([1, 0, -0.5, -0.5])


def test_grpo_divides_by_the_population_spread() -> None:
    # mean 0.25, population std sqrt(3/16) = 0.4330: 0.75 / 0.4330 = 1.7321, -0.25 / 0.4330 = -0.5774.
    got = grpo(*tensors([1, 0, 0, 0]), signal_tolerance=1e-6, std_floor=0.01)
    assert got.tolist() == pytest.approx([1.7320508, -0.5773503, -0.5773503, -0.5773503])


def test_the_floor_keeps_a_tiny_spread_tiny() -> None:
    # std 0.0005 is below the floor 0.01: +-0.0005 / 0.01 = +-0.05, where an epsilon would give +-1.
    got = grpo(*tensors([0.5, 0.501]), signal_tolerance=1e-6, std_floor=0.01)
    assert got.tolist() == pytest.approx([-0.05, 0.05])


@pytest.mark.parametrize("method", ["grpo", "centered", "rloo"])
def test_no_spread_is_exactly_zero(method: str) -> None:
    # The mean of seven 0.1 is not exactly 0.1.
    for rewards in ([0.1] * 7, [0.3], [0.1, 0.1 + 1e-7]):
        got = advantage(method, *tensors(rewards), signal_tolerance=1e-6)  # type: ignore[arg-type]
        assert got.tolist() == [0.0] * len(rewards)


def test_a_group_without_valid_rollouts_is_zero() -> None:
    assert rloo(*tensors([NAN, NAN], [False, False]), signal_tolerance=1e-6).tolist() == [0.0, 0.0]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        rloo(*tensors([NAN, 1.0]), signal_tolerance=1e-6)
    with pytest.raises(ValueError, match="shapes differ"):
        rloo(torch.zeros(3), torch.ones(2, dtype=torch.bool), signal_tolerance=1e-6)
    with pytest.raises(ValueError, match="expected 1 axes"):
        rloo(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), signal_tolerance=1e-6)
    with pytest.raises(ValueError, match="expected grpo, centered or rloo"):
        advantage("best", *tensors([0, 1]), signal_tolerance=1e-6)  # type: ignore[arg-type]
