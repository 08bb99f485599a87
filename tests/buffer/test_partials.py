"""What is kept of unfinished groups, how tokens are counted once, and how a ticket is issued again with them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.buffer.partials import num_shared_tokens
from stream_grpo.buffer.transitions import Kind
from stream_grpo.transport.codec import decode_group, encode_group, group_to_batch
from stream_grpo.types import EndReason, Fate, PolicyVersion, Rollout, RolloutGroup, Ticket
from tests.buffer.fakes import Buffer, group_for
from tests.fakes import make_group, make_rollout

V0, V1, V2, V3 = (PolicyVersion(0, step) for step in range(4))


def started(**changes: Any) -> Buffer:
    buffer = Buffer(**changes)
    buffer.start()
    return buffer


def so_far(
    ticket: Ticket, num_tokens: int, version: PolicyVersion | Sequence[PolicyVersion] = V0, **changes: Any
) -> RolloutGroup:
    """Two rollouts of a ticket's group that have `num_tokens` each and go on."""
    group = group_for(ticket, version, [None, None], num_response=num_tokens, end_reason=EndReason.PARTIAL)
    return replace(group, **changes)


def partial(buffer: Buffer, group: RolloutGroup, now: float = 0.0) -> str:
    return buffer.intake.partial(encode_group(group), now)


def test_tokens_of_partials_are_in_flight_and_counted_once() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    assert partial(buffer, so_far(ticket, 1)) == ""
    assert buffer.tokens == {"generated": 2, "in_flight": 2}
    assert partial(buffer, so_far(ticket, 3)) == ""
    assert buffer.tokens == {"generated": 6, "in_flight": 6}
    assert buffer.groups == {"ticketed": 1}
    buffer.insert(group_for(ticket, V0))  # 2 rollouts of 4 tokens, the first 3 of them as before
    assert buffer.tokens == {"generated": 8, "buffered": 8}
    assert buffer.restarted().tokens == buffer.tokens


@pytest.mark.parametrize("restarts", [False, True])
def test_a_ticket_is_issued_again_with_its_newest_partial(restarts: bool) -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0")
    partial(buffer, so_far(ticket, 1))
    newest = so_far(ticket, 2)
    partial(buffer, newest)
    buffer = buffer.restarted() if restarts else buffer
    buffer.intake.hello("s0", 5.0)
    (again,) = buffer.issue(V0, 1, "s1", now=9.0)
    assert (again.group_id, again.owner_epoch, again.problem_id) == (ticket.group_id, 1, newest.problem_id)
    assert again.prefix == encode_group(newest)
    assert again.seed == ticket.seed
    # The first owner is too late from now on; the second has the tokens, and they are counted once.
    assert partial(buffer, so_far(ticket, 3)) == "duplicate: owner epoch 0, the ticket is now of 1"
    assert partial(buffer, so_far(again, 3)) == ""
    assert buffer.tokens == {"generated": 6, "in_flight": 6}
    buffer.insert(group_for(again, V0))
    assert buffer.tokens == {"generated": 8, "buffered": 8}


def test_a_repeated_request_gets_the_prefix_again() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1, "s0")
    partial(buffer, so_far(ticket, 2))
    buffer.intake.hello("s0", 0.0)
    first, _ = buffer.intake.issue("s1", V0, 1, "a request", 0.0)
    assert first[0].prefix
    assert buffer.restarted().intake.issue("s1", V0, 1, "a request", 0.0)[0] == first


def test_what_comes_late_or_twice_changes_nothing() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    partial(buffer, so_far(ticket, 2))
    num_rows = len(buffer.journal.rows)
    # What it has already is kept, and not written again.
    assert partial(buffer, so_far(ticket, 2)) == ""
    assert partial(buffer, so_far(ticket, 1)) == ""
    assert len(buffer.journal.rows) == num_rows
    assert partial(buffer, replace(so_far(ticket, 1), group_id="g00000077")) == ("unknown: no ticket has this group id")
    buffer.insert(group_for(ticket, V0))
    assert partial(buffer, so_far(ticket, 3)) == "duplicate: this group was taken or has ended"
    assert buffer.tokens == {"generated": 8, "buffered": 8}


