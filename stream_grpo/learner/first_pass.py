"""What a recipe needs to know of a whole batch before its first gradient.

B sequences, T tokens, K of them from the token before the first target on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_grpo.algo.kl import kl_to_advantage
from stream_grpo.algo.log_ratio import log_ratio
from stream_grpo.algo.mask import outward, second_moment_bound
from stream_grpo.algo.recipe import Recipe, given
from stream_grpo.algo.step_scale import WeightSums, weight_sums
from stream_grpo.learner.batching import Microbatch, TrainBatch
from stream_grpo.learner.forward import Entropy, Shared, Targets, on_device
from stream_grpo.learner.ranks import ALONE, Ranks, summed_weights
from stream_grpo.learner.shared_prompts import shared_prompts


class Model(Protocol):
    """What a learner step asks of the engine."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    def logprobs(self, targets: Targets, *, entropy: Entropy = "none") -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of the targets under the sampler's distribution, [B, K] each.

        `entropy`: whether it is wanted, else it is 0.
        """

    def reference_logprobs(self, targets: Targets) -> Tensor:
        """Logprobs of the reference policy, without a gradient."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part of the loss."""

    def update(self, learning_rate: float) -> float:
        """Clip, change the weights, clear. Returns the norm before clipping."""

    def end_step(self, step: int) -> None:
        """Learner step `step` is made."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The facts. Tensors are found by the identity of their microbatch."""

    start_logprobs: Mapping[int, Tensor] = field(default_factory=dict)
    """[B, K] at the start of the step; empty where the policy is still there."""
    advantage_terms: Mapping[int, Tensor] = field(default_factory=dict)
    """[B, K] KL as a part of the advantage."""
    second_moment_bound: float | None = None
    effective_share: float | None = None
    """Effective sample size over the number of sequences."""


@torch.no_grad()
def first_pass(
    model: Model, recipe: Recipe, batch: TrainBatch, *, num_updates: int, kl_weight: float, ranks: Ranks = ALONE
) -> FirstPass:
    """One forward pass over the whole batch, where the recipe or the number of updates ask for it.

    With several ranks `batch` is this one's share, and the bound and the effective share are over all of them.
    """
    keeps_start = recipe.proximal == "recomputed" and num_updates > 1
    if not (keeps_start or recipe.needs_first_pass):
        return FirstPass()
    start: dict[int, Tensor] = {}
    terms: dict[int, Tensor] = {}
    moved: list[Tensor] = []
    weights: list[WeightSums] = []
    for microbatch in (m for minibatch in batch.minibatches for m in minibatch.microbatches):
        tensors = tensors_of(microbatch, model.device)
        logprobs_BK, _ = model.logprobs(tensors.targets)
        if keeps_start:
            start[id(microbatch)] = logprobs_BK
        if recipe.kl_place == "advantage":
            reference_BK = model.reference_logprobs(tensors.targets)
            term_BK = kl_to_advantage(logprobs_BK, reference_BK, tensors.mask_BK, weight=kl_weight).kl_BT
            terms[id(microbatch)] = torch.where(tensors.regularized_B(recipe).unsqueeze(1), term_BK, 0.0)
        if recipe.mask_second_moment is not None:
            log_R_BK = log_ratio("token", logprobs_BK, tensors.behavior_BK, tensors.mask_BK).log_ratio_BT
            advantage_BK = tensors.advantage_BK + terms.get(id(microbatch), torch.zeros_like(log_R_BK))
            moved.append(log_R_BK[tensors.mask_BK & outward(log_R_BK, advantage_BK)])
        if recipe.learning_rate_scale == "ess":
            weights.append(_sequence_weights(recipe, logprobs_BK, tensors))
    return FirstPass(
        start,
        terms,
        float(second_moment_bound(ranks.joined(torch.cat(moved)), tau=given(recipe.mask_second_moment)))
        if moved
        else None,
        summed_weights(ranks, sum(weights[1:], weights[0])).effective_share() if weights else None,
    )


def _sequence_weights(recipe: Recipe, logprobs_BK: Tensor, tensors: Tensors) -> WeightSums:
    """Sums of policy / behavior of whole sequences, truncated where the recipe's correction truncates."""
    level = recipe.correction_level or "sequence_sum"
    log_weight_BK = log_ratio(level, logprobs_BK, tensors.behavior_BK, tensors.mask_BK).log_ratio_BT
    # Every trained token of a sequence holds its ratio.
    log_weight_B = torch.where(tensors.mask_BK, log_weight_BK, -math.inf).amax(dim=1)
    if recipe.correction_high is not None:
        log_weight_B = log_weight_B.clamp(max=math.log(recipe.correction_high))
    return weight_sums(log_weight_B, tensors.mask_BK.any(dim=1))


class Tensors(NamedTuple):
    """A microbatch on the device. All [B, K] start at the token before the first target."""

    token_ids_BT: Tensor
    num_last: int
    """K."""
    mask_BK: Tensor
    behavior_BK: Tensor
    age_BK: Tensor
    differs_BK: Tensor
    advantage_B: Tensor
    tokens_B: Tensor
    problem_tokens_B: Tensor
    has_signal_B: Tensor
    token_advantage_BK: Tensor | None = None
    shared: Shared | None = None
    """How the sequences are computed, where several are in a row."""
    turns_BT: Tensor | None = None
    """Of every token, see `Microbatch`."""

    @property
    def targets(self) -> Targets:
        """What a model is asked about."""
        return Targets(self.token_ids_BT, self.num_last, self.shared, self.turns_BT, self.mask_BK)

    @property
    def advantage_BK(self) -> Tensor:
        """Of every token: that of its sequence, and what single tokens get on top."""
        whole_BK = self.advantage_B.unsqueeze(1).expand_as(self.mask_BK)
        return whole_BK if self.token_advantage_BK is None else whole_BK + self.token_advantage_BK

    def regularized_B(self, recipe: Recipe) -> Tensor:
        """Where KL and entropy act."""
        return self.has_signal_B | bool(recipe.regularize_without_signal)


def tensors_of(microbatch: Microbatch, device: torch.device) -> Tensors:
    """A microbatch's arrays as tensors, without the positions that no loss looks at."""
    first = max(int(microbatch.mask_BT.any(axis=0).argmax()) - 1, 0)

    def late(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array[:, first:]).to(device)

    def whole(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Tensors(
        token_ids_BT=whole(microbatch.token_ids_BT),
        num_last=microbatch.token_ids_BT.shape[1] - first,
        mask_BK=late(microbatch.mask_BT),
        behavior_BK=late(microbatch.behavior_logprobs_BT),
        age_BK=late(microbatch.ages_BT),
        differs_BK=late(microbatch.differs_BT),
        advantage_B=whole(microbatch.advantages_B),
        tokens_B=whole(microbatch.tokens_B),
        problem_tokens_B=whole(microbatch.problem_tokens_B),
        has_signal_B=whole(microbatch.has_signal_B),
        token_advantage_BK=None if (extra := microbatch.token_advantages_BT) is None else late(extra),
        shared=_shared(microbatch, first, device),
        turns_BT=None if (turns_BT := microbatch.turns_BT) is None else whole(turns_BT),
    )


def _shared(microbatch: Microbatch, first: int, device: torch.device) -> Shared | None:
    if microbatch.row_B is None:
        return None
    lengths_B, num_prompt_B = microbatch.lengths_B, microbatch.num_prompt_B
    rows = shared_prompts(microbatch.token_ids_BT, lengths_B, num_prompt_B, microbatch.row_B, microbatch.block_B)
    return on_device(rows, lengths_B, first, device)
