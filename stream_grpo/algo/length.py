"""Length in the objective: a term against longer-than-usual answers. What rewards say of length is made with them.

B rollouts. A length counts the tokens that were sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_grpo.algo.grouped import group_mean, groups_of
from stream_grpo.algo.shapes import require_rank, require_same_shape


def length_deviation(lengths_B: Tensor, valid_B: Tensor, group_B: Tensor, *, weight: float, acts_B: Tensor) -> Tensor:
    """weight (l - mean l) / mean l, the mean over valid rollouts of the group, [B]: to be subtracted from advantages.

    It goes on top of the scaled advantage, so that its size does not depend on the group's spread. `acts_B` says where
    it acts: pass `Advantages.has_signal_B`, or all True to let groups without signal learn length alone. 0 elsewhere,
    for invalid rollouts, and in a group of empty answers.
    """
    tensors = {"lengths_B": lengths_B, "valid_B": valid_B, "group_B": group_B, "acts_B": acts_B}
    require_rank(1, **tensors)
    require_same_shape(**tensors)
    if weight < 0:
        raise ValueError(f"weight {weight}: expected 0 or more")
    lengths_B = lengths_B if lengths_B.is_floating_point() else lengths_B.to(torch.get_default_dtype())
    groups = groups_of(group_B, valid_B)
    mean_B = group_mean(lengths_B, groups)[groups.index_B]
    acts_B = acts_B & valid_B & (mean_B > 0)
    return torch.where(acts_B, weight * (lengths_B - mean_B) / torch.where(acts_B, mean_B, 1.0), 0.0)
