"""The counted rules are those of the buffer."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.buffer import tickets
from stream_grpo.buffer.selectors import Candidate, select
from stream_grpo.buffer.staleness import staleness
from stream_grpo.planner import rule
from stream_grpo.types import PolicyVersion

SMALL = st.integers(0, 8)


@given(live=st.integers(0, 200), lag=SMALL, age=SMALL, size=st.integers(1, 20))
def test_tickets_are_issued_as_by_the_buffer(live: int, lag: int, age: int, size: int) -> None:
    ours = rule.room(live, lag, max_policy_age=age, groups_per_step=size)
    assert ours == tickets.room(live, lag, max_policy_age=age, groups_per_step=size)


@given(missing=st.integers(1, 100), with_signal=st.integers(0, 256), without=st.integers(0, 256))
def test_blocks_are_as_large_as_those_of_the_buffer(missing: int, with_signal: int, without: int) -> None:
    share = (with_signal + 1) / (with_signal + without + 2)
    assert rule.block_size(missing, share) == tickets.block_size(missing, share)


@given(
    ages=st.lists(SMALL, max_size=12),
    ages_in_flight=st.lists(SMALL, max_size=12),
    size=st.integers(1, 6),
    limit=st.integers(0, 8),
    waits=st.booleans(),
)
def test_a_step_begins_when_it_does_in_the_buffer(
    ages: list[int], ages_in_flight: list[int], size: int, limit: int, waits: bool
) -> None:
    # No live group has fewer than 0 steps left: (II) of the proof.
    ages = sorted((age for age in ages if age <= limit), reverse=True)
    ages_in_flight = [age for age in ages_in_flight if age <= limit]
    learner = 20
    theirs = select(
        [Candidate(f"a{number:03d}", age) for number, age in enumerate(ages)],
        [Candidate(f"f{number:03d}", age) for number, age in enumerate(ages_in_flight)],
        size,
        limit,
        waits=waits,
    )
    ours = rule.may_begin(
        len(ages),
        [(learner - age, 1) for age in ages[size:]],
        Counter(learner - age for age in ages_in_flight),
        learner=learner,
        max_policy_age=limit,
        groups_per_step=size,
        waits=waits,
    )
    assert ours == bool(theirs.batch)


@given(version=SMALL, issue=SMALL, insert=SMALL, lease=SMALL)
def test_the_parts_of_an_age_are_those_of_the_buffer(version: int, issue: int, insert: int, lease: int) -> None:
    issued_at, inserted_at = issue, issue + insert
    learner = max(inserted_at, version) + lease
    theirs = staleness(
        PolicyVersion(0, version),
        issued_at=PolicyVersion(0, issued_at),
        inserted_at=PolicyVersion(0, inserted_at),
        learner=PolicyVersion(0, learner),
        forks={},
    )
    assert tuple(rule.parts(version, issued_at=issued_at, inserted_at=inserted_at, learner=learner)) == tuple(theirs)
