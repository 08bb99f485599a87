"""Advantages of one group: what each rollout scored beyond its group's baseline.

G rollouts of one group. `valid_G` says which of them were scored; the others get advantage 0, enter no baseline, and
their reward may hold anything, NaN included. A group is never padded or reshaped: its baseline is over the valid
rollouts it has. A group of fewer than two valid rollouts, or whose valid rewards differ by no more than
`signal_tolerance`, has no signal and its advantages are exactly 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank, require_same_shape

Advantage = Literal["grpo", "centered", "rloo"]


def advantage(
    method: Advantage, rewards_G: Tensor, valid_G: Tensor, *, signal_tolerance: float, std_floor: float = 0.01
) -> Tensor:
    """The named advantage of every rollout of one group, [G]. Raises ValueError for shapes, rewards or a name."""
    if method == "grpo":
        return grpo(rewards_G, valid_G, signal_tolerance=signal_tolerance, std_floor=std_floor)
    if method == "centered":
        return centered(rewards_G, valid_G, signal_tolerance=signal_tolerance)
    if method == "rloo":
        return rloo(rewards_G, valid_G, signal_tolerance=signal_tolerance)
    raise ValueError(f"advantage {method!r}: expected grpo, centered or rloo")


def grpo(rewards_G: Tensor, valid_G: Tensor, *, signal_tolerance: float, std_floor: float) -> Tensor:
    """A_i = (r_i - mean r) / max(std r, std_floor), with the population std (DeepSeekMath, arXiv 2402.03300).

    The floor stands where others add an epsilon: graded rewards 1e-3 apart are not blown up to advantages of 1.
    """
    if std_floor <= 0:
        raise ValueError(f"std_floor {std_floor}: expected above 0")
    deviation_G, num_valid = _deviation(rewards_G, valid_G, signal_tolerance)
    std = (deviation_G.square().sum() / max(num_valid, 1)).sqrt()
    return deviation_G / std.clamp(min=std_floor)


def centered(rewards_G: Tensor, valid_G: Tensor, *, signal_tolerance: float) -> Tensor:
    """A_i = r_i - mean r (Dr. GRPO, arXiv 2503.20783)."""
    deviation_G, _ = _deviation(rewards_G, valid_G, signal_tolerance)
    return deviation_G


def rloo(rewards_G: Tensor, valid_G: Tensor, *, signal_tolerance: float) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) (r_i - mean r), n valid rollouts (arXiv 2402.14740).

    Unbiased for every n: a group that lost a rollout keeps its scale.
    """
    deviation_G, num_valid = _deviation(rewards_G, valid_G, signal_tolerance)
    return deviation_G * (num_valid / max(num_valid - 1, 1))


def _deviation(rewards_G: Tensor, valid_G: Tensor, signal_tolerance: float) -> tuple[Tensor, int]:
    """(r_i - mean over the valid rollouts, number of valid rollouts); zeros without signal."""
    require_rank(1, rewards_G=rewards_G, valid_G=valid_G)
    require_same_shape(rewards_G=rewards_G, valid_G=valid_G)
    valid_rewards = rewards_G[valid_G]
    if not bool(torch.isfinite(valid_rewards).all()):
        raise ValueError(f"a valid rollout has a reward that is not finite: {valid_rewards.tolist()}")
    num_valid = valid_rewards.numel()
    if num_valid < 2 or float(valid_rewards.max() - valid_rewards.min()) <= signal_tolerance:
        return torch.zeros_like(rewards_G), num_valid
    return torch.where(valid_G, rewards_G - valid_rewards.mean(), 0.0), num_valid