def test_a_partial_of_weights_that_nobody_has_published_is_not_kept() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    assert "branch 4" in partial(buffer, so_far(ticket, 2, PolicyVersion(4, 1)))
    assert buffer.tokens == {}


def test_a_ticket_past_its_deadline_takes_its_tokens_along() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    partial(buffer, so_far(ticket, 3))
    buffer.intake.expire(100.1)
    assert buffer.groups == {"stale": 1}
    assert buffer.tokens == {"generated": 6, "stale": 6}


def test_tokens_that_a_later_record_does_not_have_are_stale() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    partial(buffer, so_far(ticket, 3))
    # Sampled anew after its second token: 2 x 1 of the 2 x 3 tokens do not go on.
    partial(buffer, so_far(ticket, 3, [V0, V0, V1]))
    assert buffer.tokens == {"generated": 8, "in_flight": 6, "stale": 2}
    # Sampled anew from the start, by other weights.
    buffer.insert(group_for(ticket, V1))
    assert buffer.tokens == {"generated": 16, "buffered": 8, "stale": 8}
    assert buffer.restarted().tokens == buffer.tokens


def test_a_partial_tells_the_curator_nothing_and_its_mixed_tokens_count_with_the_group() -> None:
    buffer = started()
    (ticket,) = buffer.issue(V0, 1)
    group = so_far(ticket, 3)
    mixed = tuple(replace(rollout, mixed_context_from=4) for rollout in group.rollouts)
    partial(buffer, replace(group, rollouts=mixed))
    assert buffer.book.outbox.num_outcomes == 0
    assert buffer.book.mixed_context_tokens == 0
    buffer.insert(group_for(ticket, V0, mixed_context_from=4))
    assert buffer.book.outbox.num_outcomes == 1
    assert buffer.book.mixed_context_tokens == 6  # of 3 + 4 tokens those from 4 on, in 2 rollouts


def test_a_prefix_keeps_its_group_as_old_as_its_tokens() -> None:
    """Age 2, 2 a step. A group begun at step 0 goes on at step 2, and is waited for like any other of that age."""
    buffer = started()
    (straggler,) = buffer.issue(V0, 1, "s0")
    partial(buffer, so_far(straggler, 2))
    for version in (V0, V1):
        buffer.fill(version, 2)
        buffer.train(version)
    buffer.fill(V2, 5)  # 6 are live: for a new ticket of lag 0 the stream is full
    assert not buffer.issue(V2, 1, "s1")
    buffer.intake.hello("s0", 0.0)
    (again,) = buffer.issue(V2, 1, "s1")
    assert again.prefix
    assert buffer.book.ticket_candidate(next(iter(buffer.book.tickets))).age == 2
    assert "waits for group g00000001 of s1 with 0 steps left" in buffer.leases.lease(V2, 2, 0.0).cause
    prefix = decode_group(again.prefix)
    whole = group_for(again, [V0, V0, V2, V2])
    assert prefix.rollouts[0].token_ids.tolist() == whole.rollouts[0].token_ids[:5].tolist()
    buffer.insert(whole)
    batch = buffer.leases.lease(V2, 2, 0.0)
    assert (batch.groups[0].group_id, batch.ages) == ("g00000001", [2, 0])


def test_a_prefix_waits_for_weights_that_do_not_make_its_group_older() -> None:
    """Age 2, 2 a step: a full stream of lag 0 has no place for a group that would become 1 step old."""
    buffer = started()
    buffer.fill(V0, 2)
    buffer.train(V0)
    (ticket,) = buffer.issue(V1, 1, "s0")
    partial(buffer, so_far(ticket, 2, V1))
    buffer.fill(V1, 5)
    buffer.intake.hello("s0", 0.0)
    # At lag 1 there may be 4 live: 5 others are.
    assert not buffer.issue(V0, 1, "s1")
    (again,) = buffer.issue(V1, 1, "s2")
    assert again.prefix


