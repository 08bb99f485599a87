"""Corrections: weights for tokens whose proximal and behavior policy differ, through staleness or engine mismatch.

B sequences, T tokens. rho = proximal / behavior. A weight carries no gradient, and it never changes a denominator:
otherwise the tokens that are kept would be inflated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank

Correction = Literal["none", "tis", "icepop"]


def correction_weight(method: Correction, log_rho_BT: Tensor, *, low: float, high: float) -> Tensor:
    """The named weight of every token, [B, T]. Raises ValueError for shapes, bounds or a name."""
    if method == "none":
        return torch.ones_like(log_rho_BT)
    if method == "tis":
        return truncated(log_rho_BT, high=high)
    if method == "icepop":
        return masked(log_rho_BT, low=low, high=high)
    raise ValueError(f"correction {method!r}: expected none, tis or icepop")


def truncated(log_rho_BT: Tensor, *, high: float) -> Tensor:
    """min(rho, high): truncated importance sampling (TIS), after IMPALA's truncated weights (arXiv 1802.01561)."""
    require_rank(2, log_rho=log_rho_BT)
    if high <= 0:
        raise ValueError(f"high {high}: expected above 0")
    return log_rho_BT.detach().exp().clamp(max=high)


def masked(log_rho_BT: Tensor, *, low: float, high: float) -> Tensor:
    """rho where low <= rho <= high, else 0 (IcePop, arXiv 2510.18855)."""
    require_rank(2, log_rho=log_rho_BT)
    if low >= high:
        raise ValueError(f"low {low}: expected below high {high}")
    rho_BT = log_rho_BT.detach().exp()
    return torch.where((rho_BT >= low) & (rho_BT <= high), rho_BT, 0.0)
