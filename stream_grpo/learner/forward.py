"""One forward pass: logprobs of given tokens, and entropy, under the distribution that the sampler draws from.

B sequences, T tokens, K of them at the end, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from stream_grpo.algo.filter_logits import filter_logits
from stream_grpo.learner.logprobs import token_entropy, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How the sampler makes a distribution of logits: the learner does the same, or its ratios are wrong."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def has_full_support(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p == 1.0 and self.top_k in (-1, 0) and self.min_p == 0.0

    def logprobs(self, logits_BTV: Tensor, token_ids_BT: Tensor) -> Tensor:
        """Of every token given those before it, [B, T]; 0 for the first."""
        return token_logprobs(self._filtered(logits_BTV), token_ids_BT, self._divisor)

    def entropy(self, logits_BTV: Tensor, token_ids_BT: Tensor, *, with_gradient: bool) -> Tensor:
        """In nats, of the distribution each token is drawn from, [B, T]."""
        with torch.set_grad_enabled(with_gradient):
            return token_entropy(self._filtered(logits_BTV), token_ids_BT, self._divisor)

    @property
    def _divisor(self) -> float:
        return self.temperature if self.has_full_support else 1.0

    def _filtered(self, logits_BTV: Tensor) -> Tensor:
        if self.has_full_support:
            return logits_BTV
        return filter_logits(
            logits_BTV.float() / self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


PLAIN = Distribution(temperature=1.0)
"""What a probe is measured under."""


def logits(model: Callable[..., Any], token_ids_BT: Tensor, num_last: int) -> Tensor:
    """Logits at the last `num_last` positions. Padding is on the right: causal attention never looks at it."""
    output = model(input_ids=token_ids_BT, use_cache=False, logits_to_keep=num_last)
    result: Tensor = output.logits
    return result


def with_fp32_head(model: Any) -> None:
    """Have the output head multiply in float32, whatever the dtype of the model.

    Logits in bfloat16 carry three digits: the logprobs of likely tokens, and with them the ratios, would be rounded
    (ScaleRL, arXiv 2510.13786).
    """
    head = model.get_output_embeddings()
    # Bound to the head, so that a copy of the model has a head with weights of its own.
    head.forward = MethodType(_fp32_forward, head)


def _fp32_forward(head: Any, hidden: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias.float()
    return linear(hidden.float(), head.weight.float(), bias)
