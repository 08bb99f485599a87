"""What groups are drawn from."""

from itertools import islice

import numpy as np
import pytest

from stream_grpo.planner.given import Given, lengths
from stream_grpo.planner.group import draw_groups
from stream_grpo.planner.world import Rollouts


def test_a_group_of_the_measured_size_is_a_row_as_it_is() -> None:
    rollouts = Rollouts(length_RG=np.array([[1, 2], [3, 4]]), reward_RG=np.array([[1.0, 1.0], [0.0, 1.0]]))
    drawn = list(islice(draw_groups(rollouts, 2, np.random.default_rng(0)), 50))
    assert {(tuple(row), signal) for row, signal in drawn} == {((1, 2), False), ((3, 4), True)}


def test_a_smaller_group_has_signal_as_often_as_its_rewards_differ() -> None:
    # 2 of 4 rollouts without repetition, 1 of the 4 right: they differ if it is drawn, 2 / 4.
    rollouts = Rollouts(length_RG=np.array([[5, 6, 7, 8]]), reward_RG=np.array([[1.0, 0.0, 0.0, 0.0]]))
    drawn = list(islice(draw_groups(rollouts, 2, np.random.default_rng(0)), 4000))
    # Standard error sqrt(1/4 / 4000) = 0.008.
    assert np.mean([signal for _, signal in drawn]) == pytest.approx(0.5, abs=0.04)
    assert all(len(set(row)) == 2 for row, _ in drawn)


def test_a_larger_group_may_find_signal_where_the_measured_one_had_none() -> None:
    # After 2 equal ones the urn gives an equal third with 2.5 / 3 and fourth with 3.5 / 4: both with 0.729.
    rollouts = Rollouts(length_RG=np.array([[5, 6]]), reward_RG=np.array([[1.0, 1.0]]))
    drawn = list(islice(draw_groups(rollouts, 4, np.random.default_rng(0)), 4000))
    assert np.mean([signal for _, signal in drawn]) == pytest.approx(1 - 2.5 / 3 * 3.5 / 4, abs=0.04)
    assert all(len(row) == 4 for row, _ in drawn)


def test_given_lengths_have_their_mean_deviation_and_correlation() -> None:
    given = Given(mean_tokens=1000.0, engine_step_s=1.0, learner_tokens_per_s=1.0, tokens_cv=0.5, group_correlation=0.4)
    drawn = lengths(given, group_size=8, max_tokens=100_000, seed=0)
    assert drawn.mean() == pytest.approx(1000.0, rel=0.05)
    assert drawn.std() / drawn.mean() == pytest.approx(0.5, rel=0.1)
    logs = np.log(drawn)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.4, abs=0.08)
    assert lengths(given, group_size=8, max_tokens=1200, seed=0).max() == 1200


def test_lengths_below_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Rollouts(length_RG=np.array([[0, 1]]))
