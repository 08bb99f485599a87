"""What the buffer must know of a group, read from its record without building Python objects per token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stream_grpo.buffer.soundness import Rollout, Tokens, fault_of
from stream_grpo.transport.codec import GROUP_SCHEMA
from stream_grpo.types import NEVER_VALID, Decision, EndReason, PolicyVersion

_READ = tuple(field.name for field in fields(Tokens))
"""Per-token columns that are looked at."""


class RolloutFacts(NamedTuple):
    """A valid rollout in numbers."""

    num_tokens: int
    """Sampled tokens that may be trained."""
    versions: frozenset[PolicyVersion]
    """That sampled any of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A group in numbers. Valid rollouts are those of `Rollout.valid`: scored, ended, not aborted, not empty."""

    group_id: str
    owner_epoch: int
    problem_id: str
    domain: str
    sampler_id: str
    config_hash: str
    rewards: tuple[float, ...]
    """Of the valid rollouts."""
    rollouts: tuple[RolloutFacts, ...]
    """The valid ones, in the same order."""
    num_rollouts: int
    """All of them."""
    num_passed: int
    """Valid rollouts whose verifier said pass."""
    num_failed: int
    num_unscored: int
    """All others."""
    num_truncated: int
    """Rollouts that ended at the length limit."""
    num_unfinished: int
    """Rollouts that were still being sampled."""
    versions: frozenset[PolicyVersion]
    """That sampled any token of the group."""
    mean_step: float
    """Of the sampled tokens; -1 where there is none."""
    num_tokens: int
    """Sampled tokens of all rollouts."""
    seconds: float
    """From dispatch to the end of the last rollout."""
    num_valid_tokens: int
    """Sampled tokens of the valid rollouts that may be trained: all but those of a trunk."""
    mixed_context_tokens: int
    """Tokens sampled on a KV cache of older weights."""
    fault: str
    """What makes it unfit for training, see `soundness`; empty where nothing does."""
    step_spread: float = 0.0
    """Largest minus smallest step score of the valid rollouts; 0 where one of them has no steps."""

    @property
    def spread(self) -> float:
        """Largest minus smallest reward of the valid rollouts; 0 where there is none."""
        return max(self.rewards) - min(self.rewards) if self.rewards else 0.0

    @property
    def reward_sum(self) -> float:
        """Of the valid rollouts; 0 where one of their rewards is not finite."""
        total = sum(self.rewards, 0.0)
        return total if math.isfinite(total) else 0.0

    @property
    def reward_variance(self) -> float:
        """Population variance of the valid rewards; 0 where there is none."""
        return float(np.var(self.rewards)) if self.rewards else 0.0


def batch_of_record(data: bytes) -> pa.RecordBatch:
    """The record batch of bytes that were checked before: on receipt, or by their CRC32."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), GROUP_SCHEMA)


