"""Gradient weights: how strongly each token's log pi is pulled along its advantage.

B sequences, T tokens. Every first-order method is one loss, L = -(1/D) sum sg(w_t) A_t log pi_t, and differs in w_t
alone. `log_ratio_BT` is at the level its recipe chose, r = exp(log ratio). Log ratio and advantage are 0 under the
mask, and with them everything but the weight itself, which acts on that advantage. Weights are detached. Where a log
ratio stands at its upper bound, what is linear in r (ppo, plain) has no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.choices import WeightKind
from stream_grpo.algo.log_ratio import LOG_RATIO_BOUND, sequence_mean
from stream_grpo.algo.shapes import require_rank, require_same_shape

RATIO_BOUND = math.exp(LOG_RATIO_BOUND) * (1 - 1e-6)
"""A ratio above this stands at its bound, to the rounding of exp."""


class Weighted(NamedTuple):
    """A gradient weight per token, the value of the objective behind it, and where its bounds acted. All detached."""

    weight_BT: Tensor
    """w_t."""
    surrogate_BT: Tensor
    """Value of the published objective, to be maximised; 0 under the mask."""
    clipped_low_BT: Tensor
    """True where the ratio's lower bound acted."""
    clipped_high_BT: Tensor
    """True where the ratio's upper bound acted."""
    clipped_dual_BT: Tensor
    """True where the dual clip acted: advantage negative and ratio above it."""


