"""The policy loss: ratio, trust region, correction and aggregation composed, with statistics that add up.

B sequences, T tokens. Loss = 1/D sum over trained tokens of w(proximal / behavior) clip(policy / proximal, A).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from stream_grpo.algo.aggregate import Aggregation, aggregate
from stream_grpo.algo.clip import ClippedLoss, ppo_clip
from stream_grpo.algo.correction import Correction, correction_weight
from stream_grpo.algo.ratio import LogRatio, token_log_ratio
from stream_grpo.algo.shapes import require_rank, require_same_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """Detached float64 scalars over trained tokens; parts add up to the statistics of the whole."""

    num_tokens: Tensor
    num_clipped_low: Tensor
    num_clipped_high: Tensor
    num_clipped_dual: Tensor
    num_clamped: Tensor
    """Log ratios beyond the bound, of update and correction."""
    ratio_sum: Tensor
    """Of policy / proximal."""
    ratio_max: Tensor
    """Of policy / proximal."""
    k1_sum: Tensor
    k3_sum: Tensor
    weight_sum: Tensor
    """Of policy / behavior."""
    weight_square_sum: Tensor
    """Of policy / behavior."""

    def __add__(self, other: PolicyStats) -> PolicyStats:
        """The statistics of two parts together."""
        names = [f.name for f in fields(self) if f.name != "ratio_max"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return PolicyStats(**sums, ratio_max=torch.maximum(self.ratio_max, other.ratio_max))

    def metrics(self) -> dict[str, float]:
        """Plain numbers.

        k1 and k3 estimate KL(behavior || policy) per token from the behavior's own samples: k1 = -log R and
        k3 = R - 1 - log R with R = policy / behavior (joschu.net/blog/kl-approx.html). `ess` is the effective share
        of the tokens, (sum R)^2 / (n sum R^2): 1 when both policies are one.
        """
        n = max(float(self.num_tokens), 1.0)
        square_sum = float(self.weight_square_sum)
        return {
            "clip_share_low": float(self.num_clipped_low) / n,
            "clip_share_high": float(self.num_clipped_high) / n,
            "clip_share_dual": float(self.num_clipped_dual) / n,
            "ratio_mean": float(self.ratio_sum) / n,
            "ratio_max": float(self.ratio_max),
            "k1": float(self.k1_sum) / n,
            "k3": float(self.k3_sum) / n,
            "ess": float(self.weight_sum) ** 2 / (n * square_sum) if square_sum else 0.0,
            "num_clamped": float(self.num_clamped),
        }


def policy_loss(
    policy_logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor | None,
    behavior_logprobs_BT: Tensor,
    advantage_B: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    correction: Correction,
    correction_low: float,
    correction_high: float,
    aggregation: Aggregation,
    denominator: float,
) -> tuple[Tensor, PolicyStats]:
    """This part's share of the loss (scalar, with gradient to the policy logprobs alone) and its statistics.

    With correction `none` the proximal policy is the behavior policy: `proximal_logprobs_BT` is None and staleness
    stands in the clipped ratio. With any other correction it is the policy at the start of the learner step (decoupled
    PPO, arXiv 2110.00641). Values under the mask may be anything, NaN included. Raises ValueError for shapes and when
    a correction cannot act.
    """
    if (proximal_logprobs_BT is None) != (correction == "none"):
        raise ValueError(f"correction {correction!r}: proximal logprobs are needed for all corrections but 'none'")
    require_rank(1, advantage_B=advantage_B)
    if advantage_B.shape[0] != mask_BT.shape[0]:
        raise ValueError(f"{advantage_B.shape[0]} advantages for {mask_BT.shape[0]} sequences")
    proximal_BT = (behavior_logprobs_BT if proximal_logprobs_BT is None else proximal_logprobs_BT).detach()
    behavior_BT = behavior_logprobs_BT.detach()

    update = token_log_ratio(policy_logprobs_BT, proximal_BT, mask_BT)
    staleness = token_log_ratio(proximal_BT, behavior_BT, mask_BT)
    total = token_log_ratio(policy_logprobs_BT.detach(), behavior_BT, mask_BT)

    advantage_BT = advantage_B.unsqueeze(1).expand_as(mask_BT)
    clipped = ppo_clip(update.log_ratio_BT, advantage_BT, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight_BT = correction_weight(correction, staleness.log_ratio_BT, low=correction_low, high=correction_high)
    loss = aggregate(aggregation, clipped.loss_BT * weight_BT, mask_BT, denominator)
    return loss, _statistics(update, staleness, total, clipped, mask_BT)


def _statistics(
    update: LogRatio, staleness: LogRatio, total: LogRatio, clipped: ClippedLoss, mask_BT: Tensor
) -> PolicyStats:
    require_same_shape(update=update.log_ratio_BT, total=total.log_ratio_BT, mask=mask_BT)
    mask_BT = mask_BT.double()
    ratio_BT = update.log_ratio_BT.detach().double().exp() * mask_BT
    total_log_BT = total.log_ratio_BT.double()
    total_BT = total_log_BT.exp()
    return PolicyStats(
        num_tokens=mask_BT.sum(),
        num_clipped_low=(clipped.clipped_low_BT * mask_BT).sum(),
        num_clipped_high=(clipped.clipped_high_BT * mask_BT).sum(),
        num_clipped_dual=(clipped.clipped_dual_BT * mask_BT).sum(),
        num_clamped=(update.num_clamped + staleness.num_clamped).double(),
        ratio_sum=ratio_BT.sum(),
        ratio_max=ratio_BT.max() if ratio_BT.numel() else mask_BT.sum(),
        k1_sum=-total_log_BT.sum(),
        k3_sum=(torch.expm1(total_log_BT) - total_log_BT).sum(),
        weight_sum=(total_BT * mask_BT).sum(),
        weight_square_sum=(total_BT.square() * mask_BT).sum(),
    )
