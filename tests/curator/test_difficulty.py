"""The sliding success rate and the expected signal, by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curator.difficulty import NoSignalCause, SlidingRate, counts, expected_signal, no_signal_cause
from tests.curator.fakes import make_outcome


def test_expected_signal_is_the_chance_of_a_mixed_group() -> None:
    # G = 2: 1 - p^2 - (1-p)^2 = 2 p (1-p): 0, 0.375, 0.5, 0.
    np.testing.assert_allclose(expected_signal([0.0, 0.25, 0.5, 1.0], 2), [0.0, 0.375, 0.5, 0.0], rtol=0, atol=1e-15)
    # G = 8, p = 0.5: 1 - 2/256.  G = 3, p = 0.1: 1 - 0.001 - 0.729 = 0.27.
    assert expected_signal(0.5, 8) == 1 - 2 / 256
    assert float(expected_signal(0.1, 3)) == pytest.approx(0.27, abs=1e-15)


def test_a_group_of_one_never_has_signal() -> None:
    assert float(expected_signal(0.3, 1)) == pytest.approx(0.0, abs=1e-15)


@given(st.floats(0, 1), st.integers(1, 64))
def test_expected_signal_is_a_probability_and_symmetric(p: float, group_size: int) -> None:
    signal = float(expected_signal(p, group_size))
    assert 0 <= signal <= 1
    assert signal == pytest.approx(float(expected_signal(1 - p, group_size)), abs=1e-12)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="within"):
        expected_signal([0.5, rate], 4)


def test_the_rate_moves_from_unseen_rate_by_one_formula() -> None:
    state = SlidingRate(np.array([0, 1]), rate_step=0.25, unseen_rate=0.5)  # each problem a domain of its own
    state.update(1, 1.0, num_scored=4, step=7)
    # 0.75 x 0.5 + 0.25 x 1 = 0.625; then 0.75 x 0.625 + 0.25 x 0 = 0.46875; all exact in binary.
    assert state.rate_P.tolist() == [0.5, 0.625]
    state.update(1, 0.0, num_scored=3, step=9)
    assert state.rate_P.tolist() == [0.5, 0.46875]
    assert state.num_groups_P.tolist() == [0, 2]
    assert state.num_scored_P.tolist() == [0, 7]
    assert state.last_step_P.tolist() == [-1, 9]


def test_a_problem_never_seen_has_the_rate_of_its_domain_and_starts_from_it() -> None:
    # Problems 0 and 1 are of one domain, problem 2 of another.
    state = SlidingRate(np.array([0, 0, 1]), rate_step=0.5, domain_step=0.25, unseen_rate=0.5)
    state.update(0, 1.0)
    # Own: 0.5 x 0.5 + 0.5 x 1 = 0.75. Domain: the mean of 0.5 and 1 = 0.75. The other domain has not moved.
    assert state.rate_P.tolist() == [0.75, 0.75, 0.5]
    state.update(1, 0.0)
    # Starts from the domain: 0.5 x 0.75 = 0.375; domain: the mean of 0.5, 1 and 0; problem 0 keeps its own.
    assert state.rate_P.tolist() == [0.75, 0.375, 0.5]
    assert state.domain_rate_D.tolist() == pytest.approx([0.5, 0.5], abs=1e-15)
    for _ in range(3):
        state.update(2, 1.0)
    # (0.5 + 1 + 1) / 3 = 0.8333, a step of 1/3; the third would have one of 1/4, and from there on it slides:
    # 0.75 x 0.8333 + 0.25 = 0.875, then 0.75 x 0.875 + 0.25 = 0.90625, where the mean of five would be 0.9.
    assert state.domain_rate_D[1] == pytest.approx(0.875, abs=1e-15)
    state.update(2, 1.0)
    assert state.domain_rate_D[1] == pytest.approx(0.90625, abs=1e-15)


def test_an_unscored_rollout_is_missing_and_not_failed() -> None:
    state = SlidingRate(np.array([0]), rate_step=0.5, unseen_rate=0.5)
    # One of one scored rollouts passed, three are unscored: the mean is 1, not 1/4. 0.5 x 0.5 + 0.5 x 1 = 0.75.
    state.apply(0, make_outcome(0, passed=1, failed=0, unscored=3))
    assert state.rate_P.tolist() == [0.75]
    assert state.num_scored_P.tolist() == [1]
    assert not counts(make_outcome(1, passed=0, failed=0, unscored=4))


@pytest.mark.parametrize(("fate", "moves"), [("accepted", True), ("no_signal", True), ("stale", False),
                                             ("invalid", False), ("refused", False)])  # fmt: skip
def test_only_whole_groups_of_a_known_policy_count(fate: str, moves: bool) -> None:
    assert counts(make_outcome(0, passed=2, failed=0, fate=fate)) is moves


def test_rewards_beyond_the_unit_interval_are_clipped_and_counted() -> None:
    state = SlidingRate(np.array([0]), rate_step=0.5, unseen_rate=0.5)
    state.update(0, -1.0)
    assert state.rate_P.tolist() == [0.25]
    assert state.num_clipped == 1


def test_nan_is_no_mean_reward() -> None:
    with pytest.raises(ValueError, match="NaN"):
        SlidingRate(np.array([0])).update(0, math.nan)


@pytest.mark.parametrize(("step", "unseen"), [(0.0, 0.5), (1.5, 0.5), (0.5, -0.1), (0.5, 1.1)])
def test_impossible_settings_are_refused(step: float, unseen: float) -> None:
    with pytest.raises(ValueError, match="expected in"):
        SlidingRate(np.array([0]), rate_step=step, unseen_rate=unseen)


@pytest.mark.parametrize(
    ("passed", "failed", "unscored", "truncated", "cause"),
    [
        (4, 0, 0, 0, NoSignalCause.ALL_RIGHT),
        (4, 0, 0, 4, NoSignalCause.ALL_RIGHT),
        (0, 4, 0, 1, NoSignalCause.ALL_WRONG),
        (0, 4, 0, 2, NoSignalCause.TRUNCATED),
        (0, 2, 2, 2, NoSignalCause.TRUNCATED),
        (2, 2, 0, 0, NoSignalCause.SAME_REWARD),
    ],
)
def test_no_signal_has_a_cause(passed: int, failed: int, unscored: int, truncated: int, cause: NoSignalCause) -> None:
    outcome = make_outcome(0, passed=passed, failed=failed, unscored=unscored, truncated=truncated, fate="no_signal")
    assert no_signal_cause(outcome) is cause


def test_the_sliding_rate_is_an_estimator_without_doubt() -> None:
    state = SlidingRate(np.array([0, 0, 0]), rate_step=0.5, unseen_rate=0.5)
    state.observe(1, 4, 4, 3.7)
    np.testing.assert_array_equal(state.predict().mean_P, state.rate_P)
    np.testing.assert_array_equal(state.predict(np.array([1, 2])).mean_P, state.rate_P[[1, 2]])
    assert state.last_step_P.tolist() == [-1, 3, -1]
    assert state.has_passed_P.tolist() == [False, True, False]
