"""From rollout groups to a train batch: checks, advantages, minibatches, padded microbatches. No torch.

G rollouts of one group, B sequences, T tokens. Every [B, T] array is indexed by token: entry t belongs to token t, so
nothing is shifted here (`logprobs.token_logprobs` does that, once).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_grpo.learner.rows import Pack, packs
from stream_grpo.types import PolicyVersion, Rollout, RolloutGroup, StepScore


class Scored(NamedTuple):
    """The advantages of a train batch, B rollouts of all its groups."""

    advantages_B: NDArray[np.float64]
    has_signal_B: NDArray[np.bool_]
    """Whether the rewards of the rollout's group differ."""
    token_advantages_BR: NDArray[np.float64] | None = None
    """What single tokens of the response get on top, R up to where the last step ends. None: nothing."""


Steps = tuple[StepScore, ...]
"""The steps of a rollout in order; they end at tokens of the response."""
AdvantageFunction = Callable[
    [NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], Sequence[Steps]],
    Scored,
]
"""(rewards_B, valid_B, group_B, lengths_B, steps_B) -> advantages. The reward of a rollout that is not valid is NaN,
the length is in sampled tokens."""


class Sampled(NamedTuple):
    """What the learner knows of the weights that sampled a token."""

    age: int
    """Policy age, in learner steps."""
    differs: bool = False
    """Whether they are known to differ from the learner's: by checksum, not by number."""


