"""Denominators are global: the parts of a loss add up to the loss of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.aggregate import Aggregation, aggregate, denominator

COUNTS = {"num_tokens": 8, "num_sequences": 2, "num_groups": 3, "group_size": 4, "max_new_tokens": 5}
METHODS: list[Aggregation] = ["token_mean", "sequence_mean", "fixed_length"]


def slow_loss(method: str, losses: list[list[float]], group_size: int, max_new_tokens: int) -> float:
    """One group of trained tokens only."""
    trained = [row for row in losses if row]
    if not trained:
        return 0.0
    if method == "token_mean":
        return sum(sum(row) for row in trained) / sum(len(row) for row in trained)
    if method == "sequence_mean":
        return sum(sum(row) / len(row) for row in trained) / len(trained)
    return sum(sum(row) for row in trained) / (group_size * max_new_tokens)


@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=8),
    st.sampled_from(METHODS),
    st.integers(1, 8),
)
def test_parts_add_up_to_the_slow_loop_over_the_whole(
    losses: list[list[float]], method: Aggregation, size: int
) -> None:
    width = max(1, *(len(row) for row in losses)) + 1
    loss = torch.zeros(len(losses), width, dtype=torch.float64)
    mask = torch.zeros(len(losses), width, dtype=torch.bool)
    for i, row in enumerate(losses):
        loss[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    divisor = denominator(
        method,
        num_tokens=sum(map(len, losses)),
        num_sequences=sum(bool(row) for row in losses),
        num_groups=1,
        group_size=8,
        max_new_tokens=6,
    )
    parts = zip(loss.split(size), mask.split(size), strict=True)
    got = sum(float(aggregate(method, part, part_mask, divisor)) for part, part_mask in parts)
    assert got == pytest.approx(slow_loss(method, losses, 8, 6), rel=1e-12, abs=1e-12)


def test_each_denominator_counts_what_it_says() -> None:
    # fixed_length: 3 groups x 4 rollouts x 5 tokens.
    assert [denominator(m, **COUNTS) for m in METHODS] == [8, 2, 60]


def test_the_mean_of_means_is_not_the_token_mean() -> None:
    # Two tokens of loss 1 and six of loss 0: 2 / 8, where the mean of the two microbatch means would be 0.5.
    parts = [torch.ones(1, 2), torch.zeros(1, 6)]
    total = sum(float(aggregate("token_mean", p, torch.ones_like(p, dtype=torch.bool), 8.0)) for p in parts)
    assert total == 0.25


def test_masked_tokens_are_not_in_the_divisor() -> None:
    # 25 kept tokens of loss 1 and a masked completion of 5: 25 / 25, not 25 / 30.
    loss, mask = torch.ones(6, 5), torch.ones(6, 5, dtype=torch.bool)
    mask[5] = False
    divisor = denominator("token_mean", **{**COUNTS, "num_tokens": int(mask.sum())})
    assert float(aggregate("token_mean", loss, mask, divisor)) == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_nothing_trained_is_a_loss_of_zero_on_its_graph(method: Aggregation) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    total = aggregate(method, loss, torch.zeros(2, 3, dtype=torch.bool), 0.0)
    total.backward()
    assert total.item() == 0.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [[0.0] * 3] * 2


def test_a_denominator_of_another_batch_is_refused() -> None:
    ones, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="denominator 0 with trained tokens"):
        aggregate("token_mean", ones, mask, 0.0)
    with pytest.raises(ValueError, match="expected 0 or more"):
        aggregate("token_mean", ones, mask, -1.0)
    with pytest.raises(ValueError, match="expected token_mean"):
        aggregate("mean", ones, mask, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected token_mean"):
        denominator("mean", **COUNTS)  # type: ignore[arg-type]
