"""Rollout groups as Arrow: one record batch a group, one row a rollout.

Samplers encode; the buffer validates and appends the received bytes as they are; the learner decodes. The bytes are an
encapsulated IPC message without its schema, so that a journal segment (schema, then messages) is a plain Arrow stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup, StepScore

GROUP_SCHEMA = pa.schema(
    [
        # The group, repeated on each of its rows.
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("owner_epoch", pa.int32(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("sampler_id", pa.string(), nullable=False),
        pa.field("ticket_step", pa.int32(), nullable=False),
        pa.field("config_hash", pa.string(), nullable=False),
        pa.field("dispatched_at_s", pa.float64(), nullable=False),
        pa.field("finished_at_s", pa.float64(), nullable=False),
        # The rollout.
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("version_branch", pa.list_(pa.int32()), nullable=False),
        pa.field("version_step", pa.list_(pa.int32()), nullable=False),
        pa.field("turn", pa.list_(pa.int16()), nullable=False),
        pa.field("end_reason", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("mixed_context_from", pa.int32()),
        pa.field("environment_snapshot", pa.binary()),
        # What the verifier said of it.
        pa.field("decision", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_components", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("evidence", pa.string(), nullable=False),
        pa.field("verifier", pa.string(), nullable=False),
        pa.field("verifier_version", pa.string(), nullable=False),
        # S steps of the response: the token of it at which each ends, exclusive, and its score.
        pa.field("step_ends", pa.list_(pa.int32()), nullable=False),
        pa.field("step_scores", pa.list_(pa.float64()), nullable=False),
    ],
    metadata={"schema": "stream_grpo.rollout", "schema_version": "2"},
)

_PER_TOKEN: dict[str, Any] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "version_branch": np.int32,
    "version_step": np.int32,
    "turn": np.int16,
}
_PER_GROUP = (
    "group_id",
    "owner_epoch",
    "problem_id",
    "domain",
    "sampler_id",
    "ticket_step",
    "config_hash",
    "dispatched_at_s",
    "finished_at_s",
)


def group_to_batch(group: RolloutGroup) -> pa.RecordBatch:
    """A group as one record batch of GROUP_SCHEMA."""
    rollouts = group.rollouts
    columns: dict[str, Any] = {name: [getattr(group, name)] * len(rollouts) for name in _PER_GROUP}
    columns |= _per_token(rollouts)
    for name in ("num_prompt_tokens", "seed", "mixed_context_from", "environment_snapshot"):
        columns[name] = [getattr(r, name) for r in rollouts]
    columns["end_reason"] = [r.end_reason.value for r in rollouts]
    columns["decision"] = [r.reward.decision.value for r in rollouts]
    columns["reward_components"] = [list(r.reward.components.items()) for r in rollouts]
    for name in ("reward", "evidence", "verifier", "verifier_version"):
        columns[name] = [getattr(r.reward, name) for r in rollouts]
    columns["step_ends"] = [[step.end for step in r.reward.steps] for r in rollouts]
    columns["step_scores"] = [[step.score for step in r.reward.steps] for r in rollouts]
    arrays = [_array(columns[f.name], f.type) for f in GROUP_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=GROUP_SCHEMA)


def _array(values: Any, of_type: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=of_type)


def _per_token(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    """The columns with one value a token; as they are all of one length, they share their offsets.

    Raises ValueError for a rollout whose arrays differ in length.
    """
    lengths = [len(r.token_ids) for r in rollouts]
    ends = np.zeros(len(rollouts) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    offsets, columns = pa.array(ends), dict[str, pa.Array]()
    for name, dtype in _PER_TOKEN.items():
        arrays = [getattr(r, name) for r in rollouts]
        if (found := [len(array) for array in arrays]) != lengths:
            raise ValueError(f"{name}: lengths {found} differ from those of token_ids, {lengths}")
        values = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    return columns


def encode_group(group: RolloutGroup) -> bytes:
    """A group as the bytes that travel and are journaled: one IPC message, without its schema."""
    data: bytes = group_to_batch(group).serialize().to_pybytes()
    return data


def read_batch(data: bytes | memoryview | pa.Buffer) -> pa.RecordBatch:
    """Read `encode_group` bytes and check them without building Python objects.

    Raises ValueError where they are no batch of GROUP_SCHEMA, hold more or fewer groups than one, or have per-token
    columns of differing lengths, or steps that have no finite score each or whose ends do not rise within the response.
    """
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), GROUP_SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ValueError(f"not a rollout group: {error}") from error
    if batch.num_rows == 0:
        raise ValueError("a group without rollouts")
    for name in _PER_GROUP:
        column = batch.column(name)
        if column.null_count or len(set(column.to_pylist())) != 1:
            raise ValueError(f"column {name}: rows of one group differ")
    # Equal offsets are equal lengths; where offsets differ, lengths may still not.
    ids = batch.column("token_ids")
    for name in _PER_TOKEN:
        column = batch.column(name)
        has_offsets = column.offsets.equals(ids.offsets)
        if column.null_count or not (has_offsets or column.value_lengths().equals(ids.value_lengths())):
            raise ValueError(f"column {name}: lengths differ from token_ids")
    _check_steps(batch)
    return batch


def _check_steps(batch: pa.RecordBatch) -> None:
    num_steps = batch.column("step_ends").value_lengths()
    if not batch.column("step_scores").value_lengths().equals(num_steps):
        raise ValueError("column step_scores: lengths differ from step_ends")
    ends, scores = batch.column("step_ends").flatten(), batch.column("step_scores").flatten()
    if ends.null_count or scores.null_count:
        raise ValueError("columns step_ends and step_scores: a value is null")
    if not len(ends):
        return
    row = np.repeat(np.arange(batch.num_rows), num_steps.to_numpy())
    end, before = ends.to_numpy(), np.roll(ends.to_numpy(), 1)
    before[np.flatnonzero(np.diff(row, prepend=-1))] = 0
    num_response = batch.column("token_ids").value_lengths().to_numpy() - batch.column("num_prompt_tokens").to_numpy()
    wrong = (end <= before) | (end > num_response[row]) | ~np.isfinite(scores.to_numpy())
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"step_ends: a step of rollout {row[i]} ends at token {end[i]} with score {scores[i]}: expected rising "
            f"ends from 1 to {num_response[row[i]]}, and finite scores"
        )


def batch_to_group(batch: pa.RecordBatch) -> RolloutGroup:
    """The inverse of `group_to_batch`."""
    columns: dict[str, Any] = {name: _split(batch.column(name), dtype) for name, dtype in _PER_TOKEN.items()}
    for field in GROUP_SCHEMA:
        if field.name not in columns:
            columns[field.name] = batch.column(field.name).to_pylist()
    rollouts = tuple(_rollout({name: values[i] for name, values in columns.items()}) for i in range(batch.num_rows))
    return RolloutGroup(**{name: columns[name][0] for name in _PER_GROUP}, rollouts=rollouts)


def decode_group(data: bytes | memoryview | pa.Buffer) -> RolloutGroup:
    """The inverse of `encode_group`; raises ValueError as `read_batch` does."""
    return batch_to_group(read_batch(data))


def _split(column: pa.ListArray, dtype: Any) -> list[NDArray[Any]]:
    values = column.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    offsets = column.offsets.to_numpy()
    return [values[offsets[i] : offsets[i + 1]] for i in range(len(column))]


def _rollout(row: dict[str, Any]) -> Rollout:
    reward = RewardResult(
        decision=Decision(row["decision"]),
        reward=row["reward"],
        components=dict(row["reward_components"]),
        evidence=row["evidence"],
        verifier=row["verifier"],
        verifier_version=row["verifier_version"],
        steps=tuple(map(StepScore, row["step_ends"], row["step_scores"])),
    )
    per_rollout = ("num_prompt_tokens", "seed", "mixed_context_from", "environment_snapshot")
    return Rollout(
        **{name: row[name] for name in (*_PER_TOKEN, *per_rollout)},
        end_reason=EndReason(row["end_reason"]),
        reward=reward,
    )
