"""How many tickets are issued, for whom, again and to whom, and when they end."""

import hashlib
from dataclasses import replace

import pytest

from stream_grpo.buffer.tickets import block_size, group_id_of, room, seed_of
from stream_grpo.buffer.transitions import Kind
from stream_grpo.types import Fate, PolicyVersion, Ticket
from tests.buffer.fakes import Buffer, group_for

V0, V1, V2 = (PolicyVersion(0, step) for step in range(3))


def ids(tickets: list[Ticket]) -> list[str]:
    return [ticket.group_id for ticket in tickets]


def started(**changes: object) -> Buffer:
    buffer = Buffer(**changes)  # type: ignore[arg-type]
    buffer.start()
    return buffer


@pytest.mark.parametrize(
    ("live", "lag", "expected"),
    [(0, 0, 12), (11, 0, 1), (12, 0, 0), (0, 1, 8), (7, 1, 1), (8, 1, 0), (0, 2, 4), (0, 3, 0), (20, 0, 0)],
)
def test_room_by_hand(live: int, lag: int, expected: int) -> None:
    # max_policy_age 2, 4 groups a step: (2 + 1 - lag) * 4 - live.
    assert room(live, lag, max_policy_age=2, groups_per_step=4) == expected


@pytest.mark.parametrize(
    ("missing", "share", "expected"), [(4, 0.5, 8), (3, 0.4, 8), (3, 3 / 4, 4), (1, 0.9, 2), (2, 1.0, 2)]
)
def test_block_size_by_hand(missing: int, share: float, expected: int) -> None:
    assert block_size(missing, share) == expected


def test_ids_sort_by_issue_and_seeds_are_stable() -> None:
    assert group_id_of(1) == "g00000001" < group_id_of(2) < group_id_of(10)
    # sha256("7/g00000001"), first 8 bytes, shifted by one: the same on every machine.
    assert seed_of(7, "g00000001") == int.from_bytes(_sha("7/g00000001")[:8], "big") >> 1
    assert seed_of(7, "g00000001") != seed_of(8, "g00000001") != seed_of(8, "g00000002")


def _sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def test_no_ticket_before_the_learner_has_started() -> None:
    buffer = Buffer()
    assert buffer.intake.issue("s0", V0, 4, "r", 0.0) == ([], "the learner has not started")


def test_all_samplers_share_one_limit() -> None:
    buffer = started()  # age 2, 2 a step: 6 live at lag 0
    assert len(buffer.issue(V0, 4, "s0")) == 4
    assert len(buffer.issue(V0, 4, "s1")) == 2
    assert buffer.intake.issue("s2", V0, 4, "r", 0.0) == (
        [],
        "6 groups are live, the limit for weights 0 steps old is 6",
    )


def test_old_weights_get_fewer_tickets() -> None:
    buffer = started()
    buffer.fill(V0, 2)
    buffer.train(V0)
    buffer.fill(V1, 2)
    buffer.train(V1)
    assert len(buffer.issue(V0, 9)) == 2  # the learner is at 2, lag 2: (3 - 2) * 2
    assert len(buffer.issue(V1, 9)) == 2  # lag 1: 4, of which 2 are live
    assert len(buffer.issue(V2, 9)) == 2  # lag 0: 6, of which 4 are live


def test_weights_that_are_too_old_get_none_and_are_named() -> None:
    buffer = started(max_policy_age=1)
    for version in (V0, V1):
        buffer.fill(version, 2)
        buffer.train(version)
    assert buffer.intake.issue("s0", V0, 1, "r", 0.0) == ([], "weights 0.0 are 2 steps old, max_policy_age is 1")
    assert "branch 4" in buffer.intake.issue("s0", PolicyVersion(4, 0), 1, "r", 0.0)[1]


def test_a_group_that_ends_leaves_the_count_at_once() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 6)
    assert not buffer.issue(V0, 1)
    buffer.insert(group_for(tickets[0], V0, [0.0, 0.0]))  # no signal
    buffer.insert(group_for(tickets[1], V0))  # accepted: still live
    assert len(buffer.issue(V0, 9)) == 1


def test_a_ticket_says_all_its_sampler_must_know() -> None:
    buffer = started()
    buffer.fill(V0, 2)
    buffer.train(V0)
    (ticket,) = buffer.issue(V1, 1, now=50.0)
    assert ticket == Ticket(
        group_id="g00000003", owner_epoch=0, step=1, seed=seed_of(7, "g00000003"), issued_at_s=50.0, deadline_s=150.0
    )


def test_ids_never_come_again_after_a_restart() -> None:
    buffer = started()
    assert ids(buffer.issue(V0, 3)) == ["g00000001", "g00000002", "g00000003"]
    buffer = buffer.restarted()
    assert ids(buffer.issue(V0, 9)) == ["g00000004", "g00000005", "g00000006"]


def test_a_repeated_request_gets_the_same_tickets_even_after_a_restart() -> None:
    buffer = started()
    first, _ = buffer.intake.issue("s0", V0, 2, "s0/1", 0.0)
    again, _ = buffer.restarted().intake.issue("s0", V0, 2, "s0/1", 3.0)
    assert again == first


