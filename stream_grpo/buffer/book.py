"""The book: all that the buffer knows, as folds over one sequence of transitions. It touches nothing but its journal.

Every change is a transition that is journaled and then applied, and a restart applies the journaled ones again: there
is no second way for anything to change. What `intake` (for samplers) and `leases` (for the learner) write here may be
told to others only after `Journal.commit`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from stream_grpo.buffer.admission import Admission, config_changed
from stream_grpo.buffer.facts import batch_of_record, facts_of
from stream_grpo.buffer.ledger import Ledger
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.outcomes import Outbox
from stream_grpo.buffer.partials import Partials
from stream_grpo.buffer.retention import Limits, Retention
from stream_grpo.buffer.selectors import Candidate
from stream_grpo.buffer.signal import SignalWatch
from stream_grpo.buffer.snapshot import Fold, set_folds, snapshot_row
from stream_grpo.buffer.staleness import Losses, oldest_trained
from stream_grpo.buffer.stock import Held, Stock
from stream_grpo.buffer.tickets import InFlight, TicketBook
from stream_grpo.buffer.transitions import Kind, Location, Transition
from stream_grpo.config_stream import Selector, TooOld
from stream_grpo.errors import StreamGrpoError
from stream_grpo.types import Fate, PolicyVersion, sampling_part

REMEMBERED = 16384
"""Inserts that are known again when they are repeated."""

GRACE_S = 15.0
"""After a start no ticket ends for so long: samplers send again, every 10 s, what the buffer was not there to take."""
_log = logging.getLogger(__name__)


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
    counts_steps: bool = False
    """Whether step scores that differ are signal too."""
    config_hash: str | None = None
    """Groups with another one are invalid; None takes any."""
    rescores: bool = True
    """Whether groups whose rewards alone are of another configuration are scored again instead."""
    ticket_timeout_s: float = 30.0
    """A ticket whose owner is not heard of for so long is issued again."""
    vocab_size: int | None = None
    """Groups with token ids from here on are invalid; None takes any."""
    uniform_group_version: bool = False
    """Groups with tokens of two versions are invalid."""
    too_old: TooOld = "wait"
    max_requeues: int = 3
    selector: Selector = "fewest_steps_left"
    max_uses: int = 1
    reused_per_step: int = 0
    """Places of a step for groups trained on before; the others are fresh."""

    @property
    def fresh_per_step(self) -> int:
        """Groups that a step must have, and that the rule of tickets counts."""
        return self.groups_per_step - self.reused_per_step


class Records(Protocol):
    """What the book needs of a journal."""

    def replay(self) -> Iterator[Transition]:
        """Every committed transition, or the newest snapshot and those after it."""

    def append(self, transition: Transition) -> None:
        """Add a transition to the next commit."""

    def append_group(self, data: bytes, transition: Transition) -> Transition:
        """Add a record and its transition; returns the transition with the record's location."""

    def read(self, location: Location, group_id: str = "") -> bytes:
        """A committed record."""