def test_at_age_0_a_block_that_was_interrupted_is_sampled_anew() -> None:
    buffer = started(max_policy_age=0)
    tickets = buffer.issue(V0, 1, "s0")
    assert partial(buffer, so_far(tickets[1], 3)) == ""
    buffer.intake.hello("s0", 0.0)
    again = buffer.issue(V0, 1, "s1")
    assert [ticket.prefix for ticket in again] == [b""] * 4
    assert buffer.tokens == {"generated": 6, "stale": 6}
    assert [ticket.seed for ticket in again] == [ticket.seed for ticket in tickets]


def test_a_restore_ends_what_is_too_old_with_its_prefix() -> None:
    buffer = started()
    for version in (V0, V1):
        buffer.fill(version, 2)
        buffer.train(version)
    young, old = buffer.issue(V2, 2, "s0")
    partial(buffer, so_far(young, 2, V2))
    partial(buffer, so_far(old, 2, [V1, V2]))
    # From a checkpoint of step 0: weights of step 2 are 2 steps from its branch, as the bound allows.
    buffer.start(PolicyVersion(1, 0), b1=V0)
    assert buffer.tokens["in_flight"] == 8
    buffer.intake.hello("s0", 0.0)
    assert all(ticket.prefix for ticket in buffer.issue(PolicyVersion(1, 0), 2, "s1"))
    # The new branch makes a step: 3 steps are too many, and the step itself waits for both before it begins.
    assert "with 0 steps left" in buffer.leases.lease(PolicyVersion(1, 0), 2, 0.0).cause


def test_what_is_to_be_continued_outlives_a_buffer_that_was_down() -> None:
    buffer = started()
    with_prefix, without = buffer.issue(V0, 2)
    partial(buffer, so_far(with_prefix, 2))
    # A sampler that starts together with the buffer takes long to load: what has a prefix gets a whole deadline.
    buffer = buffer.restarted(now=1000.0)
    assert buffer.intake.expire(1050.0) == 1
    assert buffer.book.tickets.get(without.group_id) is None
    assert buffer.intake.expire(1100.1) == 1


# -- another configuration --------------------------------------------------------------------------------------------


def scored(ticket: Ticket, config_hash: str, version: PolicyVersion = V0, **rollout: Any) -> RolloutGroup:
    return replace(group_for(ticket, version, **rollout), config_hash=config_hash)


def test_after_a_change_of_rewards_buffered_groups_are_scored_again_as_a_whole() -> None:
    buffer = started(config_hash="a-1")
    tickets = buffer.issue(V0, 2)
    for ticket in tickets:
        buffer.insert(scored(ticket, "a-1", mixed_context_from=5))
    journal = buffer.journal
    buffer = Buffer(journal, config_hash="a-2")
    assert buffer.groups == {"ticketed": 2}
    assert buffer.tokens == {"generated": 16, "in_flight": 16}
    assert buffer.book.num_live == 2
    # Begun again before anybody took them: nothing more happens.
    buffer = Buffer(journal, config_hash="a-2")
    assert buffer.tokens == {"generated": 16, "in_flight": 16}
    again = buffer.issue(V0, 2, "s1")
    assert [(ticket.group_id, ticket.owner_epoch) for ticket in again] == [(t.group_id, 1) for t in tickets]
    assert decode_group(again[0].prefix).rollouts[0].reward.reward == 1.0
    assert again[0].problem_id == f"problem-of-{tickets[0].group_id}"
    answer = buffer.insert(scored(again[0], "a-2", mixed_context_from=5))
    assert answer
    assert answer.fate is Fate.ACCEPTED
    # Under the new rewards it may have no signal, as any other.
    buffer.insert(replace(group_for(again[1], V0, [1.0, 1.0]), config_hash="a-2"))
    assert buffer.groups == {"accepted": 1, "no_signal": 1}
    assert buffer.tokens == {"generated": 16, "buffered": 8, "no_signal": 8}
    buffer = Buffer(journal, config_hash="a-2")
    assert buffer.groups == {"accepted": 1, "no_signal": 1}
    assert buffer.book.mixed_context_tokens == 4  # of 3 + 4 tokens the last 2, in 2 rollouts of one group


