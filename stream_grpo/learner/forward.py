"""One forward pass: logprobs of given tokens, and entropy, under the distribution that the sampler draws from.

B sequences, T tokens, K of them at the end, J = K - 1, V vocabulary; where prompts are shared or sequences packed R
rows of L tokens. N tokens that are asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from stream_grpo.algo.filter_logits import filter_logits
from stream_grpo.learner.head import Question, asked
from stream_grpo.learner.logprobs import entropy_at, logprobs_at, token_entropy, token_logprobs
from stream_grpo.learner.shared_prompts import SharedPrompts

Entropy = Literal["gradient", "value", "none"]
"""Whether it is wanted, and with a gradient; 0 where it is not."""


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

    def logprobs_at(self, logits_RLV: Tensor, shared: Shared, token_ids_BT: Tensor) -> Tensor:
        """What `logprobs` gives for the last tokens, [B, K], from the logits of rows that share prompts."""
        ids_BJ = token_ids_BT[:, -shared.at_BJ.shape[1] :]
        given = self._filtered(logits_RLV), shared.row_B, shared.at_BJ
        return pad(logprobs_at(*given, ids_BJ, self._divisor), (1, 0))

    def entropy_at(self, logits_RLV: Tensor, shared: Shared, *, with_gradient: bool) -> Tensor:
        """What `entropy` gives for the last tokens, [B, K], from the logits of rows that share prompts."""
        with torch.set_grad_enabled(with_gradient):
            given = self._filtered(logits_RLV), shared.row_B, shared.at_BJ
            return pad(entropy_at(*given, self._divisor), (1, 0))

    def measured(self, logits_NV: Tensor, token_ids_N: Tensor, entropy: Entropy) -> Tensor:
        """[2, N]: logprob of each token and entropy of the distribution that its own logits are of."""
        one, logits_1NV = logits_NV.new_zeros(1, dtype=torch.int64), self._filtered(logits_NV.unsqueeze(0))
        at_1N = torch.arange(len(token_ids_N), device=logits_NV.device).unsqueeze(0)
        logprobs_1N = logprobs_at(logits_1NV, one, at_1N, token_ids_N.unsqueeze(0), self._divisor)
        if entropy == "none":
            return torch.cat([logprobs_1N, torch.zeros_like(logprobs_1N)])
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            entropy_1N = entropy_at(logits_1NV, one, at_1N, self._divisor)
        return torch.cat([logprobs_1N, entropy_1N])

    @property
    def _divisor(self) -> float:
        return self.temperature if self.has_full_support else 1.0

    def _filtered(self, logits_BTV: Tensor) -> Tensor:
        if self.has_full_support:
            return logits_BTV
        logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
        return filter_logits(logits_BTV / self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


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
    """Rows of several sequences on the device, see `shared_prompts`; logits are wanted from column `first` on."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    sees_RLL: Tensor
    row_B: Tensor
    at_BJ: Tensor
    """Where, counted from `first`, stands what gives a token its logits; J = K - 1 tokens a sequence."""
    first: int
    is_packed: bool = False
    """Whether a row has more than one prompt, so that many positions between give no token its logits."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a model is asked about: the last tokens of B sequences, given all before them."""

    token_ids_BT: Tensor
    num_last: int
    """K, of every sequence."""
    shared: Shared | None = None
    """The same sequences as rows of several, where that is how they are computed."""
    turns_BT: Tensor | None = None
    """The action that each sampled token is part of, -1 for all others, where a grammar makes that matter."""
    wanted_BK: Tensor | None = None
    """Where the result is looked at; elsewhere it may be 0. None: everywhere."""


