"""Statistics per group over a flat batch, by group index and never by reshape.

B rollouts in any order, P groups of any sizes. Invalid rollouts enter no statistic; their values may hold anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank, require_same_shape


class Groups(NamedTuple):
    """Which rollouts belong together and count."""

    index_B: Tensor
    """int64, 0 to P - 1: the group of every rollout."""
    valid_B: Tensor
    num_valid_P: Tensor
    """int64: valid rollouts of every group; 0 is possible."""


def groups_of(group_B: Tensor, valid_B: Tensor) -> Groups:
    """Groups by equal `group_B`, whatever its values and order."""
    require_rank(1, group_B=group_B, valid_B=valid_B)
    require_same_shape(group_B=group_B, valid_B=valid_B)
    if valid_B.dtype != torch.bool:
        raise ValueError(f"valid_B has dtype {valid_B.dtype}: expected torch.bool")
    labels, index_B = torch.unique(group_B, return_inverse=True)
    return Groups(index_B, valid_B, torch.bincount(index_B[valid_B], minlength=labels.numel()))


def group_sum(values_B: Tensor, groups: Groups) -> Tensor:
    """Sum over the valid rollouts of every group, [P]."""
    kept_B = torch.where(groups.valid_B, values_B, 0.0)
    return values_B.new_zeros(groups.num_valid_P.shape).index_add(0, groups.index_B, kept_B)


def group_mean(values_B: Tensor, groups: Groups) -> Tensor:
    """Mean over the valid rollouts of every group, [P]; 0 for a group without any."""
    return group_sum(values_B, groups) / groups.num_valid_P.clamp(min=1)


def group_spread(values_B: Tensor, groups: Groups) -> Tensor:
    """Largest minus smallest of the valid rollouts of every group, [P]; minus infinity for a group without any."""
    lowest_P = values_B.new_full(groups.num_valid_P.shape, math.inf)
    highest_P = -lowest_P
    lowest_P = lowest_P.scatter_reduce(
        0, groups.index_B, values_B.where(groups.valid_B, lowest_P.new_tensor(math.inf)), "amin"
    )
    highest_P = highest_P.scatter_reduce(
        0, groups.index_B, values_B.where(groups.valid_B, lowest_P.new_tensor(-math.inf)), "amax"
    )
    return highest_P - lowest_P


def group_quantile(values_B: Tensor, groups: Groups, *, share: float) -> Tensor:
    """The `share` quantile over the valid rollouts of every group, linear between neighbours, [P]; 0 where none.

    With x sorted and n valid rollouts it lies at position share (n - 1) (type 7 of Hyndman and Fan, 1996); 0.5 is the
    median.
    """
    order = torch.argsort(torch.where(groups.valid_B, values_B, math.inf))  # invalid ones last
    order = order[torch.argsort(groups.index_B[order], stable=True)]
    sorted_B = values_B[order]
    sizes_P = torch.bincount(groups.index_B, minlength=groups.num_valid_P.numel())
    starts_P = sizes_P.cumsum(0) - sizes_P
    position_P = (groups.num_valid_P - 1).clamp(min=0).to(values_B.dtype) * share
    below_P, above_P = (sorted_B[starts_P + at_P.long()] for at_P in (position_P.floor(), position_P.ceil()))
    quantile_P = torch.lerp(below_P, above_P, position_P.frac())
    return torch.where(groups.num_valid_P > 0, quantile_P, 0.0)
