"""Trust masks: which tokens may move the policy at all.

B sequences, T tokens; N values, M of them. pi is the policy, mu the behavior policy, rho = proximal / behavior and R =
policy / behavior, both at token level and from `log_ratio`: bounded, and 0 under the mask. A mask never changes a
denominator: a rejected token counts in it as before, otherwise the tokens that are kept would be inflated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.log_ratio import sequence_mean
from stream_grpo.algo.shapes import require_rank, require_same_shape

Band = tuple[float, float]

PROBABILITY_FLOOR = 1e-8
"""A probability of all other tokens below this is rounding: float32 cannot tell it from 0."""


class Rejected(NamedTuple):
    """What the masks left, and what each of them took."""

    keep_BT: Tensor
    """True on trained tokens that every mask keeps."""
    reasons: dict[str, Tensor]
    """Name of each mask that is on -> the trained tokens [B, T] it rejects; a token may have several reasons."""


def trust_mask(
    staleness_log_BT: Tensor,
    total_log_BT: Tensor,
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    ratio_band: Band | None = None,
    tv: float | None = None,
    binary_kl: float | None = None,
    second_moment_bound: float | Tensor | None = None,
    sequence_band: Band | None = None,
    sequence_k3: float | None = None,
    negative_kl: float | None = None,
    veto: Band | None = None,
) -> Rejected:
    """Trained tokens that every mask with a bound keeps, [B, T], from log rho and log R; None turns a mask off."""
    tensors = {
        "staleness_log": staleness_log_BT,
        "total_log": total_log_BT,
        "policy_logprobs": policy_logprobs_BT,
        "behavior_logprobs": behavior_logprobs_BT,
        "advantage": advantage_BT,
    }
    require_rank(2, mask=mask_BT, **tensors)
    require_same_shape(mask=mask_BT, **tensors)
    # Logprobs and advantages are compared, never summed: a NaN under the mask decides about itself alone.
    log_rho_BT, log_R_BT, policy_BT, behavior_BT, advantage_BT = (tensor.detach() for tensor in tensors.values())
    keep: dict[str, Tensor] = {}
    if ratio_band is not None:
        keep["ratio_band"] = within_band(log_rho_BT, _band("ratio_band", ratio_band))
    if tv is not None:
        keep["tv"] = within_tv(policy_BT, behavior_BT, advantage_BT, delta=_bound("tv", tv))
    if binary_kl is not None:
        delta = _bound("binary_kl", binary_kl)
        keep["binary_kl"] = within_binary_kl(policy_BT, behavior_BT, advantage_BT, delta=delta)
    if second_moment_bound is not None:
        keep["second_moment"] = within_second_moment(log_R_BT, advantage_BT, bound=second_moment_bound)
    keep |= _keep_sequences(log_rho_BT, mask_BT, band=sequence_band, k3=sequence_k3, veto=veto)
    if negative_kl is not None:
        delta = _bound("negative_kl", negative_kl)
        keep["negative_kl"] = negative_within_kl(log_R_BT, advantage_BT, mask_BT, delta=delta)
    kept_BT = mask_BT
    for keep_BT in keep.values():
        kept_BT = kept_BT & keep_BT
    return Rejected(kept_BT, {name: mask_BT & ~keep_BT for name, keep_BT in keep.items()})


def within_band(log_rho_BT: Tensor, band: Band) -> Tensor:
    """lo <= rho <= hi, per token [B, T] (IcePop, arXiv 2510.18855, as a mask)."""
    return (log_rho_BT >= _log(band[0])) & (log_rho_BT <= _log(band[1]))


def within_tv(policy_BT: Tensor, behavior_BT: Tensor, advantage_BT: Tensor, *, delta: float) -> Tensor:
    """Not (A > 0 and pi - mu > delta) and not (A < 0 and pi - mu < -delta), per token [B, T].

    |pi - mu| is the total variation between "this token" and "any other" (DPPO-Binary-TV, arXiv 2602.04879).
    """
    moved_BT = policy_BT.exp() - behavior_BT.exp()
    return ~(((advantage_BT > 0) & (moved_BT > delta)) | ((advantage_BT < 0) & (moved_BT < -delta)))


def within_binary_kl(policy_BT: Tensor, behavior_BT: Tensor, advantage_BT: Tensor, *, delta: float) -> Tensor:
    """Not (KL > delta while pi - mu has the sign of A), per token [B, T].

    KL = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), of "this token" against "any other" (DPPO-Binary-KL, arXiv
    2602.04879). 1 - p is floored at 1e-8; verl adds as much to it.
    """
    mu_BT = behavior_BT.exp()
    others_policy_BT = (1 - policy_BT.exp()).clamp(min=PROBABILITY_FLOOR)
    others_behavior_BT = (1 - mu_BT).clamp(min=PROBABILITY_FLOOR)
    kl_BT = mu_BT * (behavior_BT - policy_BT)
    kl_BT = kl_BT + others_behavior_BT * (others_behavior_BT / others_policy_BT).log()
    return ~((kl_BT > delta) & (advantage_BT * (policy_BT - behavior_BT) > 0))


def within_second_moment(log_R_BT: Tensor, advantage_BT: Tensor, *, bound: float | Tensor) -> Tensor:
    """Not (|log R| > bound while log R has the sign of A), per token [B, T]; the bound is the batch's, see below."""
    return ~((log_R_BT.abs() > bound) & outward(log_R_BT, advantage_BT))


