"""Log ratios of two policies, token by token.

B sequences, T tokens. Two ratios are kept apart: policy / proximal is the update, proximal / behavior is staleness and
engine mismatch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank, require_same_shape

LOG_RATIO_BOUND = 20.0
"""exp(20) is 4.9e8: beyond it a ratio says only that the two policies have nothing in common."""


class LogRatio(NamedTuple):
    """A log ratio and how often its bound acted."""

    log_ratio_BT: Tensor
    """0 under the mask."""
    num_clamped: Tensor
    """Scalar: trained tokens whose log ratio lay beyond the bound. They carry no gradient."""


def token_log_ratio(
    numerator_logprobs_BT: Tensor, denominator_logprobs_BT: Tensor, mask_BT: Tensor, bound: float = LOG_RATIO_BOUND
) -> LogRatio:
    """log (p / q) of every trained token, clamped to [-bound, bound].

    Values under the mask are replaced before any arithmetic: a NaN there reaches neither result nor gradient.
    """
    tensors = {"numerator": numerator_logprobs_BT, "denominator": denominator_logprobs_BT, "mask": mask_BT}
    require_rank(2, **tensors)
    require_same_shape(**tensors)
    numerator_BT = torch.where(mask_BT, numerator_logprobs_BT, 0.0)
    denominator_BT = torch.where(mask_BT, denominator_logprobs_BT, 0.0)
    log_ratio_BT = numerator_BT - denominator_BT
    num_clamped = (log_ratio_BT.detach().abs() > bound).sum()
    return LogRatio(log_ratio_BT.clamp(-bound, bound), num_clamped)
