"""What becomes of groups that get too old: waited for, dropped, sampled again, or kept in the baseline."""

import logging
from dataclasses import replace

import pytest

from stream_grpo.buffer.transitions import Kind
from stream_grpo.types import Fate
from tests.buffer.fakes import Buffer, group_by_rollout, group_for
from tests.buffer.test_leases import lease_ids, started, v

SETTINGS = ["wait", "drop", "requeue", "baseline_only"]


def steps(buffer: Buffer, first: int, count: int) -> int:
    """How many of `count` steps are made, each with two new groups of its own weights."""
    made = 0
    for step in range(first, first + count):
        buffer.fill(v(step), 2)
        if not buffer.train(v(step)):
            return made
        made += 1
    return made


@pytest.mark.parametrize("too_old", SETTINGS[1:])
def test_a_step_never_waits_for_a_straggler_where_it_may_be_lost(too_old: str) -> None:
    buffer = started(too_old=too_old)
    (straggler,) = buffer.issue(v(0), 1)
    assert steps(buffer, 0, 50) == 50
    answer = buffer.insert(group_for(straggler, v(0)))
    assert answer
    assert (answer.fate, answer.reason) == (Fate.STALE, "age: 50 at insert, max_policy_age is 2")
    assert buffer.groups == {"trained": 100, "stale": 1}


def test_groups_that_get_too_old_in_the_buffer_end_at_the_next_lease() -> None:
    # n = 2, age 2: six groups of weights 0. The freshest go first, so that at step 3 two of the six are left, 3 old.
    buffer = started(too_old="drop", selector="freshest_first")
    old = buffer.fill(v(0), 6)
    assert buffer.train(v(0)) == old[:2]
    buffer.fill(v(1), 2)
    assert buffer.train(v(1)) == ["g00000007", "g00000008"]
    buffer.fill(v(2), 2)
    assert buffer.train(v(2)) == ["g00000009", "g00000010"]
    assert lease_ids(buffer, v(3)) == []
    assert buffer.groups == {"trained": 6, "stale": 4}
    assert buffer.book.ledger.ends["stale: age"] == 4
    # They hold no place any more: 6 new tickets.
    assert len(buffer.issue(v(3), 9)) == 6


def test_the_group_with_the_most_signal_goes_first() -> None:
    buffer = started(too_old="drop", selector="expected_signal")
    # Variances p (1 - p) of 1 in 4, 2 in 4 and 3 in 4: 3/16, 1/4, 3/16.
    for ticket, num_passed in zip(buffer.issue(v(0), 3), (1, 2, 3), strict=True):
        buffer.insert(group_for(ticket, v(0), [1.0] * num_passed + [0.0] * (4 - num_passed)))
    assert lease_ids(buffer, v(0)) == ["g00000002", "g00000001"]
    assert lease_ids(buffer.restarted(), v(0)) == ["g00000002", "g00000001"]


@pytest.mark.parametrize("too_old", SETTINGS)
def test_report_c22_no_setting_hands_out_what_is_older_than_the_limit(too_old: str) -> None:
    """Versions 7, 8, 9 and 10 lie in the buffer, the learner is at 10, the limit is 2: 7 is dropped and counted."""
    buffer = Buffer(too_old=too_old)
    buffer.start(v(7))
    for step in (7, 8, 9):
        buffer.fill(v(step), 1)
        buffer.book.lineage.version = v(step + 1)  # steps that the buffer did not see
    buffer.fill(v(10), 1)
    batch = buffer.leases.lease(v(10), 2, 0.0)
    assert batch.ages == [2, 1]
    assert buffer.book.ledger.ends["stale: age"] == 1