def test_a_group_that_is_scored_again_counts_once_in_the_share_with_signal() -> None:
    buffer = started(config_hash="a-1")
    tickets = buffer.issue(V0, 3)
    for ticket in tickets:
        buffer.insert(scored(ticket, "a-1"))
    assert buffer.book.signal.expected_share == 4 / 5  # (3 + 1) / (3 + 2)
    buffer = Buffer(buffer.journal, config_hash="a-2")
    # None of the three has rewards of this configuration yet.
    assert buffer.book.signal.expected_share == 1 / 2
    first, second, _ = buffer.issue(V0, 3, "s1")
    buffer.insert(scored(first, "a-2"))
    buffer.insert(replace(group_for(second, V0, [1.0, 1.0]), config_hash="a-2"))
    assert buffer.book.signal.expected_share == 2 / 4
    assert Buffer(buffer.journal, config_hash="a-2").book.signal.expected_share == 2 / 4


def staleness_of(buffer: Buffer, version: PolicyVersion, group_id: str) -> tuple[int, int, int]:
    batch = buffer.leases.lease(version, buffer.book.rules.groups_per_step, 0.0)
    return batch.staleness[[held.group_id for held in batch.groups].index(group_id)]


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_group_waited_before_it_is_scored_again_is_time_in_queue(restarts: bool) -> None:
    """Issued at 0, in at 1, buffered until 2, scored again at 2, leased at 2: nothing, 1 and 1."""
    buffer = started(config_hash="a-1", groups_per_step=1, too_old="drop", selector="freshest_first")
    (ticket,) = buffer.issue(V0, 1)
    for version in (V0, V1):
        (other,) = buffer.issue(version, 1)
        buffer.insert(scored(other, "a-1", version))
        buffer.train(version)
        if version == V0:
            buffer.insert(scored(ticket, "a-1"))
    buffer = Buffer(buffer.journal, **{**asdict(buffer.book.rules), "config_hash": "a-2"})
    (again,) = buffer.issue(V2, 1, "s1")
    buffer.insert(scored(again, "a-2"))
    buffer = buffer.restarted() if restarts else buffer
    assert staleness_of(buffer, V2, ticket.group_id) == (0, 1, 1)


@pytest.mark.parametrize(("begun_with", "expected"), [(2, (0, 1, 0)), (0, (1, 0, 0))])
def test_what_an_earlier_owner_sampled_was_in_flight_since_its_ticket(
    begun_with: int, expected: tuple[int, int, int]
) -> None:
    """Issued at 0 and again at 1. Without tokens of the first owner the second's weights, of 0, are late by 1."""
    buffer = started(groups_per_step=1)
    (ticket,) = buffer.issue(V0, 1, "s0")
    if begun_with:
        partial(buffer, so_far(ticket, begun_with))
    buffer.fill(V0, 1)
    assert buffer.train(V0) == ["g00000002"]
    buffer.intake.hello("s0", 0.0)
    (again,) = buffer.issue(V0, 1, "s1")
    assert bool(again.prefix) == bool(begun_with)
    buffer.insert(group_for(again, V0))
    assert staleness_of(buffer.restarted(), V1, ticket.group_id) == expected


