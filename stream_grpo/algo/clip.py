"""Trust regions: how far one batch may move the policy.

B sequences, T tokens. A loss here is to be minimised; it is the negative of the papers' surrogate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank, require_same_shape


class ClippedLoss(NamedTuple):
    """A loss per token and where its bounds took the gradient away."""

    loss_BT: Tensor
    clipped_low_BT: Tensor
    """True where the advantage is negative and the ratio below 1 - clip_low."""
    clipped_high_BT: Tensor
    """True where the advantage is positive and the ratio above 1 + clip_high."""
    clipped_dual_BT: Tensor
    """True where the advantage is negative and the ratio above dual_clip."""


def ppo_clip(
    log_ratio_BT: Tensor, advantage_BT: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with dual clip, where A < 0, -max(that minimum, dual_clip A).

    PPO (arXiv 1707.06347), separate bounds from DAPO (arXiv 2503.14476), dual clip from arXiv 1912.09729.
    """
    require_rank(2, log_ratio=log_ratio_BT, advantage=advantage_BT)
    require_same_shape(log_ratio=log_ratio_BT, advantage=advantage_BT)
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low {clip_low}, clip_high {clip_high}: expected 0 or more")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip {dual_clip}: expected above 1")
    ratio_BT = log_ratio_BT.exp()
    surrogate_BT = torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantage_BT)
    positive_BT, negative_BT = advantage_BT > 0, advantage_BT < 0
    clipped_dual_BT = torch.zeros_like(negative_BT)
    if dual_clip is not None:
        surrogate_BT = torch.where(negative_BT, torch.maximum(surrogate_BT, dual_clip * advantage_BT), surrogate_BT)
        clipped_dual_BT = negative_BT & (ratio_BT > dual_clip)
    return ClippedLoss(
        loss_BT=-surrogate_BT,
        clipped_low_BT=negative_BT & (ratio_BT < 1 - clip_low),
        clipped_high_BT=positive_BT & (ratio_BT > 1 + clip_high),
        clipped_dual_BT=clipped_dual_BT,
    )