def test_a_sampler_that_begins_anew_gives_its_tickets_back_first_of_all() -> None:
    buffer = started()
    old = buffer.issue(V0, 2, "s0")
    other = buffer.issue(V0, 1, "s1")
    assert buffer.intake.hello("s0", 10.0) == 0
    buffer = buffer.restarted()
    assert buffer.intake.hello("s0", 11.0) == 1
    # 3 are live, so 3 are free; the first two are those of s0, under the next epoch, with the seed they had.
    new = buffer.issue(V0, 9, "s2", now=20.0)
    assert ids(new) == ["g00000001", "g00000002", "g00000004", "g00000005", "g00000006"]
    assert [ticket.owner_epoch for ticket in new] == [1, 1, 0, 0, 0]
    assert [ticket.seed for ticket in new[:2]] == [ticket.seed for ticket in old]
    assert new[0].deadline_s == 120.0
    assert other[0].group_id not in ids(new)


def test_a_ticket_is_issued_again_though_the_limit_is_reached() -> None:
    buffer = started()
    buffer.issue(V0, 6, "s0")
    buffer.intake.hello("s0", 0.0)
    # 6 live of 6: a new one has no place, one issued again leaves the count first.
    assert len(buffer.issue(V0, 9, "s1")) == 6
    assert not buffer.issue(V0, 9, "s1")


def test_only_the_newest_epoch_may_insert() -> None:
    buffer = started()
    (old,) = buffer.issue(V0, 1, "s0")
    buffer.intake.hello("s0", 0.0)
    (new,) = buffer.issue(V0, 1, "s1")
    answer = buffer.insert(group_for(old, V0))
    assert answer
    assert (answer.fate, answer.reason) == (Fate.REFUSED, "duplicate: owner epoch 0, the ticket is now of 1")
    answer = buffer.insert(group_for(new, V0))
    assert answer
    assert answer.fate is Fate.ACCEPTED
    assert buffer.groups == {"accepted": 1, "refused": 1}
    assert buffer.tokens == {"generated": 16, "buffered": 8, "refused": 8}


def test_a_released_ticket_may_still_be_honoured_by_what_was_on_its_way() -> None:
    buffer = started()
    (old,) = buffer.issue(V0, 1, "s0")
    buffer.intake.hello("s0", 0.0)
    answer = buffer.insert(group_for(old, V0))
    assert answer
    assert answer.fate is Fate.ACCEPTED
    assert ids(buffer.issue(V0, 1, "s1")) == ["g00000002"]


def test_an_exact_repeat_is_acknowledged_again_and_counted_once() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 3)
    rewards: dict[int, list[float | None]] = {0: [1.0, 0.0], 1: [1.0, 1.0], 2: [1.0, None]}
    groups = [group_for(ticket, V0, rewards[i]) for i, ticket in enumerate(tickets)]
    first = [buffer.insert(group) for group in groups]
    assert [answer.fate for answer in first if answer] == [Fate.ACCEPTED, Fate.NO_SIGNAL, Fate.INVALID]
    before = buffer.groups
    buffer = buffer.restarted()
    assert [buffer.insert(group) for group in groups] == first
    assert buffer.groups == before


def test_another_group_under_a_taken_id_is_a_duplicate() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    buffer.insert(group_for(ticket, V0))
    answer = buffer.insert(group_for(ticket, V0, logprob=-0.25))
    assert answer
    assert (answer.fate, answer.reason) == (Fate.REFUSED, "duplicate: this group was taken or has ended")
    assert buffer.tokens == {"generated": 16, "buffered": 8, "refused": 8}


def test_a_group_nobody_had_a_ticket_for_is_refused() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)

    answer = buffer.insert(replace(group_for(ticket, V0), group_id="g00000099"))
    assert answer
    assert answer.reason == "unknown: no ticket has this group id"


def test_a_ticket_that_is_issued_again_says_how_many_rollouts_its_group_is_to_have() -> None:
    buffer = started()
    named, unnamed, done = (ticket.group_id for ticket in buffer.issue(V0, 3, "s0", now=0.0))
    buffer.intake.name_problems({named: "add/1+1", unnamed: "add/2+2", done: "add/3+3"}, 1.0, {named: 5, done: 4})
    buffer.insert(group_for(buffer.book.tickets.get(done).ticket, V0))  # type: ignore[union-attr]
    buffer = buffer.restarted(now=0.0)
    buffer.intake.hello("s0", 2.0)
    again = {ticket.group_id: ticket for ticket in buffer.issue(V0, 3, "s1", now=3.0)}
    assert [(again[name].problem_id, again[name].group_size) for name in (named, unnamed)] == [
        ("add/1+1", 5), ("add/2+2", 0)
    ]  # fmt: skip
    # One that has ended is forgotten.
    assert buffer.book.tickets._sizes == {named: 5}


def test_a_ticket_past_its_deadline_ends_as_stale_with_its_problem_named() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 2, "s3", now=0.0)
    buffer.intake.name_problems({tickets[1].group_id: "add/1+1", "g00000077": "of nobody"}, 1.0)
    buffer = buffer.restarted(now=0.0)
    assert buffer.intake.expire(100.0) == 0
    assert buffer.intake.expire(100.1) == 2
    ends = [row for row in buffer.journal.rows if row.kind is Kind.STALE]
    assert [(row.reason, row.problem_id, row.sampler_id) for row in ends] == [
        ("deadline", "", "s3"),
        ("deadline", "add/1+1", "s3"),
    ]
    assert buffer.groups == {"stale": 2}
    answer = buffer.insert(group_for(tickets[0], V0))
    assert answer
    assert answer.fate is Fate.REFUSED


def test_a_buffer_that_was_down_gives_samplers_time_to_send_again() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)  # its deadline is at 100
    buffer = buffer.restarted(now=200.0)
    assert buffer.intake.expire(204.0) == 0
    answer = buffer.insert(group_for(ticket, V0), 204.5)
    assert answer
    assert answer.fate is Fate.ACCEPTED
