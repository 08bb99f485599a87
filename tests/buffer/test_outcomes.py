"""The outbox: every record becomes one outcome, in order, sent until it is acknowledged."""

import math

import pytest

from curator.schema import Outcome
from stream_grpo.buffer.book import Book
from stream_grpo.buffer.outcomes import BATCH, Outbox, Outgoing
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.errors import JournalError
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import PolicyVersion
from tests.buffer.fakes import Buffer, MemoryJournal, group_for, rules
from tests.fakes import START, make_group


def arrive(outbox: Outbox, journal: MemoryJournal, count: int, kind: Kind = Kind.ACCEPTED) -> None:
    for _ in range(count):
        group_id = f"g{len(journal.records)}"
        row = Transition(kind=kind, time_s=0.0, group_id=group_id)
        outbox.apply(journal.append_group(encode_group(make_group(group_id)), row))
    outbox.committed()


def positioned(next_sequence: int = 0, count: int = 0) -> tuple[Outbox, MemoryJournal]:
    outbox, journal = Outbox(), MemoryJournal()
    arrive(outbox, journal, count)
    assert outbox.next_message(journal.read) == Outgoing(())
    outbox.answered(next_sequence, 0)
    return outbox, journal


def sent(outbox: Outbox, journal: MemoryJournal) -> list[Outcome]:
    message = outbox.next_message(journal.read)
    assert message
    assert message.outcomes
    return list(message.outcomes)


def test_nothing_is_sent_before_the_position_is_known() -> None:
    outbox, journal = Outbox(), MemoryJournal()
    arrive(outbox, journal, 1)
    assert outbox.num_acknowledged == -1
    assert outbox.next_message(journal.read) == Outgoing(())
    assert outbox.next_message(journal.read) is None


def test_it_goes_on_where_the_curator_stands() -> None:
    outbox, journal = positioned(next_sequence=2, count=5)
    assert [outcome.sequence for outcome in sent(outbox, journal)] == [2, 3, 4]
    # One report is on its way: no other, whatever arrives.
    arrive(outbox, journal, 1)
    assert outbox.next_message(journal.read) is None
    outbox.answered(5)
    assert [outcome.sequence for outcome in sent(outbox, journal)] == [5]
    assert not outbox.all_acknowledged
    outbox.answered(6)
    assert outbox.all_acknowledged


def test_outcomes_are_those_of_the_records_with_their_fates() -> None:
    outbox, journal = positioned()
    arrive(outbox, journal, 1)
    arrive(outbox, journal, 1, Kind.NO_SIGNAL)
    outbox.apply(Transition(kind=Kind.REFUSED, time_s=0.0, group_id="g0", num_tokens=8))
    outbox.apply(Transition(kind=Kind.STALE, time_s=0.0, group_id="g0", reason="age"))
    arrive(outbox, journal, 1, Kind.INVALID)
    outcomes = sent(outbox, journal)
    assert [(o.sequence, o.group_id, o.fate) for o in outcomes] == [
        (0, "g0", "accepted"), (1, "g1", "no_signal"), (2, "g2", "invalid")
    ]  # fmt: skip
    assert outcomes[0].problem_id == "problem-of-g0"


def test_what_is_not_durable_is_not_sent() -> None:
    outbox, journal = positioned()
    row = Transition(kind=Kind.ACCEPTED, time_s=0.0, group_id="g0")
    outbox.apply(journal.append_group(encode_group(make_group("g0")), row))
    assert outbox.next_message(journal.read) is None
    assert not outbox.all_acknowledged
    outbox.committed()
    assert len(sent(outbox, journal)) == 1


def test_a_report_has_a_bounded_number_of_outcomes() -> None:
    outbox, journal = positioned(count=BATCH + 3)
    assert len(sent(outbox, journal)) == BATCH
    outbox.answered(BATCH)
    assert len(sent(outbox, journal)) == 3