def on_device(prompts: SharedPrompts, lengths_B: NDArray[np.int64], first: int, device: torch.device) -> Shared:
    """The rows as tensors, for logits from column `first` on; every sequence is longer than `first`."""
    at_BJ = prompts.before(lengths_B, first) - first
    assert (at_BJ >= 0).all(), f"sequences of {lengths_B} tokens, looked at from {first} on"

    def moved(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Shared(
        moved(prompts.token_ids_RL),
        moved(prompts.position_ids_RL),
        moved(prompts.sees()),
        moved(prompts.row_B),
        moved(at_BJ),
        first,
        prompts.is_packed,
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A causal language model as the learner asks it."""

    call: Callable[..., Any]
    """Its forward pass: DeepSpeed's engine, or the module itself."""
    module: Any
    dtype: torch.dtype
    """Of its weights."""
    max_positions: int | None
    """Positions whose logits may exist at once; None: those of any microbatch, since its head cannot be asked."""

    def logprobs(
        self,
        distribution: Distribution,
        targets: Targets,
        support: Support | None = None,
        *,
        entropy: Entropy = "none",
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of the targets, [B, K] each.

        `support`: what these were drawn from, where it is not all tokens.
        """
        if self._asks(targets):
            return self._of_positions(distribution, targets, support, entropy)
        with_gradient = entropy == "gradient"
        token_ids_BT, num_last, shared = targets.token_ids_BT, targets.num_last, targets.shared
        if shared is not None:
            logits_RLV = within(shared_logits(self.call, shared, self.dtype), support, shared)
            logprobs_BK = distribution.logprobs_at(logits_RLV, shared, token_ids_BT)
            if entropy == "none":
                return logprobs_BK, torch.zeros_like(logprobs_BK)
            return logprobs_BK, distribution.entropy_at(logits_RLV, shared, with_gradient=with_gradient)
        logits_BKV = within(logits(self.call, token_ids_BT, num_last), support)
        ids_BK = token_ids_BT[:, -num_last:]
        logprobs_BK = distribution.logprobs(logits_BKV, ids_BK)
        if entropy == "none":
            return logprobs_BK, torch.zeros_like(logprobs_BK)
        return logprobs_BK, distribution.entropy(logits_BKV, ids_BK, with_gradient=with_gradient)

    def _asks(self, targets: Targets) -> bool:
        """Whether single positions are asked for: where all logits are too many, or most would be for nothing."""
        if self.max_positions is None:
            return False
        if (shared := targets.shared) is None:
            return len(targets.token_ids_BT) * targets.num_last > self.max_positions
        num_rows, length = shared.token_ids_RL.shape
        return shared.is_packed or num_rows * (length - shared.first) > self.max_positions

    def _of_positions(
        self, distribution: Distribution, targets: Targets, support: Support | None, entropy: Entropy
    ) -> tuple[Tensor, Tensor]:
        assert self.max_positions is not None
        token_ids_BT, num_last, wanted_BK = targets.token_ids_BT, targets.num_last, targets.wanted_BK
        ids_BJ = token_ids_BT[:, token_ids_BT.shape[1] - num_last + 1 :]
        wanted_BJ = torch.ones_like(ids_BJ, dtype=torch.bool) if wanted_BK is None else wanted_BK[:, 1:]
        if not wanted_BJ.any():
            # A forward pass without a single one has no gradient, for which other ranks would wait.
            wanted_BJ = torch.ones_like(wanted_BJ)
        question = Question(
            at_N=_places(targets)[wanted_BJ],
            measure=_measure(distribution, ids_BJ[wanted_BJ], _of_draws(support, wanted_BJ), entropy),
            num_at_once=self.max_positions,
        )
        with asked(self.module, question):
            if targets.shared is None:
                found_2N = logits(self.call, token_ids_BT, num_last)
            else:
                found_2N = shared_logits(self.call, targets.shared, self.dtype)
        found_2BJ = found_2N.new_zeros(2, *ids_BJ.shape).masked_scatter(wanted_BJ.expand(2, -1, -1), found_2N)
        logprobs_BK, entropy_BK = pad(found_2BJ, (1, 0))
        return logprobs_BK, entropy_BK if entropy == "gradient" else entropy_BK.detach()


def _places(targets: Targets) -> Tensor:
    """[B, J] where, among the positions that the head is given, stands what gives each token its logits."""
    if (shared := targets.shared) is not None:
        return shared.row_B.unsqueeze(1) * (shared.token_ids_RL.shape[1] - shared.first) + shared.at_BJ
    shape = len(targets.token_ids_BT), targets.num_last
    at_BK = torch.arange(math.prod(shape), device=targets.token_ids_BT.device).reshape(shape)
    return at_BK[:, :-1]


def _of_draws(support: Support | None, wanted_BJ: Tensor) -> Support | None:
    """The same with the masks of single draws, [N]."""
    return None if support is None else Support(support.masks_MV, support.index_BT[:, 1:][wanted_BJ])


def _measure(
    distribution: Distribution, token_ids_N: Tensor, support: Support | None, entropy: Entropy
) -> Callable[[Tensor, slice, bool], Tensor]:
    def measure(logits_NV: Tensor, piece: slice, gradient_alone: bool) -> Tensor:
        # An entropy without a gradient is not computed once more for one.
        kind: Entropy = "none" if gradient_alone and entropy == "value" else entropy
        if support is not None:
            logits_NV = logits_NV.masked_fill(~support.masks_MV[support.index_BT[piece]], -torch.inf)
        return distribution.measured(logits_NV, token_ids_N[piece], kind)

    return measure
