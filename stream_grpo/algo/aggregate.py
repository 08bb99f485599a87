"""From losses per token to the loss of a batch that is cut into microbatches and ranks.

B sequences, T tokens. The denominator is global: it is counted once over every microbatch and rank of an optimizer
update and handed in, so that the sum of the parts is the loss of the whole, however it is cut.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from stream_grpo.algo.choices import Aggregation
from stream_grpo.algo.shapes import require_rank, require_same_shape

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


class BatchCounts(NamedTuple):
    """What an optimizer update trains, over all its microbatches and ranks, counted before any rejection mask.

    Before, because a mask that took its tokens out of the denominator as well would raise the weight of those it keeps.
    """

    num_tokens: int
    num_sequences: int
    """Sequences with a trained token."""
    num_problems: int
    """Problems with a trained token."""
    num_constant: int
    """Rollouts of all groups x max_new_tokens: groups x group_size x max_new_tokens where all are of one size."""


def denominator(aggregation: Aggregation, counts: BatchCounts) -> float:
    """What the summed loss of an optimizer update is divided by.

    tokens (DAPO, arXiv 2503.14476), sequences (GRPO, arXiv 2402.03300), problems (prompt averaging of ScaleRL, arXiv
    2510.13786), constant (Dr. GRPO, arXiv 2503.20783).
    """
    if aggregation == "tokens":
        return float(counts.num_tokens)
    if aggregation == "sequences":
        return float(counts.num_sequences)
    if aggregation == "problems":
        return float(counts.num_problems)
    if aggregation == "constant":
        return float(counts.num_constant)
    raise ValueError(f"aggregation {aggregation!r}: expected {', '.join(AGGREGATIONS)}")


def aggregate(
    aggregation: Aggregation,
    loss_BT: Tensor,
    mask_BT: Tensor,
    *,
    tokens_B: Tensor | None = None,
    problem_tokens_B: Tensor | None = None,
    denominator: float,
) -> Tensor:
    """This part's share of the loss, a scalar: sum of loss x `token_share` over trained tokens.

    Where nothing is trained the loss is 0 and still hangs on its graph.
    """
    require_rank(2, loss=loss_BT, mask=mask_BT)
    require_same_shape(loss=loss_BT, mask=mask_BT)
    share_B1 = token_share(
        aggregation, mask_BT, tokens_B=tokens_B, problem_tokens_B=problem_tokens_B, denominator=denominator
    )
    return (torch.where(mask_BT, loss_BT, 0.0) * share_B1.to(loss_BT.dtype)).sum()


def token_share(
    aggregation: Aggregation,
    mask_BT: Tensor,
    *,
    tokens_B: Tensor | None = None,
    problem_tokens_B: Tensor | None = None,
    denominator: float,
) -> Tensor:
    """1 / (own count x denominator) of every token of a sequence, [B, 1] in float64.

    The own count of a token is 1 for tokens and constant; for sequences `tokens_B`, the trained tokens of its
    sequence; for problems `problem_tokens_B`, those of all sequences of its problem, wherever they were put. Both are
    counted before any rejection mask.
    """
    if denominator < 0:
        raise ValueError(f"denominator {denominator}: expected 0 or more")
    if aggregation == "sequences":
        own_B1 = _own_count("tokens_B", tokens_B, mask_BT)
    elif aggregation == "problems":
        own_B1 = _own_count("problem_tokens_B", problem_tokens_B, mask_BT)
    elif aggregation in AGGREGATIONS:
        own_B1 = torch.ones(len(mask_BT), 1, device=mask_BT.device)
    else:
        raise ValueError(f"aggregation {aggregation!r}: expected {', '.join(AGGREGATIONS)}")
    if denominator == 0 and bool(mask_BT.any()):
        raise ValueError("denominator 0 with trained tokens: it was not counted over this part")
    return 1 / (own_B1.double() * (denominator or 1.0))


def _own_count(name: str, counts_B: Tensor | None, mask_BT: Tensor) -> Tensor:
    """The counts as a column of 1 or more, [B, 1]; ValueError where they leave out a trained token."""
    if counts_B is None:
        raise ValueError(f"{name} is missing: this aggregation divides by it")
    num_trained_B = mask_BT.sum(dim=1)
    require_same_shape(**{name: counts_B, "trained tokens": num_trained_B})
    if bool((counts_B < num_trained_B).any()):
        raise ValueError(f"{name} {counts_B.tolist()}: expected at least the trained tokens {num_trained_B.tolist()}")
    return counts_B.clamp(min=1).unsqueeze(1)
