"""The groups the buffer holds: accepted, leased, and trained ones that a restore may still bring back.

A fold over transitions, but for the bytes: those of live groups are kept in memory, all others stay on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stream_grpo.buffer.facts import GroupFacts, batch_of_record, facts_of
from stream_grpo.buffer.lineage import Lineage, contains
from stream_grpo.buffer.transitions import Kind, Location, Transition
from stream_grpo.types import PolicyVersion

Reader = Callable[[Location, str], bytes]
_ENDS = (Kind.STALE, Kind.INVALID, Kind.RESCORED)
"""After which a group is no longer held."""


@dataclass(slots=True)
class Held:
    """A group that was accepted and has no final end."""

    group_id: str
    problem_id: str
    sampler_id: str
    location: Location
    num_tokens: int
    state: Kind
    version: PolicyVersion
    """Leased: the version the step starts from. Trained: the version that was made."""
    versions: frozenset[PolicyVersion] = frozenset()
    """That sampled its tokens."""
    config_hash: str = ""
    data: bytes = b""
    """The record, while the group is live."""


class Stock:
    """Held groups in the order they came in."""

    def __init__(self) -> None:
        """Empty."""
        self._held: dict[str, Held] = {}
        self._leased: dict[str, None] = {}
        self._num_live = 0
        self.final: PolicyVersion | None = None
        """The oldest kept checkpoint; groups it contains are trained for good."""

    def apply(self, row: Transition, lineage: Lineage) -> list[str]:
        """Follow a transition; the ids of groups whose training became final."""
        held = self._held.get(row.group_id)
        if row.kind is Kind.ACCEPTED and row.location:
            self._held[row.group_id] = Held(
                row.group_id, row.problem_id, row.sampler_id, row.location, row.num_tokens, row.kind, row.version
            )
            self._num_live += 1
        elif row.kind is Kind.CHECKPOINTED:
            return self._make_final(row.version, lineage)
        elif held and row.kind in (Kind.LEASED, Kind.TRAINED, Kind.RESTORED, *_ENDS):
            self._move(held, row)
        return []

    def _move(self, held: Held, row: Transition) -> None:
        was_live = held.state is not Kind.TRAINED
        self._leased.pop(held.group_id, None)
        if row.kind in _ENDS:
            del self._held[held.group_id]
        else:
            held.state = Kind.ACCEPTED if row.kind is Kind.RESTORED else row.kind
            held.version = row.version
        if row.kind is Kind.LEASED:
            self._leased[held.group_id] = None
        is_live = row.kind in (Kind.LEASED, Kind.RESTORED)
        self._num_live += is_live - was_live
        if not is_live:
            held.data = b""

    def _make_final(self, version: PolicyVersion, lineage: Lineage) -> list[str]:
        self.final = version
        final = [h.group_id for h in self.trained() if contains(version, h.version, lineage.forks)]
        for group_id in final:
            del self._held[group_id]
        return final

    def keep(self, facts: GroupFacts, data: bytes) -> None:
        """Keep the bytes of a group that was just accepted."""
        held = self._held[facts.group_id]
        held.data, held.versions, held.config_hash = data, facts.versions, facts.config_hash

    def load(self, read: Reader) -> None:
        """Read from disk what is missing in memory, after a restart or a restore."""
        for held in self._held.values():
            if held.versions and (held.data or held.state is Kind.TRAINED):
                continue
            data = read(held.location, held.group_id)
            self.keep(facts_of(batch_of_record(data)), data if held.state is not Kind.TRAINED else b"")

    def __getitem__(self, group_id: str) -> Held:
        """A held group."""
        return self._held[group_id]

    @property
    def num_live(self) -> int:
        """Accepted and leased groups."""
        return self._num_live

    @property
    def num_leased(self) -> int:
        """Leased groups."""
        return len(self._leased)

    def accepted(self) -> list[Held]:
        """Groups that may be leased, oldest dispatched first."""
        return sorted(self._in_state(Kind.ACCEPTED), key=lambda held: held.group_id)

    def leased(self) -> list[Held]:
        """Leased groups in the order of their batch."""
        return [self._held[group_id] for group_id in self._leased]

    def trained(self) -> list[Held]:
        """Trained groups that are not final."""
        return list(self._in_state(Kind.TRAINED))

    def _in_state(self, state: Kind) -> Iterator[Held]:
        return (held for held in self._held.values() if held.state is state)
