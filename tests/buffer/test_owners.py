"""Heartbeats: whose tickets are issued again because nothing was heard of them, and what that loses."""

from typing import Any

from stream_grpo.buffer.transitions import Kind
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import Fate, PolicyVersion
from tests.buffer.fakes import Buffer, group_for
from tests.buffer.test_partials import so_far

V0 = PolicyVersion(0, 0)


def started(**changes: Any) -> Buffer:
    """Tickets are lost after 10 s."""
    buffer = Buffer(**{"ticket_timeout_s": 10.0, "sample_deadline_s": 1000.0, **changes})
    buffer.start()
    for sampler in ("s0", "s1"):
        buffer.intake.hello(sampler, 0.0)
    return buffer


def beat(buffer: Buffer, now: float, tokens: dict[str, int], *, incarnation: int = 0, sampler: str = "s0") -> None:
    buffer.intake.owners.heartbeat(sampler, incarnation, tokens, now)


def test_a_ticket_that_is_not_heard_of_is_issued_again_before_new_ones() -> None:
    buffer = started()
    silent, heard = buffer.issue(V0, 2, "s0", now=0.0)
    for now in (4.0, 8.0, 12.0):
        beat(buffer, now, {heard.group_id: 5})
    assert buffer.intake.release_silent(9.9) == 0
    assert buffer.intake.release_silent(12.0) == 1
    assert buffer.intake.release_silent(13.5) == 0
    again, new = buffer.issue(V0, 2, "s1", now=14.0)
    assert (again.group_id, again.owner_epoch) == (silent.group_id, 1)
    assert (new.group_id, new.owner_epoch) == ("g00000003", 0)
    row = next(row for row in buffer.journal.rows if row.kind is Kind.LOST)
    assert (row.group_id, row.sampler_id, row.owner_epoch) == (silent.group_id, "s0", 0)


def test_that_it_is_lost_outlives_the_buffer() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0")
    buffer.intake.release_silent(11.0)
    # Just started, a buffer counts every owner as heard: it waits once more before it issues the ticket again.
    buffer = buffer.restarted(now=12.0)
    assert [held.ticket.group_id for held in buffer.book.tickets.released()] == [ticket.group_id]
    assert buffer.issue(V0, 1, "s1", now=13.0)[0].group_id == "g00000002"
    assert buffer.issue(V0, 1, "s1", now=22.1)[0].group_id == ticket.group_id


def test_until_it_is_issued_again_its_owner_may_bring_it() -> None:
    buffer = started()
    early, late = buffer.issue(V0, 2, "s0")
    buffer.intake.release_silent(11.0)
    answer = buffer.insert(group_for(early, V0), 12.0)
    assert answer
    assert answer.fate is Fate.ACCEPTED
    (again,) = buffer.issue(V0, 1, "s1", now=12.0)
    assert again.group_id == late.group_id
    answer = buffer.insert(group_for(late, V0), 13.0)
    assert answer
    assert (answer.fate, answer.reason) == (Fate.REFUSED, "duplicate: owner epoch 0, the ticket is now of 1")
    assert buffer.tokens == {"generated": 16, "buffered": 8, "refused": 8}


def test_an_owner_that_is_heard_again_keeps_its_ticket() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0")
    buffer.intake.release_silent(11.0)
    beat(buffer, 12.0, {ticket.group_id: 5})
    assert buffer.issue(V0, 1, "s1", now=13.0)[0].group_id == "g00000002"
    # Silent once more.
    assert buffer.issue(V0, 1, "s1", now=22.1)[0].group_id == ticket.group_id


def test_a_partial_is_a_sign_of_life() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0")
    assert buffer.intake.partial(encode_group(so_far(ticket, 2)), 8.0) == ""
    assert buffer.intake.release_silent(17.0) == 0
    assert buffer.intake.release_silent(18.5) == 1


def test_what_is_said_of_the_tickets_of_others_is_void() -> None:
    buffer = started()
    (mine,) = buffer.issue(V0, 1, "s0")
    beat(buffer, 9.0, {mine.group_id: 5, "g00000077": 1}, sampler="s1")
    beat(buffer, 9.0, {mine.group_id: 5}, incarnation=3)
    beat(buffer, 9.0, {mine.group_id: 5}, sampler="nobody")
    assert buffer.intake.release_silent(11.0) == 1


def test_what_an_earlier_incarnation_says_holds_nothing() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0")
    buffer.intake.hello("s0", 1.0)
    beat(buffer, 2.0, {ticket.group_id: 5}, incarnation=0)
    # Its partial is taken, and does not hold the ticket either.
    assert buffer.intake.partial(encode_group(so_far(ticket, 2)), 2.0) == ""
    (again,) = buffer.issue(V0, 1, "s0", now=2.0)
    assert (again.group_id, bool(again.prefix)) == (ticket.group_id, True)


def test_tokens_beyond_the_newest_partial_are_lost_with_their_owner() -> None:
    buffer = started()
    some, none, unheard = buffer.issue(V0, 3, "s0")
    buffer.intake.partial(encode_group(so_far(some, 3)), 1.0)  # 2 rollouts of 3
    beat(buffer, 5.0, {some.group_id: 10, none.group_id: 7})
    buffer.intake.hello("s0", 6.0)
    assert {ticket.group_id for ticket in buffer.issue(V0, 3, "s1", now=7.0)} == {
        some.group_id, none.group_id, unheard.group_id
    }  # fmt: skip
    # 10 - 6 of the first, 7 of the second, and of the third nobody knows.
    assert buffer.book.ledger.lost_in_sampler == 11
    assert buffer.tokens == {"generated": 6, "in_flight": 6}
    assert buffer.restarted().book.ledger.as_fields() == buffer.book.ledger.as_fields()


def test_what_has_come_in_of_a_block_is_not_lost_with_its_sampler() -> None:
    buffer = started(max_policy_age=0)
    tickets = buffer.issue(V0, 1, "s0")
    buffer.insert(group_for(tickets[0], V0))
    assert buffer.intake.release_silent(11.0) == 3
    again = buffer.issue(V0, 1, "s1", now=11.0)
    assert [ticket.group_id for ticket in again] == [ticket.group_id for ticket in tickets[1:]]


def test_the_tickets_of_one_that_says_goodbye_are_issued_again_at_once() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0", now=1.0)
    buffer.intake.goodbye("s0", 7, 2.0)  # of another incarnation
    assert not buffer.book.tickets.released()
    buffer.intake.goodbye("s0", 0, 2.0)
    (again,) = buffer.issue(V0, 1, "s1", now=2.0)
    assert (again.group_id, again.owner_epoch) == (ticket.group_id, 1)
    # What it had said of them before is void.
    beat(buffer, 3.0, {ticket.group_id: 5})
    assert buffer.book.tickets.get(ticket.group_id).sampler_id == "s1"  # type: ignore[union-attr]
