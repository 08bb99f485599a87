"""The KL to the reference in the rewards of a train batch, before its advantages are made.

B sequences, K tokens from the one before the first target on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_grpo.algo.kl import kl_to_reward
from stream_grpo.algo.recipe import Recipe
from stream_grpo.learner.batching import Scored, TrainBatch, make_train_batch
from stream_grpo.learner.first_pass import Model, tensors_of
from stream_grpo.learner.ranks import ALONE, Ranks
from stream_grpo.types import Rollout, RolloutGroup


def with_kl_in_rewards(
    model: Model,
    recipe: Recipe,
    groups: Sequence[RolloutGroup],
    *,
    weight: float,
    vocab_size: int,
    microbatch_tokens: int,
    ranks: Ranks = ALONE,
    share_of: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
) -> list[RolloutGroup]:
    """The groups with -weight sum log (policy / reference) over its trained tokens added to each valid reward.

    The policy is that at the start of the learner step. A group whose rewards do not differ keeps them, unless the
    recipe lets the KL act without signal. `share_of` keeps this rank's share of a batch and sees to it that the others
    call `kl_terms` with theirs. Raises ValueError as `make_train_batch` does.
    """
    batch = make_train_batch(
        groups, _places, vocab_size=vocab_size, microbatch_tokens=microbatch_tokens, num_ranks=ranks.num_ranks
    )
    num_rollouts = sum(len(group.rollouts) for group in groups)
    terms_B = kl_terms(model, share_of(batch), weight=weight, num_rollouts=num_rollouts, ranks=ranks)
    rewarded, first = [], 0
    for group in groups:
        terms = terms_B[first : first + len(group.rollouts)]
        first += len(group.rollouts)
        acts = recipe.regularize_without_signal or _has_spread(group, recipe.signal_tolerance)
        rewarded.append(_added(group, terms) if acts else group)
    return rewarded


@torch.no_grad()
def kl_terms(
    model: Model, share: TrainBatch, *, weight: float, num_rollouts: int, ranks: Ranks = ALONE
) -> NDArray[np.float64]:
    """-weight sum log (policy / reference) of every rollout of a batch, [B], from this rank's share of it.

    An advantage is the place of the rollout, as `_places` has it.
    """
    terms_B = torch.zeros(num_rollouts, dtype=torch.float64)
    for microbatch in share.minibatches[0].microbatches:
        tensors = tensors_of(microbatch, model.device)
        policy_BK, _ = model.logprobs(tensors.targets)
        reference_BK = model.reference_logprobs(tensors.targets)
        term_B, _ = kl_to_reward(policy_BK, reference_BK, tensors.mask_BK, weight=weight)
        # Added, since a sequence that only fills up a share adds 0 to the place of another.
        terms_B.index_add_(0, torch.from_numpy(microbatch.advantages_B).long(), term_B.double().cpu())
    result: NDArray[np.float64] = ranks.summed(terms_B).numpy()
    return result


def _places(rewards_B: NDArray[np.float64], *_: Any) -> Scored:
    """For an advantage the place of the rollout among all: packing changes the order, and advantages go with it."""
    return Scored(np.arange(len(rewards_B), dtype=np.float64), np.ones(len(rewards_B), dtype=np.bool_))


def _has_spread(group: RolloutGroup, tolerance: float) -> bool:
    rewards = [rollout.reward.reward for rollout in group.rollouts if rollout.valid]
    kept = [reward for reward in rewards if reward is not None]
    return bool(kept) and max(kept) - min(kept) > tolerance


def _added(group: RolloutGroup, terms: NDArray[np.float64]) -> RolloutGroup:
    rollouts = zip(group.rollouts, terms.tolist(), strict=True)
    return replace(group, rollouts=tuple(_plus(rollout, term) for rollout, term in rollouts))


def _plus(rollout: Rollout, term: float) -> Rollout:
    if not rollout.valid or rollout.reward.reward is None:
        return rollout
    return replace(rollout, reward=replace(rollout.reward, reward=rollout.reward.reward + term))