def gradient_weight(
    kind: WeightKind,
    log_ratio_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    ratio_BT: Tensor | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    cap: float | None = None,
    soft_positive: float | None = None,
    soft_negative: float | None = None,
    gamma_positive: tuple[float, float] | None = None,
    gamma_negative: tuple[float, float] | None = None,
    policy_logprobs_BT: Tensor | None = None,
) -> Weighted:
    """The named weight of every token, [B, T]. Raises ValueError for shapes, settings or a name.

    The objectives of cispo, topr, gamma and reinforce are sg(w) A log pi. Their value needs `policy_logprobs_BT`;
    without it the value is w A, that of sg(w) A pi / sg(pi), which has the same gradient. `ratio_BT` is
    exp(log_ratio_BT) where it is at hand.
    """
    require_rank(2, log_ratio=log_ratio_BT, advantage=advantage_BT, mask=mask_BT)
    require_same_shape(log_ratio=log_ratio_BT, advantage=advantage_BT, mask=mask_BT)
    log_ratio_BT, advantage_BT = log_ratio_BT.detach(), advantage_BT.detach()
    ratio_BT = log_ratio_BT.exp() if ratio_BT is None else ratio_BT.detach()
    if kind == "ppo":
        weighted = ppo(ratio_BT, advantage_BT, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    elif kind == "soft":
        weighted = soft(ratio_BT, advantage_BT, positive=soft_positive, negative=soft_negative)
    elif kind == "geometric":
        weighted = geometric(log_ratio_BT, advantage_BT, mask_BT, clip_low=clip_low, clip_high=clip_high)
    elif kind == "plain":
        weighted = plain(ratio_BT, advantage_BT)
    elif kind == "cispo":
        weighted = cispo(ratio_BT, advantage_BT, cap=cap)
    elif kind == "topr":
        weighted = topr(ratio_BT, advantage_BT)
    elif kind == "gamma":
        weighted = gamma(log_ratio_BT, ratio_BT, advantage_BT, positive=gamma_positive, negative=gamma_negative)
    elif kind == "reinforce":
        weighted = reinforce(advantage_BT)
    else:
        names = "ppo, cispo, soft, topr, gamma, geometric, plain or reinforce"
        raise ValueError(f"weight {kind!r}: expected {names}")
    if policy_logprobs_BT is not None and kind in ("cispo", "topr", "gamma", "reinforce"):
        require_same_shape(policy_logprobs=policy_logprobs_BT, mask=mask_BT)
        logprobs_BT = torch.where(mask_BT, policy_logprobs_BT.detach(), 0.0)
        weighted = weighted._replace(surrogate_BT=weighted.surrogate_BT * logprobs_BT)
    # All else is 0 or False with advantage 0 and log ratio 0.
    return weighted._replace(clipped_high_BT=weighted.clipped_high_BT & mask_BT)


def ppo(
    ratio_BT: Tensor,
    advantage_BT: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> Weighted:
    """w = r, and 0 where min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) takes its bound; [B, T].

    PPO (arXiv 1707.06347) with separate bounds (DAPO, arXiv 2503.14476). A dual clip also bounds it from below by
    dual_clip A where A < 0 (arXiv 1912.09729). At level sequence_mean this is GSPO-token (arXiv 2507.18071).
    """
    clip_low, clip_high = _clips("ppo", clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip {dual_clip}: expected above 1, it bounds the ratio from above where A < 0")
    free_BT = ratio_BT * advantage_BT
    surrogate_BT = torch.minimum(free_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantage_BT)
    clipped_BT = surrogate_BT < free_BT
    high_BT = clipped_BT & (advantage_BT > 0)
    dual_BT = torch.zeros_like(high_BT)
    if dual_clip is not None:
        dual_BT = (advantage_BT < 0) & (ratio_BT > dual_clip)
        surrogate_BT = torch.where(dual_BT, dual_clip * advantage_BT, surrogate_BT)
    return Weighted(
        weight_BT=_below_bound(ratio_BT) * ~(clipped_BT | dual_BT),
        surrogate_BT=surrogate_BT,
        clipped_low_BT=clipped_BT & ~high_BT,
        clipped_high_BT=high_BT,
        clipped_dual_BT=dual_BT,
    )


def cispo(ratio_BT: Tensor, advantage_BT: Tensor, *, cap: float | None) -> Weighted:
    """w = min(r, cap) for both signs of the advantage, [B, T] (CISPO, arXiv 2506.13585; ScaleRL, arXiv 2510.13786).

    The cap is the paper's 1 + eps_high, and what TRL calls epsilon_high; the paper's lower bound, which it leaves off,
    is left out. A capped token keeps its gradient.
    """
    if cap is None or cap <= 0:
        raise ValueError(f"cap {cap}: weight 'cispo' needs the largest ratio it lets through, a number above 0")
    weight_BT = ratio_BT.clamp(max=cap)
    return _unclipped(weight_BT, weight_BT * advantage_BT)._replace(clipped_high_BT=ratio_BT > cap)


def soft(ratio_BT: Tensor, advantage_BT: Tensor, *, positive: float | None, negative: float | None) -> Weighted:
    """w = 4 s (1 - s) r with s = sigmoid(tau (r - 1)), the gradient of (4 / tau) s A; [B, T] (SAPO, arXiv 2511.20347).

    tau is `positive` where A > 0 and `negative` elsewhere.
    """
    if positive is None or negative is None or positive <= 0 or negative <= 0:
        raise ValueError(f"soft_positive {positive}, soft_negative {negative}: temperatures, expected above 0")
    tau_BT = torch.where(advantage_BT > 0, torch.full_like(ratio_BT, positive), negative)
    logit_BT = tau_BT * (ratio_BT - 1)
    gate_BT = torch.sigmoid(logit_BT)
    # sigmoid(-x) is 1 - sigmoid(x) without its cancellation.
    weight_BT = 4 * gate_BT * torch.sigmoid(-logit_BT) * ratio_BT
    return _unclipped(weight_BT, 4 / tau_BT * gate_BT * advantage_BT)


def topr(ratio_BT: Tensor, advantage_BT: Tensor) -> Weighted:
    """w = 1 where A >= 0 and min(r, 1) where A < 0, [B, T] (TOPR, arXiv 2503.14286).

    The paper's r is the ratio of the whole sequence, level sequence_sum; Trinity-RFT takes the token's.
    """
    weight_BT = torch.where(advantage_BT < 0, ratio_BT.clamp(max=1), 1.0)
    return _unclipped(weight_BT, weight_BT * advantage_BT)


def gamma(
    log_ratio_BT: Tensor,
    ratio_BT: Tensor,
    advantage_BT: Tensor,
    *,
    positive: tuple[float, float] | None,
    negative: tuple[float, float] | None,
) -> Weighted:
    """w = r^k exp(lambda (1 - r)), [B, T], with (k, lambda) `positive` where A >= 0 and `negative` where A < 0.

    VESPO (arXiv 2602.10693); its r is the ratio of the whole sequence, level sequence_sum. The authors' code floors r
    at 1e-8 inside the power; the bound of the log ratio does that here.
    """
    if positive is None or negative is None or min(*positive, *negative) <= 0:
        raise ValueError(f"gamma_positive {positive}, gamma_negative {negative}: (k, lambda), expected above 0")
    one_minus_BT = 1 - ratio_BT
    log_positive_BT = positive[0] * log_ratio_BT + positive[1] * one_minus_BT
    log_negative_BT = negative[0] * log_ratio_BT + negative[1] * one_minus_BT
    weight_BT = torch.where(advantage_BT < 0, log_negative_BT, log_positive_BT).exp()
    return _unclipped(weight_BT, weight_BT * advantage_BT)


def geometric(
    log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, *, clip_low: float | None, clip_high: float | None
) -> Weighted:
    """w = exp(mean_t c_t) of the sequence, and 0 on clipped tokens, [B, T] (GMPO, arXiv 2507.20673).

    c_t is min(log r_t, clip_high) where A > 0 and max(log r_t, -clip_low) where A < 0: the bounds are log ratios, as
    in the paper (0.4) and its code. The paper's objective exp(mean_t c_t) A has 1 / T_sequence in its gradient: that is
    the aggregation `sequences`. Level token.
    """
    clip_low, clip_high = _clips("geometric", clip_low, clip_high)
    bounded_BT = log_ratio_BT.clamp(-clip_low, clip_high)
    clipped_BT = bounded_BT * advantage_BT < log_ratio_BT * advantage_BT
    ratio_B1 = sequence_mean(torch.where(clipped_BT, bounded_BT, log_ratio_BT), mask_BT).exp()
    weighted = _unclipped(ratio_B1 * ~clipped_BT, ratio_B1 * advantage_BT)
    high_BT = clipped_BT & (advantage_BT > 0)
    return weighted._replace(clipped_low_BT=clipped_BT & ~high_BT, clipped_high_BT=high_BT)


def plain(ratio_BT: Tensor, advantage_BT: Tensor) -> Weighted:
    """w = r, [B, T]: importance sampling as it is."""
    return _unclipped(_below_bound(ratio_BT), ratio_BT * advantage_BT)


def reinforce(advantage_BT: Tensor) -> Weighted:
    """w = 1, [B, T]: REINFORCE (Williams 1992), whoever sampled the tokens."""
    return _unclipped(torch.ones_like(advantage_BT), advantage_BT)


def _below_bound(ratio_BT: Tensor) -> Tensor:
    """The ratio, and 0 where it is flat, at its upper bound: a weight of exp(20) would drown all other tokens."""
    if float(ratio_BT.amax()) < RATIO_BOUND:
        return ratio_BT
    return torch.where(ratio_BT < RATIO_BOUND, ratio_BT, 0.0)


def _unclipped(weight_BT: Tensor, surrogate_BT: Tensor) -> Weighted:
    nowhere_BT = torch.zeros_like(weight_BT, dtype=torch.bool)
    return Weighted(weight_BT, surrogate_BT, nowhere_BT, nowhere_BT, nowhere_BT)


def _clips(kind: WeightKind, clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    if clip_low is None or clip_high is None or not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low {clip_low}, clip_high {clip_high}: weight {kind!r} needs both, 0 or more")
    return clip_low, clip_high
