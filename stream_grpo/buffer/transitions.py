"""Transitions: what happened to a group, one row each, and the Arrow schema of the log that holds them.

Everything the buffer knows is a fold over these rows, so a restart rebuilds it, from the newest snapshot on. What the
columns hold, by kind:

    kind           branch, step               reason                              also
    hello          -                          -                                   sampler_id, owner_epoch: incarnation
    ticketed       weights of the sampler     id of the request it answers        sampler_id, owner_epoch; issued again:
                                                                                  dropped_tokens, lost_tokens,
                                                                                  mixed_context_tokens of those dropped
    picked         -                          -                                   problem_id of a ticket; num_rollouts
                                                                                  that its group is to have
    partial        learner when it came in    -                                   the record so far and num_tokens; it
                                                                                  replaces the one before
    lost           -                          -                                   sampler_id that was not heard of for
                                                                                  too long: to be issued again
    accepted       learner when it came in    -                                   the record and its counts
    no_signal      learner when it came in    all_right, all_wrong, same_reward   the record and its counts
    invalid        learner at the end         what is wrong with it               the record, where it ends on arrival;
                                                                                  sampler_id, problem_id of a ticket
    stale          learner at the end         age, deadline, surplus or restore   the record, where it ends on arrival;
                                                                                  sampler_id, problem_id of a ticket
    refused        learner when it came in    why this copy is not taken          crc32, num_tokens; no record is kept
    leased         learner the step starts at -
    trained        the version that was made  -                                   problem_id, tokens by fate
    restored       learner after the restore  -                                   leased or trained, available again
    lent           learner the step starts at -                                   trained before, leased once more
    reused         the version that was made  -                                   num_tokens, and those of it by fate
    undone         version of the use it ends -                                   trained_tokens of that use
    requeued       learner at the end         -                                   problem_id, to be sampled again first
    rescored       learner at the time        -                                   sampler_id, problem_id, owner_epoch of
                                                                                  an accepted group: a ticket again;
                                                                                  mixed_context_tokens that leave
    started        learner                    forks as JSON: {"1": [0, 10]}
    checkpointed   the oldest kept checkpoint -
    evaluated      the evaluated weights      -                                   sampler_id, num_tokens; once a version
    removed        -                          -                                   segment: it leaves the disk next
    snapshot       -                          all folds as JSON, see `snapshot`   first row of every log but the first;
                                                                                  segment: the number of its log
    followed       -                          -                                   last row of every log but the newest;
                                                                                  segment: the log that follows

The counts of a record are `num_tokens`, sampled ones, `num_rollouts`, `num_valid`, `reward_sum`, `num_truncated` and
`mixed_context_tokens`, and `dropped_tokens`, those of the partial before that it does not have. A ticket that ends has
the counts of its newest partial. A `stale` row of an accepted group that was too old names its problem. `crc32` is of
the record's bytes, `checksum` is the CRC32 of the other columns of the row as a JSON list without spaces: Arrow itself
does not notice a flipped bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from stream_grpo.types import Fate, PolicyVersion


class Kind(StrEnum):
    """What a row says; the first eight are the states of a group."""

    TICKETED = Fate.TICKETED.value
    ACCEPTED = Fate.ACCEPTED.value
    LEASED = Fate.LEASED.value
    TRAINED = Fate.TRAINED.value
    STALE = Fate.STALE.value
    NO_SIGNAL = Fate.NO_SIGNAL.value
    INVALID = Fate.INVALID.value
    REFUSED = Fate.REFUSED.value
    HELLO = "hello"
    PICKED = "picked"
    PARTIAL = "partial"
    LOST = "lost"
    RESTORED = "restored"
    LENT = "lent"
    REUSED = "reused"
    UNDONE = "undone"
    REQUEUED = "requeued"
    RESCORED = "rescored"
    STARTED = "started"
    CHECKPOINTED = "checkpointed"
    EVALUATED = "evaluated"
    REMOVED = "removed"
    SNAPSHOT = "snapshot"
    FOLLOWED = "followed"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record lies: the segment's number, first byte, bytes, CRC32."""

    segment: int
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One row of the log. Its columns are explained on top of this file."""

    kind: Kind
    time_s: float
    """Unix time."""
    group_id: str = ""
    problem_id: str = ""
    sampler_id: str = ""
    branch: int = -1
    step: int = -1
    owner_epoch: int = 0
    segment: int = 0
    offset: int = 0
    length: int = 0
    """Bytes of the record; 0 where the row has none."""
    crc32: int = 0
    num_tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    baseline_only_tokens: int = 0
    num_truncated: int = 0
    """Rollouts that reached the length limit."""
    mixed_context_tokens: int = 0
    """Tokens sampled on a KV cache of older weights."""
    num_rollouts: int = 0
    num_valid: int = 0
    """Rollouts with a reward."""
    reward_sum: float = 0.0
    """Of the valid rollouts; 0 where one of their rewards is not finite."""
    dropped_tokens: int = 0
    """Tokens of the group's newest partial that do not go on from here."""
    lost_tokens: int = 0
    """Tokens beyond the newest partial that the owner before had, by its last heartbeat."""
    reason: str = ""

    @property
    def version(self) -> PolicyVersion:
        """Branch and step as one."""
        return PolicyVersion(self.branch, self.step)

    @property
    def location(self) -> Location | None:
        """Where the record lies, for a row that brought one."""
        return Location(self.segment, self.offset, self.length, self.crc32) if self.length else None

    @property
    def makes_outcome(self) -> bool:
        """Whether the curator is told: of complete records, of tickets that end without one, of requeues."""
        if self.kind is Kind.PARTIAL:
            return False
        is_ticket_end = self.kind in (Kind.STALE, Kind.INVALID) and bool(self.sampler_id)
        return bool(self.length) or is_ticket_end or self.kind is Kind.REQUEUED


