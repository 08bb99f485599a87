"""Advantages: what each rollout scored beyond a baseline.

B rollouts of many groups, G rollouts of one. The valid flag says which of them were scored; the others get advantage
0, enter no statistic, and their reward may hold anything, NaN included. Groups are told apart by an index, of any
order and size, and are never padded or reshaped.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from stream_grpo.algo.choices import GROUP_BASELINES, GROUP_SCALES, Baseline, Scale, Std
from stream_grpo.algo.grouped import Groups, group_mean, group_quantile, group_spread, group_sum, groups_of
from stream_grpo.algo.shapes import require_rank, require_same_shape

BASELINES: tuple[Baseline, ...] = get_args(Baseline)
SCALES: tuple[Scale, ...] = get_args(Scale)

MAD_TO_STD = 1.4826
"""1 / the 0.75 quantile of the standard normal: median absolute deviation to standard deviation."""
MEAN_DEVIATION_TO_STD = 1.2533
"""sqrt(pi / 2): mean absolute deviation to standard deviation of a normal."""


class Advantages(NamedTuple):
    """Advantages of a batch and what they were made of."""

    advantage_B: Tensor
    """(reward - baseline) / scale; exactly 0 for invalid rollouts, and without signal under a group's own baseline."""
    has_signal_B: Tensor
    """bool: this rollout's group has two valid rewards further apart than the tolerance."""
    baseline_B: Tensor
    """0 for invalid rollouts."""
    scale_B: Tensor


def check_choices(baseline: Baseline, scale: Scale) -> None:
    """Raise ValueError for a name that is unknown or a pair that has no meaning."""
    if baseline not in BASELINES:
        raise ValueError(f"baseline {baseline!r}: expected {', '.join(BASELINES)}")
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r}: expected {', '.join(SCALES)}")
    if scale in GROUP_SCALES and baseline not in GROUP_BASELINES:
        raise ValueError(
            f"scale {scale!r} with baseline {baseline!r}: a group without spread keeps its advantage and would be "
            f"divided by the floor of its own spread; expected a baseline of {', '.join(GROUP_BASELINES)}"
        )


def group_advantage(
    rewards_B: Tensor,
    valid_B: Tensor,
    group_B: Tensor,
    *,
    baseline: Baseline,
    scale: Scale,
    signal_tolerance: float,
    scale_floor: float = 0.01,
    std: Std = "population",
    prior: float | None = None,
) -> Advantages:
    """A_i = (r_i - baseline_i) / max(scale_i, scale_floor) over the valid rollouts of each group, all [B].

    Baselines of the group: `group_mean` (GRPO, arXiv 2402.03300); `leave_one_out`, the mean of the others, unbiased
    for every number of valid rollouts (RLOO, arXiv 2402.14740); `group_median`. With these, a group of fewer than two
    valid rollouts, or whose rewards differ by no more than `signal_tolerance`, has advantages of exactly 0. Others:
    `running_mean` and `running_quantile` take `prior`, `batch_mean` the batch's mean, `none` 0 (REINFORCE).

    Scales: `group_std`; `batch_std`, of the unscaled advantages of the batch (REINFORCE++ with baseline, arXiv
    2501.03262); `batch_reward_std`, of its rewards (as TRL reads Lite PPO, arXiv 2508.08221); `group_mean`, for rewards
    of 0 or more (MaxRL, arXiv 2602.02710); `group_mad` (Hampel, 1974); `none` (Dr. GRPO, arXiv 2503.20783). The floor
    stands where others add an epsilon: rewards 1e-3 apart are not blown up to advantages of 1. The batch is what is
    passed: for its statistics to be those of a train batch, pass all of it.
    """
    check_choices(baseline, scale)
    _check_rewards(rewards_B, valid_B, scale_floor=scale_floor)
    groups = groups_of(group_B, valid_B)
    rewards_B = torch.where(valid_B, rewards_B, 0.0)

    has_signal_P = (groups.num_valid_P >= 2) & (group_spread(rewards_B, groups) > signal_tolerance)
    has_signal_B = has_signal_P[groups.index_B]
    acts_B = valid_B & has_signal_B if baseline in GROUP_BASELINES else valid_B
    baseline_B = torch.where(valid_B, _baseline(baseline, rewards_B, groups, prior), 0.0)
    deviation_B = torch.where(acts_B, rewards_B - baseline_B, 0.0)
    scale_B = _scale(scale, rewards_B, deviation_B, groups, std=std, floor=scale_floor)
    return Advantages(deviation_B / scale_B, has_signal_B, baseline_B, scale_B)


def running_mean(prior: float, rewards_B: Tensor, valid_B: Tensor, *, decay: float) -> float:
    """decay prior + (1 - decay) mean r over the valid rollouts; the prior itself where there is none."""
    if not 0 <= decay < 1:
        raise ValueError(f"decay {decay}: expected 0 or more and below 1")
    kept = _check_rewards(rewards_B, valid_B)
    return decay * prior + (1 - decay) * float(kept.mean()) if kept.numel() else prior