@pytest.mark.parametrize("is_scored_again", [False, True])
def test_what_ends_in_flight_is_among_what_is_lost(is_scored_again: bool) -> None:
    """2 rollouts of 4 tokens, of each the last 2 on a cache of older weights."""
    buffer = started(config_hash="a-1")
    (ticket,) = buffer.issue(V0, 1, "s0")
    if is_scored_again:
        buffer.insert(scored(ticket, "a-1", mixed_context_from=5))
        buffer = Buffer(buffer.journal, config_hash="a-2")
    else:
        begun = group_for(ticket, V0, [None, None], mixed_context_from=5, end_reason=EndReason.PARTIAL)
        partial(buffer, replace(begun, config_hash="a-1"))
    assert buffer.book.mixed_context_tokens == 0
    assert buffer.intake.expire(1000.0) == 1
    for each in (buffer, buffer.restarted()):
        assert each.tokens == {"generated": 8, "stale": 8}
        lost = each.book.losses.as_fields()["lost"]
        assert (lost["groups"], lost["tokens"], lost["length_mean"]) == (1, 8, 4.0)
        # Rewards 1 and 0, where there were any.
        assert lost["reward_mean"] == (0.5 if is_scored_again else None)
        assert each.book.mixed_context_tokens == 4


def test_tokens_in_mixed_context_that_do_not_go_on_count_too() -> None:
    buffer = started(groups_per_step=1, too_old="drop")
    (ticket,) = buffer.issue(V0, 1, "s0")
    partial(buffer, group_for(ticket, V0, [None, None], mixed_context_from=5, end_reason=EndReason.PARTIAL))
    for version in (V0, V1, V2):
        buffer.fill(version, 1)
        buffer.train(version)
    buffer.intake.hello("s0", 0.0)
    # Of age 3 its tokens have no place any more, and the group is sampled anew.
    (again,) = buffer.issue(V3, 1, "s1")
    assert (again.group_id, again.prefix) == (ticket.group_id, b"")
    assert buffer.book.mixed_context_tokens == 4
    assert buffer.restarted().book.mixed_context_tokens == 4


def test_groups_to_be_scored_again_are_as_old_as_they_are() -> None:
    buffer = started(config_hash="a-1", groups_per_step=1)
    (old,) = buffer.issue(V0, 1)
    buffer.insert(scored(old, "a-1", V0))
    for version in (V0, V1):
        (ticket,) = buffer.issue(version, 1)
        buffer.insert(scored(ticket, "a-1", version))
        buffer.train(version)
    buffer.insert(scored(buffer.issue(V2, 1)[0], "a-1", V2))
    ages = [buffer.book.candidate(held).age for held in buffer.book.stock.accepted()]
    again = Buffer(buffer.journal, config_hash="a-2", groups_per_step=1)
    assert [again.book.ticket_candidate(held).age for held in again.book.tickets] == ages


def test_leased_groups_are_scored_again_once_the_learner_has_said_that_their_step_was_not_made() -> None:
    buffer = started(config_hash="a-1")
    for ticket in buffer.issue(V0, 4):
        buffer.insert(scored(ticket, "a-1"))
    buffer.train(V0)
    leased = [held.group_id for held in buffer.leases.lease(V1, 2, 0.0).groups]
    buffer = Buffer(buffer.journal, config_hash="a-2")
    assert buffer.groups == {"trained": 2, "leased": 2}
    made = Buffer(buffer.journal, config_hash="a-2")
    # A checkpoint contains the step: they are trained, and not sampled nor trained again.
    made.start(PolicyVersion(1, 2), b1=V2)
    assert made.groups == {"trained": 4}
    rows = [row for row in buffer.journal.rows if row.kind is Kind.TRAINED]
    assert [row.group_id for row in rows[2:]] == leased


def test_trained_groups_that_a_restore_brings_back_are_scored_again() -> None:
    buffer = started(config_hash="a-1")
    for ticket in buffer.issue(V0, 4):
        buffer.insert(scored(ticket, "a-1"))
    buffer.train(V0)
    buffer.leases.lease(V1, 2, 0.0)
    buffer = Buffer(buffer.journal, config_hash="a-2")
    buffer.start(PolicyVersion(1, 0), b1=V0)
    assert buffer.groups == {"ticketed": 4}
    assert buffer.tokens == {"generated": 32, "in_flight": 32}
    assert len(buffer.issue(PolicyVersion(1, 0), 9, "s1")) == 6  # 2 new ones beside


