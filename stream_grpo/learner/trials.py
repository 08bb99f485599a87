"""What a model is tried for at the learner's start: whether it gives the same logprobs however they are computed.

B sequences, K tokens of each at its end, N positions.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stream_grpo.learner.forward import Distribution, LanguageModel, Targets, has_windows, logits, on_device
from stream_grpo.learner.head import Question, asked, can_be_asked
from stream_grpo.learner.shared_prompts import shared_prompts

_LOGIT_BYTES = 4  # in float32
_log = logging.getLogger(__name__)
# Far above rounding, far below what another prompt in sight would do.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1}


def max_positions(model: LanguageModel, logits_bytes: int, vocab_size: int, device: torch.device) -> int | None:
    """How many positions' logits may exist at once; None for a model whose head cannot be asked for some."""
    if not can_be_asked(model.module):
        reason = f"its output head is a {type(model.module.get_output_embeddings()).__name__}"
    elif not gives_out_unchanged(model, device):
        reason = "it changes its logits behind the output head"
    else:
        return max(1, logits_bytes // (_LOGIT_BYTES * vocab_size))
    _log.warning("learner.logits_bytes has no effect on this model: %s", reason)
    return None


def attention_cost(
    model: LanguageModel, distribution: Distribution, vocab_size: int, device: torch.device, *, packing: bool
) -> float | None:
    """By the multiplications of a forward pass; None for a model whose attention does not take our mask."""
    module: Any = model.module
    text, weight = module.config.get_text_config(), module.get_input_embeddings().weight
    if has_windows(text):
        if packing:
            _log.warning("learner.packing has no effect: layers of this model see a window, for which they take masks")
        return None
    num_looked_up = 0 if text.tie_word_embeddings else getattr(weight, "ds_numel", weight.numel())
    num_weights: int = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters()) - num_looked_up
    gap = gap_of_rows(model, distribution, vocab_size, device, packing=packing)
    if gap > TOLERANCE[model.dtype]:
        _log.warning(
            "learner.share_prompts and learner.packing have no effect: logprobs of this model move by %.1e where "
            "sequences share a row, so that its attention does not keep them apart",
            gap,
        )
        return None
    # Of a token: 2 multiplications a weight. Of a pair: query times key and weight times value in every layer.
    return 2 * float(text.hidden_size * text.num_hidden_layers) / num_weights


@torch.no_grad()
def gap_of_rows(
    model: LanguageModel, distribution: Distribution, vocab_size: int, device: torch.device, *, packing: bool
) -> float:
    """Largest gap between the logprobs of a few sequences computed apart and in one row with their prompt once.

    With `packing` one of another prompt is in that row too.
    """
    num_sequences = 4 if packing else 3
    lengths_B, num_prompt_B = np.array([9, 7, 8, 6])[:num_sequences], np.array([4, 4, 4, 3])[:num_sequences]
    ids_BT = np.arange(9 * num_sequences).reshape(num_sequences, 9) % vocab_size
    ids_BT[:3, :4] = ids_BT[0, :4]
    blocks = np.array([0, 0, 0, 1])[:num_sequences]
    rows = shared_prompts(ids_BT, lengths_B, num_prompt_B, np.zeros(num_sequences, np.int64), blocks)
    first = int(num_prompt_B.min()) - 1
    shared, ids = on_device(rows, lengths_B, first, device), torch.from_numpy(ids_BT).to(device)
    apart, _ = model.logprobs(distribution, Targets(ids, ids.shape[1] - first))
    together, _ = model.logprobs(distribution, Targets(ids, ids.shape[1] - first, shared))
    is_token = torch.arange(first, 9, device=device) < torch.from_numpy(lengths_B).to(device)[:, None]
    return _largest_gap(apart, together, is_token)


@torch.no_grad()
def gives_out_unchanged(model: LanguageModel, device: torch.device) -> bool:
    """Whether what the output head gives out is what the model does: no scale, no bound on logits behind it."""
    # Whole numbers, which every dtype holds exactly; far apart, so that a bound shows.
    figures_1N = torch.arange(-4, 5, device=device, dtype=torch.float32).unsqueeze(0) * 25
    ids_1N = torch.zeros_like(figures_1N, dtype=torch.int64)
    question = Question(
        at_N=torch.arange(ids_1N.shape[1], device=device),
        measure=lambda *_: figures_1N,
        num_at_once=ids_1N.shape[1],
    )
    with asked(model.module, question):
        found = logits(model.call, ids_1N, ids_1N.shape[1])
    return found.shape == figures_1N.shape and torch.equal(found.float(), figures_1N)


def _largest_gap(one_BK: Tensor, other_BK: Tensor, is_token_BK: Tensor) -> float:
    # A token outside the support of a filter has -inf both ways; anything else that is not finite is no logprob.
    gap_BK = torch.where(one_BK == other_BK, 0.0, (one_BK - other_BK).abs()).nan_to_num(nan=torch.inf)
    return float(torch.where(is_token_BK, gap_BK, 0.0).max())
