"""The samplers' side of the buffer: who may make a group, and how a group is taken. Time enters as an argument."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stream_grpo.buffer.admission import Admission, admit
from stream_grpo.buffer.book import Book, Refusal
from stream_grpo.buffer.facts import GroupFacts, facts_of
from stream_grpo.buffer.owners import Owners
from stream_grpo.buffer.tickets import InFlight, block_size, room
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.transport.codec import read_batch
from stream_grpo.types import Fate, PolicyVersion, Ticket


class Answer(NamedTuple):
    """How an insert was taken, and who is to be told."""

    asked_by: Hashable
    fate: Fate
    reason: str


class _Again(NamedTuple):
    """A ticket that may be issued again."""

    held: InFlight
    keeps_prefix: bool
    """Whether what an earlier owner has sampled goes along, where there is any."""


@dataclass(slots=True)
class _Arrived:
    """A group that has come in and is not journaled yet."""

    data: bytes
    facts: GroupFacts
    crc32: int
    asked_by: list[Hashable]


class Intake:
    """Issues tickets and takes inserts, by the rules of the book.

    With `max_policy_age` 0 tickets come in blocks: what comes in is staged, and journaled in the order of the ids once
    every ticket of the block has its insert or its end.
    """

    def __init__(self, book: Book, *, now: float) -> None:
        """Begin with nothing staged: a restart makes samplers send again what was not acknowledged.

        `now`: the start, in unix seconds, up to which every owner of a ticket counts as heard.
        """
        self._book, self._rules = book, book.rules
        self._lineage = book.lineage
        self._tickets, self._partials = book.tickets, book.partials
        self.owners = Owners(book, now=now)
        """Follows who holds which ticket."""
        self._stock = book.stock
        self._signal = book.signal
        self._outbox = book.outbox
        self._staged: dict[str, _Arrived] = {}
        self._answers: list[Answer] = []
        self._target_policy_age = self._rules.max_policy_age

    def aim_at(self, target_policy_age: int | None) -> None:
        """Issue new tickets as if this were the maximum, where it is lower. None: the maximum itself.

        Not journaled: the learner tells it with every lease, and without it only more tickets are issued.
        """
        highest = self._rules.max_policy_age
        self._target_policy_age = highest if target_policy_age is None else min(target_policy_age, highest)

    def hello(self, sampler_id: str, now: float) -> int:
        """A sampler begins anew: its tickets are to be issued again. Returns the number of this incarnation."""
        epoch = self._tickets.next_epoch(sampler_id)
        self._book.write(Transition(kind=Kind.HELLO, time_s=now, sampler_id=sampler_id, owner_epoch=epoch))
        return epoch

    def goodbye(self, sampler_id: str, incarnation: int, now: float) -> None:
        """A sampler leaves: its tickets are to be issued again, as if it began anew. Void of an earlier incarnation."""
        if incarnation == self._tickets.epoch_of(sampler_id):
            self.hello(sampler_id, now)

    def name_problems(self, problems: Mapping[str, str], now: float, sizes: Mapping[str, int] = {}) -> None:
        """Note which problem was picked for each group in flight, and how many rollouts the group is to have."""
        for group_id, problem_id in problems.items():
            if self._tickets.get(group_id):
                row = Transition(kind=Kind.PICKED, time_s=now, group_id=group_id, problem_id=problem_id)
                self._book.write(replace(row, num_rollouts=sizes.get(group_id, 0)))

    def partial(self, data: bytes, now: float) -> str:
        """Take what its owner has so far of a group in flight; why not, where it is not kept.

        Raises Refusal where the bytes are no group.
        """
        facts = self._facts_of(data)
        return self._why_refused(facts) or self.owners.partial(facts, data, now)

    def release_silent(self, now: float) -> int:
        """Release the tickets whose owners were not heard of for too long; how many there were."""
        return self.owners.release_silent(self._staged, now)

    def _facts_of(self, data: bytes) -> GroupFacts:
        try:
            return facts_of(read_batch(data), self._rules.vocab_size)
        except ValueError as error:
            raise Refusal(str(error)) from error

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
            return [self._with_prefix(ticket) for ticket in repeated], ""
        if self._lineage.version is None:
            return [], "the learner has not started"
        if self._rules.max_policy_age == 0:
            again, num_new, cause = self._block(version, now)
        else:
            again, num_new, cause = self._room(version, num_wanted, now)
        new = Transition(
            kind=Kind.TICKETED,
            time_s=now,
            sampler_id=sampler_id,
            branch=version.branch,
            step=version.step,
            reason=request,
        )
        rows = [self._issued_again(new, ticket) for ticket in again]
        rows += [replace(new, group_id=group_id) for group_id in self._tickets.new_group_ids(num_new)]
        for row in rows:
            self._book.write(row)
            self.owners.issued(row.group_id)
        tickets = [self._with_prefix(held.ticket) for row in rows if (held := self._tickets.get(row.group_id))]
        return tickets, "" if tickets else cause

    def _issued_again(self, new: Transition, again: _Again) -> Transition:
        group_id = again.held.ticket.group_id
        partial = self._partials.get(group_id)
        num_tokens = partial.num_tokens if partial else 0
        return replace(
            new,
            group_id=group_id,
            owner_epoch=again.held.ticket.owner_epoch + 1,
            dropped_tokens=0 if again.keeps_prefix else num_tokens,
            mixed_context_tokens=partial.mixed_context_tokens if partial and not again.keeps_prefix else 0,
            lost_tokens=self.owners.lost_tokens(group_id),
        )

    def _with_prefix(self, ticket: Ticket) -> Ticket:
        partial = self._partials.get(ticket.group_id)
        return replace(ticket, prefix=partial.data) if partial else ticket

    def _room(self, version: PolicyVersion, num_wanted: int, now: float) -> tuple[list[_Again], int, str]:
        """Which tickets to issue again, how many new ones, and the cause where there is no room for any."""
        try:
            lag = self._lineage.age_in_flight(version)
        except ValueError as error:
            return [], 0, f"weights {version}: {error}"
        age, size, live = self._rules.max_policy_age, self._rules.fresh_per_step, self._book.num_live
        if lag > age:
            return [], 0, f"weights {version} are {lag} steps old, max_policy_age is {age}"
        offered = (self._again(held, lag) for held in self.owners.released(now))
        again = [ticket for ticket in offered if ticket][:num_wanted]
        target = self._target_policy_age
        free = room(live, lag, max_policy_age=target, groups_per_step=size)
        limit = max(0, (target + 1 - lag) * size)
        cause = f"{live} groups are live, the limit for weights {lag} steps old is {limit}"
        cause += f" with target_policy_age = {target}" if target < age else ""
        return again, min(free, num_wanted - len(again)), cause

    def _again(self, held: InFlight, lag: int) -> _Again | None:
        """How a ticket is issued again to weights that lag by `lag`, or None where its group would have no place."""
        partial = self._partials.get(held.ticket.group_id)
        age = max(map(self._lineage.age, partial.versions), default=0) if partial else 0
        if self._has_place(held, max(lag, age)):
            return _Again(held, keeps_prefix=True)
        return _Again(held, keeps_prefix=False) if self._has_place(held, lag) else None

    def _has_place(self, held: InFlight, age: int) -> bool:
        """Whether a group in flight may become as old as this; `selectors` has the proof."""
        rules = self._rules
        if age > rules.max_policy_age:
            return False
        # It leaves the count of live groups before it enters it.
        num_others = self._book.num_live - 1
        has_room = room(num_others, age, max_policy_age=rules.max_policy_age, groups_per_step=rules.fresh_per_step) > 0
        return has_room or age <= self._book.ticket_candidate(held).age

    def _block(self, version: PolicyVersion, now: float) -> tuple[list[_Again], int, str]:
        """The next block of the synchronous loop, or the rest of one whose sampler began anew, or why neither."""
        if version != self._lineage.version:
            return [], 0, f"weights {version} are not the learner's, {self._lineage.version}"
        released = [held for held in self.owners.released(now) if held.ticket.group_id not in self._staged]
        if released:
            return [_Again(held, keeps_prefix=self._is_only_scored(held)) for held in released], 0, ""
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

    def _is_only_scored(self, held: InFlight) -> bool:
        """Whether a group in flight has all its tokens, of the learner's weights.

        A rest would be sampled from another seed than the whole, so that a block that was interrupted would not be the
        block that was not: the seeds of its tickets make it anew.
        """
        partial = self._partials.get(held.ticket.group_id)
        return bool(partial and partial.is_complete and not any(map(self._lineage.age, partial.versions)))

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
        facts = self._facts_of(data)
        crc32 = zlib.crc32(data)
        known = self._book.taken.get((facts.group_id, facts.owner_epoch, crc32))
        if known:
            self._answers.append(Answer(asked_by, known.fate, known.reason))
            return
        staged = self._staged.get(facts.group_id)
        if staged and staged.data == data:
            staged.asked_by.append(asked_by)
            return
        group = _Arrived(data, facts, crc32, [asked_by])
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
            num_rollouts=facts.num_rollouts,
            num_valid=len(facts.rewards),
            reward_sum=facts.reward_sum,
        )

    def _take(self, group: _Arrived, now: float) -> None:
        rules, facts = self._rules, group.facts
        admission = admit(
            facts,
            self._lineage,
            max_policy_age=rules.max_policy_age,
            signal_tolerance=rules.signal_tolerance,
            counts_steps=rules.counts_steps,
            config_hash=rules.config_hash,
            by_rollout=rules.too_old == "baseline_only",
            uniform_group_version=rules.uniform_group_version,
        )
        num_shared, earlier = self.owners.shared_tokens(facts.group_id, group.data)
        row = replace(self._row_of(facts, admission, now), crc32=group.crc32, dropped_tokens=earlier - num_shared)
        self._book.write(row, group.data)
        self._outbox.keep(facts)
        if admission.fate is Fate.ACCEPTED:
            self._stock.keep(facts, group.data)
        elif admission.fate is Fate.STALE:
            self._book.requeue(facts.group_id, facts.problem_id, now)
        self._answers += [Answer(asked_by, *admission) for asked_by in group.asked_by]

    def _refuse(self, group: _Arrived, why: str, now: float) -> None:
        row = self._row_of(group.facts, Admission(Fate.REFUSED, why), now)
        # A copy that is not kept: only the group itself counts in mixed context.
        self._book.write(replace(row, crc32=group.crc32, mixed_context_tokens=0))
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

    @property
    def staged_bytes(self) -> int:
        """Bytes of records that have come in and will be journaled with their block."""
        return sum(len(group.data) for group in self._staged.values())

    def take_answers(self) -> list[Answer]:
        """How inserts were taken since the last call."""
        answers, self._answers = self._answers, []
        return answers
