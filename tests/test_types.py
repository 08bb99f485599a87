"""Versions, ages across branches, and what makes a rollout valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.types import EndReason, PolicyVersion, forks_from_plain, forks_to_plain, policy_age
from tests.fakes import make_group, make_rollout

V = PolicyVersion


def test_versions_are_ordered_by_branch_then_step() -> None:
    assert V(0, 9) < V(0, 10) < V(1, 3)


@pytest.mark.parametrize(
    ("version", "learner", "forks", "age"),
    [
        (V(0, 7), V(0, 10), {}, 3),
        # Branch 1 forks at (0, 10): back from 13 to 10 and on from 10 to 12.
        (V(0, 13), V(1, 12), {1: V(0, 10)}, 5),
        # A version that the branch contains: 8 is before the fork, so 12 - 8.
        (V(0, 8), V(1, 12), {1: V(0, 10)}, 4),
        # Two forks: 2 from (1, 11), 1 from (0, 10). Back from (0, 13) to 10, on to 12.
        (V(0, 13), V(2, 12), {1: V(0, 10), 2: V(1, 11)}, 5),
        # Branch 2 forks at (1, 11); (1, 14) is 3 beyond the fork, the learner 1 beyond it.
        (V(1, 14), V(2, 12), {1: V(0, 10), 2: V(1, 11)}, 4),
        # Branch 2 forks from (0, 5), before branch 1 did: the common ancestor of both is (0, 5).
        (V(1, 14), V(2, 6), {1: V(0, 10), 2: V(0, 5)}, 10),
    ],
)
def test_age_goes_over_the_common_ancestor(version: V, learner: V, forks: dict[int, PolicyVersion], age: int) -> None:
    assert policy_age(version, learner, forks) == age


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_age_is_never_negative_and_0_only_at_equal_weights(fork: int, on: int, off: int) -> None:
    age = policy_age(V(0, fork + off), V(1, fork + on), {1: V(0, fork)})
    assert age == on + off


def test_a_version_ahead_of_the_learner_and_an_unknown_branch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.5 is ahead of the learner at 0\.4"):
        policy_age(V(0, 5), V(0, 4), {})
    with pytest.raises(ValueError, match="branch 3 has no recorded fork"):
        policy_age(V(0, 5), V(3, 4), {})


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    group = make_group(version=[V(0, 4), V(0, 5), V(0, 6), V(0, 6)])
    assert group.age(V(0, 7), {}) == 3


@pytest.mark.parametrize(
    ("rollout", "valid"),
    [
        (make_rollout(1.0), True),
        (make_rollout(0.0, end_reason=EndReason.LENGTH), True),
        (make_rollout(None), False),
        (make_rollout(1.0, end_reason=EndReason.ABORT), False),
        (make_rollout(1.0, end_reason=EndReason.ERROR), False),
        (make_rollout(1.0, num_response=0), False),
    ],
)
def test_a_valid_rollout_is_scored_finished_and_not_empty(rollout: object, valid: bool) -> None:
    assert rollout.valid is valid  # type: ignore[attr-defined]


def test_forks_go_through_plain_values_and_back() -> None:
    forks = {2: PolicyVersion(1, 5), 1: PolicyVersion(0, 10)}
    plain = forks_to_plain(forks)
    assert list(plain.items()) == [("1", [0, 10]), ("2", [1, 5])]
    assert forks_from_plain(plain) == forks
