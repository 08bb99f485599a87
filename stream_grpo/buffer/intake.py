"""The samplers' side of the buffer: who may make a group, and how a group is taken. Time enters as an argument."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stream_grpo.buffer.admission import Admission, admit
from stream_grpo.buffer.book import Book, Refusal
from stream_grpo.buffer.facts import GroupFacts, facts_of
from stream_grpo.buffer.tickets import InFlight, block_size, room
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.transport.codec import read_batch
from stream_grpo.types import Fate, PolicyVersion, Ticket


class Answer(NamedTuple):
    """How an insert was taken, and who is to be told."""

    asked_by: Hashable
    fate: Fate
    reason: str


@dataclass(slots=True)
class _Arrived:
    """A group that has come in and is not journaled yet."""

    data: bytes
    facts: GroupFacts
    asked_by: list[Hashable]


class Intake:
    """Issues tickets and takes inserts, by the rules of the book.

    With `max_policy_age` 0 tickets come in blocks: what comes in is staged, and journaled in the order of the ids once
    every ticket of the block has its insert or its end.
    """

    def __init__(self, book: Book) -> None:
        """Begin with nothing staged: a restart makes samplers send again what was not acknowledged."""
        self._book, self._rules = book, book.rules
        self._lineage = book.lineage
        self._tickets = book.tickets
        self._stock = book.stock
        self._signal = book.signal
        self._outbox = book.outbox
        self._staged: dict[str, _Arrived] = {}
        self._answers: list[Answer] = []

    def hello(self, sampler_id: str, now: float) -> int:
        """A sampler begins anew: its tickets are to be issued again. Returns the number of this incarnation."""
        epoch = self._tickets.next_epoch(sampler_id)
        self._book.write(Transition(kind=Kind.HELLO, time_s=now, sampler_id=sampler_id, owner_epoch=epoch))
        return epoch

    def name_problems(self, problems: Mapping[str, str], now: float) -> None:
        """Note which problem was picked for each group in flight."""
        for group_id, problem_id in problems.items():
            if self._tickets.get(group_id):
                self._book.write(Transition(kind=Kind.PICKED, time_s=now, group_id=group_id, problem_id=problem_id))

    def evaluated(self, sampler_id: str, version: PolicyVersion, num_tokens: int, now: float) -> None:
        """Take the tokens of an evaluation into the account, once for every version."""
        if version not in self._book.ledger.evaluated:
            row = Transition(kind=Kind.EVALUATED, time_s=now, sampler_id=sampler_id, num_tokens=num_tokens)
            self._book.write(replace(row, branch=version.branch, step=version.step))

    def issue(
        self, sampler_id: str, version: PolicyVersion, num_wanted: int, request: str, now: float
    ) -> tuple[list[Ticket], str]:
        """Up to `num_wanted` tickets for weights of `version`, or none and the cause.

        With `max_policy_age` 0 a block is issued whole, whatever was wanted. `request` names the request: the same one,
        repeated, gets the same tickets.
        """
        repeated = self._tickets.answered(request)
        if repeated:
            return repeated, ""
        if self._lineage.version is None:
            return [], "the learner has not started"
        if self._rules.max_policy_age == 0:
            again, num_new, cause = self._block(version)
        else:
            again, num_new, cause = self._room(version, num_wanted)
        issued = [(held.ticket.group_id, held.ticket.owner_epoch + 1) for held in again]
        issued += [(group_id, 0) for group_id in self._tickets.new_group_ids(num_new)]
        for group_id, epoch in issued:
            self._book.write(
                Transition(
                    kind=Kind.TICKETED,
                    time_s=now,
                    group_id=group_id,
                    sampler_id=sampler_id,
                    branch=version.branch,
                    step=version.step,
                    owner_epoch=epoch,
                    reason=request,
                )
            )
        tickets = [held.ticket for group_id, _ in issued if (held := self._tickets.get(group_id))]
        return tickets, "" if tickets else cause

    def _room(self, version: PolicyVersion, num_wanted: int) -> tuple[list[InFlight], int, str]:
        """Which tickets to issue again, how many new ones, and the cause where there is no room for any."""
        try:
            lag = self._lineage.age_in_flight(version)
        except ValueError as error:
            return [], 0, f"weights {version}: {error}"
        age, size, live = self._rules.max_policy_age, self._rules.groups_per_step, self._book.num_live
        if lag > age:
            return [], 0, f"weights {version} are {lag} steps old, max_policy_age is {age}"
        # A ticket that is issued again leaves the count of live groups before it enters it.
        has_room = room(live - 1, lag, max_policy_age=age, groups_per_step=size) > 0
        again = self._tickets.released()[:num_wanted] if has_room else []
        free = room(live, lag, max_policy_age=age, groups_per_step=size)
        cause = f"{live} groups are live, the limit for weights {lag} steps old is {(age + 1 - lag) * size}"
        return again, min(free, num_wanted - len(again)), cause

    def _block(self, version: PolicyVersion) -> tuple[list[InFlight], int, str]:
        """The next block of the synchronous loop, or the rest of one whose sampler began anew, or why neither."""
        if version != self._lineage.version:
            return [], 0, f"weights {version} are not the learner's, {self._lineage.version}"
        released = [held for held in self._tickets.released() if held.ticket.group_id not in self._staged]
        if released:
            return released, 0, ""
        if len(self._tickets):
            return [], 0, f"a block is open: {len(self._tickets) - len(self._staged)} groups of it have not come in"
        missing = self._rules.groups_per_step - self._stock.num_live
        if missing <= 0:
            return [], 0, "the batch is complete, the learner has not finished its step"
        outbox = self._outbox
        if not outbox.all_acknowledged:
            cause = f"the curator has taken {outbox.num_acknowledged} of {outbox.num_outcomes} outcomes"
            return [], 0, f"{cause}; it refused: {outbox.refusal}" if outbox.refusal else cause
        return [], block_size(missing, self._signal.expected_share), ""

    def expire(self, now: float) -> int:
        """End every ticket past its deadline, its problem named; how many there were."""
        overdue = [held for held in self._tickets.overdue(now) if held.ticket.group_id not in self._staged]
        for held in overdue:
            self._book.end_ticket(held, "deadline", now)
        if overdue:
            self._close_block(now)
        return len(overdue)

    def insert(self, asked_by: Hashable, data: bytes, now: float) -> None:
        """Take a group's record; `take_answers` says how, for a block once it has ended.

        Raises Refusal where the bytes are no group.
        """
        try:
            facts = facts_of(read_batch(data), self._rules.vocab_size)
        except ValueError as error:
            raise Refusal(str(error)) from error
        known = self._book.taken.get((facts.group_id, facts.owner_epoch, zlib.crc32(data)))
        if known:
            self._answers.append(Answer(asked_by, known.fate, known.reason))
            return
        staged = self._staged.get(facts.group_id)
        if staged and staged.data == data:
            staged.asked_by.append(asked_by)
            return
        group = _Arrived(data, facts, [asked_by])
        wrong = self._why_refused(facts)
        if wrong:
            self._refuse(group, wrong, now)
        elif self._rules.max_policy_age == 0:
            self._staged[facts.group_id] = group
            self._close_block(now)
        else:
            self._take(group, now)

    def _why_refused(self, facts: GroupFacts) -> str:
        held = self._tickets.get(facts.group_id)
        if held is None:
            if self._tickets.was_issued(facts.group_id):
                return "duplicate: this group was taken or has ended"
            return "unknown: no ticket has this group id"
        if facts.owner_epoch != held.ticket.owner_epoch:
            return f"duplicate: owner epoch {facts.owner_epoch}, the ticket is now of {held.ticket.owner_epoch}"
        if facts.group_id in self._staged:
            return "duplicate: this group has come in"
        return ""

    def _row_of(self, facts: GroupFacts, admission: Admission, now: float) -> Transition:
        return replace(
            self._book.row(Kind(admission.fate), now, facts.group_id, admission.reason),
            problem_id=facts.problem_id,
            sampler_id=facts.sampler_id,
            owner_epoch=facts.owner_epoch,
            num_tokens=facts.num_tokens,
            num_truncated=facts.num_truncated,
            mixed_context_tokens=facts.mixed_context_tokens,
        )

    def _take(self, group: _Arrived, now: float) -> None:
        rules, facts = self._rules, group.facts
        admission = admit(
            facts,
            self._lineage,
            max_policy_age=rules.max_policy_age,
            signal_tolerance=rules.signal_tolerance,
            config_hash=rules.config_hash,
            uniform_group_version=rules.uniform_group_version,
        )
        self._book.write(self._row_of(facts, admission, now), group.data)
        if admission.fate is Fate.ACCEPTED:
            self._stock.keep(facts, group.data)
        self._answers += [Answer(asked_by, *admission) for asked_by in group.asked_by]

    def _refuse(self, group: _Arrived, why: str, now: float) -> None:
        row = self._row_of(group.facts, Admission(Fate.REFUSED, why), now)
        # A copy that is not kept: only the group itself counts in mixed context.
        self._book.write(replace(row, crc32=zlib.crc32(group.data), mixed_context_tokens=0))
        self._answers += [Answer(asked_by, Fate.REFUSED, why) for asked_by in group.asked_by]

    def settle(self, now: float) -> None:
        """After a restore: what has come in of a block but lost its ticket is refused, the rest goes on."""
        for group_id in [group_id for group_id in self._staged if not self._tickets.get(group_id)]:
            self._refuse(self._staged.pop(group_id), "duplicate: this group ended with the restore", now)
        self._close_block(now)

    def _close_block(self, now: float) -> None:
        """Once every ticket of the block has its insert or its end: journal the groups in the order of their ids."""
        if not self._staged or len(self._staged) < len(self._tickets):
            return
        for group_id in sorted(self._staged):
            self._take(self._staged.pop(group_id), now)
        num_missing = self._rules.groups_per_step - self._stock.num_leased
        for surplus in self._stock.accepted()[num_missing:]:
            self._book.write(self._book.row(Kind.STALE, now, surplus.group_id, "surplus"))

    def take_answers(self) -> list[Answer]:
        """How inserts were taken since the last call."""
        answers, self._answers = self._answers, []
        return answers
