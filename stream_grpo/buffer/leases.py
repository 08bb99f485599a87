"""The learner's side of the buffer: start, lease, trained, checkpointed. Pure; time enters as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stream_grpo.buffer.book import Book, Refusal
from stream_grpo.buffer.lineage import contains, forks_to_json
from stream_grpo.buffer.selectors import ORDERS, keep_in_order, select, select_again
from stream_grpo.buffer.staleness import Staleness, staleness
from stream_grpo.buffer.stock import Held
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.types import Forks, PolicyVersion


class Batch(NamedTuple):
    """The groups of a step, or why there are none yet."""

    groups: list[Held]
    """Those that were trained on before come last."""
    records: list[bytes]
    ages: list[int]
    staleness: list[Staleness]
    """The parts of each age."""
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
        # All before the first is written: with it the learner is a step further, and every age one more.
        rows = []
        for held in [*self._stock.leased(), *self._stock.lent()]:
            num_valid, num_baseline_only = sum(r.num_tokens for r in held.rollouts), self._num_baseline_only(held)
            tokens = {
                "trained": num_valid - num_baseline_only,
                "baseline_only": num_baseline_only,
                "masked": held.num_tokens - num_valid,
            }
            rows.append(self._trained_row(made, held, tokens, now))
        for row in rows:
            self._book.write(row)

    def _num_baseline_only(self, held: Held) -> int:
        """Tokens of the valid rollouts that are too old to be trained on, where these stay in the baseline."""
        if self._rules.too_old != "baseline_only":
            return 0
        limit, age_of = self._rules.max_policy_age, self._lineage.age
        return sum(r.num_tokens for r in held.rollouts if max(map(age_of, r.versions)) > limit)

    def _restore(self, now: float) -> None:
        self._undo_uses(now)
        self._book.end_other_configurations(self._unseen(), now)
        back = [*self._stock.leased(), *self._unseen()]
        live = [
            *map(self._book.candidate, [*self._stock.accepted(), *back]),
            *map(self._book.ticket_candidate, self._tickets),
        ]
        kept = keep_in_order(live, self._rules.fresh_per_step, self._rules.max_policy_age)
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

    def _undo_uses(self, now: float) -> None:
        """Take back the further uses that the learner's version does not contain."""
        learner, forks = self._lineage.learner, self._lineage.forks
        for held in self._stock.used():
            for made in [made for made in held.uses if not contains(learner, made, forks)]:
                row = Transition(
                    kind=Kind.UNDONE, time_s=now, group_id=held.group_id, branch=made.branch, step=made.step
                )
                self._book.write(replace(row, trained_tokens=held.uses[made]))

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
                return Batch([], [], [], [], cause)
        groups = [*self._stock.leased(), *self._stock.lent()]
        oldest = [self._book.oldest_trained(held) for held in groups]
        return Batch(
            groups,
            [held.data or self._book.journal.read(held.location, held.group_id) for held in groups],
            list(map(self._lineage.age, oldest)),
            [self._staleness(held, of) for held, of in zip(groups, oldest, strict=True)],
            "",
        )

    def _staleness(self, held: Held, version: PolicyVersion) -> Staleness:
        lineage = self._lineage
        return staleness(
            version,
            issued_at=held.issued_at,
            inserted_at=held.came_in_at,
            learner=lineage.learner,
            forks=lineage.forks,
        )

    def _lease_batch(self, now: float) -> str:
        """Lease the next batch; the cause where it must wait."""
        rules, book, limit = self._rules, self._book, self._rules.max_policy_age
        available = []
        for held in self._stock.accepted():
            group = book.candidate(held)
            if group.age <= limit:
                available.append(group)
            else:
                book.end_too_old(held, now)
        selection = select(
            available,
            [book.ticket_candidate(held) for held in self._tickets],
            rules.fresh_per_step,
            limit,
            order=ORDERS[rules.selector],
            waits=rules.too_old == "wait",
        )
        for group_id in self._select_again() if selection.batch else ():
            book.write(book.row(Kind.LENT, now, group_id))
        for group_id in selection.batch:
            book.write(book.row(Kind.LEASED, now, group_id))
        return selection.cause

    def _select_again(self) -> tuple[str, ...]:
        """Trained groups that the next step uses once more."""
        rules, book = self._rules, self._book
        if not rules.reused_per_step:
            return ()
        trained = [book.candidate(held) for held in self._stock.used() if book.is_of_run(held.config_hash)]
        young = [group for group in trained if group.age <= rules.max_policy_age]
        return select_again(young, rules.reused_per_step, order=ORDERS[rules.selector], max_uses=rules.max_uses)

    def trained(
        self, version: PolicyVersion, group_ids: Sequence[str], tokens: Mapping[str, Mapping[str, int]], now: float
    ) -> None:
        """A step that made `version` is finished; a repeat does nothing.

        Raises Refusal where the groups are not those leased, LedgerError where the tokens do not add up.
        """
        if version == self._lineage.version and set(group_ids) == {
            held.group_id for held in self._stock.used() if version in (held.version, *held.uses)
        }:
            return
        leased = {held.group_id: held for held in [*self._stock.leased(), *self._stock.lent()]}
        learner = self._lineage.learner
        if version != _next(learner):
            raise Refusal(f"trained {version}: the step from {learner} makes another version")
        if len(group_ids) != len(leased) or set(group_ids) != set(leased) or set(tokens) != set(leased):
            raise Refusal(f"trained {version}: reported {sorted(group_ids)}, leased {sorted(leased)}")
        rows = [self._trained_row(version, leased[group_id], tokens[group_id], now) for group_id in group_ids]
        for row in rows:
            self._ledger.check_row(row)
        for row in rows:
            self._book.write(row)
        self._ledger.check()

    def _trained_row(self, version: PolicyVersion, held: Held, tokens: Mapping[str, int], now: float) -> Transition:
        return Transition(
            kind=Kind.REUSED if held.state is Kind.TRAINED else Kind.TRAINED,
            time_s=now,
            group_id=held.group_id,
            problem_id=held.problem_id,
            branch=version.branch,
            step=version.step,
            num_tokens=held.num_tokens,
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
