"""Rewards made robust before they become advantages: bounds for all, or each group's own tails cut.

B rollouts. Invalid rollouts keep whatever they hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_grpo.algo.grouped import group_quantile, groups_of
from stream_grpo.algo.shapes import require_rank, require_same_shape


def clip_rewards(rewards_B: Tensor, *, low: float, high: float) -> Tensor:
    """min(max(r, low), high), [B]."""
    require_rank(1, rewards_B=rewards_B)
    if low >= high:
        raise ValueError(f"low {low}: expected below high {high}")
    return rewards_B.clamp(low, high)


def winsorize(rewards_B: Tensor, valid_B: Tensor, group_B: Tensor, *, share: float) -> Tensor:
    """min(max(r, q(share)), q(1 - share)) with q the quantiles of the rollout's own group, [B] (Tukey, 1962).

    A quantile lies linearly between its two neighbours, over the valid rollouts of the group.
    """
    require_rank(1, rewards_B=rewards_B)
    require_same_shape(rewards_B=rewards_B, valid_B=valid_B)
    if not 0 <= share < 0.5:
        raise ValueError(f"share {share}: expected 0 or more and below 0.5")
    groups = groups_of(group_B, valid_B)
    low_B, high_B = (group_quantile(rewards_B, groups, share=q)[groups.index_B] for q in (share, 1 - share))
    return torch.where(valid_B, rewards_B.clamp(low_B, high_B), rewards_B)
