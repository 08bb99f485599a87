"""Denominators are global: the parts of a loss add up to the loss of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.aggregate import AGGREGATIONS, Aggregation, BatchCounts, aggregate, denominator


def padded(losses: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Trained tokens first, NaN under the mask."""
    width = max(1, *(len(row) for row in losses)) + 1
    loss = torch.full((len(losses), width), float("nan"), dtype=torch.float64)
    mask = torch.zeros(len(losses), width, dtype=torch.bool)
    for i, row in enumerate(losses):
        loss[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return loss, mask


def slow_aggregate(aggregation: str, losses: list[list[float]], problems: list[int], constant: int) -> float:
    """From the definitions: a mean of tokens, of sequence means, of problem means, or a sum over a constant."""
    tokens = [x for row in losses for x in row]
    if not tokens:
        return 0.0
    if aggregation == "tokens":
        return math.fsum(tokens) / len(tokens)
    if aggregation == "constant":
        return math.fsum(tokens) / constant
    if aggregation == "sequences":
        means = [math.fsum(row) / len(row) for row in losses if row]
        return math.fsum(means) / len(means)
    pooled: dict[int, list[float]] = {}
    for row, problem in zip(losses, problems, strict=True):
        pooled.setdefault(problem, []).extend(row)
    means = [math.fsum(mine) / len(mine) for mine in pooled.values() if mine]
    return math.fsum(means) / len(means)


def counted(
    losses: list[list[float]], problems: list[int], constant: int
) -> tuple[BatchCounts, dict[str, torch.Tensor]]:
    lengths = [len(row) for row in losses]
    by_problem = {p: sum(n for n, q in zip(lengths, problems, strict=True) if q == p) for p in problems}
    counts = BatchCounts(sum(lengths), sum(n > 0 for n in lengths), sum(n > 0 for n in by_problem.values()), constant)
    own = {"tokens_B": torch.tensor(lengths), "problem_tokens_B": torch.tensor([by_problem[p] for p in problems])}
    return counts, own


BATCHES = st.lists(st.tuples(st.lists(st.floats(-5, 5), max_size=6), st.integers(0, 2)), min_size=1, max_size=10).map(
    lambda rows: ([row for row, _ in rows], [problem for _, problem in rows])
)


@given(BATCHES, st.sampled_from(AGGREGATIONS), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2]))
def test_every_cut_adds_up_to_the_slow_loop(
    batch: tuple[list[list[float]], list[int]], aggregation: Aggregation, num_microbatches: int, num_ranks: int
) -> None:
    losses, problems = batch
    loss, mask = padded(losses)
    loss.requires_grad_()
    counts, own = counted(losses, problems, constant=60)
    divisor = denominator(aggregation, counts)
    whole = aggregate(aggregation, loss, mask, **own, denominator=divisor)
    assert whole.item() == pytest.approx(slow_aggregate(aggregation, losses, problems, 60), rel=1e-9, abs=1e-9)
    (whole_gradient,) = torch.autograd.grad(whole, loss)
    # Rank k has every num_ranks-th sequence, so that problems lie across ranks and microbatches.
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(num_ranks):
        rows = torch.arange(rank, len(losses), num_ranks)
        for part in rows.tensor_split(num_microbatches):
            parts = {name: count[part] for name, count in own.items()}
            total = total + aggregate(aggregation, loss[part], mask[part], **parts, denominator=divisor)
    assert total.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-12)
    (gradient,) = torch.autograd.grad(total, loss)
    assert gradient.isfinite().all()
    assert gradient.flatten().tolist() == pytest.approx(whole_gradient.flatten().tolist(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("cut", [[2], [1, 1]], ids=["one part", "two microbatches or ranks"])
def test_the_token_mean_of_uneven_sequences_is_not_a_mean_of_means(cut: list[int]) -> None:
    # Report C01: two tokens of loss 1 and six of loss 0 are 2 / 8, however they are cut; every gradient is 1 / 8.
    loss, mask = padded([[1.0, 1.0], [0.0] * 6])
    loss.requires_grad_()
    parts = zip(loss.split(cut), mask.split(cut), strict=True)
    total = torch.stack([aggregate("tokens", part, kept, denominator=8.0) for part, kept in parts]).sum()
    (gradient,) = torch.autograd.grad(total, loss)
    assert total.item() == 0.25
    assert gradient[mask].tolist() == [0.125] * 8


def test_a_completion_that_is_left_out_is_not_in_the_divisor() -> None:
    # Report C03: 30 tokens, 5 of them of a cut completion, loss 1 on the rest: 25 / 25, not 25 / 30.
    losses = [[1.0] * 5] * 5 + [[]]
    loss, mask = padded(losses)
    counts, _ = counted(losses, [0] * 6, constant=30)
    assert denominator("tokens", counts) == 25.0
    assert float(aggregate("tokens", loss, mask, denominator=25.0)) == 1.0


def test_rejected_tokens_stay_in_the_divisor() -> None:
    # Four trained tokens of loss 2, two of them rejected (loss 0): 4 / 4 = 1 for tokens, and 4 / 4 / 1 for sequences.
    loss, mask = padded([[2.0, 2.0, 0.0, 0.0]])
    four = torch.tensor([4])
    assert float(aggregate("tokens", loss, mask, denominator=4.0)) == 1.0
    assert float(aggregate("sequences", loss, mask & (loss != 0), tokens_B=four, denominator=1.0)) == 1.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_trained_is_zero_for_every_aggregation(aggregation: Aggregation) -> None:
    # Report C03: every completion left out. No NaN in value or gradient, and a graph for the optimizer's collectives.
    loss, mask = padded([[], []])
    loss.requires_grad_()
    counts, own = counted([[], []], [0, 1], constant=0)
    total = aggregate(aggregation, loss, mask, **own, denominator=denominator(aggregation, counts))
    total.backward()
    assert total.item() == 0.0
    assert loss.grad is not None
    assert bool((loss.grad == 0).all())


def test_problems_weigh_alike_whatever_their_lengths() -> None:
    # Problem 0 has five tokens of loss 1 over two sequences, problem 1 a single one of loss 3: (1 + 3) / 2 = 2.
    losses = [[1.0], [3.0], [1.0] * 4]
    loss, mask = padded(losses)
    counts, own = counted(losses, [0, 1, 0], constant=60)
    assert counts == BatchCounts(6, 3, 2, 60)
    assert float(aggregate("problems", loss, mask, **own, denominator=2.0)) == pytest.approx(2.0)


def test_counts_that_do_not_fit_are_refused() -> None:
    loss, mask = padded([[1.0, 1.0]])
    for arguments, message in [
        ({"aggregation": "sequences"}, "tokens_B is missing"),
        ({"aggregation": "problems", "tokens_B": torch.tensor([2])}, "problem_tokens_B is missing"),
        ({"aggregation": "sequences", "tokens_B": torch.tensor([1])}, "expected at least the trained tokens"),
        ({"aggregation": "sequences", "tokens_B": torch.tensor([2, 2])}, "shapes differ"),
        ({"aggregation": "means"}, "aggregation 'means': expected tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            aggregate(loss_BT=loss, mask_BT=mask, denominator=1.0, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="denominator 0 with trained tokens"):
        aggregate("tokens", loss, mask, denominator=0.0)
    with pytest.raises(ValueError, match="expected 0 or more"):
        aggregate("tokens", loss, mask, denominator=-1.0)
    with pytest.raises(ValueError, match="aggregation 'means': expected tokens"):
        denominator("means", BatchCounts(1, 1, 1, 1))  # type: ignore[arg-type]
