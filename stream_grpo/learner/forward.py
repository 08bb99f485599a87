"""One forward pass: logprobs of given tokens, and entropy, under the distribution that the sampler draws from.

B sequences, T tokens, K of them at the end, V vocabulary; where prompts are shared R rows of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, pad

from stream_grpo.algo.filter_logits import filter_logits
from stream_grpo.learner.logprobs import entropy_at, logprobs_at, token_entropy, token_logprobs
from stream_grpo.learner.shared_prompts import SharedPrompts


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

    def logprobs(self, logits_BTV: Tensor, token_ids_BT: Tensor, support: Support | None = None) -> Tensor:
        """Of every token given those before it, [B, T]; 0 for the first."""
        logits_BTV = within(logits_BTV, support)
        return token_logprobs(self._filtered(logits_BTV), token_ids_BT, self._divisor)

    def entropy(
        self, logits_BTV: Tensor, token_ids_BT: Tensor, support: Support | None = None, *, with_gradient: bool
    ) -> Tensor:
        """In nats, of the distribution each token is drawn from, [B, T]."""
        with torch.set_grad_enabled(with_gradient):
            logits_BTV = within(logits_BTV, support)
            return token_entropy(self._filtered(logits_BTV), token_ids_BT, self._divisor)

    def logprobs_at(
        self, logits_RLV: Tensor, shared: Shared, token_ids_BT: Tensor, support: Support | None = None
    ) -> Tensor:
        """What `logprobs` gives for the last tokens, [B, K], from the logits of rows that share prompts."""
        ids_BJ = token_ids_BT[:, -shared.at_BJ.shape[1] :]
        given = self._filtered(within(logits_RLV, support, shared)), shared.row_B, shared.at_BJ
        return pad(logprobs_at(*given, ids_BJ, self._divisor), (1, 0))

    def entropy_at(
        self, logits_RLV: Tensor, shared: Shared, support: Support | None = None, *, with_gradient: bool
    ) -> Tensor:
        """What `entropy` gives for the last tokens, [B, K], from the logits of rows that share prompts."""
        with torch.set_grad_enabled(with_gradient):
            given = self._filtered(within(logits_RLV, support, shared)), shared.row_B, shared.at_BJ
            return pad(entropy_at(*given, self._divisor), (1, 0))

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


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that a grammar left to each draw, as a few masks that many draws share."""

    masks_MV: Tensor
    """True where the token could be drawn; the first mask is all of them."""
    index_BT: Tensor
    """The mask of the draw of each token."""

    def of_last(self, num_last: int) -> Support:
        """The same of the last tokens."""
        return Support(self.masks_MV, self.index_BT[:, -num_last:])


def within(logits_BTV: Tensor, support: Support | None, shared: Shared | None = None) -> Tensor:
    """Logits with -inf where the grammar did not let a token be drawn; `shared`: they are those of its rows."""
    if support is None:
        return logits_BTV
    # Token t is drawn from the logits at t - 1.
    index_BJ = support.index_BT[:, 1:]
    if shared is None:
        before_BT = pad(index_BJ, (0, 1))
    else:
        before_BT = index_BJ.new_zeros(logits_BTV.shape[:2])
        # All first actions begin in one state of the grammar, so that all draws after a shared prompt have one mask.
        is_drawn_BJ = index_BJ > 0
        row_BJ = shared.row_B.unsqueeze(1).expand_as(index_BJ)
        before_BT[row_BJ[is_drawn_BJ], shared.at_BJ[is_drawn_BJ]] = index_BJ[is_drawn_BJ]
    return logits_BTV.masked_fill(~support.masks_MV[before_BT], -torch.inf)


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of shared prompts on the device, see `shared_prompts`; logits are wanted from column `first` on."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    sees_RLL: Tensor
    row_B: Tensor
    at_BJ: Tensor
    """Where, counted from `first`, stands what gives a token its logits; J = K - 1 tokens a sequence."""
    first: int


def on_device(prompts: SharedPrompts, lengths_B: NDArray[np.int64], first: int, device: torch.device) -> Shared:
    """The rows as tensors, for logits from column `first` on: no later than the end of any prompt."""
    arrays = (
        prompts.token_ids_RL,
        prompts.position_ids_RL,
        prompts.sees(),
        prompts.row_B,
        prompts.before(lengths_B, first) - first,
    )
    ids_RL, positions_RL, sees_RLL, row_B, at_BJ = (torch.from_numpy(array).to(device) for array in arrays)
    return Shared(ids_RL, positions_RL, sees_RLL, row_B, at_BJ, first)


def has_windows(model_config: Any) -> bool:
    """Whether any layer sees a part of the sequence alone: such a layer takes our mask in place of its window."""
    kinds = getattr(model_config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(model_config, "sliding_window", None))


def shared_logits(model: Callable[..., Any], shared: Shared, dtype: torch.dtype) -> Tensor:
    """[R, L - first, V] logits of rows that share prompts. The model's attention takes a mask of four dimensions."""
    num_last = shared.token_ids_RL.shape[1] - shared.first
    output = model(**shared_inputs(shared, dtype), use_cache=False, logits_to_keep=num_last)
    result: Tensor = output.logits
    return result


def shared_inputs(shared: Shared, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a model is given of such rows: ids, positions, and 0 or the least number for who sees whom."""
    hidden = torch.zeros(shared.sees_RLL.shape, dtype=dtype, device=shared.sees_RLL.device)
    hidden.masked_fill_(~shared.sees_RLL, torch.finfo(dtype).min)
    return {
        "input_ids": shared.token_ids_RL,
        "attention_mask": hidden.unsqueeze(1),
        "position_ids": shared.position_ids_RL,
    }


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
