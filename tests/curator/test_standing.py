"""What retires, what is suspect, what it costs, and what time it is."""

import numpy as np
import pytest

from curator.clock import PolicyClock
from curator.cost import ExpectedTokens
from curator.estimators.belief import LogitNormal, Point, beta_of_counts
from curator.standing import Limits, retired, suspects


def test_a_problem_retires_by_probability_and_after_several_groups() -> None:
    # Jeffreys after 80 of 80: P(p > 0.95) = 1 - I_0.95(80.5, 0.5), about 0.996; after 8 of 8 about 0.63.
    belief = beta_of_counts([80, 80, 8, 0, 0], [80, 80, 8, 8, 300])
    solved, hopeless = retired(belief, np.array([10, 1, 2, 2, 30]))
    assert solved.tolist() == [True, False, False, False, False]
    # After 0 of 8 P(p < 0.02) is about 0.43, after 0 of 300 almost 1.
    assert hopeless.tolist() == [False, False, False, False, True]


def test_a_retired_problem_comes_back_as_its_posterior_widens() -> None:
    logit = np.array([4.0, 4.0])  # 0.982
    solved, _ = retired(LogitNormal(logit, np.array([0.1, 4.0])), np.array([3, 3]))
    # logit(0.95) = 2.94: 1.06 is 3.3 deviations away, then 0.53: probabilities 0.9996 and 0.70.
    assert solved.tolist() == [True, False]


def test_a_problem_that_fails_where_others_like_it_pass_is_suspect() -> None:
    others = Point(np.array([0.5, 0.5, 0.5, 0.1, 0.5]))
    has_passed = np.array([False, False, True, False, False])
    scored, groups = np.array([16, 16, 16, 16, 4]), np.array([2, 1, 2, 2, 2])
    # 0.5^16 is surprising; one group is not enough; one pass clears it; 0.1 is expected to fail; 0.5^4 = 0.06.
    assert suspects(others, has_passed, scored, groups).tolist() == [True, False, False, False, False]
    lenient = Limits(surprise=0.1)
    assert suspects(others, has_passed, scored, groups, lenient).tolist() == [True, False, False, False, True]


def test_expected_tokens_slide_and_begin_with_the_domain() -> None:
    cost = ExpectedTokens(np.array([0, 0, 1]), step=0.5, domain_step=0.5)
    every = np.arange(3)
    assert cost.predict(every).tolist() == [1, 1, 1]
    cost.observe(0, 100)
    assert cost.predict(every).tolist() == [100, 100, 100]
    cost.observe(0, 200)
    cost.observe(2, 50)
    cost.observe(1, 0)  # no tokens: refused before it was sampled
    # Own: 150 and 50; the domain of problem 1 is at 150.
    assert cost.predict(every).tolist() == [150, 150, 50]


def test_time_goes_on_over_a_restore() -> None:
    clock = PolicyClock()
    assert [clock.time(0, step) for step in (10, 500)] == [10, 500]
    # Restored from step 400: fresh groups of a new branch are of the present, what comes of the old one is late.
    assert clock.time(1, 400) == 500
    assert clock.time(1, 403) == 503
    assert clock.time(0, 498) == 498
    assert clock.now == pytest.approx(503)
