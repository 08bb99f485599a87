"""Further uses of a trained group: bounded, within the age bound, counted apart, and undone by a restore."""

import re

import pytest

from stream_grpo.buffer.book import Refusal
from stream_grpo.buffer.leases import Batch
from stream_grpo.buffer.selectors import Candidate, expected_signal, fewest_steps_left, freshest_first, select_again
from stream_grpo.buffer.transitions import Kind
from stream_grpo.errors import LedgerError
from stream_grpo.types import PolicyVersion
from tests.buffer.fakes import Buffer
from tests.buffer.test_leases import v


def started(**changes: object) -> Buffer:
    """3 groups a step, of which 1 may be used again, up to 3 times in all; age at most 2."""
    buffer = Buffer(**{"groups_per_step": 3, "reused_per_step": 1, "max_uses": 3, **changes})  # type: ignore[arg-type]
    buffer.start()
    return buffer


def lease(buffer: Buffer, version: PolicyVersion) -> Batch:
    return buffer.leases.lease(version, 3, 0.0)


def ids(batch: Batch) -> list[str]:
    return [held.group_id for held in batch.groups]


def step(buffer: Buffer, version: PolicyVersion, num_new: int = 2) -> list[str]:
    """Two new groups, and a step; the ids of its batch."""
    buffer.fill(version, num_new)
    return buffer.train(version)


def reused(buffer: Buffer) -> dict[str, int]:
    fields: dict[str, int] = buffer.book.ledger.as_fields()["reused"]
    return fields


def test_a_batch_has_its_fresh_groups_and_up_to_so_many_of_those_trained_before() -> None:
    buffer = started()
    # Nothing was trained before: the step begins with its 2 fresh groups and waits for no other.
    assert step(buffer, v(0)) == ["g00000001", "g00000002"]
    assert step(buffer, v(1)) == ["g00000003", "g00000004", "g00000001"]
    assert reused(buffer) == {"uses": 1, "tokens": 8}
    # Every group has its one fate, from its first use.
    assert buffer.groups == {"trained": 4}
    assert buffer.tokens == {"generated": 32, "trained": 32}


def test_the_least_used_goes_first_then_the_order_of_the_run() -> None:
    trained = [Candidate("a", 1, num_uses=2), Candidate("b", 0, num_uses=1), Candidate("c", 2, num_uses=1)]
    assert select_again(trained, 3, order=fewest_steps_left, max_uses=3) == ("c", "b", "a")
    assert select_again(trained, 2, order=freshest_first, max_uses=3) == ("b", "c")
    assert select_again(trained, 3, order=freshest_first, max_uses=2) == ("b", "c")
    varied = [Candidate("a", 1, reward_variance=0.1, num_uses=1), Candidate("b", 1, reward_variance=0.2, num_uses=1)]
    assert select_again(varied, 1, order=expected_signal, max_uses=2) == ("b",)


def test_no_group_is_used_more_often_than_allowed_or_when_it_is_too_old() -> None:
    buffer = started(max_policy_age=3)
    uses: dict[str, list[int]] = {}
    for number in range(12):
        buffer.fill(v(number), 2)
        batch = lease(buffer, v(number))
        assert max(batch.ages) <= 3
        for group_id in buffer.train(v(number)):
            uses.setdefault(group_id, []).append(number)
    # Two fresh ones a step, and from step 1 on one used one.
    assert len(uses) == 24
    assert reused(buffer)["uses"] == 11
    assert all(len(at) <= 3 and at[-1] - at[0] <= 3 for at in uses.values())
    # With one place a step and two new groups a step, none comes to its third use.
    assert sorted(len(at) for at in uses.values()) == [1] * 13 + [2] * 11


def test_a_group_may_come_to_its_last_use_and_not_further() -> None:
    buffer = started(groups_per_step=4, reused_per_step=2, max_uses=2, max_policy_age=8)
    batches = []
    for number in range(3):
        buffer.fill(v(number), 2)
        batches.append(buffer.leases.lease(v(number), 4, 0.0))
        buffer.train(v(number))
    first, second, third = map(ids, batches)
    assert (first, second[2:], third[2:]) == (["g00000001", "g00000002"], first, second[:2])


def test_the_rule_of_tickets_counts_the_fresh_places() -> None:
    # (2 + 1 - 0) x 2 fresh places, not 3; used groups hold none.
    assert len(started().issue(v(0), 99)) == 6
    buffer = started()
    step(buffer, v(0))
    assert len(buffer.issue(v(1), 99)) == 6


def test_a_lease_with_used_groups_is_the_same_for_a_repeat_and_after_a_restart() -> None:
    buffer = started()
    step(buffer, v(0))
    buffer.fill(v(1), 3)
    batch = lease(buffer, v(1))
    assert ids(batch) == ["g00000003", "g00000004", "g00000001"]
    assert ids(lease(buffer, v(1))) == ids(batch)
    restarted = buffer.restarted()
    again = lease(restarted, v(1))
    assert (ids(again), again.records, again.ages) == (ids(batch), batch.records, batch.ages)
    # The bytes of the used one come from the journal, those of the others from memory.
    assert [bool(held.data) for held in again.groups] == [True, True, False]
    assert all(batch.records)


