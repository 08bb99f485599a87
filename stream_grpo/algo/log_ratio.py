"""Log ratios of two policies, at the level a recipe asks for, and the proximal policy between them.

B sequences, T tokens. Three policies: policy (trained), proximal (start of the learner step), behavior (sampled).
policy / proximal is the update, proximal / behavior is staleness and engine mismatch, policy / behavior is both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.choices import ProximalMethod, RatioLevel
from stream_grpo.algo.shapes import require_rank, require_same_shape

LOG_RATIO_BOUND = 20.0
"""exp(20) is 4.9e8: beyond it a ratio says only that the two policies have nothing in common."""


class LogRatio(NamedTuple):
    """A log ratio and how often its bound acted."""

    log_ratio_BT: Tensor
    """Within the bound; 0 under the mask."""
    num_clamped: Tensor
    """Scalar: trained tokens on which the bound acted. The log ratio has no gradient there."""


def log_ratio(
    level: RatioLevel,
    numerator_BT: Tensor,
    denominator_BT: Tensor,
    mask_BT: Tensor,
    *,
    bound: float = LOG_RATIO_BOUND,
) -> LogRatio:
    """log (p / q) of every trained token [B, T], from two policies' logprobs, clamped to [-bound, bound].

    With l_t = log p_t - log q_t over the trained tokens of a sequence, a token's log ratio is
    token: l_t (PPO, arXiv 1707.06347).
    sequence_mean: mean_t l_t, for all its tokens (GSPO, arXiv 2507.18071).
    sequence_sum: sum_t l_t, the whole product, for all its tokens; the bound acts on the sum (VESPO, arXiv 2602.10693).
    prefix_min: l_t + min_{s<t} l_s, and l_t for the first token; the minimum is over earlier trained tokens, carries no
    gradient and may exceed 0 (MinPRO, arXiv 2601.22718). Here the bound acts on each l_t first, then on the result.

    Values under the mask may be anything: a NaN there reaches neither result nor gradient.
    """
    tensors = {"numerator": numerator_BT, "denominator": denominator_BT, "mask": mask_BT}
    require_rank(2, **tensors)
    require_same_shape(**tensors)
    if bound <= 0:
        raise ValueError(f"bound {bound}: expected above 0, it is the largest absolute log ratio")
    # The difference is linear: what is replaced after it reaches neither value nor gradient.
    token_BT = torch.where(mask_BT, numerator_BT - denominator_BT, 0.0)
    if level == "token":
        return _of_tokens(token_BT, bound)
    if level == "sequence_mean":
        return _of_sequence(sequence_mean(token_BT, mask_BT), mask_BT, bound)
    if level == "sequence_sum":
        return _of_sequence(token_BT.sum(dim=1, keepdim=True), mask_BT, bound)
    if level == "prefix_min":
        return _prefix_min(token_BT, mask_BT, bound)
    raise ValueError(f"ratio_level {level!r}: expected token, sequence_mean, sequence_sum or prefix_min")


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the trained tokens of each sequence, [B, 1]; 0 where nothing is trained.

    `values_BT` must be 0 under the mask.
    """
    return values_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def proximal_logprobs(
    method: ProximalMethod,
    *,
    recomputed_BT: Tensor | None = None,
    behavior_BT: Tensor,
    policy_BT: Tensor | None = None,
    age_BT: Tensor | None = None,
    mask_BT: Tensor,
) -> Tensor:
    """Logprobs of the proximal policy, [B, T], detached and 0 under the mask.

    recomputed: by a forward pass at the start of the learner step (decoupled PPO, arXiv 2110.00641).
    behavior: the behavior policy's own, so that the update ratio is policy / behavior.
    interpolated: log prox = log mu + a (log pi - log mu), a = (d - 1) / d for a token of policy age d >= 1 and a = 0 at
    age 0 (A-3PO, arXiv 2512.06547, and AReaL's `loglinear`). One step behind the policy on the line from behavior to
    policy: at ages 0 and 1 that is the behavior policy itself.
    """
    if method == "recomputed":
        proximal_BT = _given(method, "recomputed_BT", recomputed_BT)
    elif method == "behavior":
        proximal_BT = behavior_BT
    elif method == "interpolated":
        policy_BT = _given(method, "policy_BT", policy_BT).detach()
        age_BT = _given(method, "age_BT", age_BT)
        require_same_shape(policy=policy_BT, behavior=behavior_BT, age=age_BT)
        steps_BT = age_BT.to(policy_BT.dtype).clamp(min=1)
        proximal_BT = behavior_BT + (steps_BT - 1) / steps_BT * (policy_BT - behavior_BT)
    else:
        raise ValueError(f"proximal {method!r}: expected recomputed, behavior or interpolated")
    require_rank(2, proximal=proximal_BT, mask=mask_BT)
    require_same_shape(proximal=proximal_BT, mask=mask_BT)
    return torch.where(mask_BT, proximal_BT.detach(), 0.0)


def _given(method: ProximalMethod, name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is None: the proximal policy {method!r} is made from it, expected a tensor [B, T]")
    return value


def _of_tokens(token_BT: Tensor, bound: float) -> LogRatio:
    smallest, largest = token_BT.detach().aminmax()
    if -bound <= float(smallest) and float(largest) <= bound:  # nearly always, and the cheapest to find out
        return LogRatio(token_BT, torch.zeros((), dtype=torch.int64, device=token_BT.device))
    return LogRatio(token_BT.clamp(-bound, bound), torch.count_nonzero(_beyond(token_BT, bound)))


def _of_sequence(log_ratio_B1: Tensor, mask_BT: Tensor, bound: float) -> LogRatio:
    num_clamped = torch.count_nonzero(_beyond(log_ratio_B1, bound) & mask_BT)
    return LogRatio(log_ratio_B1.clamp(-bound, bound) * mask_BT, num_clamped)


def _prefix_min(token_BT: Tensor, mask_BT: Tensor, bound: float) -> LogRatio:
    bounded_BT = token_BT.clamp(-bound, bound)
    # An infinity marks "no trained token so far": bounded log ratios are finite.
    running_BT = torch.where(mask_BT, bounded_BT.detach(), torch.inf).cummin(dim=1).values
    earlier_BT = torch.nn.functional.pad(running_BT[:, :-1], (1, 0), value=torch.inf)
    earlier_BT = earlier_BT.nan_to_num(nan=torch.nan, posinf=0.0)
    product_BT = (bounded_BT + earlier_BT) * mask_BT
    num_clamped = torch.count_nonzero(_beyond(token_BT, bound) | _beyond(product_BT, bound))
    return LogRatio(product_BT.clamp(-bound, bound), num_clamped)


def _beyond(log_ratio: Tensor, bound: float) -> Tensor:
    return log_ratio.detach().abs() > bound
