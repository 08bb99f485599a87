"""From losses per token to the loss of a batch that is cut into microbatches and ranks.

B sequences, T tokens. The denominator is global: it is counted once over every microbatch and rank of an optimizer
update and handed in, so that the sum of the parts is the loss of the whole, however it is cut.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_grpo.algo.shapes import require_rank, require_same_shape

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def denominator(
    method: Aggregation,
    *,
    num_tokens: int,
    num_sequences: int,
    num_groups: int,
    group_size: int,
    max_new_tokens: int,
) -> float:
    """What the summed loss of an optimizer update is divided by; counts are over all its microbatches and ranks.

    token_mean: trained tokens (DAPO, arXiv 2503.14476). sequence_mean: sequences with trained tokens (GRPO, arXiv
    2402.03300). fixed_length: groups x group_size x max_new_tokens (Dr. GRPO, arXiv 2503.20783).
    """
    if method == "token_mean":
        return float(num_tokens)
    if method == "sequence_mean":
        return float(num_sequences)
    if method == "fixed_length":
        return float(num_groups * group_size * max_new_tokens)
    raise ValueError(f"aggregation {method!r}: expected token_mean, sequence_mean or fixed_length")


def aggregate(method: Aggregation, loss_BT: Tensor, mask_BT: Tensor, denominator: float) -> Tensor:
    """This part's share of the loss, a scalar: sum over trained tokens / denominator.

    sequence_mean divides each sequence by its own trained tokens first; a sequence is never cut over parts. Where
    nothing is trained (denominator 0) the loss is 0 and still hangs on its graph.
    """
    require_rank(2, loss=loss_BT, mask=mask_BT)
    require_same_shape(loss=loss_BT, mask=mask_BT)
    if denominator < 0:
        raise ValueError(f"denominator {denominator}: expected 0 or more")
    kept_BT = torch.where(mask_BT, loss_BT, 0.0)
    if method == "sequence_mean":
        kept_BT = kept_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    elif method not in ("token_mean", "fixed_length"):
        raise ValueError(f"aggregation {method!r}: expected token_mean, sequence_mean or fixed_length")
    if denominator == 0:
        if bool(mask_BT.any()):
            raise ValueError("denominator 0 with trained tokens: it was not counted over this part")
        return kept_BT.sum()
    return kept_BT.sum() / denominator
