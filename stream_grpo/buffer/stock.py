"""The groups the buffer holds: accepted, leased, and trained ones that a restore may bring back or a step use again.

A fold over transitions, but for the bytes: those of live groups are kept in memory, all others stay on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stream_grpo.buffer.facts import GroupFacts, RolloutFacts, batch_of_record, facts_of
from stream_grpo.buffer.lineage import Lineage, contains
from stream_grpo.buffer.transitions import Kind, Location, Transition
from stream_grpo.types import PolicyVersion

Reader = Callable[[Location, str], bytes]
_ENDS = (Kind.STALE, Kind.INVALID, Kind.RESCORED)
"""After which a group is no longer held."""


@dataclass(slots=True)
class Held:
    """A group that was accepted and has no final end, or may be used again."""

    group_id: str
    record: Transition
    """The row that brought it."""
    issued_at: PolicyVersion
    """The learner when the ticket was issued under which its first tokens were sampled."""
    came_in_at: PolicyVersion
    """The learner when the group came in; of one that was scored again, for the first time."""
    state: Kind
    version: PolicyVersion
    """Leased: the version the step starts from. Trained: the version that was made."""
    uses: dict[PolicyVersion, int] = field(default_factory=dict)
    """Versions that further uses made, and the tokens that each trained on."""
    versions: frozenset[PolicyVersion] = frozenset()
    """That sampled its tokens."""
    rollouts: tuple[RolloutFacts, ...] = ()
    """The valid ones."""
    reward_variance: float = 0.0
    config_hash: str = ""
    data: bytes = b""
    """The record's bytes, while the group is live."""

    @property
    def problem_id(self) -> str:
        """The problem."""
        return self.record.problem_id

    @property
    def sampler_id(self) -> str:
        """Who sampled it."""
        return self.record.sampler_id

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all rollouts."""
        return self.record.num_tokens

    @property
    def location(self) -> Location:
        """Where its bytes are."""
        location = self.record.location
        assert location is not None
        return location

    @property
    def num_uses(self) -> int:
        """Steps that have trained on it."""
        return (self.state is Kind.TRAINED) + len(self.uses)


class Stock:
    """Held groups in the order they came in."""

    folded = ("_held", "_leased", "_lent", "_final", "_issued", "_begun", "_came_in", "_num_live", "final")

    def __init__(self, *, max_uses: int = 1, max_policy_age: int = 0) -> None:
        """Empty. Trained groups are held on for up to `max_uses` while they may be young enough."""
        self._max_uses, self._max_policy_age = max_uses, max_policy_age
        self._held: dict[str, Held] = {}
        self._leased: dict[str, None] = {}
        self._lent: dict[str, None] = {}
        self._final: dict[str, Held] = {}
        """Trained for good, and still of use: to a step, or to a restore, which undoes further uses."""
        self._issued: dict[str, PolicyVersion] = {}
        self._begun: set[str] = set()
        """Groups in flight that have tokens: a ticket that is issued again with them goes on from the earlier one."""
        self._came_in: dict[str, PolicyVersion] = {}
        """Groups in flight that came in before and are scored again."""
        self._num_live = 0
        self.final: PolicyVersion | None = None
        """The oldest kept checkpoint; groups it contains are trained for good."""

    def apply(self, row: Transition, lineage: Lineage) -> list[str]:
        """Follow a transition; the ids of groups whose training became final."""
        held = self._held.get(row.group_id)
        match row.kind:
            case Kind.TICKETED | Kind.PARTIAL:
                self._follow_ticket(row, lineage.learner)
            case Kind.ACCEPTED if row.location:
                issued_at, came_in_at = self._take_moments(row)
                self._held[row.group_id] = Held(row.group_id, row, issued_at, came_in_at, row.kind, row.version)
                self._num_live += 1
            case Kind.STARTED:
                self._lent.clear()
            case Kind.CHECKPOINTED:
                return self._make_final(row.version, lineage)
            case Kind.LENT:
                self._lent[row.group_id] = None
            case Kind.REUSED | Kind.UNDONE:
                self._use(row)
            case Kind.STALE | Kind.NO_SIGNAL | Kind.INVALID if held is None:
                self._take_moments(row)
            case Kind.LEASED | Kind.TRAINED | Kind.RESTORED | Kind.RESCORED | Kind.STALE | Kind.INVALID if held:
                self._move(held, row)
                if row.kind is Kind.TRAINED:
                    self._forget_used_up(lineage)
            case _:
                pass
        return []

    def _follow_ticket(self, row: Transition, learner: PolicyVersion) -> None:
        if row.kind is Kind.PARTIAL:
            self._begun |= {row.group_id} if row.num_tokens else set()
        elif row.dropped_tokens or row.group_id not in self._begun:
            self._take_moments(row)
            self._issued[row.group_id] = learner

    def _take_moments(self, row: Transition) -> tuple[PolicyVersion, PolicyVersion]:
        """When the ticket of a group was issued and when the group came in, forgotten here."""
        self._begun.discard(row.group_id)
        issued_at = self._issued.pop(row.group_id, row.version)
        return issued_at, self._came_in.pop(row.group_id, row.version)

    def _use(self, row: Transition) -> None:
        self._lent.pop(row.group_id, None)
        held = self[row.group_id]
        if row.kind is Kind.REUSED:
            held.uses[row.version] = row.trained_tokens
        else:
            del held.uses[row.version]

    def _move(self, held: Held, row: Transition) -> None:
        was_live = held.state is not Kind.TRAINED
        self._leased.pop(held.group_id, None)
        if row.kind is Kind.RESCORED:
            self._begun.add(held.group_id)
            self._issued[held.group_id], self._came_in[held.group_id] = held.issued_at, held.came_in_at
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
        final = [h.group_id for h in self._in_state(Kind.TRAINED) if contains(version, h.version, lineage.forks)]
        for group_id in final:
            self._final[group_id] = self._held.pop(group_id)
        self._forget_used_up(lineage)
        return final

    def _forget_used_up(self, lineage: Lineage) -> None:
        """Let go of groups that are trained for good, and that neither a step nor a restore can ask for again."""
        for group_id, held in list(self._final.items()):
            # What a step trained on is at least 1 older after it.
            can_be_used = held.num_uses < self._max_uses and lineage.age(held.version) < self._max_policy_age
            is_final = all(self.final and contains(self.final, use, lineage.forks) for use in held.uses)
            if is_final and not can_be_used and group_id not in self._lent:
                del self._final[group_id]

    def segments(self) -> set[int]:
        """Segments with a group that has no final end, or may be used again."""
        return {held.location.segment for held in (*self._held.values(), *self._final.values())}

    def live_segments(self) -> set[int]:
        """Segments with a group that is still to be trained, or may be used again."""
        waiting = (held for held in self._held.values() if held.state is not Kind.TRAINED or self._may_use_again(held))
        return {held.location.segment for held in (*waiting, *self._final.values())}

    def _may_use_again(self, held: Held) -> bool:
        return held.num_uses < self._max_uses

    def keep(self, facts: GroupFacts, data: bytes) -> None:
        """Keep the bytes of a group that was just accepted."""
        held = self[facts.group_id]
        held.data, held.versions, held.config_hash = data, facts.versions, facts.config_hash
        held.rollouts, held.reward_variance = facts.rollouts, facts.reward_variance

    def load(self, read: Reader) -> None:
        """Read from disk what is missing in memory, after a restart or a restore."""
        for held in [*self._held.values(), *self._final.values()]:
            if held.versions and (held.data or held.state is Kind.TRAINED):
                continue
            data = read(held.location, held.group_id)
            self.keep(facts_of(batch_of_record(data)), data if held.state is not Kind.TRAINED else b"")

    def __getitem__(self, group_id: str) -> Held:
        """A held group."""
        return self._held.get(group_id) or self._final[group_id]

    def get(self, group_id: str) -> Held | None:
        """A group whose end is not final, if it is one."""
        return self._held.get(group_id)

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

    def lent(self) -> list[Held]:
        """Groups leased for a further use, in the order of their batch."""
        return [self[group_id] for group_id in self._lent]

    def trained(self) -> list[Held]:
        """Trained groups that are not final."""
        return list(self._in_state(Kind.TRAINED))

    def used(self) -> list[Held]:
        """Trained groups that a step may use again or has, those that are final included."""
        return [*self._final.values(), *self._in_state(Kind.TRAINED)]

    def _in_state(self, state: Kind) -> Iterator[Held]:
        return (held for held in self._held.values() if held.state is state)
