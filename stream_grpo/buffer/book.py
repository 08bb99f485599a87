"""The book: all that the buffer knows, as folds over one sequence of transitions. It touches nothing but its journal.

Every change is a transition that is journaled and then applied, and a restart applies the journaled ones again: there
is no second way for anything to change. What `intake` (for samplers) and `leases` (for the learner) write here may be
told to others only after `Journal.commit`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from stream_grpo.buffer.admission import Admission, config_changed
from stream_grpo.buffer.ledger import Ledger
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.outcomes import Outbox
from stream_grpo.buffer.selectors import Candidate
from stream_grpo.buffer.signal import SignalWatch
from stream_grpo.buffer.stock import Held, Stock
from stream_grpo.buffer.tickets import InFlight, TicketBook
from stream_grpo.buffer.transitions import Kind, Location, Transition
from stream_grpo.errors import StreamGrpoError
from stream_grpo.types import Fate

REMEMBERED = 16384
"""Inserts that are known again when they are repeated."""

GRACE_S = 15.0
"""After a start no ticket ends for so long: samplers send again, every 10 s, what the buffer was not there to take."""


class Refusal(StreamGrpoError):
    """A request that is not granted; the message goes to whoever asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides over groups, from the configuration of the run."""

    groups_per_step: int
    max_policy_age: int
    sample_deadline_s: float
    max_groups_without_signal: int
    run_seed: int
    signal_tolerance: float | None = 1e-6
    config_hash: str | None = None
    """Groups with another one are invalid; None takes any."""
    vocab_size: int | None = None
    """Groups with token ids from here on are invalid; None takes any."""
    uniform_group_version: bool = False
    """Groups with tokens of two versions are invalid."""


class Records(Protocol):
    """What the book needs of a journal."""

    def replay(self) -> Iterator[Transition]:
        """Every committed transition."""

    def append(self, transition: Transition) -> None:
        """Add a transition to the next commit."""

    def append_group(self, data: bytes, transition: Transition) -> Transition:
        """Add a record and its transition; returns the transition with the record's location."""

    def read(self, location: Location, group_id: str = "") -> bytes:
        """A committed record."""


class Book:
    """Tickets, groups, account and outcomes of one run, and the only way to change them."""

    def __init__(self, journal: Records, rules: Rules, *, now: float) -> None:
        """Rebuild everything from the journal; groups of another configuration end.

        Raises JournalError or LedgerError where the journal contradicts itself.
        """
        self.rules, self.journal = rules, journal
        self.lineage, self.ledger, self.stock = Lineage(), Ledger(), Stock()
        self.signal, self.outbox = SignalWatch(), Outbox()
        self.tickets = TicketBook(
            self.lineage,
            run_seed=rules.run_seed,
            sample_deadline_s=rules.sample_deadline_s,
        )
        self.taken: OrderedDict[tuple[str, int, int], Admission] = OrderedDict()
        """How the last inserts were taken, by group, owner epoch and CRC32."""
        self.mixed_context_tokens = 0
        """Sampled on a KV cache of older weights, of all groups taken."""
        for row in journal.replay():
            self._apply(row)
        self.ledger.check()
        self.tickets.extend_deadlines(now + GRACE_S)
        self.stock.load(journal.read)
        self.outbox.committed()
        self.end_other_configurations([*self.stock.accepted(), *self.stock.leased()], now)

    def write(self, row: Transition, data: bytes = b"") -> None:
        """Journal a transition with the record it brings, and apply it. Raises LedgerError for an illegal one."""
        # The ledger refuses an illegal row before anything is journaled.
        self.ledger.check_row(row)
        if data:
            row = self.journal.append_group(data, row)
        else:
            self.journal.append(row)
        self._apply(row)

    def _apply(self, row: Transition) -> None:
        self.ledger.apply(row)
        self.tickets.apply(row)
        self.lineage.apply(row)
        self.ledger.forget(self.stock.apply(row, self.lineage))
        self.signal.apply(row)
        self.outbox.apply(row)
        self.mixed_context_tokens += row.mixed_context_tokens
        if row.crc32:
            self.taken[(row.group_id, row.owner_epoch, row.crc32)] = Admission(Fate(row.kind), row.reason)
            if len(self.taken) > REMEMBERED:
                self.taken.popitem(last=False)

    def row(self, kind: Kind, now: float, group_id: str = "", reason: str = "") -> Transition:
        """A transition that happens now, with the learner where it is."""
        learner = self.lineage.learner
        return Transition(
            kind=kind, time_s=now, group_id=group_id, branch=learner.branch, step=learner.step, reason=reason
        )

    def end_ticket(self, held: InFlight, reason: str, now: float) -> None:
        """End a group in flight as stale, its problem and sampler named."""
        group_id = held.ticket.group_id
        row = replace(
            self.row(Kind.STALE, now, group_id, reason),
            problem_id=self.tickets.problem_of(group_id),
            sampler_id=held.sampler_id,
            owner_epoch=held.ticket.owner_epoch,
        )
        self.write(row)

    def end_other_configurations(self, groups: Iterable[Held], now: float) -> None:
        """End held groups whose configuration is not the run's as invalid, before they are leased."""
        for held in groups:
            if self.rules.config_hash not in (None, held.config_hash):
                reason = config_changed(held.config_hash, self.rules.config_hash)
                self.write(self.row(Kind.INVALID, now, held.group_id, reason))

    @property
    def num_live(self) -> int:
        """In flight + buffered with signal + leased."""
        return len(self.tickets) + self.stock.num_live

    def candidate(self, held: Held) -> Candidate:
        """A held group in the order: as old as its oldest token."""
        return Candidate(held.group_id, max(map(self.lineage.age, held.versions)), held.sampler_id)

    def ticket_candidate(self, held: InFlight) -> Candidate:
        """A group in flight in the order: as old as its oldest token may be."""
        return Candidate(held.ticket.group_id, self.lineage.age_in_flight(held.version), held.sampler_id)
