"""The order of a step, the rule by which it begins, and who is waited for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.buffer.selectors import Candidate, in_order, keep_in_order, select, steps_left


def groups(**ages: int) -> list[Candidate]:
    return [Candidate(name, age, "s0") for name, age in ages.items()]


def test_fewest_steps_left_first_then_oldest_dispatched() -> None:
    # max_policy_age 3: ages 0, 2, 2, 1 leave 3, 1, 1, 2 steps.
    ordered = in_order(groups(a=0, d=2, b=2, c=1))
    assert [(group.group_id, steps_left(group, 3)) for group in ordered] == [("b", 1), ("d", 1), ("c", 2), ("a", 3)]


def test_a_batch_is_the_first_of_the_order() -> None:
    assert select(groups(a=0, b=1, c=1), [], 2, 2).batch == ("b", "c")


def test_too_few_groups_wait_and_say_for_whom() -> None:
    selection = select(groups(a=0), [Candidate("b", 1, "s7"), Candidate("c", 0, "s8")], 2, 2)
    assert selection.batch == ()
    assert selection.cause == "1 groups buffered, 2 in flight, 2 needed; waits for group b of s7 with 1 steps left"
    assert select(groups(a=0), [], 2, 2).cause == "1 groups buffered, 0 in flight, 2 needed; no group is in flight"


def test_a_straggler_with_no_step_left_is_waited_for() -> None:
    # k = 0: none may be left behind with 0 steps left.
    available = groups(a=1, b=1, c=1)
    assert select(available, groups(z=2), 2, 2).cause.endswith("waits for group z of s0 with 0 steps left")
    assert select(available, groups(z=1), 2, 2).batch == ("a", "b")


@pytest.mark.parametrize(("num_old", "may_begin"), [(2, True), (3, False)])
def test_at_most_k_batches_may_be_left_with_k_steps(num_old: int, may_begin: bool) -> None:
    # n = 2, age 2: k = 1 allows 1 * 2 groups with 1 step left to be left behind.
    in_flight = [Candidate(f"z{i}", 1) for i in range(num_old)]
    selection = select(groups(a=1, b=1), in_flight, 2, 2)
    assert bool(selection.batch) == may_begin


def test_buffered_groups_that_are_left_behind_count_too() -> None:
    # Of a..d, all with 1 step left, a and b are taken; c, d and z are 3 with 1 step, above k n = 2.
    available = groups(a=1, b=1, c=1, d=1)
    assert not select(available, groups(z=1), 2, 2).batch
    assert select(available, groups(z=0), 2, 2).batch == ("a", "b")


def test_age_0_waits_for_everything_in_flight() -> None:
    assert not select(groups(a=0, b=0), groups(c=0), 2, 0).batch
    assert select(groups(a=0, b=0), [], 2, 0).batch == ("a", "b")


def test_a_restore_keeps_what_has_a_place() -> None:
    # n = 1, age 2. Steps left: a -1, b 0, c 0, d 1, e 1, f 2. Places: 1 with 0, 2 with up to 1, 3 with up to 2.
    live = groups(a=3, b=2, c=2, d=1, e=1, f=0)
    assert keep_in_order(live, 1, 2) == {"b", "d", "f"}


@given(ages=st.lists(st.integers(0, 6), max_size=40), num_groups=st.integers(1, 4), max_policy_age=st.integers(0, 4))
def test_what_a_restore_keeps_is_trained_in_time(ages: list[int], num_groups: int, max_policy_age: int) -> None:
    live = [Candidate(f"g{i:03d}", age) for i, age in enumerate(ages)]
    kept = keep_in_order(live, num_groups, max_policy_age)
    left = [group for group in live if group.group_id in kept]
    while len(left) >= num_groups:
        assert all(group.age <= max_policy_age for group in left)
        batch = set(select(left, [], num_groups, max_policy_age).batch)
        assert batch
        left = [Candidate(group.group_id, group.age + 1) for group in left if group.group_id not in batch]
