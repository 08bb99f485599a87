"""Random batches of small size, float64, and what a loss gives back on one.

B rollouts in groups of 4, T tokens. Three policies: policy, proximal, behavior, as in `stream_grpo/algo`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

GROUP_SIZE = 4
MAX_NEW_TOKENS = 32
"""The constant that Dr. GRPO divides by; never shorter than a batch is wide."""

Draw = Literal["mixed", "trained", "beyond"]
"""mixed: in every second batch some rollouts are fully masked. trained: every rollout has trained tokens.
beyond: as trained, and some token log ratios lie outside [-20, 20]."""


class Result(NamedTuple):
    """What is compared: the loss, and its derivative by every policy logprob, 0 where nothing is trained."""

    value: float
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Under the mask stand finite numbers that mean nothing: the peers multiply by 0."""

    policy_BT: Tensor
    proximal_BT: Tensor
    behavior_BT: Tensor
    advantage_B: Tensor
    mask_BT: Tensor
    length_B: Tensor
    """Tokens of the completion; those without a mask are observations."""
    rewards_B: Tensor
    valid_B: Tensor
    group_B: Tensor
    """Groups of any size for rewards; the loss does not read it."""

    def first_half(self) -> Batch:
        """The same with the second half of the rollouts untrained."""
        mask_BT = self.mask_BT.clone()
        mask_BT[len(mask_BT) // 2 :] = False
        return replace(self, mask_BT=mask_BT)


def draw(kind: Draw, num_batches: int, *, seed: int) -> list[Batch]:
    """Random batches of one kind; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [_batch(kind, i, generator) for i in range(num_batches)]


def _batch(kind: Draw, index: int, generator: torch.Generator) -> Batch:
    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) * (high - low) + low

    def integer(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape or (1,), generator=generator)

    def log_ratio(size: float) -> Tensor:
        normal = torch.randn(B, T, generator=generator, dtype=torch.float64) * 0.25
        return torch.where(uniform(B, T) < 0.04, uniform(B, T, low=-size, high=size), normal.clamp(-1, 1))

    B, T = GROUP_SIZE * int(integer(1, 2)), int(integer(4, 24))
    policy_BT = -uniform(B, T, low=0.02, high=4.0)
    # A logprob is below 0, whatever the drawn ratio.
    proximal_BT = (policy_BT - log_ratio(4.0)).clamp(max=-1e-3)
    behavior_BT = (proximal_BT - log_ratio(3.0)).clamp(max=-1e-3)
    if kind == "beyond":
        far_BT, up_BT = uniform(B, T) < 0.1, uniform(B, T) < 0.5
        policy_BT = torch.where(far_BT & ~up_BT, policy_BT - 25, policy_BT)
        proximal_BT = torch.where(far_BT & up_BT, proximal_BT - 25, proximal_BT)

    length_B = integer(1, T, B)
    length_B[int(integer(0, B - 1))] = T
    mask_BT = (torch.arange(T) < length_B[:, None]) & (uniform(B, T) > 0.1)
    mask_BT[:, 0] = True
    if kind == "mixed" and index % 2:
        masked_B = uniform(B) < 0.3
        masked_B[int(integer(0, B - 1))] = True
        masked_B[int(integer(0, B - 1))] = False
        mask_BT &= ~masked_B[:, None]

    advantage_B = torch.randn(B, generator=generator, dtype=torch.float64)
    advantage_B[uniform(B) < 0.15] = 0.0
    graded = index % 3 == 0
    rewards_B = uniform(B) if graded else integer(0, 1, B).double()
    return Batch(
        policy_BT=policy_BT,
        proximal_BT=proximal_BT,
        behavior_BT=behavior_BT,
        advantage_B=advantage_B,
        mask_BT=mask_BT,
        length_B=length_B,
        rewards_B=rewards_B,
        valid_B=uniform(B) > 0.1,
        group_B=integer(0, B // 2, B),
    )