@pytest.mark.parametrize("too_old", SETTINGS)
def test_report_c27_one_stuck_rollout_stops_nothing_for_longer_than_its_deadline(too_old: str) -> None:
    """The fourth rollout of a group never returns: others train meanwhile, it ends, also right after a resume."""
    buffer = started(too_old=too_old, sample_deadline_s=5.0)
    (stuck,) = buffer.issue(v(0), 1)
    # With `wait` the steps end when it has no step left, else they go on.
    assert steps(buffer, 0, 4) == (2 if too_old == "wait" else 4)
    buffer = buffer.restarted(now=4.0)
    assert buffer.intake.expire(18.0) == 0  # the grace of 15 s after a start
    assert buffer.intake.expire(20.0) == 1
    assert buffer.book.ledger.ends["stale: deadline"] == 1
    step = buffer.book.lineage.learner.step
    assert steps(buffer, step, 4) == 4
    assert buffer.book.tickets.get(stuck.group_id) is None


@pytest.mark.parametrize("too_old", SETTINGS)
def test_report_c30_the_buffer_has_a_limit_however_fast_its_sampler_is(too_old: str) -> None:
    """Ten times as many groups are asked for as the learner takes, a thousand in all: 64 are live at most."""
    buffer = started(too_old=too_old, groups_per_step=16, max_policy_age=3)
    step = num_asked = most = 0
    while num_asked < 1000:
        num_asked += 160
        buffer.fill(v(step), 160)
        most = max(most, buffer.book.num_live)
        buffer.leases.lease(v(step), 16, 0.0)
        with_bytes = sum(bool(held.data) for held in [*buffer.book.stock.accepted(), *buffer.book.stock.leased()])
        assert with_bytes <= 64
        ids = [held.group_id for held in buffer.book.stock.leased()]
        buffer.leases.trained(v(step + 1), ids, {group_id: {"trained": 8} for group_id in ids}, 0.0)
        step += 1
    assert most == 64  # (3 + 1) x 16
    # The sampler is slowed down, so that nothing is thrown away; what is live is all that was not trained.
    assert buffer.groups == {"trained": 16 * step, "accepted": 48}


def lose(buffer: Buffer, problem_id: str, step: int) -> int:
    """A group of a problem takes 5 steps, from `step` on, and is too old then; the step after."""
    (slow,) = buffer.issue(v(step), 1)
    assert steps(buffer, step, 5) == 5
    buffer.insert(replace(group_for(slow, v(step)), problem_id=problem_id))
    return step + 5


def test_report_c32_a_slow_problem_is_trained_where_steps_wait_for_it() -> None:
    """Problem H always needs more time than 5 steps take, the limit is 2: with `wait` the learner is paced by it."""
    buffer = started()
    (slow,) = buffer.issue(v(0), 1)
    assert steps(buffer, 0, 5) == 2
    assert "waits for group g00000001 of s0 with 0 steps left" in buffer.leases.lease(v(2), 2, 0.0).cause
    buffer.insert(replace(group_for(slow, v(0)), problem_id="H"))
    assert buffer.train(v(2))[0] == slow.group_id
    assert "stale" not in buffer.groups


