"""What the buffer must know of a group, read from its record without building Python objects per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stream_grpo.buffer.soundness import Tokens, fault_of
from stream_grpo.transport.codec import GROUP_SCHEMA
from stream_grpo.types import NEVER_VALID, Decision, EndReason, PolicyVersion


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
    """Sampled tokens of the valid rollouts."""
    mixed_context_tokens: int
    """Tokens sampled on a KV cache of older weights."""
    fault: str
    """What makes it unfit for training, see `soundness`; empty where nothing does."""

    @property
    def spread(self) -> float:
        """Largest minus smallest reward of the valid rollouts; 0 where there is none."""
        return max(self.rewards) - min(self.rewards) if self.rewards else 0.0


def batch_of_record(data: bytes) -> pa.RecordBatch:
    """The record batch of bytes that were checked before: on receipt, or by their CRC32."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), GROUP_SCHEMA)


def facts_of(batch: pa.RecordBatch, vocab_size: int | None = None) -> GroupFacts:
    """The facts of one group, a batch of GROUP_SCHEMA. Raises ValueError where a token is null."""

    def first(name: str) -> Any:
        return batch.column(name)[0].as_py()

    tokens = _tokens(batch)
    mask = tokens.loss_mask
    branches, steps = _per_token(batch, "version_branch")[mask], tokens.version_step[mask]
    sampled = np.bincount(tokens.rollout[mask], minlength=batch.num_rows)
    rewards, decisions = batch.column("reward").to_pylist(), batch.column("decision").to_pylist()
    end_reasons = batch.column("end_reason").to_pylist()
    valid = [
        reward is not None and end_reason not in NEVER_VALID and bool(num_sampled)
        for reward, end_reason, num_sampled in zip(rewards, end_reasons, sampled, strict=True)
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
        num_passed=num_passed,
        num_failed=num_failed,
        num_unscored=batch.num_rows - num_passed - num_failed,
        num_truncated=end_reasons.count(EndReason.LENGTH.value),
        num_unfinished=end_reasons.count(EndReason.PARTIAL.value),
        versions=frozenset(PolicyVersion(b, s) for b, s in set(zip(branches.tolist(), steps.tolist(), strict=True))),
        mean_step=float(steps.mean()) if len(steps) else -1.0,
        num_tokens=len(steps),
        seconds=first("finished_at_s") - first("dispatched_at_s"),
        num_valid_tokens=int(sampled[valid].sum()),
        mixed_context_tokens=_mixed_context_tokens(batch, tokens),
        fault=fault_of(tokens, np.array(valid, np.bool_), vocab_size),
    )


def _per_token(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    column = batch.column(name).flatten()
    if column.null_count:
        raise ValueError(f"column {name}: {column.null_count} tokens are null")
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


def _tokens(batch: pa.RecordBatch) -> Tokens:
    lengths = batch.column("token_ids").value_lengths().to_numpy().astype(np.int64)
    rollout = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return Tokens(
        token_ids=_per_token(batch, "token_ids"),
        loss_mask=_per_token(batch, "loss_mask"),
        behavior_logprobs=_per_token(batch, "behavior_logprobs"),
        version_step=_per_token(batch, "version_step"),
        rollout=rollout,
        position=np.arange(len(rollout)) - starts[rollout],
        lengths=lengths,
        num_prompt=batch.column("num_prompt_tokens").to_numpy().astype(np.int64),
    )


def _mixed_context_tokens(batch: pa.RecordBatch, tokens: Tokens) -> int:
    begins = batch.column("mixed_context_from")
    if begins.null_count == len(begins):
        return 0
    mixed_from = np.array([n if n is not None else np.iinfo(np.int64).max for n in begins.to_pylist()], np.int64)
    return int((tokens.loss_mask & (tokens.position >= mixed_from[tokens.rollout])).sum())
