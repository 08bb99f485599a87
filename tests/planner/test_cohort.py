"""Samplers advanced together: whose slots are whose, who asks, what starts when. By hand."""

from stream_grpo.planner.cohort import Cohort
from stream_grpo.planner.group import Group
from stream_grpo.planner.world import Settings

SETTINGS = Settings(num_samplers=2, group_size=2, max_num_seqs=4)


def cohort_with(num_groups: int, *, tokens: int = 10) -> tuple[Cohort, list[Group]]:
    """Two samplers of 4 slots, and groups of 2 rollouts."""
    cohort = Cohort(0, 2, SETTINGS)
    cohort.version = 0
    groups = [Group(number, [tokens, tokens], True, 0, 0, 1e9) for number in range(num_groups)]
    for group in groups:
        cohort.add(group)
    return cohort, groups


def test_each_sampler_asks_for_what_fits_its_slots_and_two_more() -> None:
    cohort, _ = cohort_with(0)
    assert cohort.num_wanted() == 2 * (4 // 2 + 2)


def test_a_sampler_with_more_than_it_can_run_leaves_the_slots_of_another_empty() -> None:
    # The first asks for 4 groups and is given these; it has slots for 2 of them, and the other one has no group.
    cohort, groups = cohort_with(4)
    cohort.start()
    assert [group.sampler for group in groups] == [0, 0, 0, 0]
    assert [group.num_started for group in groups] == [2, 2, 0, 0]
    assert (cohort.num_running, cohort.num_wanted()) == (4, 4)


def test_what_waits_starts_as_the_rollouts_of_its_own_sampler_end() -> None:
    cohort, groups = cohort_with(6)
    cohort.start()
    # 2 of 4 groups of the first, both groups of the second.
    assert [group.sampler for group in groups] == [0, 0, 0, 0, 1, 1]
    assert cohort.num_running == 8
    assert cohort.make_steps(cohort.steps_to_next_end()) == [groups[0], groups[1], groups[4], groups[5]]
    # All end at step 10. The first asks anew for 2 groups, the second for 2 besides the 2 that it has not been given.
    assert cohort.num_wanted() == 2 + 4
    cohort.start()
    assert (cohort.num_running, [group.starts for group in groups[2:4]]) == (4, [[(10, 2)], [(10, 2)]])


def test_a_group_that_is_cut_frees_its_slots_and_is_asked_for_again() -> None:
    cohort, groups = cohort_with(1)
    groups[0].due_s = 5.0
    cohort.start()
    before = cohort.num_wanted()
    cohort.make_steps(3)
    assert list(cohort.cut(5.0)) == groups
    assert (groups[0].num_aborted_tokens, cohort.num_running, cohort.num_wanted()) == (6, 0, before + 1)