_COLUMNS: Mapping[str, pa.DataType] = {
    "kind": pa.string(),
    "time_s": pa.float64(),
    "group_id": pa.string(),
    "problem_id": pa.string(),
    "sampler_id": pa.string(),
    "branch": pa.int32(),
    "step": pa.int32(),
    "owner_epoch": pa.int32(),
    "segment": pa.int32(),
    "offset": pa.int64(),
    "length": pa.int64(),
    "crc32": pa.uint32(),
    "num_tokens": pa.int64(),
    "trained_tokens": pa.int64(),
    "masked_tokens": pa.int64(),
    "baseline_only_tokens": pa.int64(),
    "num_truncated": pa.int32(),
    "mixed_context_tokens": pa.int64(),
    "num_rollouts": pa.int32(),
    "num_valid": pa.int32(),
    "reward_sum": pa.float64(),
    "dropped_tokens": pa.int64(),
    "lost_tokens": pa.int64(),
    "reason": pa.string(),
}

TRANSITION_SCHEMA = pa.schema(
    [pa.field(name, of_type, nullable=False) for name, of_type in {**_COLUMNS, "checksum": pa.uint32()}.items()],
    metadata={"schema": "stream_grpo.transition", "schema_version": "6"},
)

_ROW = pa.struct(list(TRANSITION_SCHEMA))


_FLOATS = frozenset(name for name, of_type in _COLUMNS.items() if of_type == pa.float64())


def _items(row: Transition) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(row, name)) for name in _COLUMNS)


def checksum(values: Iterable[Any]) -> int:
    """CRC32 of a row's values in column order, as a JSON list without spaces."""
    return zlib.crc32(json.dumps(list(values), separators=(",", ":")).encode())


def encode_transitions(rows: Iterable[Transition]) -> bytes:
    """Rows as one IPC message, without its schema."""
    # The checksum is of what is read back: a whole number in a column of floats comes back as a float.
    values = ([float(value) if name in _FLOATS else value for name, value in _items(row)] for row in rows)
    # One conversion for all columns: an array each takes twice as long for the few rows of a commit.
    structs = pa.array([(*row, checksum(row)) for row in values], _ROW)
    data: bytes = pa.RecordBatch.from_struct_array(structs).serialize().to_pybytes()
    return data


def decode_transitions(batch: pa.RecordBatch) -> list[Transition]:
    """The inverse of `encode_transitions`. Raises ValueError where a row is not what was written."""
    rows = []
    for row in batch.to_pylist():
        expected = row.pop("checksum")
        if checksum(row.values()) != expected:
            raise ValueError(f"a row of group '{row['group_id']}' does not have its checksum")
        rows.append(Transition(**{**row, "kind": Kind(row["kind"])}))
    return rows
