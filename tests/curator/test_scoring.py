"""The maths of scoring a pool: intervals, chances of mixed groups, the prior, the second stage, verdicts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator.answers import final_answer
from curator.schema import Problem
from curator.scoring import (
    JEFFREYS,
    Beta,
    Interval,
    expected_mixed,
    fit_prior,
    fit_priors,
    lowest_mixed,
    mixed,
    mixed_unbiased,
    more_samples,
    wilson,
)
from curator.scoring_run import Tally
from curator.scoring_table import variance
from curator.verdicts import Rule, Verdict, credit_of, credits, verdict

COUNTS = st.integers(0, 12).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def test_wilson_is_where_the_score_test_no_longer_refuses() -> None:
    # |q - p| = z sqrt(p (1 - p) / n) at both ends, which is how the interval is defined.
    for passed, scored in ((1, 8), (4, 8), (30, 256)):
        for end in wilson(passed, scored):
            assert abs(passed / scored - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / scored))
    # With no pass of 8: high = z^2 / (n + z^2) = 3.8415 / 11.8415.
    assert wilson(0, 8) == Interval(0.0, pytest.approx(0.32440, abs=1e-5))
    assert wilson(8, 8).high == 1.0
    assert wilson(0, 0) == Interval(0.0, 1.0)


@given(COUNTS, st.integers(2, 12))
def test_the_unbiased_chance_is_the_share_of_mixed_groups_among_all_groups_of_the_samples(
    counts: tuple[int, int], group_size: int
) -> None:
    passed, scored = counts
    if scored < group_size:
        assert mixed_unbiased(passed, scored, group_size) is None
        return
    samples = [1] * passed + [0] * (scored - passed)
    groups = list(itertools.combinations(samples, group_size))
    assert mixed_unbiased(passed, scored, group_size) == pytest.approx(
        sum(0 < sum(group) < group_size for group in groups) / len(groups)
    )


@pytest.mark.parametrize(("rate", "scored", "group_size"), [(0.3, 6, 4), (0.9, 9, 8), (0.02, 8, 8)])
def test_the_unbiased_chance_is_unbiased(rate: float, scored: int, group_size: int) -> None:
    # Over all outcomes of the samples, weighted by their chance.
    mean = sum(
        math.comb(scored, k) * rate**k * (1 - rate) ** (scored - k) * (mixed_unbiased(k, scored, group_size) or 0.0)
        for k in range(scored + 1)
    )
    assert mean == pytest.approx(mixed(rate, group_size))


@settings(deadline=None)
@given(st.floats(0.5, 30), st.floats(0.5, 30), st.sampled_from([2, 4, 8, 32]))
def test_the_expected_chance_is_the_integral_over_the_posterior(a: float, b: float, group_size: int) -> None:
    # Midpoints in u with p = sin^2(u): dp = 2 sin u cos u du takes the poles of the density at both ends away.
    u = (np.arange(20_000) + 0.5) / 20_000 * math.pi / 2
    p = np.sin(u) ** 2
    weight = np.exp((2 * a - 1) * np.log(np.sin(u)) + (2 * b - 1) * np.log(np.cos(u)))
    values = 1 - p**group_size - (1 - p) ** group_size
    assert expected_mixed(Beta(a, b), group_size) == pytest.approx(
        float((values * weight).sum() / weight.sum()), abs=2e-3
    )


@given(st.floats(0, 1), st.floats(0, 1), st.integers(2, 32))
def test_no_rate_of_an_interval_has_a_smaller_chance(x: float, y: float, group_size: int) -> None:
    low, high = min(x, y), max(x, y)
    inside = [mixed(low + (high - low) * i / 50, group_size) for i in range(51)]
    assert lowest_mixed(Interval(low, high), group_size) <= min(inside) + 1e-12


def test_the_prior_of_a_pool_has_its_mean_and_its_spread() -> None:
    # 400 problems with rates from Beta(0.4, 1.2): mean 0.25, strength 1.6.
    draw = np.random.default_rng(0)
    counts = [(int(draw.binomial(8, rate)), 8) for rate in draw.beta(0.4, 1.2, 400)]
    prior = fit_prior(counts)
    assert prior.mean == pytest.approx(0.25, abs=0.03)
    assert prior.a + prior.b == pytest.approx(1.6, rel=0.3)
    assert fit_prior([]) == fit_prior([(0, 0)]) == JEFFREYS


def test_the_prior_is_the_most_likely_of_the_grid_against_a_slow_loop() -> None:
    counts = [(0, 3), (1, 3), (3, 3), (2, 5)]

    def log_likelihood(prior: Beta) -> float:
        total = -((prior.mean - 0.5) ** 2) - math.log(prior.a + prior.b) ** 2 / 8
        for k, n in counts:
            total += math.lgamma(prior.a + k) + math.lgamma(prior.b + n - k) - math.lgamma(prior.a + prior.b + n)
            total += math.lgamma(prior.a + prior.b) - math.lgamma(prior.a) - math.lgamma(prior.b)
        return total

    grid = [Beta(m * s, (1 - m) * s) for m in np.linspace(0.01, 0.99, 50) for s in np.geomspace(0.1, 100, 40)]
    assert log_likelihood(fit_prior(counts)) == pytest.approx(max(map(log_likelihood, grid)))


def test_a_small_domain_has_the_prior_of_the_pool() -> None:
    counts = {"easy": [(8, 8)] * 30, "hard": [(0, 8)] * 30, "few": [(0, 8)] * 3}
    priors = fit_priors(counts)
    assert priors["easy"].mean > 0.9 > 0.1 > priors["hard"].mean
    assert priors["few"] == fit_prior([*counts["easy"], *counts["hard"], *counts["few"]])


def test_the_second_stage_goes_to_rates_in_the_middle() -> None:
    # Beta(5, 5), m = 0.5, s = 10: 0.25 / 0.01 - 10 - 1 = 14. Beta(1, 9), m = 0.1: 0.09 / 0.01 - 11 < 0.
    assert more_samples(Beta(5, 5), target_sd=0.1, most=100) == 14
    assert more_samples(Beta(1, 9), target_sd=0.1, most=100) == 0
    assert more_samples(Beta(5, 5), target_sd=0.1, most=10) == 10


@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0.02, 0.3))
def test_after_the_second_stage_the_spread_to_be_expected_is_the_target(a: float, b: float, target: float) -> None:
    known = Beta(a, b)
    num = more_samples(known, target_sd=target, most=10_000)
    left = known.mean * (1 - known.mean) / (a + b + num + 1)
    assert left <= target**2 * (1 + 1e-9)
    assert num == 0 or known.mean * (1 - known.mean) / (a + b + num) > target**2 * (1 - 1e-9)


def tally(passed: int, scored: int, **more: object) -> Tally:
    return Tally(passed=passed, scored=scored, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "synthetic", "expected"),
    [
        (tally(4, 8), False, (True, "a mixed group at")),
        (tally(64, 64), False, (False, "too easy: a mixed group at 0.0")),
        (tally(0, 64), False, (False, "too hard")),
        (tally(0, 64, num_cut=40), False, (False, "cut at the length limit")),
        (tally(0, 0, unscored=8), False, (False, "no answer could be scored: not sampled")),
        (tally(0, 0, refusal="too long"), False, (False, "cannot be sampled: too long")),
        # One of 8: the interval begins at 0.0224, so 1 - 0.0224^8 - 0.9776^8 = 0.166 is all that is sure.
        (tally(1, 8), True, (False, "synthetic, signal not shown: at least 0.166 < 0.2")),
        (tally(1, 8), False, (True, "a mixed group at")),
        (tally(4, 8), True, (True, "synthetic, signal shown: at least 0.856")),
    ],
)
def test_verdicts(found: Tally, synthetic: bool, expected: tuple[bool, str]) -> None:
    decided = verdict(found, JEFFREYS.after(found.passed, found.scored), Rule(), is_synthetic=synthetic)
    assert decided.keep is expected[0]
    assert decided.why.startswith(expected[1])
    assert isinstance(decided, Verdict)


def test_credit_goes_to_the_first_column_that_names_someone() -> None:
    def problem(**extra: object) -> Problem:
        return Problem(problem_id="a", prompt="1?", answer="1", verifier="exact", extra=extra)

    assert credit_of(problem(parent_id=7, generator="g")) == "parent_id:7"
    assert credit_of(problem(parent_id=" ", metadata={"source_dataset": "chain_sum"})) == (
        "metadata.source_dataset:chain_sum"
    )
    assert credit_of(problem(level=3)) is None
    assert credit_of(problem(made={"by": "x"}), ["made.by"]) == "made.by:x"
    rows = [
        {"credit": name, "keep": kept, "signal_low": 0.5, "tokens": 3}
        for name, kept in (("a", 0), ("b", 1), ("b", 1), (None, 1))
    ]
    assert [(c.name, c.num_problems, c.num_kept, c.signal, c.num_tokens) for c in credits(rows)] == [
        ("b", 2, 2, 0.5, 6),
        ("a", 1, 0, 0.5, 3),
    ]


@pytest.mark.parametrize(
    ("text", "extra", "answer"),
    [
        (r"so \boxed{4} or \boxed{ X }", {}, "x"),
        ("1+1=2\n#### 2\nrest", {}, "2"),
        ("1+6=07,#7", {"answer_prefix": "#"}, "7"),
        ("thinking\nThe answer is  Five\n", {}, "the answer is five"),
        ("", {}, ""),
    ],
)
def test_the_final_answer(text: str, extra: dict[str, str], answer: str) -> None:
    assert final_answer(text, Problem(problem_id="a", prompt="?", answer="", verifier="exact", extra=extra)) == answer


@given(st.lists(st.floats(-3, 3), max_size=9))
def test_the_variance_of_rewards_is_unbiased(rewards: list[float]) -> None:
    found = variance(rewards)
    assert found is None if len(rewards) < 2 else found == pytest.approx(np.var(rewards, ddof=1), abs=1e-9)


@pytest.mark.parametrize("values", [{"group_size": 1}, {"min_signal": 1.5}, {"min_synthetic_signal": -0.1}])
def test_a_rule_that_means_nothing_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--"):
        Rule(**values)  # type: ignore[arg-type]
