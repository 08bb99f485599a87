"""The KL term: how the policy is held near a reference.

B sequences, T tokens. x = log (policy / reference) of a sampled token. Under the policy's own tokens k1 and k3 have
the value of KL(policy || reference), k2 a biased one (joschu.net/blog/kl-approx.html); as a loss it is their gradients
that count, and these differ. Values under the mask may be anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from stream_grpo.algo.choices import KL, KLPlace
from stream_grpo.algo.log_ratio import log_ratio

STEER_BOUND = 0.2
"""Largest relative error the weight reacts to (Ziegler et al., arXiv 1909.08593)."""


class KLEstimate(NamedTuple):
    """A KL estimate per token and how often the bound on log ratios acted."""

    kl_BT: Tensor
    """0 under the mask."""
    num_clamped: Tensor
    """Scalar: trained tokens with a log ratio beyond the bound, in any of its ratios. They carry no gradient there."""


def check_kl_place(kl: KL, place: KLPlace) -> None:
    """Raise ValueError for a KL estimator where it does not do what it says."""
    if kl not in get_args(KL):
        raise ValueError(f"kl {kl!r}: expected none, k1, k2, k3 or k3_off_policy")
    if place not in get_args(KLPlace):
        raise ValueError(f"place {place!r}: expected reward, advantage or loss")
    if kl == "k1" and place == "loss":
        raise ValueError(
            "kl 'k1' in the loss: its expected gradient on-policy is 0, so it would hold nothing; "
            "expected k2, k3 or k3_off_policy, or k1 in the reward or advantage"
        )
    if kl not in ("none", "k1") and place != "loss":
        raise ValueError(
            f"kl {kl!r} in the {place}: only there k1 has the gradient of the KL; expected k1, or the loss"
        )


def kl_k1(policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> KLEstimate:
    """x, [B, T]. Its value is unbiased, its expected gradient on-policy 0: for rewards and advantages only."""
    x = log_ratio("token", policy_logprobs_BT, reference_logprobs_BT.detach(), mask_BT)
    return KLEstimate(x.log_ratio_BT, x.num_clamped)


def kl_k2(policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> KLEstimate:
    """x^2 / 2, [B, T]. Its expected gradient on-policy is that of KL(policy || reference), exactly."""
    x = log_ratio("token", policy_logprobs_BT, reference_logprobs_BT.detach(), mask_BT)
    return KLEstimate(x.log_ratio_BT.square() / 2, x.num_clamped)


def kl_k3(policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> KLEstimate:
    """exp(-x) - 1 + x, [B, T] (GRPO, arXiv 2402.03300).

    Its value is unbiased and never below 0. Its expected gradient on-policy is that of KL(reference || policy), the
    other direction: the same near the reference, unbounded where the policy gives up what the reference favours.
    """
    x = log_ratio("token", policy_logprobs_BT, reference_logprobs_BT.detach(), mask_BT)
    return KLEstimate(_k3(x.log_ratio_BT), x.num_clamped)


def kl_k3_off_policy(
    policy_logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor
) -> KLEstimate:
    """policy / proximal (exp(-x) - 1 + x) with gradient through both factors, [B, T] (DeepSeek-V3.2, arXiv 2512.02556).

    Under tokens sampled from the proximal policy, value and gradient are those of KL(policy || reference) without
    bias. Where tokens come from an older policy and no correction weight multiplies this term, pass the behavior
    logprobs as proximal.
    """
    x = log_ratio("token", policy_logprobs_BT, reference_logprobs_BT.detach(), mask_BT)
    update = log_ratio("token", policy_logprobs_BT, proximal_logprobs_BT.detach(), mask_BT)
    return KLEstimate(update.log_ratio_BT.exp() * _k3(x.log_ratio_BT), x.num_clamped + update.num_clamped)


def kl_loss(
    kl: KL,
    policy_logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
) -> KLEstimate:
    """The named estimator as a loss per token, [B, T]. Raises ValueError for k1, none or a name it does not know."""
    check_kl_place(kl, "loss")
    if kl == "k2":
        return kl_k2(policy_logprobs_BT, reference_logprobs_BT, mask_BT)
    if kl == "k3":
        return kl_k3(policy_logprobs_BT, reference_logprobs_BT, mask_BT)
    if kl == "k3_off_policy":
        return kl_k3_off_policy(policy_logprobs_BT, proximal_logprobs_BT, reference_logprobs_BT, mask_BT)
    raise ValueError("kl 'none' has no loss")


def kl_to_advantage(
    policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor, *, weight: float
) -> KLEstimate:
    """-weight x, detached, [B, T]: to be added to the advantage of its own token.

    Each token answers for its own divergence and not for that of the tokens after it.
    """
    k1 = kl_k1(policy_logprobs_BT.detach(), reference_logprobs_BT, mask_BT)
    return KLEstimate(-weight * k1.kl_BT, k1.num_clamped)


def kl_to_reward(
    policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor, *, weight: float
) -> tuple[Tensor, Tensor]:
    """(-weight sum of x over a sequence's trained tokens, detached, [B]; tokens clamped): to be added to the reward.

    The gradient of KL(policy || reference) of whole sequences, at the variance of a sum. It must be added before the
    advantages are made.
    """
    k1 = kl_k1(policy_logprobs_BT.detach(), reference_logprobs_BT, mask_BT)
    return -weight * k1.kl_BT.sum(dim=1), k1.num_clamped


def steer_weight(weight: float, observed: float, target: float, *, horizon: float, num_sequences: int) -> float:
    """weight (1 + e num_sequences / horizon), e = observed / target - 1 clipped to +-0.2 (arXiv 1909.08593).

    `horizon` is the number of sequences over which the weight changes by its own size at an error of 1.
    """
    if weight <= 0 or target <= 0 or horizon <= 0:
        raise ValueError(f"weight {weight}, target {target}, horizon {horizon}: expected above 0")
    if not 0 <= num_sequences <= horizon:
        raise ValueError(f"num_sequences {num_sequences}: expected 0 or more and at most horizon {horizon}")
    error = min(max(observed / target - 1, -STEER_BOUND), STEER_BOUND)
    return weight * (1 + error * num_sequences / horizon)


@torch.no_grad()
def ema_update(reference: Iterable[Tensor], policy: Iterable[Tensor], *, decay: float) -> None:
    """reference = decay reference + (1 - decay) policy, in place, tensor by tensor.

    Keep the reference in float32: in bfloat16 a step of (1 - decay) below 1/256 of a value is rounded away.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay {decay}: expected from 0 to 1")
    for held, current in zip(reference, policy, strict=True):
        held.lerp_(current.to(held), 1 - decay)


def _k3(x_BT: Tensor) -> Tensor:
    """exp(-x) - 1 + x, accurate near 0."""
    return torch.expm1(-x_BT) + x_BT