def outward(log_R_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """A > 0 and R > 1, or A < 0 and R < 1: the policy has already moved the way the advantage pulls; bool, [B, T]."""
    return advantage_BT * log_R_BT > 0


def second_moment_bound(log_R_N: Tensor, *, tau: float) -> Tensor:
    """Largest b such that the mean of (log R)^2 over |log R| <= b is below tau; inf where no value need go. Scalar.

    M2PO (arXiv 2510.01161; tau 0.04) drops the largest until the mean of the rest is below tau. `log_R_N` is over a
    whole batch, all ranks and microbatches, of the tokens that may be dropped: in the authors' code the `outward`
    ones (they then clip at the bound), in AReaL's all tokens, on rho.
    """
    require_rank(1, log_R=log_R_N)
    if tau <= 0:
        raise ValueError(f"tau {tau}: expected above 0, it bounds the mean squared log ratio")
    sizes_N = log_R_N.detach().abs()
    if sizes_N.numel() == 0 or bool(sizes_N.square().mean() < tau):
        return sizes_N.new_tensor(torch.inf)
    # Squares below tau are never dropped: a mean of such is below tau. Only the others need an order.
    small_N, large_M = sizes_N[sizes_N.square() < tau], sizes_N[sizes_N.square() >= tau].sort().values
    counts_M = torch.arange(1, large_M.numel() + 1, device=sizes_N.device) + small_N.numel()
    means_M = (small_N.square().sum() + large_M.square().cumsum(dim=0)) / counts_M
    num_kept = int(torch.count_nonzero(means_M < tau))
    if num_kept == large_M.numel():
        return sizes_N.new_tensor(torch.inf)
    # Values equal to the first one that goes go with it: a bound cannot tell them apart.
    kept = torch.cat((small_N, large_M[:num_kept]))
    kept = kept[kept < large_M[num_kept]]
    return kept.max() if kept.numel() else sizes_N.new_zeros(())


def negative_within_kl(log_R_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, *, delta: float) -> Tensor:
    """Not (A < 0 and mean_t log(mu / pi) of its sequence > delta), [B, T] (DeepSeek-V3.2, arXiv 2512.02556)."""
    return ~((advantage_BT < 0) & (-sequence_mean(log_R_BT, mask_BT) > delta))


def _keep_sequences(
    log_rho_BT: Tensor, mask_BT: Tensor, *, band: Band | None, k3: float | None, veto: Band | None
) -> dict[str, Tensor]:
    """Masks that keep or reject a whole sequence, each [B, T], from log rho.

    sequence_band: lo <= exp(mean_t log rho_t) <= hi. sequence_k3: mean_t (rho_t - 1 - log rho_t) <= c. veto: every
    rho_t within [lo, hi]. As in verl's rollout correction and SkyRL's off-policy correction.
    """
    keep: dict[str, Tensor] = {}
    if band is not None:
        mean_B1 = sequence_mean(log_rho_BT, mask_BT)
        keep["sequence_band"] = within_band(mean_B1, _band("sequence_band", band)).expand_as(mask_BT)
    if k3 is not None:
        k3_B1 = sequence_mean(torch.expm1(log_rho_BT) - log_rho_BT, mask_BT)
        keep["sequence_k3"] = (k3_B1 <= _bound("sequence_k3", k3)).expand_as(mask_BT)
    if veto is not None:
        within_BT = within_band(log_rho_BT, _band("veto", veto))
        keep["veto"] = within_BT.all(dim=1, keepdim=True).expand_as(mask_BT)
    return keep


def _band(name: str, band: Band) -> Band:
    low, high = band
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"{name} {band}: expected 0 <= low <= 1 <= high, so that matched policies are kept")
    return band


def _bound(name: str, bound: float) -> float:
    if not bound >= 0:
        raise ValueError(f"{name} {bound}: expected 0 or more")
    return bound


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
