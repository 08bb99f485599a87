"""Batches for the learner: leased once, trained once, final with a checkpoint, available again after a restore."""

import re

import pytest

from stream_grpo.buffer.book import Refusal
from stream_grpo.errors import LedgerError
from stream_grpo.types import PolicyVersion
from tests.buffer.fakes import Buffer, group_for


def v(step: int, branch: int = 0) -> PolicyVersion:
    return PolicyVersion(branch, step)


def started(**changes: object) -> Buffer:
    buffer = Buffer(**changes)  # type: ignore[arg-type]
    buffer.start()
    return buffer


def lease_ids(buffer: Buffer, version: PolicyVersion) -> list[str]:
    return [held.group_id for held in buffer.leases.lease(version, 2, 0.0).groups]


def test_a_lease_is_the_same_for_a_repeat_and_after_a_restart() -> None:
    buffer = started()
    buffer.fill(v(0), 5)
    assert lease_ids(buffer, v(0)) == ["g00000001", "g00000002"]
    assert lease_ids(buffer, v(0)) == ["g00000001", "g00000002"]
    buffer = buffer.restarted()
    batch = buffer.leases.lease(v(0), 2, 0.0)
    assert [held.group_id for held in batch.groups] == ["g00000001", "g00000002"]
    assert all(held.data for held in batch.groups)
    assert buffer.groups == {"accepted": 3, "leased": 2}


def test_trained_groups_are_never_leased_again_and_a_repeat_changes_nothing() -> None:
    buffer = started()
    buffer.fill(v(0), 4)
    ids = buffer.train(v(0))
    buffer.leases.trained(v(1), ids, {}, 0.0)
    assert buffer.groups == {"accepted": 2, "trained": 2}
    buffer = buffer.restarted()
    buffer.leases.trained(v(1), ids, {}, 0.0)
    assert buffer.groups == {"accepted": 2, "trained": 2}
    assert lease_ids(buffer, v(1)) == ["g00000003", "g00000004"]


def test_ages_are_those_at_lease() -> None:
    buffer = started()
    buffer.fill(v(0), 4)
    buffer.train(v(0))
    assert buffer.leases.lease(v(1), 2, 0.0).ages == [1, 1]


@pytest.mark.parametrize(
    ("version", "ids", "sentence"),
    [
        (v(1), ["g00000001"], "trained 0.1: reported ['g00000001'], leased ['g00000001', 'g00000002']"),
        (v(1), ["g00000001", "g00000001"], "reported ['g00000001', 'g00000001']"),
        (v(2), ["g00000001", "g00000002"], "trained 0.2: the step from 0.0 makes another version"),
    ],
)
def test_what_was_not_leased_is_not_trained(version: PolicyVersion, ids: list[str], sentence: str) -> None:
    buffer = started()
    buffer.fill(v(0), 4)
    lease_ids(buffer, v(0))
    with pytest.raises(Refusal, match=re.escape(sentence)):
        buffer.leases.trained(version, ids, {group_id: {"trained": 8} for group_id in ids}, 0.0)
    assert buffer.groups == {"accepted": 2, "leased": 2}


def test_tokens_that_do_not_add_up_change_nothing() -> None:
    buffer = started()
    buffer.fill(v(0), 2)
    ids = lease_ids(buffer, v(0))
    tokens = {ids[0]: {"trained": 8}, ids[1]: {"trained": 5, "masked": 2}}
    with pytest.raises(LedgerError, match="g00000002: 8 sampled tokens, the learner accounts for 7"):
        buffer.leases.trained(v(1), ids, tokens, 0.0)
    assert buffer.groups == {"leased": 2}
    tokens[ids[1]]["baseline_only"] = 1
    buffer.leases.trained(v(1), ids, tokens, 0.0)
    assert buffer.tokens == {"generated": 16, "trained": 13, "masked": 2, "baseline_only": 1}


