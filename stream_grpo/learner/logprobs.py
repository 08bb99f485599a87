"""Logprobs of given tokens, and entropy, from logits.

B sequences, T tokens, V vocabulary. One index means one token everywhere: entry t belongs to token t, whose
distribution the logits at t - 1 give. The shift by one stands here and nowhere else. Token 0 has no predecessor and
its entry is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of every token given those before it, [B, T], in fp32 (fp64 from fp64).

    Logsumexp minus the chosen logit: the normalised [B, T, V] is never stored. Raises ValueError for shapes and a
    temperature that is not positive.
    """
    _check(logits_BTV, token_ids_BT, temperature)
    logits_BTV = _scaled(logits_BTV[:, :-1], temperature)
    chosen_BT = logits_BTV.gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    return pad(chosen_BT - logits_BTV.logsumexp(-1), (1, 0))


def logprobs_at(logits_RLV: Tensor, row_B: Tensor, at_BJ: Tensor, token_ids_BJ: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of tokens whose distributions lie at [row, at], [B, J].

    Raises ValueError for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: expected above 0")
    logits_RLV = _scaled(logits_RLV, temperature)
    rows_B1 = row_B.unsqueeze(1)
    return logits_RLV[rows_B1, at_BJ, token_ids_BJ] - logits_RLV.logsumexp(-1)[rows_B1, at_BJ]


def entropy_at(logits_RLV: Tensor, row_B: Tensor, at_BJ: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of the distributions at [row, at], [B, J]."""
    num_rows, length, vocab_size = logits_RLV.shape
    logits_NV, num_tokens = logits_RLV.reshape(-1, vocab_size), max(1, _CHUNK_ELEMENTS // vocab_size)
    starts = range(0, len(logits_NV), num_tokens)
    parts = [_entropy(_scaled(logits_NV[start : start + num_tokens], temperature)) for start in starts]
    return torch.cat(parts).reshape(num_rows, length)[row_B.unsqueeze(1), at_BJ]


def token_entropy(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of the distribution each token is drawn from, [B, T]."""
    _check(logits_BTV, token_ids_BT, temperature)
    # Some sequences at a time: a metric must not be what memory runs out on.
    num_rows = max(1, _CHUNK_ELEMENTS // logits_BTV[0].numel())
    starts = range(0, len(logits_BTV), num_rows)
    parts = [_entropy(_scaled(logits_BTV[start : start + num_rows, :-1], temperature)) for start in starts]
    return pad(torch.cat(parts), (1, 0))


def _entropy(logits_BTV: Tensor) -> Tensor:
    log_p_BTV = logits_BTV.log_softmax(-1)
    # A logit of -inf has p = 0 and log p = -inf; its part of the entropy, and of its gradient, is 0.
    return -(log_p_BTV.exp() * log_p_BTV.masked_fill(log_p_BTV.isneginf(), 0.0)).sum(-1)


def _check(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float) -> None:
    if logits_BTV.ndim != 3 or logits_BTV.shape[:2] != token_ids_BT.shape:
        raise ValueError(f"logits {tuple(logits_BTV.shape)} do not fit token ids {tuple(token_ids_BT.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: expected above 0")


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1 else logits / temperature
