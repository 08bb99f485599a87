"""`max_policy_age` 0: tickets in blocks, groups journaled in the order of their ids, the surplus counted."""

import pytest

from stream_grpo.buffer.signal import SignalWatch
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import Fate, PolicyVersion, Ticket
from tests.buffer.fakes import Buffer, group_for

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def started(groups_per_step: int = 2, **changes: object) -> Buffer:
    buffer = Buffer(max_policy_age=0, groups_per_step=groups_per_step, **changes)  # type: ignore[arg-type]
    buffer.start()
    return buffer


def cause(buffer: Buffer, version: PolicyVersion = V0) -> str:
    tickets, why = buffer.intake.issue("s0", version, 99, "a request", 0.0)
    assert not tickets
    return why


def insert_all(buffer: Buffer, tickets: list[Ticket], with_signal: str) -> list[Fate]:
    """Insert in reverse order; `with_signal` has + for a group with signal and - for one without. The fates."""
    for ticket, sign in list(zip(tickets, with_signal, strict=True))[::-1]:
        buffer.insert(group_for(ticket, V0, [1.0, 0.0] if sign == "+" else [0.0, 0.0]))
    return [Fate(row.kind) for row in buffer.journal.rows if row.length][-len(tickets) :]


def test_a_block_is_issued_whole_and_only_one_at_a_time() -> None:
    buffer = started()
    # 2 missing at an expected share of (0 + 1) / (0 + 2): 4 tickets, whatever was wanted.
    assert len(buffer.issue(V0, 1)) == 4
    assert cause(buffer) == "a block is open: 4 groups of it have not come in"


def test_groups_of_a_block_are_journaled_by_id_once_all_are_in() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 1)
    for ticket in tickets[:0:-1]:
        assert buffer.insert(group_for(ticket, V0, [0.0, 0.0])) is None
    assert not [row for row in buffer.journal.rows if row.length]
    assert cause(buffer) == "a block is open: 1 groups of it have not come in"
    buffer.insert(group_for(tickets[0], V0, [1.0, 0.0]))
    journaled = [row.group_id for row in buffer.journal.rows if row.length]
    assert journaled == [ticket.group_id for ticket in tickets]
    assert buffer.groups == {"accepted": 1, "no_signal": 3}


def test_a_further_block_covers_what_is_missing() -> None:
    buffer = started(groups_per_step=3)
    insert_all(buffer, buffer.issue(V0, 1), "+-----")
    # 1 of 6 had signal: the share is (1 + 1) / (6 + 2) = 1/4, and 2 are missing: 8 tickets.
    assert len(buffer.issue(V0, 1)) == 8


def test_the_first_groups_by_id_fill_the_batch_and_the_rest_is_surplus() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 1)
    fates = insert_all(buffer, tickets, "-+++")
    assert fates == [Fate.NO_SIGNAL, Fate.ACCEPTED, Fate.ACCEPTED, Fate.ACCEPTED]
    assert buffer.groups == {"accepted": 2, "no_signal": 1, "stale": 1}
    assert buffer.book.ledger.ends["stale: surplus"] == 1
    # 4 groups of 2 x 4 tokens.
    assert buffer.tokens == {"generated": 32, "buffered": 16, "no_signal": 8, "stale": 8}
    assert cause(buffer) == "the batch is complete, the learner has not finished its step"
    assert buffer.train(V0) == [tickets[1].group_id, tickets[2].group_id]


def test_the_next_block_is_for_the_next_version_alone() -> None:
    buffer = started()
    insert_all(buffer, buffer.issue(V0, 1), "++--")
    buffer.leases.lease(V0, 2, 0.0)
    assert cause(buffer) == "the batch is complete, the learner has not finished its step"
    buffer.train(V0)
    assert cause(buffer, V0) == "weights 0.0 are not the learner's, 0.1"
    # 2 of 4 had signal: (2 + 1) / (4 + 2) = 1/2.
    tickets = buffer.issue(V1, 1)
    assert [ticket.group_id for ticket in tickets] == [f"g0000000{n}" for n in (5, 6, 7, 8)]