def test_report_c32_a_slow_problem_is_requeued_so_often_and_then_reported_by_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Problem H always needs 5 steps, the limit is 2: `requeue` puts it first 3 times, and then it is named."""
    buffer, step = started(too_old="requeue", max_requeues=3), 0
    for attempt in range(1, 6):
        with caplog.at_level(logging.WARNING):
            step = lose(buffer, "H", step)
        buffer = buffer.restarted()
        losses = buffer.book.losses.as_fields()
        assert losses["requeued"] == min(attempt, 3)
        assert losses["never_fresh"] == ({"H": attempt - 3} if attempt > 3 else {})
        assert losses["by_problem"] == {"H": {"num_lost": attempt, "num_trained": 0}}
    assert [record.message for record in caplog.records] == [
        "problem H is never fresh: 4 groups in a row got older than max_policy_age = 2; it is not put first again "
        "before one is trained"
    ]
    requeued = [row for row in buffer.journal.rows if row.kind is Kind.REQUEUED]
    assert [(row.problem_id, row.makes_outcome) for row in requeued] == [("H", True)] * 3
    # One that is trained ends the row, and counts in the share.
    (quick,) = buffer.issue(v(step), 1)
    buffer.insert(replace(group_for(quick, v(step)), problem_id="H"))
    buffer.fill(v(step), 1)
    assert quick.group_id in buffer.train(v(step))
    losses = buffer.book.losses.as_fields()
    assert losses["never_fresh"] == {}
    assert losses["by_problem"] == {"H": {"num_lost": 5, "num_trained": 1}}
    lose(buffer, "H", step + 1)
    assert buffer.book.losses.as_fields()["requeued"] == 4


def test_a_group_that_gets_too_old_in_the_buffer_is_requeued_too() -> None:
    buffer = started(too_old="requeue", selector="freshest_first")
    buffer.fill(v(0), 3)  # of which the last is left behind
    buffer.train(v(0))
    assert steps(buffer, 1, 3) == 3
    assert buffer.groups == {"trained": 8, "stale": 1}
    (row,) = [row for row in buffer.journal.rows if row.kind is Kind.REQUEUED]
    assert (row.group_id, row.problem_id) == ("g00000003", "problem-of-g00000003")


def test_rollouts_that_are_too_old_stay_in_the_baseline_of_a_group_that_is_leased() -> None:
    buffer = started(too_old="baseline_only")
    (ticket,) = buffer.issue(v(0), 1)
    assert steps(buffer, 0, 3) == 3
    old, half, young = [v(0)] * 4, [v(0), v(0), v(3), v(3)], [v(2), v(3), v(3), v(3)]
    answer = buffer.insert(group_by_rollout(ticket, [old, half, young], [1.0, 0.0, 0.0]))
    assert answer
    assert answer.fate is Fate.ACCEPTED
    buffer.fill(v(3), 1)
    for each in (buffer.restarted(), buffer):
        batch = each.leases.lease(v(3), 2, 0.0)
        # Only the third rollout would be trained, and its oldest token is of weights 2.
        assert (batch.groups[0].group_id, batch.ages) == (ticket.group_id, [1, 0])
    # The learner was at 0 at issue, and it came in at 3: of the age of 1 all was in flight.
    assert batch.staleness[0] == (0, 1, 0)


def test_a_group_whose_valid_rollouts_are_all_too_old_is_stale() -> None:
    buffer = started(too_old="baseline_only")
    first, second = buffer.issue(v(0), 2)
    assert steps(buffer, 0, 3) == 3
    # The young one is not valid: it has no reward.
    rollouts = [[v(0)] * 4, [v(0), v(3), v(3), v(3)], [v(3)] * 4]
    answer = buffer.insert(group_by_rollout(first, rollouts, [1.0, 0.0, None]))
    assert answer
    assert (answer.fate, answer.reason) == (Fate.STALE, "age: 3 at insert, max_policy_age is 2")
    # One whose youngest rollout is of weights 2 may be leased up to step 4, and not at 5.
    buffer.insert(group_by_rollout(second, [[v(0)] * 4, [v(2)] * 4], [1.0, 0.0]))
    for step, age in ((3, 1), (4, 2), (5, 3)):
        buffer.book.lineage.version = v(step)
        assert buffer.book.candidate(buffer.book.stock[second.group_id]).age == age
    assert lease_ids(buffer, v(5)) == []
    assert buffer.book.ledger.ends["stale: age"] == 2


def test_a_lost_report_of_a_step_counts_what_was_in_the_baseline_alone() -> None:
    buffer = started(too_old="baseline_only")
    tickets = buffer.issue(v(0), 2)
    assert steps(buffer, 0, 3) == 3
    # 4 tokens each: too old, as old as may be, and young without a reward.
    for ticket in tickets:
        buffer.insert(group_by_rollout(ticket, [[v(0)] * 4, [v(1)] * 4, [v(3)] * 4], [1.0, 0.0, None]))
    before = buffer.tokens["trained"]
    assert lease_ids(buffer, v(3)) == [ticket.group_id for ticket in tickets]
    buffer.start(v(4, 1), b1=v(4))
    assert buffer.tokens["trained"] - before == 8
    assert (buffer.tokens["baseline_only"], buffer.tokens["masked"]) == (8, 8)
