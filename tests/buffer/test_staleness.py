"""Where an age comes from, which tokens it is of, and what is lost to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.buffer.staleness import Losses, Staleness, oldest_trained, staleness
from stream_grpo.buffer.transitions import Kind
from stream_grpo.types import PolicyVersion, policy_age
from tests.buffer.fakes import Buffer, group_for
from tests.buffer.test_leases import started, v


def parts(version: PolicyVersion, *steps: int) -> Staleness:
    """On one branch: where the learner was at issue, at insert and at lease."""
    issued_at, inserted_at, learner = map(v, steps)
    return staleness(version, issued_at=issued_at, inserted_at=inserted_at, learner=learner, forks={})


def test_the_parts_of_an_age_on_one_branch() -> None:
    # Weights 3; the learner was at 5 when the ticket was issued, at 9 when the group came, at 10 when it was leased.
    assert parts(v(3), 5, 9, 10) == Staleness(publish_lag=2, in_flight=4, in_queue=1)
    # The oldest token is of weights 6, which the sampler took up after the issue at 5: 9 - 6 in flight.
    assert parts(v(6), 5, 9, 10) == Staleness(publish_lag=0, in_flight=3, in_queue=1)
    # Weights 10 were published before the learner, at 9, had told the buffer of step 10.
    assert parts(v(10), 9, 9, 12) == Staleness(publish_lag=0, in_flight=0, in_queue=2)


def test_a_restore_can_make_a_group_younger_and_its_parts_are_cut_at_its_age() -> None:
    # Weights 0.4, issued at 0.6 and inserted at 0.8 (ages 2 and 4); the learner goes on at 1.5, from 0.5: age 1.
    known = {"issued_at": v(6), "inserted_at": v(8), "forks": {1: v(5)}}
    assert staleness(v(4), learner=v(5, 1), **known) == Staleness(1, 0, 0)  # type: ignore[arg-type]
    # At 1.8 the age is 4 again: 2 at issue, 2 more when it came in.
    assert staleness(v(4), learner=v(8, 1), **known) == Staleness(2, 2, 0)  # type: ignore[arg-type]
    assert staleness(v(4), learner=v(9, 1), **known) == Staleness(2, 2, 1)  # type: ignore[arg-type]


versions = st.builds(PolicyVersion, st.just(0), st.integers(0, 9)) | st.builds(
    PolicyVersion, st.just(1), st.integers(4, 9)
)


@given(version=versions, times=st.lists(versions, min_size=3, max_size=3))
def test_the_parts_add_up_to_the_age_and_none_is_negative(version: PolicyVersion, times: list[PolicyVersion]) -> None:
    forks = {1: v(4)}
    issued_at, inserted_at, learner = sorted(times)
    found = staleness(version, issued_at=issued_at, inserted_at=inserted_at, learner=learner, forks=forks)
    assert sum(found) == (policy_age(version, learner, forks) if version <= learner else 0)
    assert min(found) >= 0


def test_of_a_group_that_is_trained_whole_the_oldest_token_counts() -> None:
    age = {v(0): 4, v(2): 2, v(3): 1}.__getitem__
    assert oldest_trained([frozenset({v(0), v(2)})], age, 2) == v(0)
    assert oldest_trained([frozenset({v(3), v(2)})], age, 2) == v(2)


def test_of_a_group_that_is_trained_in_parts_the_oldest_token_of_the_young_ones_counts() -> None:
    age = {v(0): 4, v(1): 3, v(2): 2, v(3): 1}.__getitem__
    old, middle, young = frozenset({v(0), v(3)}), frozenset({v(2), v(3)}), frozenset({v(3)})
    assert oldest_trained([old, middle, young], age, 2) == v(2)
    assert oldest_trained([old, middle, young], age, 1) == v(3)
    # With none young enough, of the least old: it is above the limit.
    assert oldest_trained([old, frozenset({v(1)})], age, 2) == v(1)


def test_a_lease_says_where_the_age_of_each_group_comes_from() -> None:
    buffer = started()
    (late,) = buffer.issue(v(0), 1)
    buffer.fill(v(0), 3)
    buffer.train(v(0))
    buffer.insert(group_for(late, v(0)))  # at 1: 1 step in flight
    batch = buffer.leases.lease(v(1), 2, 0.0)
    assert [held.group_id for held in batch.groups] == [late.group_id, "g00000004"]
    assert batch.staleness == [Staleness(0, 1, 0), Staleness(0, 0, 1)]
    # They are folded from the journal.
    assert buffer.restarted().leases.lease(v(1), 2, 0.0).staleness == batch.staleness


def test_weights_that_lag_are_publish_lag() -> None:
    buffer = started()
    buffer.fill(v(0), 2)
    buffer.train(v(0))
    buffer.fill(v(0), 2)  # the learner is at 1, its weights are not published
    assert buffer.leases.lease(v(1), 2, 0.0).staleness == [Staleness(1, 0, 0), Staleness(1, 0, 0)]


def lose_one_and_train_two(buffer: Buffer) -> None:
    """The lost one has rollouts of 6 tokens and rewards of 1, 0, 0; the trained ones of 4 tokens and 1, 0."""
    (slow,) = buffer.issue(v(0), 1)
    for step in range(3):
        buffer.fill(v(step), 2)
        buffer.train(v(step))
    buffer.insert(group_for(slow, v(0), [1.0, 0.0, 0.0], num_response=6))


def test_what_was_lost_is_held_against_what_was_trained() -> None:
    buffer = started(too_old="drop")
    lose_one_and_train_two(buffer)
    for each in (buffer, buffer.restarted()):
        fields = each.book.losses.as_fields()
        assert fields["lost"] == {"groups": 1, "tokens": 18, "length_mean": 6.0, "reward_mean": pytest.approx(1 / 3)}
        assert fields["trained"] == {"groups": 6, "tokens": 48, "length_mean": 4.0, "reward_mean": 0.5}
        assert fields["length_difference"] == 2.0
        assert fields["reward_difference"] == pytest.approx(1 / 3 - 1 / 2)
        assert fields["by_problem"] == {"problem-of-g00000001": {"num_lost": 1, "num_trained": 0}}
    # A restore to 0 takes the trained ones back: those of steps 1 and 2 are 1 and 2 old, and 2 places each.
    buffer.start(v(0, 1), b1=v(0))
    assert buffer.book.losses.as_fields()["trained"]["groups"] == 0
    assert buffer.groups == {"accepted": 6, "stale": 1}


def test_with_nothing_lost_or_trained_there_is_no_difference() -> None:
    fields = Losses(max_requeues=3).as_fields()
    assert (fields["lost"]["length_mean"], fields["length_difference"], fields["reward_difference"]) == (None,) * 3


def test_the_counts_of_problems_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_grpo.buffer.staleness.NUM_PROBLEMS", 2)
    buffer = started()
    for ticket in buffer.issue(v(0), 3):
        buffer.intake.name_problems({ticket.group_id: f"p-{ticket.group_id}"}, 0.0)
    buffer.intake.expire(1000.0)
    assert [row.kind for row in buffer.journal.rows[-3:]] == [Kind.STALE] * 3
    assert list(buffer.book.losses.as_fields()["by_problem"]) == ["p-g00000002", "p-g00000003"]