def test_a_lease_for_another_version_or_size_is_refused() -> None:
    buffer = started()
    with pytest.raises(Refusal, match=r"lease for 0\.3: the learner is at 0\.0"):
        buffer.leases.lease(v(3), 2, 0.0)
    with pytest.raises(Refusal, match="lease of 5 groups: a step of this run has 2"):
        buffer.leases.lease(v(0), 5, 0.0)
    with pytest.raises(Refusal, match="the learner is at no version"):
        Buffer().leases.lease(v(0), 2, 0.0)


def test_report_c22_the_age_limit_is_checked_again_when_a_batch_is_handed_out() -> None:
    """Versions 7, 8, 9 and 10 lie in the buffer, the learner is at 10, the limit is 2: 7 is dropped and counted."""
    buffer = Buffer()
    buffer.start(v(7))
    for step in (7, 8, 9):
        buffer.fill(v(step), 1)
        buffer.book.lineage.version = v(step + 1)  # steps that the buffer did not see: its own order forbids them
    buffer.fill(v(10), 1)
    batch = buffer.leases.lease(v(10), 2, 0.0)
    assert [held.versions for held in batch.groups] == [{v(8)}, {v(9)}]
    assert batch.ages == [2, 1]
    assert [held.versions for held in buffer.book.stock.accepted()] == [{v(10)}]
    assert buffer.groups == {"accepted": 1, "leased": 2, "stale": 1}
    assert buffer.book.ledger.ends["stale: age"] == 1
    assert buffer.tokens["stale"] == 8


def test_report_c29_a_pool_without_signal_ends_with_its_counts() -> None:
    buffer = started(max_groups_without_signal=6)
    for _ in range(2):
        for ticket, rewards in zip(buffer.issue(v(0), 3), ([0.0, 0.0], [0.0, 0.0], [1.0, 1.0]), strict=True):
            assert not buffer.leases.lease(v(0), 2, 0.0).groups
            buffer.insert(group_for(ticket, v(0), rewards))
    sentence = (
        "6 groups in a row had no signal: 2 all right, 4 all wrong, 0 same reward, 0 invalid; in 0 of them rollouts"
    )
    with pytest.raises(Refusal, match=sentence):
        buffer.leases.lease(v(0), 2, 0.0)
    with pytest.raises(Refusal, match=sentence):
        buffer.restarted().leases.lease(v(0), 2, 0.0)


def test_one_group_with_signal_begins_the_count_anew() -> None:
    buffer = started(max_groups_without_signal=3)
    for rewards in ([0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]):
        (ticket,) = buffer.issue(v(0), 1)
        buffer.insert(group_for(ticket, v(0), rewards))
    assert buffer.book.signal.num_without == sum(buffer.book.signal.causes.values()) == 2
    assert "1 groups buffered" in buffer.leases.lease(v(0), 2, 0.0).cause


def test_report_c31_the_last_groups_are_kept_when_the_stream_ends() -> None:
    """3 groups are buffered, a batch has 4, and the run ends: they are in the account, and there when it goes on."""
    buffer = started(groups_per_step=4)
    ids = buffer.fill(v(0), 3)
    assert buffer.leases.lease(v(0), 4, 0.0).cause == "3 groups buffered, 0 in flight, 4 needed; no group is in flight"
    buffer = buffer.restarted()
    assert buffer.groups == {"accepted": 3}
    assert buffer.tokens == {"generated": 24, "buffered": 24}
    buffer.start(v(0, 1), b1=v(0))
    buffer.fill(v(0, 1), 1)
    assert buffer.train(v(0, 1)) == [*ids, "g00000004"]


def test_a_restore_makes_available_what_the_checkpoint_has_not_seen() -> None:
    buffer = started()
    for step in range(4):
        buffer.fill(v(step), 2)
        buffer.train(v(step))
    buffer.fill(v(4), 1)
    # The learner is at 4 and goes back to 2. Trained there: steps 3 and 4, of versions 2 and 3.
    # Ages at (1, 2): version 2 is 0, version 3 is 1, version 4 is 2 steps off. All within 2, and 5 <= (0 + 1) 2 + ...
    buffer.start(v(2, 1), b1=v(2))
    assert buffer.groups == {"trained": 4, "accepted": 5}
    # Fewest steps left first: g9 of version 4 (0 left), then g7 and g8 of version 3 (1 left).
    assert buffer.train(v(2, 1)) == ["g00000009", "g00000007"]
    assert buffer.leases.lease(v(3, 1), 2, 0.0).ages == [2, 1]