def test_no_block_before_the_curator_has_taken_every_outcome() -> None:
    buffer = started(groups_per_step=3)
    outbox = buffer.book.outbox
    outbox._has_reader = True
    assert cause(buffer) == "the curator has taken -1 of 0 outcomes"
    outbox.next_message(buffer.journal.read)
    outbox.answered(0, 0)
    insert_all(buffer, buffer.issue(V0, 1), "+-----")
    assert cause(buffer) == "the curator has taken 0 of 6 outcomes"
    outbox.committed()
    outbox.next_message(buffer.journal.read)
    outbox.answered(6)
    assert len(buffer.issue(V0, 1)) == 8


def test_a_ticket_past_its_deadline_ends_the_block_without_it() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 1)
    for ticket in tickets[1:]:
        buffer.insert(group_for(ticket, V0))
    # What has come in is not late, however long the block stays open.
    assert buffer.intake.expire(500.0) == 1
    assert buffer.groups == {"accepted": 2, "stale": 2}
    assert buffer.book.ledger.ends == {"stale: deadline": 1, "stale: surplus": 1}


def test_the_rest_of_a_block_is_issued_again_when_its_sampler_begins_anew() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 1)
    buffer.insert(group_for(tickets[2], V0))
    buffer.intake.hello("s0", 0.0)
    again = buffer.issue(V0, 1)
    assert [(ticket.group_id, ticket.owner_epoch, ticket.seed) for ticket in again] == [
        (ticket.group_id, 1, ticket.seed) for ticket in (tickets[0], tickets[1], tickets[3])
    ]
    for ticket in again:
        buffer.insert(group_for(ticket, V0, [0.0, 0.0]))
    assert buffer.groups == {"accepted": 1, "no_signal": 3}


def test_staged_groups_are_lost_by_a_kill_and_taken_when_they_are_sent_again() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 1)
    for ticket in tickets[:3]:
        buffer.insert(group_for(ticket, V0))
    buffer = buffer.restarted()
    assert buffer.groups == {"ticketed": 4}
    for ticket in tickets:
        buffer.insert(group_for(ticket, V0))
    assert buffer.groups == {"accepted": 2, "stale": 2}


def test_a_repeat_of_a_staged_group_is_answered_with_it() -> None:
    buffer = started(groups_per_step=1)
    tickets = buffer.issue(V0, 1)
    for _ in range(2):
        buffer.insert(group_for(tickets[0], V0))
    buffer.intake.insert("me", encode_group(group_for(tickets[1], V0)), 0.0)
    assert len(buffer.intake.take_answers()) == 3


def test_a_restore_in_the_middle_of_a_block_goes_on_with_what_has_a_place() -> None:
    buffer = started()
    insert_all(buffer, buffer.issue(V0, 1), "++--")
    buffer.train(V0)
    tickets = buffer.issue(V1, 1)
    buffer.insert(group_for(tickets[3], V1))
    # Back to the weights of step 0: tickets for 0.1 are 1 step old, and nothing may be older than 0.
    buffer.start(PolicyVersion(1, 0), b1=PolicyVersion(0, 0))
    # The two trained groups are available again; the block is over, its staged group is refused and counted.
    assert buffer.groups == {"accepted": 2, "no_signal": 2, "stale": 4, "refused": 1}
    assert buffer.tokens["refused"] == 8
    assert buffer.train(PolicyVersion(1, 0)) == ["g00000001", "g00000002"]


@pytest.mark.parametrize(("signs", "share"), [("", 1 / 2), ("+", 2 / 3), ("-", 1 / 3), ("-" * 300 + "+" * 128, 1 / 2)])
def test_the_expected_share_looks_back_on_256_groups(signs: str, share: float) -> None:
    watch = SignalWatch()
    for sign in signs:
        kind = Kind.ACCEPTED if sign == "+" else Kind.NO_SIGNAL
        watch.apply(Transition(kind=kind, time_s=0.0, reason="all_wrong"))
    assert watch.expected_share == pytest.approx(share)
