"""What the buffer must know of a group, read from its record without building Python objects per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stream_grpo.transport.codec import GROUP_SCHEMA
from stream_grpo.types import Decision, EndReason, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A group in numbers. Valid rollouts are those of `Rollout.valid`: scored, not aborted, not empty."""

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
    versions: frozenset[PolicyVersion]
    """That sampled any token of the group."""
    mean_step: float
    """Of the sampled tokens; -1 where there is none."""
    num_tokens: int
    """Sampled tokens of all rollouts."""
    seconds: float
    """From dispatch to the end of the last rollout."""
    has_finite_logprobs: bool
    """Of the sampled tokens."""

    @property
    def spread(self) -> float:
        """Largest minus smallest reward of the valid rollouts; 0 where there is none."""
        return max(self.rewards) - min(self.rewards) if self.rewards else 0.0


def batch_of_record(data: bytes) -> pa.RecordBatch:
    """The record batch of bytes that were checked before: on receipt, or by their CRC32."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), GROUP_SCHEMA)


def facts_of(batch: pa.RecordBatch) -> GroupFacts:
    """The facts of one group, a batch of GROUP_SCHEMA."""

    def first(name: str) -> Any:
        return batch.column(name)[0].as_py()

    mask = _per_token(batch, "loss_mask")
    branches, steps = _per_token(batch, "version_branch")[mask], _per_token(batch, "version_step")[mask]
    sampled = _sampled_per_rollout(batch, mask)
    rewards, passed, failed = [], 0, 0
    end_reasons = batch.column("end_reason").to_pylist()
    for reward, decision, end_reason, num_sampled in zip(
        batch.column("reward").to_pylist(), batch.column("decision").to_pylist(), end_reasons, sampled, strict=True
    ):
        if reward is None or end_reason in (EndReason.ABORT, EndReason.ERROR) or not num_sampled:
            continue
        rewards.append(reward)
        passed += decision == Decision.PASS
        failed += decision == Decision.FAIL
    return GroupFacts(
        group_id=first("group_id"),
        owner_epoch=first("owner_epoch"),
        problem_id=first("problem_id"),
        domain=first("domain"),
        sampler_id=first("sampler_id"),
        config_hash=first("config_hash"),
        rewards=tuple(rewards),
        num_passed=passed,
        num_failed=failed,
        num_unscored=batch.num_rows - passed - failed,
        num_truncated=end_reasons.count(EndReason.LENGTH.value),
        versions=frozenset(PolicyVersion(b, s) for b, s in set(zip(branches.tolist(), steps.tolist(), strict=True))),
        mean_step=float(steps.mean()) if len(steps) else -1.0,
        num_tokens=len(steps),
        seconds=first("finished_at_s") - first("dispatched_at_s"),
        has_finite_logprobs=bool(np.isfinite(_per_token(batch, "behavior_logprobs")[mask]).all()),
    )


def _per_token(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = batch.column(name).flatten().to_numpy(zero_copy_only=False)
    return values


def _sampled_per_rollout(batch: pa.RecordBatch, mask: NDArray[Any]) -> list[int]:
    ends = np.cumsum(batch.column("loss_mask").value_lengths().to_numpy())
    sampled = np.concatenate([[0], np.cumsum(mask)])[ends]
    return [int(n) for n in np.diff(sampled, prepend=0)]