def test_a_restore_ends_what_is_too_old_or_has_no_place() -> None:
    buffer = started(max_policy_age=1)
    for step in range(3):
        buffer.fill(v(step), 2)
        buffer.train(v(step))
    buffer.fill(v(3), 4)
    # Back to 1. Version 1 (g3, g4): age 0. Version 2 (g5, g6): age 1. Version 3 (g7 to g10): age 2, too old.
    buffer.start(v(1, 1), b1=v(1))
    assert buffer.groups == {"trained": 2, "accepted": 4, "stale": 4}
    assert buffer.book.ledger.ends["stale: restore"] == 4
    assert buffer.train(v(1, 1)) == ["g00000005", "g00000006"]
    assert buffer.train(v(2, 1)) == ["g00000003", "g00000004"]


def test_a_restore_takes_back_a_lease() -> None:
    buffer = started()
    buffer.fill(v(0), 4)
    buffer.train(v(0))
    lease_ids(buffer, v(1))
    buffer = buffer.restarted()
    buffer.start(v(1, 1), b1=v(1))
    assert buffer.groups == {"accepted": 2, "trained": 2}
    assert lease_ids(buffer, v(1, 1)) == ["g00000003", "g00000004"]


def test_a_restore_of_a_restore_follows_the_forks() -> None:
    buffer = started()
    for step in range(2):
        buffer.fill(v(step), 2)
        buffer.train(v(step))
    buffer.start(v(1, 1), b1=v(1))  # g3, g4 again
    buffer.train(v(1, 1))
    buffer.fill(v(2, 1), 2)
    buffer.train(v(2, 1))
    # Branch 2 forks from (0, 0): nothing that was trained is in it. Version (0,0): age 0; (0,1): 1; (1,2): 2.
    buffer.start(v(0, 2), b1=v(1), b2=v(0))
    assert buffer.groups == {"accepted": 6}
    assert [buffer.book.candidate(held).age for held in buffer.book.stock.accepted()] == [0, 0, 1, 1, 2, 2]


def test_what_a_kept_checkpoint_contains_is_final() -> None:
    buffer = started()
    for step in range(3):
        buffer.fill(v(step), 2)
        buffer.train(v(step))
    buffer.leases.checkpointed(v(2), 0.0)
    buffer.leases.checkpointed(v(2), 0.0)
    for each in (buffer, buffer.restarted()):
        assert [held.group_id for held in each.book.stock.trained()] == ["g00000005", "g00000006"]
    with pytest.raises(Refusal, match=r"start from 1\.1: it does not contain 0\.2, which was the oldest kept"):
        buffer.start(v(1, 1), b1=v(1))
    buffer.start(v(2, 1), b1=v(2))
    assert buffer.groups == {"trained": 4, "accepted": 2}


def test_versions_never_go_back() -> None:
    buffer = started()
    buffer.fill(v(0), 2)
    buffer.train(v(0))
    buffer.start(v(1))  # where the run is: nothing happens
    for version in (v(0), v(2)):
        with pytest.raises(Refusal, match="a restore opens a new branch"):
            buffer.start(version)
    with pytest.raises(Refusal, match=r"checkpointed 0\.4: the learner is at 0\.1"):
        buffer.leases.checkpointed(v(4), 0.0)


def test_memory_holds_the_bytes_of_live_groups_alone() -> None:
    buffer = started()
    buffer.fill(v(0), 6)
    buffer.train(v(0))
    held = buffer.book.stock
    assert [bool(group.data) for group in held.trained()] == [False, False]
    assert all(group.data for group in held.accepted())
    buffer.start(v(0, 1), b1=v(0))
    assert all(group.data for group in held.accepted())


