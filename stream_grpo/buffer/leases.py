"""The learner's side of the buffer: start, lease, trained, checkpointed. Pure; time enters as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stream_grpo.buffer.book import Book, Refusal
from stream_grpo.buffer.facts import batch_of_record, facts_of
from stream_grpo.buffer.lineage import contains, forks_to_json
from stream_grpo.buffer.selectors import keep_in_order, select
from stream_grpo.buffer.stock import Held
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.types import Forks, PolicyVersion


class Batch(NamedTuple):
    """The groups of a step, or why there are none yet."""

    groups: list[Held]
    ages: list[int]
    cause: str


class Leases:
    """Hands batches to the learner and follows what becomes of them."""

    def __init__(self, book: Book) -> None:
        """Nothing of its own: leases are in the book."""
        self._book, self._rules = book, book.rules
        self._lineage = book.lineage
        self._tickets = book.tickets
        self._stock = book.stock
        self._signal = book.signal
        self._ledger = book.ledger

    def start(self, version: PolicyVersion, forks: Forks, now: float) -> None:
        """The learner starts from `version`. On a new branch all it has not trained is available again, where it fits.

        Raises Refusal for a version that goes back, or one without what a checkpoint had made final.
        """
        known = self._lineage.version
        if known == version:
            return
        if known and version.branch <= known.branch:
            raise Refusal(f"start from {version}: the run is at {known}; a restore opens a new branch")
        final = self._stock.final
        try:
            is_lost = final is not None and not contains(version, final, forks)
            is_unreported = known is not None and contains(version, _next(known), forks)
        except ValueError as error:
            raise Refusal(f"start from {version}: {error}") from error
        if is_lost:
            raise Refusal(f"start from {version}: it does not contain {final}, which was the oldest kept checkpoint")
        if known and is_unreported:
            self._count_unreported_step(_next(known), now)
        row = Transition(
            kind=Kind.STARTED, time_s=now, branch=version.branch, step=version.step, reason=forks_to_json(forks)
        )
        self._book.write(row)
        if known:
            self._restore(now)

    def _count_unreported_step(self, made: PolicyVersion, now: float) -> None:
        """A checkpoint contains the step whose report was lost: the leased groups are trained, and not available again.

        Their tokens are counted as the learner counts them.
        """
        for held in self._stock.leased():
            facts = facts_of(batch_of_record(held.data))
            tokens = {"trained": facts.num_valid_tokens, "masked": facts.num_tokens - facts.num_valid_tokens}
            self._book.write(self._trained_row(made, held.group_id, tokens, now))

    def _restore(self, now: float) -> None:
        self._book.end_other_configurations(self._unseen(), now)
        back = [*self._stock.leased(), *self._unseen()]
        live = [
            *map(self._book.candidate, [*self._stock.accepted(), *back]),
            *map(self._book.ticket_candidate, self._tickets),
        ]
        kept = keep_in_order(live, self._rules.groups_per_step, self._rules.max_policy_age)
        for held in back:
            if held.group_id in kept:
                self._book.write(self._book.row(Kind.RESTORED, now, held.group_id))
        for held in [*self._stock.accepted(), *back]:
            if held.group_id not in kept:
                self._book.write(self._book.row(Kind.STALE, now, held.group_id, "restore"))
        for flight in self._tickets:
            if flight.ticket.group_id not in kept:
                self._book.end_ticket(flight, "restore", now)
        self._stock.load(self._book.journal.read)
        self._book.rescore(self._stock.accepted(), now)

    def _unseen(self) -> list[Held]:
        """Trained groups that the learner's version does not contain."""
        learner, forks = self._lineage.learner, self._lineage.forks
        return [held for held in self._stock.trained() if not contains(learner, held.version, forks)]

    def lease(self, version: PolicyVersion, num_groups: int, now: float) -> Batch:
        """The groups of the step that starts from `version`; the same ones for a repeat.

        Raises Refusal for another version or size than the run's, and where no group has had signal for too long.
        """
        if version != self._lineage.version:
            raise Refusal(f"lease for {version}: the learner is at {self._lineage.version or 'no version'}")
        if num_groups != self._rules.groups_per_step:
            raise Refusal(f"lease of {num_groups} groups: a step of this run has {self._rules.groups_per_step}")
        if not self._stock.num_leased:
            if self._signal.num_without >= self._rules.max_groups_without_signal:
                raise Refusal(f"{self._signal.sentence()}; stream.max_groups_without_signal is reached")
            cause = self._lease_batch(now)
            if cause:
                return Batch([], [], cause)
        leased = self._stock.leased()
        return Batch(leased, [self._book.candidate(held).age for held in leased], "")

    def _lease_batch(self, now: float) -> str:
        """Lease the next batch; the cause where it must wait."""
        rules = self._rules
        available = [self._book.candidate(held) for held in self._stock.accepted()]
        for group in available:
            if group.age > rules.max_policy_age:
                self._book.write(self._book.row(Kind.STALE, now, group.group_id, "age"))
        young = [group for group in available if group.age <= rules.max_policy_age]
        in_flight = [self._book.ticket_candidate(held) for held in self._tickets]
        selection = select(young, in_flight, rules.groups_per_step, rules.max_policy_age)
        for group_id in selection.batch:
            self._book.write(self._book.row(Kind.LEASED, now, group_id))
        return selection.cause

    def trained(
        self, version: PolicyVersion, group_ids: Sequence[str], tokens: Mapping[str, Mapping[str, int]], now: float
    ) -> None:
        """A step that made `version` is finished; a repeat does nothing.

        Raises Refusal where the groups are not those leased, LedgerError where the tokens do not add up.
        """
        if version == self._lineage.version and set(group_ids) == {
            held.group_id for held in self._stock.trained() if held.version == version
        }:
            return
        leased = {held.group_id: held for held in self._stock.leased()}
        learner = self._lineage.learner
        if version != _next(learner):
            raise Refusal(f"trained {version}: the step from {learner} makes another version")
        if len(group_ids) != len(leased) or set(group_ids) != set(leased) or set(tokens) != set(leased):
            raise Refusal(f"trained {version}: reported {sorted(group_ids)}, leased {sorted(leased)}")
        rows = [self._trained_row(version, group_id, tokens[group_id], now) for group_id in group_ids]
        for row in rows:
            self._ledger.check_row(row)
        for row in rows:
            self._book.write(row)
        self._ledger.check()

    def _trained_row(self, version: PolicyVersion, group_id: str, tokens: Mapping[str, int], now: float) -> Transition:
        unknown = set(tokens) - {"trained", "masked", "baseline_only"}
        if unknown:
            raise Refusal(f"trained {version}: group {group_id} has tokens of unknown fates {sorted(unknown)}")
        return Transition(
            kind=Kind.TRAINED,
            time_s=now,
            group_id=group_id,
            branch=version.branch,
            step=version.step,
            trained_tokens=tokens.get("trained", 0),
            masked_tokens=tokens.get("masked", 0),
            baseline_only_tokens=tokens.get("baseline_only", 0),
        )

    def checkpointed(self, version: PolicyVersion, now: float) -> None:
        """The oldest kept checkpoint is of `version`: what it contains is final.

        Raises Refusal for a version the run has not reached.
        """
        learner = self._lineage.version
        if learner is None or not contains(learner, version, self._lineage.forks):
            raise Refusal(f"checkpointed {version}: the learner is at {learner or 'no version'}")
        if version == self._stock.final:
            return
        self._book.write(Transition(kind=Kind.CHECKPOINTED, time_s=now, branch=version.branch, step=version.step))


def _next(version: PolicyVersion) -> PolicyVersion:
    return PolicyVersion(version.branch, version.step + 1)
