"""Behavior weights: for tokens whose proximal and behavior policy differ, through staleness or engine mismatch.

B sequences, T tokens. rho = proximal / behavior, at token or sequence level, from `log_ratio`: bounded, and 0 under the
mask. A weight carries no gradient and never changes a denominator: otherwise what is kept would be inflated.
"""

from __future__ import annotations

from torch import Tensor

from stream_grpo.algo.choices import Correction
from stream_grpo.algo.shapes import require_rank, require_same_shape


def behavior_weight(
    kind: Correction, log_rho_BT: Tensor, mask_BT: Tensor, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """The named weight of every token, [B, T], detached and 0 under the mask.

    none: 1.
    truncated: min(rho, high) (TIS, after IMPALA's truncated weights, arXiv 1802.01561).
    masked: rho where low <= rho <= high, else 0 (IcePop, arXiv 2510.18855).
    both: min(rho, high) where low <= rho, else 0. verl truncates or masks, SkyRL multiplies a truncated weight by a
    two-sided mask; here the mask acts below alone, since what lies above is truncated.
    """
    require_rank(2, log_rho=log_rho_BT, mask=mask_BT)
    require_same_shape(log_rho=log_rho_BT, mask=mask_BT)
    if kind == "none":
        return mask_BT.to(log_rho_BT.dtype)
    rho_BT = log_rho_BT.detach().exp()
    if kind == "truncated":
        return rho_BT.clamp(max=_high(high)) * mask_BT
    if kind == "masked":
        return rho_BT * (mask_BT & (rho_BT >= _low(low)) & (rho_BT <= _high(high)))
    if kind == "both":
        return rho_BT.clamp(max=_high(high)) * (mask_BT & (rho_BT >= _low(low)))
    raise ValueError(f"correction {kind!r}: expected none, truncated, masked or both")


def _high(high: float | None) -> float:
    if high is None or not high >= 1:
        raise ValueError(f"correction_high {high}: expected 1 or more, so that matched policies have weight 1")
    return high


def _low(low: float | None) -> float:
    if low is None or not 0 <= low <= 1:
        raise ValueError(f"correction_low {low}: expected within [0, 1], so that matched policies have weight 1")
    return low
