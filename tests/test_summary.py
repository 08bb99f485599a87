"""The figures of a run's loop in its summary."""

import pytest

from stream_grpo.summary import AgeAccount, account, headline_of, loop_facts


def test_overlap_is_what_both_did_beyond_the_wall_over_the_smaller() -> None:
    samplers = [{"busy_s": 80.0, "first_busy_at": 1000.0, "probe_gap": {"max": 2e-5, "mean": 1e-6, "num_tokens": 100}}]
    learners = [{"busy_s": 60.0, "last_step_at": 1100.0}]
    facts = loop_facts(learners, [samplers], now=1102.0)
    # Wall 100 s. The sampler's last 2 s came after it: 78 s. Overlap (78 + 60 - 100) / 60.
    assert facts["loop_wall_s"] == 100.0
    assert facts["busy_s"] == {"sampler": 78.0, "learner": 60.0}
    assert facts["overlap"] == pytest.approx(38 / 60)
    assert facts["probe_gap"] == {"max": 2e-5, "mean": 1e-6, "num_tokens": 100}


def test_incarnations_that_died_count() -> None:
    samplers = [
        {"busy_s": 30.0, "first_busy_at": 1000.0, "probe_gap": {"max": 1e-5, "mean": 1e-6, "num_tokens": 100}},
        {},  # died before it told anything
        {"busy_s": 40.0, "first_busy_at": 1050.0, "probe_gap": {"max": 3e-5, "mean": 4e-6, "num_tokens": 200}},
    ]
    learners = [{"busy_s": 20.0, "last_step_at": 1040.0}, {"busy_s": 30.0, "last_step_at": 1100.0}]
    facts = loop_facts(learners, [samplers], now=1100.0)
    # Overlap (70 + 50 - 100) / 50; mean gap (100 x 1e-6 + 200 x 4e-6) / 300.
    assert facts["overlap"] == pytest.approx(0.4)
    assert facts["probe_gap"] == {"max": 3e-5, "mean": pytest.approx(3e-6), "num_tokens": 300}


def test_of_several_samplers_the_mean_is_compared_with_the_wall() -> None:
    samplers = [[{"busy_s": 90.0, "first_busy_at": 1000.0}], [{"busy_s": 70.0, "first_busy_at": 1001.0}]]
    facts = loop_facts([{"busy_s": 50.0, "last_step_at": 1100.0}], samplers, now=1100.0)
    assert facts["busy_s"]["sampler"] == 80.0
    assert facts["overlap"] == pytest.approx(0.6)  # (80 + 50 - 100) / 50


def test_a_start_without_a_step_has_no_wall_and_no_overlap() -> None:
    samplers = [[{"busy_s": 1.0, "first_busy_at": 1000.0}]]
    facts = loop_facts([{"busy_s": 0.0, "last_step_at": 0.0}], samplers, now=1100.0)
    assert (facts["loop_wall_s"], facts["overlap"], facts["busy_s"]["sampler"]) == (0.0, 0.0, 0.0)


def test_ages_are_those_of_all_learner_steps() -> None:
    ages = AgeAccount()
    for step, largest, mean in ((1, 0, 0.0), (2, 3, 1.5), (3, 2, 1.5)):
        ages.add({"event": "step", "step": step, "age_max": largest, "age_mean": mean, "num_groups": 2})
    ages.add({"event": "status"})
    assert (ages.step, ages.max, ages.mean) == (3, 3, 1.0)


def test_steps_that_a_restore_made_again_count_once() -> None:
    ages = AgeAccount()
    for branch, step, largest in ((0, 1, 0), (0, 2, 4), (0, 3, 2), (1, 2, 1), (1, 3, 1)):
        line = {"event": "step", "branch": branch, "step": step, "age_max": largest, "age_mean": largest / 2}
        ages.add({**line, "num_groups": 2})
    # Of branch 0 only step 1 is left: ages 0, 1, 1 with means 0, 0.5, 0.5.
    assert (ages.step, ages.max) == (3, 1)
    assert ages.mean == pytest.approx(1 / 3)
    ages.keep_before(3)  # the learner ended at step 2
    assert (ages.step, ages.max, ages.mean) == (2, 1, 0.25)
    # With groups used again steps differ: a mean of 2 over 4 groups beside means of 0 and 0.5 over 2 each.
    ages.add({"event": "step", "branch": 2, "step": 3, "age_max": 3, "age_mean": 2.0, "num_groups": 4})
    assert ages.mean == pytest.approx((0 * 2 + 0.5 * 2 + 2 * 4) / 8)


def test_the_trained_share_is_of_the_generated_tokens() -> None:
    parts: dict[str, dict[str, int]] = {"groups": {}, "reused": {}, "losses": {}}
    tokens = {"generated": 200, "trained": 150, "no_signal": 50}
    figures = account({"tokens": tokens, "closes": True, "lost_in_sampler": 7, **parts})
    assert figures["trained_share"] == 0.75
    assert figures["ledger_closes"] is True
    assert figures["lost_in_sampler"] == 7


def test_an_evaluation_is_summed_up_by_its_headline() -> None:
    row = {"pass_at_1": 0.5, "low": 0.25, "high": 0.75, "num_problems": 8}
    line = {"event": "evaluation", "branch": 1, "step": 50, "heldout": {"add-2": {**row, "low": 0.0}, "headline": row}}
    assert headline_of(line) == {"branch": 1, "step": 50, **row}