class Book:
    """Tickets, groups, account and outcomes of one run, and the only way to change them."""

    folded = ("taken", "mixed_context_tokens")

    def __init__(self, journal: Records, rules: Rules, *, now: float) -> None:
        """Rebuild everything from the journal; groups of another configuration end.

        Raises JournalError or LedgerError where the journal contradicts itself.
        """
        self.rules, self.journal = rules, journal
        self.lineage, self.ledger, self.retention = Lineage(), Ledger(), Retention()
        self.stock = Stock(max_uses=rules.max_uses, max_policy_age=rules.max_policy_age)
        self.signal, self.outbox, self.losses = SignalWatch(), Outbox(), Losses(rules.max_requeues)
        self.partials = Partials()
        self.tickets = TicketBook(
            self.lineage,
            run_seed=rules.run_seed,
            sample_deadline_s=rules.sample_deadline_s,
        )
        self.taken: OrderedDict[tuple[str, int, int], Admission] = OrderedDict()
        """How the last inserts were taken, by group, owner epoch and CRC32."""
        self.mixed_context_tokens = 0
        """Sampled on a KV cache of older weights: of all groups taken, and of what ended in flight."""
        for row in journal.replay():
            self._apply(row)
        self.ledger.check()
        self.stock.load(journal.read)
        self.partials.load(journal.read)
        self.tickets.extend_deadlines(now + GRACE_S)
        # What is to be continued needs a sampler, and one that starts with the buffer may take a while.
        self.tickets.extend_deadlines(now + rules.sample_deadline_s, self.partials)
        self.outbox.committed()
        self.end_other_configurations([*self.stock.accepted(), *self.stock.leased()], now)
        self._end_other_partials(now)
        # Leased groups wait for the learner's start, which says whether their step was made.
        self.rescore(self.stock.accepted(), now)

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
        if row.kind is Kind.SNAPSHOT:
            set_folds(self._folds, row)
            return
        self.ledger.apply(row)
        if row.kind is Kind.RESCORED:
            self.partials.take_back(self.stock[row.group_id])
        self.tickets.apply(row)
        self.partials.apply(row)
        self.lineage.apply(row)
        self.losses.apply(row, self.stock.get(row.group_id))
        self.ledger.forget(self.stock.apply(row, self.lineage))
        self.signal.apply(row)
        self.outbox.apply(row)
        self.retention.apply(row)
        if row.kind is Kind.CHECKPOINTED:
            self.retention.settle(self.stock.segments() | self.partials.segments())
        self.mixed_context_tokens += row.mixed_context_tokens
        if row.crc32 and row.kind is not Kind.PARTIAL:
            self.taken[(row.group_id, row.owner_epoch, row.crc32)] = Admission(Fate(row.kind), row.reason)
            if len(self.taken) > REMEMBERED:
                self.taken.popitem(last=False)

    @property
    def _folds(self) -> dict[str, Fold]:
        """What a snapshot holds."""
        return {
            "ledger": self.ledger,
            "tickets": self.tickets,
            "lineage": self.lineage,
            "stock": self.stock,
            "partials": self.partials,
            "losses": self.losses,
            "signal": self.signal,
            "outbox": self.outbox,
            "retention": self.retention,
            "book": self,
        }

    def snapshot(self, now: float, *, closes_log: int) -> Transition:
        """All that was applied as one row; the log of this number ends before it, and what follows is applied to it."""
        self.retention.close_log(closes_log)
        return snapshot_row(self._folds, now, begins_log=closes_log + 1)

    def segments_in_use(self) -> set[int]:
        """Segments with a record that a restore, a lease or the curator may still ask for."""
        return self.stock.segments() | self.partials.segments() | self.outbox.segments()

    def remove_segments(self, limits: Limits, *, closed_below: int, now: float) -> list[int]:
        """Write that segments leave the disk, which they may once this is committed; returns their numbers."""
        numbers = self.retention.removable(limits, self.segments_in_use(), closed_below=closed_below, now=now)
        for number in numbers:
            self.write(Transition(kind=Kind.REMOVED, time_s=now, segment=number))
        return numbers

    def needs_checkpoint(self, *, closed_below: int) -> bool:
        """Whether checkpoints are all that the oldest segment waits for."""
        live = self.stock.live_segments() | self.partials.segments()
        return self.retention.needs_checkpoint(live, closed_below=closed_below)

    def row(self, kind: Kind, now: float, group_id: str = "", reason: str = "") -> Transition:
        """A transition that happens now, with the learner where it is."""
        learner = self.lineage.learner
        return Transition(
            kind=kind, time_s=now, group_id=group_id, branch=learner.branch, step=learner.step, reason=reason
        )

    def end_ticket(self, held: InFlight, reason: str, now: float, kind: Kind = Kind.STALE) -> None:
        """End a group in flight, by default as stale, its problem and sampler named, and what was sampled of it."""
        group_id = held.ticket.group_id
        row = replace(
            self.row(kind, now, group_id, reason),
            problem_id=self.tickets.problem_of(group_id),
            sampler_id=held.sampler_id,
            owner_epoch=held.ticket.owner_epoch,
        )
        if partial := self.partials.get(group_id):
            row = replace(
                row,
                num_tokens=partial.num_tokens,
                num_rollouts=partial.num_rollouts,
                num_valid=partial.num_valid,
                reward_sum=partial.reward_sum,
                mixed_context_tokens=partial.mixed_context_tokens,
            )
        self.write(row)

    def end_other_configurations(self, groups: Iterable[Held], now: float) -> None:
        """End held groups whose configuration is not the run's as invalid, but for those to be scored again."""
        for held in groups:
            if not self.is_of_run(held.config_hash) and not self._is_rescored(held.config_hash):
                reason = config_changed(held.config_hash, self.rules.config_hash)
                self.write(self.row(Kind.INVALID, now, held.group_id, reason))

    def _end_other_partials(self, now: float) -> None:
        for flight in self.tickets:
            partial = self.partials.get(flight.ticket.group_id)
            if partial and not self.is_of_run(partial.config_hash) and not self._is_rescored(partial.config_hash):
                reason = config_changed(partial.config_hash, self.rules.config_hash)
                self.end_ticket(flight, reason, now, Kind.INVALID)

    def rescore(self, groups: Iterable[Held], now: float) -> None:
        """Make accepted groups whose rewards are of another configuration tickets again, which go on from all tokens.

        Whoever takes such a ticket samples nothing, and scores the group as a whole.
        """
        for held in groups:
            if self._is_rescored(held.config_hash):
                facts = facts_of(batch_of_record(held.data))
                row = replace(
                    self.row(Kind.RESCORED, now, held.group_id),
                    problem_id=held.problem_id,
                    sampler_id=held.sampler_id,
                    owner_epoch=facts.owner_epoch,
                    num_rollouts=facts.num_rollouts,
                    # They count again when the group comes in again.
                    mixed_context_tokens=-facts.mixed_context_tokens,
                )
                self.write(row)

    def is_of_run(self, config_hash: str) -> bool:
        """Whether a configuration is the run's."""
        return self.rules.config_hash in (None, config_hash)

    def _is_rescored(self, config_hash: str) -> bool:
        """Whether a configuration is the run's but for its rewards, and rewards may be given anew."""
        ours = self.rules.config_hash
        if ours is None or config_hash == ours:
            return False
        return self.rules.rescores and sampling_part(config_hash) == sampling_part(ours)

    @property
    def num_live(self) -> int:
        """In flight + buffered with signal + leased."""
        return len(self.tickets) + self.stock.num_live

    def oldest_trained(self, held: Held) -> PolicyVersion:
        """The version of the oldest token of a held group that would be trained."""
        if self.rules.too_old != "baseline_only":
            return max(held.versions, key=self.lineage.age)
        parts = [rollout.versions for rollout in held.rollouts]
        return oldest_trained(parts, self.lineage.age, self.rules.max_policy_age)

    def candidate(self, held: Held) -> Candidate:
        """A held group in the order: as old as its oldest token that would be trained."""
        age = self.lineage.age(self.oldest_trained(held))
        return Candidate(held.group_id, age, held.sampler_id, held.reward_variance, held.num_uses)

    def end_too_old(self, held: Held, now: float) -> None:
        """End a buffered group that no step may train on any more; its problem may be sampled again."""
        row = replace(self.row(Kind.STALE, now, held.group_id, "age"), problem_id=held.problem_id)
        self.write(row)
        self.requeue(held.group_id, held.problem_id, now)

    def requeue(self, group_id: str, problem_id: str, now: float) -> None:
        """Where `too_old` says so, have the problem of a group that was too old sampled again, so often and no more."""
        if self.rules.too_old != "requeue":
            return
        if self.losses.may_requeue(problem_id):
            self.write(replace(self.row(Kind.REQUEUED, now, group_id), problem_id=problem_id))
        elif self.losses.num_lost_after_requeues(problem_id) == 1:
            _log.warning(
                "problem %s is never fresh: %d groups in a row got older than max_policy_age = %d; it is not put first "
                "again before one is trained",
                problem_id,
                self.rules.max_requeues + 1,
                self.rules.max_policy_age,
            )

    def ticket_candidate(self, held: InFlight) -> Candidate:
        """A group in flight in the order: as old as its oldest token is or may be."""
        partial = self.partials.get(held.ticket.group_id)
        ages = map(self.lineage.age, partial.versions if partial else ())
        age = max([self.lineage.age_in_flight(held.version), *ages])
        return Candidate(held.ticket.group_id, age, held.sampler_id)
