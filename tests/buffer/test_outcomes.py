"""The outbox: every record becomes one outcome, in order, sent until it is acknowledged."""

import pytest

from curator.schema import OUTCOME_SCHEMA, Outcome, batch_from_bytes, outcomes_from_batch
from stream_grpo.buffer.outcomes import BATCH, Outbox, Outgoing
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.errors import JournalError
from stream_grpo.transport.codec import encode_group
from tests.buffer.fakes import MemoryJournal
from tests.fakes import make_group


def arrive(outbox: Outbox, journal: MemoryJournal, count: int, kind: Kind = Kind.ACCEPTED) -> None:
    for _ in range(count):
        group_id = f"g{len(journal.records)}"
        row = Transition(kind=kind, time_s=0.0, group_id=group_id)
        outbox.apply(journal.append_group(encode_group(make_group(group_id)), row))
    outbox.committed()


def positioned(next_sequence: int = 0, count: int = 0) -> tuple[Outbox, MemoryJournal]:
    outbox, journal = Outbox(), MemoryJournal()
    arrive(outbox, journal, count)
    assert outbox.next_message(journal.read) == Outgoing("position", {}, ())
    outbox.answered({"next_sequence": next_sequence, "durable_sequence": 0})
    return outbox, journal


def sent(outbox: Outbox, journal: MemoryJournal) -> list[Outcome]:
    message = outbox.next_message(journal.read)
    assert message
    assert message.kind == "report"
    return outcomes_from_batch(batch_from_bytes(message.body[0], OUTCOME_SCHEMA))


def test_nothing_is_sent_before_the_position_is_known() -> None:
    outbox, journal = Outbox(), MemoryJournal()
    arrive(outbox, journal, 1)
    assert outbox.num_acknowledged == -1
    assert outbox.next_message(journal.read) == Outgoing("position", {}, ())
    assert outbox.next_message(journal.read) is None


def test_it_goes_on_where_the_curator_stands() -> None:
    outbox, journal = positioned(next_sequence=2, count=5)
    assert [outcome.sequence for outcome in sent(outbox, journal)] == [2, 3, 4]
    # One report is on its way: no other, whatever arrives.
    arrive(outbox, journal, 1)
    assert outbox.next_message(journal.read) is None
    outbox.answered({"next_sequence": 5})
    assert [outcome.sequence for outcome in sent(outbox, journal)] == [5]
    assert not outbox.all_acknowledged
    outbox.answered({"next_sequence": 6})
    assert outbox.all_acknowledged


def test_outcomes_are_those_of_the_records_with_their_fates() -> None:
    outbox, journal = positioned()
    arrive(outbox, journal, 1)
    arrive(outbox, journal, 1, Kind.NO_SIGNAL)
    outbox.apply(Transition(kind=Kind.REFUSED, time_s=0.0, group_id="g0", num_tokens=8))
    outbox.apply(Transition(kind=Kind.STALE, time_s=0.0, group_id="g7", reason="deadline"))
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
    outbox.answered({"next_sequence": BATCH})
    assert len(sent(outbox, journal)) == 3


def test_after_a_refusal_the_position_is_asked_again() -> None:
    outbox, journal = positioned(next_sequence=3, count=3)
    arrive(outbox, journal, 1)
    sent(outbox, journal)
    # The curator died and has forgotten 1 and 2, which it had not written.
    outbox.refused("expected sequence 1, received 3")
    assert outbox.refusal == "expected sequence 1, received 3"
    assert outbox.next_message(journal.read) == Outgoing("position", {}, ())
    outbox.answered({"next_sequence": 1, "durable_sequence": 1})
    assert [outcome.sequence for outcome in sent(outbox, journal)] == [1, 2, 3]
    outbox.answered({"next_sequence": 4})
    assert outbox.refusal == ""


def test_only_what_the_curator_has_on_disk_is_forgotten() -> None:
    outbox, journal = positioned(next_sequence=4, count=4)
    outbox.ask_again()
    outbox.next_message(journal.read)
    outbox.answered({"next_sequence": 4, "durable_sequence": 2})
    assert [entry.sequence for entry in outbox._entries] == [2, 3]
    outbox.ask_again()
    outbox.next_message(journal.read)
    with pytest.raises(JournalError, match="the curator asks for outcome 1, which it had reported as durable"):
        outbox.answered({"next_sequence": 1, "durable_sequence": 1})


def test_a_curator_of_another_run_is_refused() -> None:
    outbox, journal = Outbox(), MemoryJournal()
    outbox.next_message(journal.read)
    with pytest.raises(JournalError, match="has taken 9 outcomes, the journal has 0: it belongs to another run"):
        outbox.answered({"next_sequence": 9, "durable_sequence": 9})
