"""The size of an optimizer step by how much its importance weights are worth.

Weights of any shape: one per sequence [B], or one per token [B, T] under a mask. VCPO takes sequence weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_same_shape

LOG_WEIGHT_BOUND = 300.0
"""exp(600) and sums of it fit a float64: up to here plain sums add over ranks without a common shift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSums:
    """Detached float64 scalars; the sums of microbatches and ranks add up to those of the whole."""

    weight_sum: Tensor
    weight_square_sum: Tensor
    num_weights: Tensor

    def __add__(self, other: WeightSums) -> WeightSums:
        """The sums of two parts together."""
        return WeightSums(
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
            num_weights=self.num_weights + other.num_weights,
        )

    def effective_share(self) -> float:
        """Effective sample size over n, (sum w)^2 / (n sum w^2) (Kong, 1992).

        1 for equal weights, 1 / n for one that outweighs all, 0 for none at all.
        """
        if float(self.num_weights) == 0:
            return 0.0
        return float(self.weight_sum / self.weight_square_sum * self.weight_sum / self.num_weights)


def weight_sums(log_weight: Tensor, mask: Tensor) -> WeightSums:
    """Sum of w, sum of w^2 and number of the weights w = exp(log_weight) under the mask.

    Log weights are clamped to [-300, 300], where a float64 ends; what the mask leaves out may hold anything.
    """
    require_same_shape(log_weight=log_weight, mask=mask)
    kept = log_weight.detach()[mask].double().clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND)
    num_weights = torch.tensor(kept.numel(), dtype=torch.float64, device=kept.device)
    return WeightSums(weight_sum=kept.exp().sum(), weight_square_sum=(2 * kept).exp().sum(), num_weights=num_weights)


def learning_rate_scale(share: float, *, base: float = 1.0) -> float:
    """min(1, sqrt(share / base)): the factor on the learning rate (VCPO, arXiv 2602.17616).

    The noise of an importance-weighted gradient grows with 1 / effective sample size, and a learning rate goes with
    the root of its batch size. `base` is the share at which the learning rate was tuned: 1 for on-policy.
    """
    if not 0 <= share <= 1 + 1e-9:
        raise ValueError(f"share {share}: expected from 0 to 1")
    if not 0 < base <= 1:
        raise ValueError(f"base {base}: expected above 0 and at most 1")
    return float(min(1.0, share / base) ** 0.5)