def running_quantile(prior: float, rewards_B: Tensor, valid_B: Tensor, *, quantile: float, step: float) -> float:
    """prior + step (quantile - share of valid rewards at or below the prior): stochastic approximation of a quantile.

    One step of Robbins and Monro (1951) down the pinball loss; the prior itself where there is no valid rollout.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile {quantile}: expected between 0 and 1")
    if step <= 0:
        raise ValueError(f"step {step}: expected above 0")
    kept = _check_rewards(rewards_B, valid_B)
    return prior + step * (quantile - float((kept <= prior).double().mean())) if kept.numel() else prior


def _baseline(baseline: Baseline, rewards_B: Tensor, groups: Groups, prior: float | None) -> Tensor:
    """The baseline of every rollout, [B]."""
    if baseline in ("running_mean", "running_quantile"):
        if prior is None:
            raise ValueError(f"prior None with baseline {baseline!r}: expected the number it has tracked so far")
        return torch.full_like(rewards_B, prior)
    if baseline == "batch_mean":
        return (rewards_B.sum() / groups.valid_B.sum().clamp(min=1)).expand_as(rewards_B)
    if baseline == "none":
        return torch.zeros_like(rewards_B)
    if baseline == "group_median":
        return group_quantile(rewards_B, groups, share=0.5)[groups.index_B]
    mean_B = group_mean(rewards_B, groups)[groups.index_B]
    if baseline == "group_mean":
        return mean_B
    # Mean of the others = r - n / (n - 1) (r - mean). A lone rollout has no others and no signal.
    num_valid_B = groups.num_valid_P[groups.index_B]
    return rewards_B - (rewards_B - mean_B) * num_valid_B / (num_valid_B - 1).clamp(min=1)


def _scale(scale: Scale, rewards_B: Tensor, deviation_B: Tensor, groups: Groups, *, std: Std, floor: float) -> Tensor:
    """What every deviation is divided by, at least the floor, [B]; 1 for none."""
    if std not in ("population", "sample"):
        raise ValueError(f"std {std!r}: expected population or sample")
    if scale == "none":
        return torch.ones_like(rewards_B)
    if scale == "batch_std":
        return _batch_std(deviation_B[groups.valid_B], std).clamp(min=floor).expand_as(rewards_B)
    if scale == "batch_reward_std":
        return _batch_std(rewards_B[groups.valid_B], std).clamp(min=floor).expand_as(rewards_B)
    if scale == "group_std":
        return _group_std(rewards_B, groups, std).clamp(min=floor)[groups.index_B]
    if scale == "group_mad":
        return _group_mad(rewards_B, groups, floor).clamp(min=floor)[groups.index_B]
    if bool((rewards_B < 0).any()):
        raise ValueError(f"a reward of {float(rewards_B.min())} with scale 'group_mean': expected 0 or more")
    return group_mean(rewards_B, groups).clamp(min=floor)[groups.index_B]


def _batch_std(values: Tensor, std: Std) -> Tensor:
    """Standard deviation of all values, a scalar; 0 for fewer than two."""
    if values.numel() < 2:
        return values.new_zeros(())
    return values.std(correction=1 if std == "sample" else 0)


def _group_std(rewards_B: Tensor, groups: Groups, std: Std) -> Tensor:
    """Standard deviation of every group, [P]; 0 for fewer than two valid rollouts."""
    centered_B = rewards_B - group_mean(rewards_B, groups)[groups.index_B]
    degrees_P = groups.num_valid_P - (1 if std == "sample" else 0)
    return (group_sum(centered_B.square(), groups) / degrees_P.clamp(min=1)).sqrt()


def _group_mad(rewards_B: Tensor, groups: Groups, floor: float) -> Tensor:
    """1.4826 median |r - median r| of every group, [P], or 1.2533 mean |r - median r| where that is below the floor.

    The median is 0 where more than half of a group scores alike, as pass or fail rewards do. The mean in its place
    (Iglewicz and Hoaglin, 1993) keeps a lone pass from being divided by the floor and worth 100.
    """
    distance_B = (rewards_B - group_quantile(rewards_B, groups, share=0.5)[groups.index_B]).abs()
    mad_P = MAD_TO_STD * group_quantile(distance_B, groups, share=0.5)
    return torch.where(mad_P >= floor, mad_P, MEAN_DEVIATION_TO_STD * group_mean(distance_B, groups))


def _check_rewards(rewards_B: Tensor, valid_B: Tensor, *, scale_floor: float = 1.0) -> Tensor:
    """The valid rewards, or ValueError for shape, dtype, a reward that is not finite, or the floor."""
    require_rank(1, rewards_B=rewards_B, valid_B=valid_B)
    require_same_shape(rewards_B=rewards_B, valid_B=valid_B)
    if not rewards_B.is_floating_point():
        raise ValueError(f"rewards_B has dtype {rewards_B.dtype}: expected a floating-point one")
    if scale_floor <= 0:
        raise ValueError(f"scale_floor {scale_floor}: expected above 0")
    kept = rewards_B[valid_B]
    if not bool(torch.isfinite(kept).all()):
        raise ValueError(f"a valid rollout has a reward that is not finite: {kept.tolist()}")
    return kept