def test_a_report_must_name_the_used_groups_and_a_repeat_changes_nothing() -> None:
    buffer = started()
    step(buffer, v(0))
    buffer.fill(v(1), 2)
    batch = ids(lease(buffer, v(1)))
    tokens = {group_id: {"trained": 8} for group_id in batch}
    with pytest.raises(Refusal, match=re.escape("leased ['g00000001', 'g00000003', 'g00000004']")):
        buffer.leases.trained(v(2), batch[:2], {name: tokens[name] for name in batch[:2]}, 0.0)
    with pytest.raises(LedgerError, match="g00000001: 8 sampled tokens, the learner accounts for 7"):
        buffer.leases.trained(v(2), batch, {**tokens, batch[2]: {"trained": 7}}, 0.0)
    assert reused(buffer) == {"uses": 0, "tokens": 0}
    for _ in range(2):
        buffer.leases.trained(v(2), batch, tokens, 0.0)
        assert reused(buffer) == {"uses": 1, "tokens": 8}
    assert reused(buffer.restarted()) == {"uses": 1, "tokens": 8}


def test_a_checkpoint_makes_training_final_and_takes_no_use_away() -> None:
    buffer = started()
    step(buffer, v(0))
    buffer.leases.checkpointed(v(1), 0.0)
    for each in (buffer.restarted(), buffer):
        assert each.book.stock.trained() == []
        assert [held.group_id for held in each.book.stock.used()] == ["g00000001", "g00000002"]
    assert step(buffer, v(1)) == ["g00000003", "g00000004", "g00000001"]
    # At step 3 they would be 3 old: after step 2 has begun nobody can ask for them.
    assert step(buffer, v(2))[2] == "g00000002"
    buffer.leases.checkpointed(v(3), 0.0)
    assert "g00000001" not in [held.group_id for held in buffer.book.stock.used()]
    assert [held.group_id for held in buffer.restarted().book.stock.used()] == [
        held.group_id for held in buffer.book.stock.used()
    ]


def test_without_reuse_what_is_final_is_let_go() -> None:
    buffer = Buffer()
    buffer.start()
    buffer.fill(v(0), 2)
    buffer.train(v(0))
    buffer.leases.checkpointed(v(1), 0.0)
    assert buffer.book.stock.used() == []


def test_a_restore_undoes_the_uses_that_its_checkpoint_does_not_contain() -> None:
    buffer = started()
    for number in range(3):
        step(buffer, v(number))
    assert [row.group_id for row in buffer.journal.rows if row.kind is Kind.REUSED] == ["g00000001", "g00000002"]
    buffer.leases.checkpointed(v(1), 0.0)
    # Back to 2: it contains the use of g1 by step 2, not that of g2 by step 3.
    buffer.start(v(2, 1), b1=v(2))
    assert reused(buffer) == {"uses": 1, "tokens": 8}
    assert buffer.groups == {"trained": 4, "accepted": 2}
    assert [held.num_uses for held in buffer.book.stock.used()] == [2, 1, 1, 1]
    assert reused(buffer.restarted()) == {"uses": 1, "tokens": 8}
    # Back to 1: neither. g3 and g4, which step 2 trained on first, are available again as fresh ones.
    buffer.start(v(1, 2), b1=v(2), b2=v(1))
    assert reused(buffer) == {"uses": 0, "tokens": 0}
    assert buffer.groups == {"trained": 2, "accepted": 4}
    assert ids(lease(buffer, v(1, 2)))[2] == "g00000001"


def test_a_restore_takes_a_lease_of_used_groups_back() -> None:
    buffer = started()
    step(buffer, v(0))
    buffer.fill(v(1), 2)
    lease(buffer, v(1))
    buffer.start(v(1, 1), b1=v(1))
    assert buffer.book.stock.lent() == []
    assert ids(lease(buffer, v(1, 1))) == ["g00000003", "g00000004", "g00000001"]


def test_a_step_whose_report_was_lost_counts_as_a_use() -> None:
    buffer = started()
    step(buffer, v(0))
    buffer.fill(v(1), 2)
    lease(buffer, v(1))
    buffer.start(v(2, 1), b1=v(2))
    assert reused(buffer) == {"uses": 1, "tokens": 8}
    assert buffer.groups == {"trained": 4}
    buffer.start(v(1, 2), b1=v(2), b2=v(1))
    assert reused(buffer) == {"uses": 0, "tokens": 0}


def test_groups_of_another_configuration_are_not_used_again() -> None:
    buffer = started(config_hash="c0")
    step(buffer, v(0))
    changed = Buffer(
        buffer.journal, groups_per_step=3, reused_per_step=1, max_uses=3, config_hash=None, max_policy_age=2
    )
    assert [held.group_id for held in changed.book.stock.used()] == ["g00000001", "g00000002"]
    other = Buffer(buffer.journal, groups_per_step=3, reused_per_step=1, max_uses=3, config_hash="c1")
    assert not any(map(other.book.is_of_run, other.book.stock.used()))