LOGPROB_TOLERANCE = 1e-6
"""How far above 0 rounding may carry a logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The sequences of one forward and backward, padded on the right."""

    token_ids_BT: NDArray[np.int64]
    """0 in the padding."""
    lengths_B: NDArray[np.int64]
    """Tokens of each sequence; what lies beyond is padding."""
    num_prompt_B: NDArray[np.int64]
    """Tokens of each sequence's prompt."""
    mask_BT: NDArray[np.bool_]
    """True where the token is a target of the loss: sampled by the policy, neither context nor padding."""
    behavior_logprobs_BT: NDArray[np.float32]
    """0 where mask is False."""
    advantages_B: NDArray[np.float64]
    tokens_B: NDArray[np.int64]
    """Target tokens of each sequence."""
    problem_tokens_B: NDArray[np.int64]
    """Target tokens of all sequences of its problem, wherever they are in the minibatch."""
    has_signal_B: NDArray[np.bool_]
    ages_BT: NDArray[np.int64]
    """0 where mask is False."""
    differs_BT: NDArray[np.bool_]
    """True where the weights that sampled the token are known to differ from the learner's."""
    token_advantages_BT: NDArray[np.float64] | None = None
    """What single tokens get on top of advantages_B; None: nothing."""
    turns_BT: NDArray[np.int64] | None = None
    """Which action of its trajectory each target is part of, -1 where mask is False; None: nobody asks."""
    row_B: NDArray[np.int64] | None = None
    """In which row each sequence lies, see `shared_prompts`; None: each is a row."""
    block_B: NDArray[np.int64] | None = None
    """With which others of its row each sequence shares a copy of its prompt; numbered over all rows."""
    rank: int = 0
    """Of the learner's ranks the one that runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one optimizer update consumes, and the counts its denominator is made of."""

    microbatches: tuple[Microbatch, ...]
    num_groups: int
    num_rollouts: int
    """All rollouts of its groups, those that are not trained among them."""
    num_problems: int
    """Groups with at least one trained sequence."""
    num_sequences: int
    """Sequences with at least one target token."""
    num_tokens: int
    """Target tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """All groups of one learner step."""

    minibatches: tuple[Minibatch, ...]
    num_groups: int
    num_left_out: int
    """Rollouts that were not valid: they enter neither baseline nor loss."""
    num_baseline_only: int = 0
    """Rollouts that enter the baseline and not the loss."""
    group_weights: tuple[float, ...] = ()
    """Of each group the sum of |advantage| over its trained rollouts."""

    @property
    def num_sequences(self) -> int:
        """Trained sequences."""
        return sum(minibatch.num_sequences for minibatch in self.minibatches)

    @property
    def num_tokens(self) -> int:
        """Target tokens."""
        return sum(minibatch.num_tokens for minibatch in self.minibatches)


@dataclass(frozen=True, slots=True)
class Trained:
    """A rollout that enters the loss, and what is known of it."""

    rollout: Rollout
    advantage: float
    has_signal: bool
    problem_tokens: int
    """Target tokens of all trained rollouts of its group."""
    token_advantages_R: NDArray[np.float64] | None = None
    """What single tokens of the response get on top."""


def make_train_batch(
    groups: Sequence[RolloutGroup],
    advantage: AdvantageFunction,
    *,
    vocab_size: int,
    microbatch_tokens: int,
    num_minibatches: int = 1,
    num_ranks: int = 1,
    sampled_by: Callable[[PolicyVersion], Sampled] = lambda version: Sampled(0),
    is_trained: Callable[[Rollout], bool] = lambda rollout: True,
    attention_cost: float | None = None,
    share_prompts: bool = True,
    packing: bool = False,
) -> TrainBatch:
    """Check the groups, give every valid rollout its advantage, cut into minibatches of whole groups and pack those.

    Minibatch i takes groups i, i + num_minibatches, ...: groups come oldest first, and so the ages are spread evenly.
    Each minibatch is dealt to `num_ranks` ranks by tokens, sequence by sequence (`shares` takes out what each runs).
    Valid rollouts that are not `is_trained` enter the baseline of their group and not the loss. The rollouts of a group
    share a prompt, and with `packing` several groups a row, where that is cheaper, by the model's `attention_cost`
    (`shared_prompts.cost`); None: never. The result depends on the order of the groups and on nothing else. Raises
    ValueError that names group and rollout.
    """
    if not groups or len(groups) < num_minibatches:
        raise ValueError(f"{len(groups)} groups for {num_minibatches} minibatches")
    trained = trainable(groups, advantage, vocab_size, is_trained)
    sizes = [len(group.rollouts) for group in groups]
    num_valid = sum(rollout.valid for group in groups for rollout in group.rollouts)
    how: dict[str, Any] = {
        "microbatch_tokens": microbatch_tokens,
        "num_ranks": num_ranks,
        "attention_cost": attention_cost,
        "share_prompts": share_prompts,
        "packing": packing,
    }
    return TrainBatch(
        minibatches=tuple(
            _minibatch(trained[i::num_minibatches], sum(sizes[i::num_minibatches]), sampled_by, **how)
            for i in range(num_minibatches)
        ),
        num_groups=len(groups),
        num_left_out=sum(sizes) - num_valid,
        num_baseline_only=num_valid - sum(map(len, trained)),
        group_weights=tuple(sum(abs(row.advantage) for row in group) for group in trained),
    )


def trainable(
    groups: Sequence[RolloutGroup],
    advantage: AdvantageFunction,
    vocab_size: int,
    is_trained: Callable[[Rollout], bool] = lambda rollout: True,
) -> list[list[Trained]]:
    """The trained rollouts of each group, with advantages among all valid ones.

    Raises ValueError that names group and rollout.
    """
    owners = [(group, index) for group in groups for index in range(len(group.rollouts))]
    rollouts = [group.rollouts[index] for group, index in owners]
    valid_B = np.array([rollout.valid for rollout in rollouts], dtype=np.bool_)
    rewards_B = np.array([_reward(group, index) for group, index in owners], dtype=np.float64)
    group_B = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    lengths_B = np.array([rollout.num_target_tokens for rollout in rollouts], dtype=np.int64)
    for at in np.flatnonzero(valid_B):
        group, index = owners[at]
        for complaint in _complaints(rollouts[at], vocab_size):
            raise ValueError(f"group {group.group_id}, rollout {index}: {complaint}")
    scored = advantage(rewards_B, valid_B, group_B, lengths_B, [rollout.reward.steps for rollout in rollouts])
    advantages_B, has_signal_B, by_token_BR = scored
    if advantages_B.shape != rewards_B.shape or not np.isfinite(advantages_B).all():
        raise ValueError(f"advantages {advantages_B.tolist()} for rewards {rewards_B.tolist()}")
    if by_token_BR is not None and not np.isfinite(by_token_BR).all():
        raise ValueError(f"token advantages are not finite; steps: {[rollout.reward.steps for rollout in rollouts]}")
    trained_B = valid_B & np.array([is_trained(rollout) for rollout in rollouts], dtype=np.bool_)
    problem_tokens_P = np.bincount(group_B, weights=np.where(trained_B, lengths_B, 0), minlength=len(groups))
    return [
        [
            Trained(
                rollouts[at],
                float(advantages_B[at]),
                bool(has_signal_B[at]),
                int(problem_tokens_P[number]),
                None if by_token_BR is None else by_token_BR[at],
            )
            for at in np.flatnonzero(trained_B & (group_B == number))
        ]
        for number in range(len(groups))
    ]


def _reward(group: RolloutGroup, index: int) -> float:
    rollout = group.rollouts[index]
    if not rollout.valid or rollout.reward.reward is None:
        return np.nan
    if not np.isfinite(rollout.reward.reward):
        raise ValueError(f"group {group.group_id}, rollout {index}: reward {rollout.reward.reward} is not finite")
    return rollout.reward.reward


def _complaints(rollout: Rollout, vocab_size: int) -> Iterable[str]:
    """What would make a gradient wrong without a word; nothing for a sound rollout."""
    ids, mask, logprobs = rollout.token_ids, rollout.loss_mask, rollout.behavior_logprobs
    num_prompt = rollout.num_prompt_tokens
    if not 0 < num_prompt < len(ids):
        yield f"{num_prompt} prompt tokens of {len(ids)}: a prompt and a response are needed"
    if not len(ids) == len(mask) == len(logprobs) == len(rollout.version_step):
        yield (
            f"{len(ids)} token ids, {len(mask)} of loss mask, {len(logprobs)} behavior logprobs, "
            f"{len(rollout.version_step)} versions: all must be as many"
        )
    if mask[:num_prompt].any():
        yield f"loss mask is set on prompt token {int(np.argmax(mask))}"
    unsampled = mask & (rollout.version_step < 0)
    if unsampled.any():
        yield f"loss mask is set on token {int(np.argmax(unsampled))}, which no policy version sampled"
    targets = logprobs[mask]
    if not np.isfinite(targets).all() or (targets > LOGPROB_TOLERANCE).any():
        bad = targets[~np.isfinite(targets) | (targets > LOGPROB_TOLERANCE)]
        yield f"behavior logprob {float(bad[0])}: expected finite and at most 0"
    if ids.min() < 0 or ids.max() >= vocab_size:
        yield f"token ids {int(ids.min())} to {int(ids.max())} outside the vocabulary of {vocab_size}"


def _minibatch(
    trained: Sequence[Sequence[Trained]],
    num_rollouts: int,
    sampled_by: Callable[[PolicyVersion], Sampled],
    **how: Any,
) -> Minibatch:
    rows = [row for group in trained for row in group]
    lengths = [len(row.rollout.token_ids) for row in rows]
    return Minibatch(
        microbatches=tuple(
            _microbatch(rows, pack, sampled_by) for pack in packs(lengths, lambda: list(map(_prompt, rows)), **how)
        ),
        num_groups=len(trained),
        num_rollouts=num_rollouts,
        num_problems=sum(bool(group) for group in trained),
        num_sequences=len(rows),
        num_tokens=sum(row.rollout.num_target_tokens for row in rows),
    )


def _prompt(row: Trained) -> tuple[int, ...]:
    return tuple(row.rollout.token_ids[: row.rollout.num_prompt_tokens].tolist())


def _microbatch(rows: Sequence[Trained], pack: Pack, sampled_by: Callable[[PolicyVersion], Sampled]) -> Microbatch:
    blocks = [(number, block) for number, row in enumerate(pack.rows) for block in row]
    padded = _pad([rows[i] for _, block in blocks for i in block], pack.rank, sampled_by)
    if len(padded.lengths_B) == len(pack.rows):
        return padded
    sizes = [len(block) for _, block in blocks]
    return replace(
        padded,
        row_B=np.repeat([number for number, _ in blocks], sizes),
        block_B=np.repeat(np.arange(len(blocks)), sizes),
    )


def with_shuffled_rewards(group: RolloutGroup, seed: int) -> RolloutGroup:
    """The same group with the rewards of its valid rollouts dealt out anew, the same way for the same seed.

    The control of a run: what is left of a rise under it is not learnt from rewards.
    """
    valid = [index for index, rollout in enumerate(group.rollouts) if rollout.valid]
    digest = hashlib.sha256(f"{seed}/{group.group_id}".encode()).digest()
    dealt = np.random.default_rng(int.from_bytes(digest[:8], "big")).permutation(valid)
    rollouts = list(group.rollouts)
    for index, other in zip(valid, dealt.tolist(), strict=True):
        rollouts[index] = replace(group.rollouts[index], reward=group.rollouts[other].reward)
    return replace(group, rollouts=tuple(rollouts))


def _pad(rows: Sequence[Trained], rank: int, sampled_by: Callable[[PolicyVersion], Sampled]) -> Microbatch:
    lengths_B = np.array([len(row.rollout.token_ids) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths_B.max()))
    token_ids_BT = np.zeros(shape, dtype=np.int64)
    mask_BT = np.zeros(shape, dtype=np.bool_)
    behavior_logprobs_BT = np.zeros(shape, dtype=np.float32)
    ages_BT = np.zeros(shape, dtype=np.int64)
    differs_BT = np.zeros(shape, dtype=np.bool_)
    by_token_BT = np.zeros(shape, dtype=np.float64)
    turns_BT = np.full(shape, -1, dtype=np.int64)
    for index, row in enumerate(rows):
        rollout, to = row.rollout, slice(lengths_B[index])
        token_ids_BT[index, to] = rollout.token_ids
        mask_BT[index, to] = rollout.loss_mask
        behavior_logprobs_BT[index, to] = np.where(rollout.loss_mask, rollout.behavior_logprobs, 0.0)
        turns_BT[index, to] = np.where(rollout.loss_mask, rollout.turn, -1)
        if row.token_advantages_R is not None:
            response = by_token_BT[index, rollout.num_prompt_tokens : lengths_B[index]]
            num_tokens = min(len(response), len(row.token_advantages_R))
            response[:num_tokens] = row.token_advantages_R[:num_tokens]
        for version in rollout.versions():
            sampled = sampled_by(version)
            tokens = rollout.loss_mask & (rollout.version_branch == version.branch)
            tokens &= rollout.version_step == version.step
            ages_BT[index, to][tokens] = sampled.age
            differs_BT[index, to][tokens] = sampled.differs
    return Microbatch(
        token_ids_BT=token_ids_BT,
        lengths_B=lengths_B,
        num_prompt_B=np.array([row.rollout.num_prompt_tokens for row in rows], dtype=np.int64),
        mask_BT=mask_BT,
        behavior_logprobs_BT=behavior_logprobs_BT,
        advantages_B=np.array([row.advantage for row in rows], dtype=np.float64),
        tokens_B=mask_BT.sum(axis=1),
        problem_tokens_B=np.array([row.problem_tokens for row in rows], dtype=np.int64),
        has_signal_B=np.array([row.has_signal for row in rows], dtype=np.bool_),
        ages_BT=ages_BT,
        differs_BT=differs_BT,
        token_advantages_BT=by_token_BT if any(row.token_advantages_R is not None for row in rows) else None,
        turns_BT=turns_BT,
        rank=rank,
    )