def test_after_a_refusal_the_position_is_asked_again() -> None:
    outbox, journal = positioned(next_sequence=3, count=3)
    arrive(outbox, journal, 1)
    sent(outbox, journal)
    # The curator died and has forgotten 1 and 2, which it had not written.
    outbox.refused("expected sequence 1, received 3")
    assert outbox.refusal == "expected sequence 1, received 3"
    assert outbox.next_message(journal.read) == Outgoing(())
    outbox.answered(1, 1)
    assert [outcome.sequence for outcome in sent(outbox, journal)] == [1, 2, 3]
    outbox.answered(4)
    assert outbox.refusal == ""


def test_only_what_the_curator_has_on_disk_is_forgotten() -> None:
    outbox, journal = positioned(next_sequence=4, count=4)
    outbox.ask_again()
    outbox.next_message(journal.read)
    outbox.answered(4, 2)
    assert [entry.sequence for entry in outbox._entries] == [2, 3]
    outbox.ask_again()
    outbox.next_message(journal.read)
    with pytest.raises(JournalError, match="the curator asks for outcome 1, which it had reported as durable"):
        outbox.answered(1, 1)


def test_a_curator_of_another_run_is_refused() -> None:
    outbox, journal = Outbox(), MemoryJournal()
    outbox.next_message(journal.read)
    with pytest.raises(JournalError, match="has taken 9 outcomes, the journal has 0: it belongs to another run"):
        outbox.answered(9, 9)


def test_a_ticket_that_ends_without_a_record_is_an_outcome_in_its_place() -> None:
    """The curator must hear of it: the problem of the group would stay in flight for ever."""
    buffer = Buffer(sample_deadline_s=10.0)
    buffer.start()
    tickets = buffer.issue(START, 4, "s0", now=0.0)
    buffer.intake.name_problems({tickets[1].group_id: "add/1"}, 0.0)
    buffer.insert(group_for(tickets[0], START))
    buffer.intake.expire(11.0)
    (late,) = buffer.issue(START, 1, "s0", now=12.0)
    buffer.insert(group_for(late, START))
    found = []
    for _ in range(2):
        # The same from the journal, whoever reads it.
        book = Book(buffer.journal, rules(), now=0.0)
        assert book.outbox.next_message(buffer.journal.read) == Outgoing(())
        book.outbox.answered(0, 0)
        found.append(sent(book.outbox, buffer.journal))
    assert [(o.sequence, o.group_id, o.problem_id, o.fate) for o in found[0]] == [
        (0, "g00000001", "problem-of-g00000001", "accepted"),
        (1, "g00000002", "add/1", "stale"),
        (2, "g00000003", "", "stale"),
        (3, "g00000004", "", "stale"),
        (4, "g00000005", "problem-of-g00000005", "accepted"),
    ]
    ended = found[0][1]
    assert (ended.num_passed, ended.num_failed, ended.num_unscored, ended.num_tokens) == (0, 0, 0, 0)
    assert math.isnan(ended.mean_reward)
    assert [repr(o) for o in found[1]] == [repr(o) for o in found[0]]


def test_tickets_that_end_with_a_restore_are_outcomes_and_groups_are_not_again() -> None:
    buffer = Buffer(max_policy_age=0)
    buffer.start()
    tickets = buffer.issue(START, 1)
    assert len(tickets) == 4
    for ticket in tickets:
        buffer.insert(group_for(ticket, START))
    buffer.train(START)
    buffer.issue(PolicyVersion(0, 1), 1)
    before = buffer.book.outbox.num_outcomes
    # Back to step 0: the 2 trained groups are available again, the block of step 1 has no place; at a share of 5/6 it
    # has ceil(2 / (5 / 6)) = 3 tickets.
    buffer.start(PolicyVersion(1, 0), b1=START)
    assert (before, buffer.book.outbox.num_outcomes) == (4, 7)
    # Groups that end later, as the surplus did, had their outcome when they came in.
    assert buffer.groups == {"accepted": 2, "stale": 2 + 3}
