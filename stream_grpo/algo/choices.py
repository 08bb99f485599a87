"""The names of the choices of a recipe, said once: the recipe offers them, the maths acts on them. No torch."""

from __future__ import annotations

from typing import Literal

AdvantageKind = Literal["reward", "gae"]
"""Where advantages come from."""
Baseline = Literal[
    "group_mean", "leave_one_out", "group_median", "running_mean", "running_quantile", "batch_mean", "none"
]
"""What is taken from a reward: of its group, of the run so far, or of the batch."""
Scale = Literal["none", "group_std", "batch_std", "batch_reward_std", "group_mean", "group_mad"]
"""What the difference is divided by."""
Std = Literal["population", "sample"]
"""Divided by n or by n - 1."""
StepAggregation = Literal["min", "product", "last", "mean", "weighted"]
"""How the step scores of a rollout become one number."""
RatioLevel = Literal["token", "sequence_mean", "sequence_sum", "prefix_min"]
"""Of what a ratio is taken."""
ProximalMethod = Literal["recomputed", "behavior", "interpolated"]
"""Where the logprobs of the proximal policy come from."""
WeightKind = Literal["ppo", "cispo", "soft", "topr", "gamma", "geometric", "plain", "reinforce"]
"""How the ratio becomes the weight of a token's gradient."""
Correction = Literal["none", "truncated", "masked", "both"]
"""The weight of proximal / behavior."""
Aggregation = Literal["tokens", "sequences", "problems", "constant"]
"""What has the same weight in the loss."""
KL = Literal["none", "k1", "k2", "k3", "k3_off_policy"]
"""Estimator of KL(policy || reference)."""
KLPlace = Literal["loss", "advantage", "reward"]
"""Where it acts."""

GROUP_BASELINES: tuple[Baseline, ...] = ("group_mean", "leave_one_out", "group_median")
"""Under these a group without spread has nothing to teach: its advantages are exactly 0."""
GROUP_SCALES: tuple[Scale, ...] = ("group_std", "group_mean", "group_mad")
"""Scales of a rollout's own group."""