def facts_of(batch: pa.RecordBatch, vocab_size: int | None = None) -> GroupFacts:
    """The facts of one group, a batch of GROUP_SCHEMA. Raises ValueError where a token is null."""

    def first(name: str) -> Any:
        return batch.column(name)[0].as_py()

    tokens = Tokens(**{name: _per_token(batch, name) for name in _READ})
    rollouts = _rollouts(batch)
    # The trunk of a branching group is sampled and has no loss mask.
    is_sampled = tokens.loss_mask | (tokens.version_step >= 0)
    targets = [int(np.count_nonzero(tokens.loss_mask[rollout.start : rollout.end])) for rollout in rollouts]
    versions = _versions(tokens, is_sampled, rollouts)
    num_tokens = int(np.count_nonzero(is_sampled))
    rewards, decisions = batch.column("reward").to_pylist(), batch.column("decision").to_pylist()
    end_reasons = batch.column("end_reason").to_pylist()
    valid = [
        reward is not None and end_reason not in NEVER_VALID and bool(num_targets)
        for reward, end_reason, num_targets in zip(rewards, end_reasons, targets, strict=True)
    ]
    decided = Counter(decision for decision, is_valid in zip(decisions, valid, strict=True) if is_valid)
    num_passed, num_failed = decided[Decision.PASS.value], decided[Decision.FAIL.value]
    return GroupFacts(
        group_id=first("group_id"),
        owner_epoch=first("owner_epoch"),
        problem_id=first("problem_id"),
        domain=first("domain"),
        sampler_id=first("sampler_id"),
        config_hash=first("config_hash"),
        rewards=tuple(reward for reward, is_valid in zip(rewards, valid, strict=True) if is_valid),
        rollouts=tuple(compress(map(RolloutFacts, targets, versions), valid)),
        num_rollouts=batch.num_rows,
        num_passed=num_passed,
        num_failed=num_failed,
        num_unscored=batch.num_rows - num_passed - num_failed,
        num_truncated=end_reasons.count(EndReason.LENGTH.value),
        num_unfinished=end_reasons.count(EndReason.PARTIAL.value),
        versions=frozenset().union(*versions),
        mean_step=int(tokens.version_step.sum(where=is_sampled)) / num_tokens if num_tokens else -1.0,
        num_tokens=num_tokens,
        seconds=first("finished_at_s") - first("dispatched_at_s"),
        num_valid_tokens=sum(count for count, is_valid in zip(targets, valid, strict=True) if is_valid),
        mixed_context_tokens=_mixed_context_tokens(batch, is_sampled, rollouts),
        fault=fault_of(tokens, compress(rollouts, valid), vocab_size),
        step_spread=_step_spread(batch, valid),
    )


def _versions(tokens: Tokens, mask: NDArray[np.bool_], rollouts: Sequence[Rollout]) -> list[frozenset[PolicyVersion]]:
    """The versions that sampled any token of each rollout, looked at where runs of tokens begin: they are few.

    `mask`: which tokens were sampled.
    """
    branch, step = tokens.version_branch, tokens.version_step
    changes = (mask[1:] != mask[:-1]) | (branch[1:] != branch[:-1]) | (step[1:] != step[:-1])
    starts = [rollout.start for rollout in rollouts if rollout.end > rollout.start]
    begins = np.union1d(np.flatnonzero(changes) + 1, np.asarray(starts, np.intp))
    begins = begins[mask[begins]]
    found = list(map(PolicyVersion, branch[begins].tolist(), step[begins].tolist()))
    bounds = np.searchsorted(begins, [0, *(rollout.end for rollout in rollouts)]).tolist()
    return [frozenset(found[start:end]) for start, end in pairwise(bounds)]


def _step_spread(batch: pa.RecordBatch, valid: Sequence[bool]) -> float:
    scores = batch.column("step_scores").to_pylist()
    kept = [of_one for of_one, is_valid in zip(scores, valid, strict=True) if is_valid]
    if not kept or not all(kept):
        return 0.0
    return float(max(map(max, kept)) - min(map(min, kept)))


def _per_token(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    column = batch.column(name).flatten()
    if column.null_count:
        raise ValueError(f"column {name}: {column.null_count} tokens are null")
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


def _rollouts(batch: pa.RecordBatch) -> list[Rollout]:
    num_prompt = batch.column("num_prompt_tokens").to_pylist()
    spans = pairwise(accumulate(batch.column("token_ids").value_lengths().to_pylist(), initial=0))
    return [Rollout(number, num_prompt[number], *span) for number, span in enumerate(spans)]


def _mixed_context_tokens(batch: pa.RecordBatch, is_sampled: NDArray[np.bool_], rollouts: Sequence[Rollout]) -> int:
    begins = batch.column("mixed_context_from").to_pylist()
    marked = ((rollout, begin) for rollout, begin in zip(rollouts, begins, strict=True) if begin is not None)
    return sum(int(np.count_nonzero(is_sampled[r.start + max(begin, 0) : r.end])) for r, begin in marked)
