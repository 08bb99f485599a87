"""The effective sample share and the learning rate it allows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.step_scale import learning_rate_scale, weight_sums

NAN = float("nan")
LOG_WEIGHTS = st.lists(st.tuples(st.floats(-40, 40), st.booleans()), min_size=1, max_size=16)


def tensors(rows: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = [x if kept else NAN for x, kept in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor([kept for _, kept in rows])


@given(LOG_WEIGHTS)
def test_the_share_equals_its_slow_loop(rows: list[tuple[float, bool]]) -> None:
    weights = [math.exp(x) for x, kept in rows if kept]
    squares = math.fsum(w * w for w in weights)
    expected = math.fsum(weights) ** 2 / (len(weights) * squares) if weights else 0.0
    assert weight_sums(*tensors(rows)).effective_share() == pytest.approx(expected, rel=1e-9)


@given(LOG_WEIGHTS, st.integers(1, 5))
def test_parts_add_up(rows: list[tuple[float, bool]], size: int) -> None:
    log_weight, mask = tensors(rows)
    first, *others = (weight_sums(*part) for part in zip(log_weight.split(size), mask.split(size), strict=True))
    for other in others:
        first = first + other
    assert first.effective_share() == pytest.approx(weight_sums(log_weight, mask).effective_share(), rel=1e-12)


def test_equal_weights_are_whole_and_one_that_outweighs_all_is_one_in_n() -> None:
    # (1 + 1 + 1 + 1)^2 / (4 x 4) = 1. Weights 3, 1: 16 / (2 x 10) = 0.8.
    every = torch.ones(2, 2, dtype=torch.bool)
    assert weight_sums(torch.full((2, 2), 7.0), every).effective_share() == pytest.approx(1.0)
    assert weight_sums(torch.tensor([math.log(3), 0.0]), every[0]).effective_share() == pytest.approx(0.8)
    assert weight_sums(torch.tensor([[250.0, 0.0], [0.0, 0.0]]), every).effective_share() == pytest.approx(0.25)


def test_sums_of_long_sequences_neither_overflow_nor_vanish() -> None:
    every = torch.ones(1000, dtype=torch.bool)
    for log_weight in (-5000.0, -300.0, 300.0, 5000.0):
        assert weight_sums(torch.full((1000,), log_weight), every).effective_share() == pytest.approx(1.0)


def test_a_share_carries_no_gradient() -> None:
    sums = weight_sums(torch.zeros(2, requires_grad=True), torch.ones(2, dtype=torch.bool))
    assert not sums.weight_sum.requires_grad


def test_the_learning_rate_goes_with_the_root_and_is_never_raised() -> None:
    # sqrt(0.25) = 0.5; with base 0.5 sqrt(0.25 / 0.5) = 0.7071; above its base it is whole.
    assert learning_rate_scale(0.25) == 0.5
    assert learning_rate_scale(0.25, base=0.5) == pytest.approx(math.sqrt(0.5))
    assert learning_rate_scale(0.9, base=0.5) == 1.0
    assert learning_rate_scale(0.0) == 0.0


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"share 1\.5: expected from 0 to 1"):
        learning_rate_scale(1.5)
    with pytest.raises(ValueError, match=r"base 0\.0: expected above 0 and at most 1"):
        learning_rate_scale(0.5, base=0.0)
    with pytest.raises(ValueError, match="shapes differ"):
        weight_sums(torch.zeros(2), torch.ones(3, dtype=torch.bool))
