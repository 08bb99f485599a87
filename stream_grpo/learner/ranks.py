"""What a learner step asks of the other ranks: sums, maxima and lists over all of them, the same numbers on each.

N values of a rank. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stream_grpo.algo.statistics import Statistics
from stream_grpo.algo.step_scale import WeightSums


class Ranks(Protocol):
    """All ranks of the learner, this one included."""

    num_ranks: int

    def summed(self, values: Tensor) -> Tensor:
        """The sum over ranks of tensors of one shape and dtype."""

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over ranks of tensors of one shape and dtype."""

    def joined(self, values_N: Tensor) -> Tensor:
        """The values of all ranks, rank by rank; each may have another number of them."""


class Alone:
    """One rank."""

    num_ranks = 1

    def summed(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def joined(self, values_N: Tensor) -> Tensor:
        """The values themselves."""
        return values_N


ALONE = Alone()


def summed_numbers(ranks: Ranks, *numbers: float) -> list[float]:
    """The sum over ranks of each number, in float64."""
    if ranks.num_ranks == 1:
        return list(numbers)
    return list(ranks.summed(torch.tensor(numbers, dtype=torch.float64)).tolist())


def summed_statistics(ranks: Ranks, own: Statistics) -> Statistics:
    """The statistics of all ranks together, in two calls. All ranks have those of one recipe."""
    if ranks.num_ranks == 1:
        return own
    parts = [*own.sums.values(), own.histogram, own.num_clamped]
    flat = ranks.summed(torch.cat([part.flatten() for part in parts]))
    *sums, histogram, num_clamped = (
        piece.view(part.shape) for piece, part in zip(torch.split(flat, [p.numel() for p in parts]), parts, strict=True)
    )
    ratio_max = ranks.largest(own.ratio_max.reshape(1)).squeeze(0)
    return Statistics(dict(zip(own.sums, sums, strict=True)), histogram, ratio_max, num_clamped)


def summed_weights(ranks: Ranks, own: WeightSums) -> WeightSums:
    """The weight sums of all ranks together."""
    if ranks.num_ranks == 1:
        return own
    weight_sum, weight_square_sum, num_weights = ranks.summed(
        torch.stack([own.weight_sum, own.weight_square_sum, own.num_weights])
    )
    return WeightSums(weight_sum=weight_sum, weight_square_sum=weight_square_sum, num_weights=num_weights)