@pytest.mark.parametrize(("now_hash", "rescores"), [("b-1", True), ("a-2", False)])
def test_other_groups_and_their_partials_end_as_invalid(now_hash: str, rescores: bool) -> None:
    buffer = started(config_hash="a-1")
    done, begun, fresh = buffer.issue(V0, 3, "s0")
    buffer.insert(scored(done, "a-1"))
    partial(buffer, so_far(begun, 3, config_hash="a-1"))
    num_outcomes = buffer.book.outbox.num_outcomes
    buffer = Buffer(buffer.journal, config_hash=now_hash, rescores=rescores)
    assert buffer.groups == {"invalid": 2, "ticketed": 1}
    assert buffer.tokens == {"generated": 14, "invalid": 14}
    assert buffer.book.ledger.ends == {"invalid: config changed": 2}
    # The curator learns that the problem of the ticket has left flight.
    assert buffer.book.outbox.num_outcomes == num_outcomes + 1
    assert buffer.book.tickets.get(fresh.group_id)


def test_a_partial_goes_on_after_a_change_of_rewards_alone() -> None:
    buffer = started(config_hash="a-1")
    (ticket,) = buffer.issue(V0, 1, "s0")
    partial(buffer, so_far(ticket, 3, config_hash="a-1"))
    buffer = Buffer(buffer.journal, config_hash="a-2")
    assert "config changed" in partial(buffer, so_far(ticket, 4, config_hash="a-1"))
    buffer.intake.hello("s0", 0.0)
    (again,) = buffer.issue(V0, 1, "s0")
    assert again.prefix
    assert partial(buffer, so_far(again, 4, config_hash="a-2")) == ""
    assert buffer.tokens == {"generated": 8, "in_flight": 8}


def test_at_age_0_only_what_has_all_its_tokens_goes_on() -> None:
    buffer = started(max_policy_age=0, config_hash="a-1")
    for ticket in buffer.issue(V0, 1):  # 2 are missing, half of the groups have signal: 4
        buffer.insert(scored(ticket, "a-1"))
    assert buffer.groups == {"accepted": 2, "stale": 2}
    buffer = Buffer(buffer.journal, max_policy_age=0, config_hash="a-2")
    again = buffer.issue(V0, 1, "s1")
    assert [bool(ticket.prefix) for ticket in again] == [True, True]
    for ticket in again:
        buffer.insert(scored(ticket, "a-2"))
    assert buffer.groups == {"accepted": 2, "stale": 2}


# -- common tokens ----------------------------------------------------------------------------------------------------

tokens = st.lists(st.tuples(st.integers(5, 7), st.integers(0, 1)), max_size=6)


def of_tokens(sampled: list[tuple[int, int]]) -> Rollout:
    rollout = make_rollout(num_response=len(sampled), version=[PolicyVersion(0, step) for _, step in sampled])
    ids = np.array([*rollout.token_ids[:3], *(token for token, _ in sampled)], np.int32)
    return replace(rollout, token_ids=ids)


@given(pairs=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3))
def test_common_tokens_are_those_before_the_first_difference(pairs: list[Any]) -> None:
    def slow(one: list[Any], other: list[Any]) -> int:
        count = 0
        for mine, yours in zip(one, other, strict=False):
            if mine != yours:
                break
            count += 1
        return count

    one, other = (
        group_to_batch(replace(make_group(), rollouts=tuple(of_tokens(pair[i]) for pair in pairs))) for i in (0, 1)
    )
    assert num_shared_tokens(one, other) == sum(slow(*pair) for pair in pairs)


def test_rollouts_of_different_prompts_have_nothing_in_common() -> None:
    one, other = group_to_batch(make_group()), group_to_batch(make_group(num_prompt=2))
    assert num_shared_tokens(one, other) == 0
    assert num_shared_tokens(one, one) == 8
