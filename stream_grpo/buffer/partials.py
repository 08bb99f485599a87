"""The newest record of every group in flight that has one: what goes on where its owner dies. A fold over transitions.

A record here is of a group that is being sampled, or of a complete one that is to be scored again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stream_grpo.buffer.facts import GroupFacts, batch_of_record, facts_of
from stream_grpo.buffer.stock import Held, Reader
from stream_grpo.buffer.tickets import IN_FLIGHT_ENDS
from stream_grpo.buffer.transitions import Kind, Location, Transition
from stream_grpo.types import PolicyVersion


@dataclass(slots=True, kw_only=True)
class Partial:
    """What is known of a group in flight."""

    location: Location
    num_tokens: int
    num_rollouts: int = 0
    num_valid: int = 0
    """Rollouts with a reward."""
    reward_sum: float = 0.0
    """Of these."""
    mixed_context_tokens: int = 0
    versions: frozenset[PolicyVersion] = frozenset()
    """That sampled its tokens."""
    config_hash: str = ""
    is_complete: bool = False
    """Whether nothing of it is left to be sampled."""
    data: bytes = b""
    """The record."""


class Partials:
    """Partials by group. All of them are kept in memory: there are no more than groups in flight."""

    folded = ("_partials",)

    def __init__(self) -> None:
        """None yet."""
        self._partials: dict[str, Partial] = {}

    def apply(self, row: Transition) -> None:
        """Follow a transition."""
        if row.kind is Kind.PARTIAL and row.location:
            self._partials[row.group_id] = Partial(location=row.location, num_tokens=row.num_tokens)
        elif row.kind in IN_FLIGHT_ENDS or (row.kind is Kind.TICKETED and row.dropped_tokens):
            self._partials.pop(row.group_id, None)

    def take_back(self, held: Held) -> None:
        """Follow a group that is to be scored again: its complete record is what goes on."""
        self._partials[held.group_id] = Partial(
            location=held.location,
            num_tokens=held.num_tokens,
            num_rollouts=held.record.num_rollouts,
            num_valid=held.record.num_valid,
            reward_sum=held.record.reward_sum,
            mixed_context_tokens=held.record.mixed_context_tokens,
            versions=held.versions,
            config_hash=held.config_hash,
            is_complete=True,
            data=held.data,
        )

    def keep(self, facts: GroupFacts, data: bytes) -> None:
        """Keep the bytes of a partial that was just taken."""
        partial = self._partials[facts.group_id]
        partial.data, partial.versions, partial.config_hash = data, facts.versions, facts.config_hash
        partial.is_complete = facts.num_unfinished == 0
        partial.num_rollouts, partial.num_valid = facts.num_rollouts, len(facts.rewards)
        partial.reward_sum, partial.mixed_context_tokens = facts.reward_sum, facts.mixed_context_tokens

    def load(self, read: Reader) -> None:
        """Read from disk what is missing in memory, after a restart."""
        for group_id, partial in self._partials.items():
            if not partial.data:
                data = read(partial.location, group_id)
                self.keep(facts_of(batch_of_record(data)), data)

    def get(self, group_id: str) -> Partial | None:
        """The newest partial of a group in flight."""
        return self._partials.get(group_id)

    def segments(self) -> set[int]:
        """Segments that hold one."""
        return {partial.location.segment for partial in self._partials.values()}

    def __contains__(self, group_id: object) -> bool:
        """Whether a group in flight has one."""
        return group_id in self._partials

    def __iter__(self) -> Iterator[str]:
        """Ids of the groups that have one."""
        return iter(self._partials)


def num_shared_tokens(one: pa.RecordBatch, other: pa.RecordBatch) -> int:
    """Sampled tokens that two records of one group have in common: of each rollout those before the first difference.

    A token is its id and its version; a rollout whose prompts differ shares nothing.
    """
    return sum(map(_num_shared, _rollouts(one), _rollouts(other)))


def _rollouts(batch: pa.RecordBatch) -> Iterator[tuple[NDArray[Any], int]]:
    """Of each rollout [3, T]: token id, branch and step of the version; and how many tokens its prompt has."""
    columns = [batch.column(name) for name in ("token_ids", "version_branch", "version_step")]
    tokens = np.stack([column.flatten().to_numpy(zero_copy_only=False) for column in columns])
    ends = np.cumsum(columns[0].value_lengths().to_numpy())
    return zip(np.split(tokens, ends[:-1], axis=1), batch.column("num_prompt_tokens").to_pylist(), strict=True)


def _num_shared(one: tuple[NDArray[Any], int], other: tuple[NDArray[Any], int]) -> int:
    (tokens, num_prompt), (others, num_others_prompt) = one, other
    length = min(tokens.shape[1], others.shape[1])
    differs = (tokens[:, :length] != others[:, :length]).any(axis=0)
    num_equal = int(differs.argmax()) if differs.any() else length
    return max(0, num_equal - num_prompt) if num_prompt == num_others_prompt else 0
