"""Advantages by a critic: what each trained token brought beyond what its prefix was worth, and the critic's own loss.

B sequences, T tokens. The value of token t is what the critic expects of the sequence before it is sampled. Values
under the mask may be anything, NaN included: tokens that no policy sampled are no steps of an episode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank, require_same_shape

STD_FLOOR = 0.01
"""Whitened advantages are divided by no less, so that those that hardly differ are not blown up."""


class Estimates(NamedTuple):
    """What follows from rewards and values; 0 under the mask."""

    advantage_BT: Tensor
    return_BT: Tensor
    """What the critic is to learn: advantage + value."""


def gae(reward_B: Tensor, value_BT: Tensor, mask_BT: Tensor, *, gamma: float, lambda_: float) -> Estimates:
    """A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, [B, T].

    Generalised advantage estimation (Schulman et al., arXiv 1506.02438) over the trained tokens of each sequence, in
    order: t + 1 is the next trained one. The whole reward comes with the last, after which nothing is worth anything:
    an answer that was cut is at its end too. With gamma = lambda = 1 it is reward - V_t.
    """
    require_rank(1, reward_B=reward_B)
    require_rank(2, value_BT=value_BT, mask_BT=mask_BT)
    require_same_shape(value_BT=value_BT, mask_BT=mask_BT)
    require_same_shape(reward_B=reward_B, mask_B=mask_BT[:, 0])
    advantage_BT = torch.zeros_like(value_BT)
    # Of the trained token after t: its value, and its advantage. Before the first from the end the reward stands there.
    next_value_B, next_advantage_B = torch.zeros_like(value_BT[:, 0]), torch.zeros_like(value_BT[:, 0])
    reward_B = reward_B.to(value_BT.dtype)
    for t in range(mask_BT.shape[1] - 1, -1, -1):
        is_trained_B = mask_BT[:, t]
        delta_B = reward_B + gamma * next_value_B - value_BT[:, t]
        advantage_B = delta_B + gamma * lambda_ * next_advantage_B
        advantage_BT[:, t] = torch.where(is_trained_B, advantage_B, 0.0)
        next_advantage_B = torch.where(is_trained_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(is_trained_B, value_BT[:, t], next_value_B)
        reward_B = torch.where(is_trained_B, 0.0, reward_B)
    return Estimates(advantage_BT, torch.where(mask_BT, advantage_BT + value_BT, 0.0))


def whitening(advantages_N: Tensor) -> tuple[float, float]:
    """(mean, max(std, STD_FLOOR)) of the advantages of all trained tokens of a batch; std over n. (0, 1) of none."""
    require_rank(1, advantages_N=advantages_N)
    if not advantages_N.numel():
        return 0.0, 1.0
    return float(advantages_N.mean()), max(float(advantages_N.std(correction=0)), STD_FLOOR)


class ValueLoss(NamedTuple):
    """This part's share of the critic's loss."""

    loss: Tensor
    """A scalar, with a gradient by the values."""
    num_clipped: Tensor
    """Trained tokens whose value has no gradient because it has moved far enough."""


def value_loss(
    value_BT: Tensor,
    start_BT: Tensor,
    return_BT: Tensor,
    mask_BT: Tensor,
    *,
    denominator: float,
    clip: float | None = None,
) -> ValueLoss:
    """1/D sum of max((V - R)^2, (V_start + clamp(V - V_start, -clip, clip) - R)^2) / 2 over trained tokens.

    The value loss of PPO's implementation (Engstrom et al., arXiv 2005.12729, section 3). `start_BT` are the values at
    the start of the learner step, `denominator` the trained tokens of the whole update; without `clip` the first term
    alone.
    """
    require_rank(2, value_BT=value_BT, start_BT=start_BT, return_BT=return_BT, mask_BT=mask_BT)
    require_same_shape(value_BT=value_BT, start_BT=start_BT, return_BT=return_BT, mask_BT=mask_BT)
    # Before anything is squared: what lies under the mask must not reach the gradient.
    value_BT, start_BT, return_BT = (torch.where(mask_BT, x_BT, 0.0) for x_BT in (value_BT, start_BT, return_BT))
    free_BT = (value_BT - return_BT).square()
    if clip is None:
        return ValueLoss(free_BT.sum() / (2 * denominator), torch.zeros((), dtype=torch.int64, device=mask_BT.device))
    moved_BT = value_BT - start_BT
    # Rounding of start + moved must not count as clipped.
    near_BT = torch.where(moved_BT.abs() <= clip, value_BT, start_BT + moved_BT.clamp(-clip, clip))
    clipped_BT = (near_BT - return_BT).square()
    loss = torch.maximum(free_BT, clipped_BT).sum() / (2 * denominator)
    return ValueLoss(loss, (clipped_BT > free_BT).sum())


def explained_variance(value_N: Tensor, return_N: Tensor) -> float | None:
    """1 - var(R - V) / var(R): 1 of a critic that knows, 0 of a constant, below 0 of one worse than that.

    None where the returns do not vary.
    """
    require_same_shape(value_N=value_N, return_N=return_N)
    if return_N.numel() < 2:
        return None
    variance = float(return_N.var(correction=0))
    return 1 - float((return_N - value_N).var(correction=0)) / variance if variance > 1e-12 else None