def test_a_ticket_of_a_branch_that_was_left_is_as_old_as_what_its_sampler_may_have_applied_there() -> None:
    """Weights 0.0, 0.1, 0.2 are published; a ticket of 0.0 may bring tokens of 0.2, 2 steps from 1.0, not 0."""
    buffer = started(max_policy_age=2)
    (ticket,) = buffer.issue(v(0), 1)
    for step in range(2):
        buffer.fill(v(step), 2)
        buffer.train(v(step))
    buffer.start(v(0, 1), b1=v(0))
    held = buffer.book.tickets.get(ticket.group_id)
    assert held
    assert buffer.book.ticket_candidate(held).age == 2
    # It is waited for, as a group with 0 steps left: none may be left behind with 0.
    assert "waits for group g00000001 of s0 with 0 steps left" in buffer.leases.lease(v(0, 1), 2, 0.0).cause
    buffer.insert(group_for(ticket, [v(0), v(1), v(2), v(2)]))
    batch = buffer.leases.lease(v(0, 1), 2, 0.0)
    assert (batch.groups[0].group_id, batch.ages[0]) == (ticket.group_id, 2)
    # Whoever still has weights of the old branch may apply newer ones of it too: 5 are live, room for (2 + 1 - 2) 2.
    assert buffer.intake.issue("s1", v(0), 1, "r", 0.0)[1].endswith("the limit for weights 2 steps old is 2")
    assert len(buffer.issue(v(0, 1), 9)) == 1
    restarted = buffer.restarted().book
    assert restarted.lineage.age_in_flight(v(0)) == 2
    assert restarted.lineage.age_in_flight(v(0, 1)) == 0


def test_a_step_in_the_checkpoint_whose_report_was_lost_is_trained_and_not_available_again() -> None:
    buffer = started()
    tickets = buffer.issue(v(0), 3)
    buffer.insert(group_for(tickets[0], v(0), [1.0, 0.0, None]))  # 12 tokens, of which 4 are of no valid rollout
    for ticket in tickets[1:]:
        buffer.insert(group_for(ticket, v(0)))
    ids = lease_ids(buffer, v(0))
    buffer.start(v(1, 1), b1=v(1))
    assert buffer.groups == {"trained": 2, "accepted": 1}
    assert buffer.tokens == {"generated": 28, "trained": 16, "masked": 4, "buffered": 8}
    assert buffer.book.lineage.version == v(1, 1)
    # A later restore to before that step takes it back.
    buffer.start(v(0, 2), b1=v(1), b2=v(0))
    assert buffer.groups == {"accepted": 3}
    assert lease_ids(buffer, v(0, 2)) == ids


def test_groups_of_another_configuration_end_before_any_lease() -> None:
    buffer = started(config_hash="c0", max_groups_without_signal=2)
    buffer.fill(v(0), 6)
    trained = buffer.train(v(0))
    lease_ids(buffer, v(1))
    # The run begins again with another configuration: 2 are buffered, 2 leased, 2 trained but not final.
    journal = buffer.journal
    buffer = Buffer(journal, config_hash="c1", max_groups_without_signal=2)
    assert buffer.groups == {"trained": 2, "invalid": 4}
    assert buffer.tokens == {"generated": 48, "trained": 16, "invalid": 32}
    assert buffer.book.ledger.ends["invalid: config changed"] == 4
    assert buffer.book.num_live == 0
    assert journal.rows[-1].reason == "config changed: the group has c0, the run c1"
    # A restore to before the step does not bring the trained ones back either.
    buffer.start(v(0, 1), b1=v(0))
    assert buffer.groups == {"invalid": 6}
    assert {row.group_id for row in journal.rows[-2:]} == set(trained)
    # They had signal once: they are no pool without any.
    assert buffer.book.signal.num_without == 0
    assert "0 groups buffered" in buffer.leases.lease(v(0, 1), 2, 0.0).cause
    assert Buffer(journal, config_hash="c1").groups == {"invalid": 6}
