"""Process rewards: one reward per reasoning step, folded into one number or spread over the tokens.

B rollouts, T tokens. A step is known by the index of the token after its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.advantage import group_advantage
from stream_grpo.algo.choices import Std, StepAggregation
from stream_grpo.algo.grouped import groups_of
from stream_grpo.algo.shapes import require_rank, require_same_shape


class PositionAdvantages(NamedTuple):
    """Advantages that differ over the tokens of a rollout."""

    advantage_BT: Tensor
    has_signal_B: Tensor
    """bool: the step rewards of this rollout's group differ by more than the tolerance."""


def aggregate_steps(step_rewards: Tensor, *, method: StepAggregation, weights: Tensor | None = None) -> Tensor:
    """One reward of a rollout from those of its steps, a scalar.

    min: a chain is as good as its weakest step. product: all steps right, each reward a probability (both: "Let's
    verify step by step", arXiv 2305.20050). last: the final state alone. mean. weighted: sum w r / sum w.
    """
    require_rank(1, step_rewards=step_rewards)
    if step_rewards.numel() == 0:
        raise ValueError("step_rewards is empty: expected at least one step")
    if (weights is not None) != (method == "weighted"):
        raise ValueError(f"weights {'given' if weights is not None else 'missing'} with method {method!r}")
    if weights is not None:
        require_same_shape(step_rewards=step_rewards, weights=weights)
        if bool((weights < 0).any()) or float(weights.sum()) <= 0:
            raise ValueError(f"weights {weights.tolist()}: expected 0 or more, with a sum above 0")
        return (weights * step_rewards).sum() / weights.sum()
    if method == "min":
        return step_rewards.min()
    if method == "product":
        return step_rewards.prod()
    if method == "last":
        return step_rewards[-1]
    if method == "mean":
        return step_rewards.mean()
    raise ValueError(f"method {method!r}: expected min, product, last, mean or weighted")


def position_advantages(
    step_rewards: Sequence[Tensor],
    step_ends: Sequence[Tensor],
    valid_B: Tensor,
    group_B: Tensor,
    *,
    num_tokens: int,
    signal_tolerance: float,
    scale: Literal["group_std", "none"] = "group_std",
    scale_floor: float = 0.01,
    std: Std = "population",
) -> PositionAdvantages:
    """A_t = sum of the normalised rewards of the steps that end at or after token t, [B, T].

    A step's reward is normalised by mean and std of all steps of all valid rollouts of its group (process
    supervision of DeepSeekMath, arXiv 2402.03300, section 4.1.3). `step_ends` are exclusive token indices into T,
    rising. A group of fewer than two valid rollouts, or without spread in its step rewards, is exactly 0. Tokens
    before the first step (the prompt) hold the whole sum: they are for the mask to leave out.
    """
    _check_steps(step_rewards, step_ends, valid_B, num_tokens)
    num_steps_B = torch.tensor([rewards.numel() for rewards in step_rewards], device=valid_B.device)
    row_S = torch.repeat_interleave(num_steps_B)
    rewards_S, ends_S = torch.cat(list(step_rewards)), torch.cat(list(step_ends))
    groups = groups_of(group_B, valid_B)
    compared_B = valid_B & (groups.num_valid_P >= 2)[groups.index_B]
    steps = group_advantage(
        rewards_S,
        compared_B[row_S],
        group_B[row_S],
        baseline="group_mean",
        scale=scale,
        signal_tolerance=signal_tolerance,
        scale_floor=scale_floor,
        std=std,
    )
    at_end_BT = rewards_S.new_zeros(len(step_rewards), num_tokens)
    at_end_BT[row_S, ends_S - 1] = steps.advantage_B
    has_signal_B = torch.zeros_like(valid_B)
    has_signal_B[row_S] = steps.has_signal_B
    return PositionAdvantages(at_end_BT.flip(1).cumsum(1).flip(1), has_signal_B)


def _check_steps(step_rewards: Sequence[Tensor], step_ends: Sequence[Tensor], valid_B: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless every rollout has as many rewards as rising ends within the tokens."""
    if not len(step_rewards) == len(step_ends) == valid_B.numel() > 0:
        raise ValueError(
            f"{len(step_rewards)} step_rewards, {len(step_ends)} step_ends and {valid_B.numel()} valid flags: "
            "expected one each per rollout, and at least one rollout"
        )
    for row, (rewards, ends) in enumerate(zip(step_rewards, step_ends, strict=True)):
        require_rank(1, step_rewards=rewards, step_ends=ends)
        if rewards.shape != ends.shape:
            raise ValueError(f"rollout {row} has {rewards.numel()} step rewards and {ends.numel()} step ends")
        bounds = [0, *ends.tolist()]
        if bounds[-1] > num_tokens or any(after <= before for before, after in pairwise(bounds)):
            raise ValueError(f"step_ends {ends.tolist()} of rollout {row}: expected rising, from 1 to {num_tokens}")
