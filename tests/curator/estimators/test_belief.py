"""Posteriors of pass rates: means, quantiles, tails, values of groups, against sums and slow integrals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator.difficulty import expected_signal
from curator.estimators.belief import Beta, LogitNormal, Point, beta_of_counts
from curator.estimators.functions import beta_cdf, log_gamma, normal_cdf
from curator.estimators.value import VALUES, centered_K, mixed_K, scaled_K


def beta_mean_of(value: np.ndarray, grid: np.ndarray, a: float, b: float) -> float:
    """E[value(p)] for p ~ Beta(a, b), by the midpoint rule."""
    log_density = (a - 1) * np.log(grid) + (b - 1) * np.log1p(-grid)
    density = np.exp(log_density - log_density.max())
    return float((value * density).sum() / density.sum())


def test_log_gamma_is_that_of_the_standard_library() -> None:
    x = np.array([0.05, 0.5, 1.0, 3.3, 100.0, 1e5])
    np.testing.assert_allclose(log_gamma(x), [math.lgamma(each) for each in x], rtol=1e-13, atol=1e-13)


def test_normal_cdf_is_that_of_the_error_function() -> None:
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(normal_cdf(x), [0.5 * math.erfc(-each / math.sqrt(2)) for each in x], atol=1e-7)


def test_the_incomplete_beta_function_is_a_binomial_tail() -> None:
    # For whole a and b: I_x(a, b) = P(Bin(a + b - 1, x) >= a).
    for a, b, x in [(2, 3, 0.3), (1, 1, 0.7), (5, 2, 0.9), (40, 60, 0.45)]:
        n = a + b - 1
        tail = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
        assert float(beta_cdf(x, np.array(float(a)), np.array(float(b)))) == pytest.approx(tail, abs=1e-12)
    assert beta_cdf([0.0, 1.0], np.array([2.0, 2.0]), np.array([0.5, 0.5])).tolist() == [0.0, 1.0]


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 50), st.floats(0.3, 50), st.floats(0.01, 0.99))
def test_a_quantile_is_where_the_tail_says(a: float, b: float, share: float) -> None:
    belief = Beta(np.array([a]), np.array([b]))
    at = float(belief.quantile_P(share)[0])
    if 1e-6 < at < 1 - 1e-6:
        assert belief.probability_above_P(at)[0] == pytest.approx(1 - share, abs=1e-5)


def test_jeffreys_posterior_of_counts() -> None:
    belief = beta_of_counts([0, 3], [8, 8])
    # (k + 1/2) / (n + 1).
    np.testing.assert_allclose(belief.mean_P, [0.5 / 9, 3.5 / 9], rtol=1e-15)
    with pytest.raises(ValueError, match="passed <= scored"):
        beta_of_counts([3], [2])
    with pytest.raises(ValueError, match="prior"):
        beta_of_counts([1], [2], prior=0)


def test_values_of_groups_by_hand() -> None:
    assert mixed_K(4).tolist() == [0, 1, 1, 1, 0]
    # k (4 - k) / 12 and sqrt(k (4 - k)) / 4.
    np.testing.assert_allclose(centered_K(4), [0, 3 / 12, 4 / 12, 3 / 12, 0])
    np.testing.assert_allclose(scaled_K(4), [0, math.sqrt(3) / 4, 0.5, math.sqrt(3) / 4, 0])
    assert centered_K(1).tolist() == [0, 0]
    with pytest.raises(ValueError, match="at least one"):
        mixed_K(0)


@given(st.floats(0, 1), st.integers(2, 32))
def test_for_a_rate_held_for_certain_values_are_the_closed_forms(p: float, group_size: int) -> None:
    belief = Point(np.array([p]))
    assert belief.group_value_P(mixed_K(group_size))[0] == pytest.approx(
        float(expected_signal(p, group_size)), abs=1e-12
    )
    assert belief.group_value_P(centered_K(group_size))[0] == pytest.approx(p * (1 - p), abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.5, 5.5), (1.5, 12.0)])
@pytest.mark.parametrize("name", VALUES)
def test_expectations_under_beta_equal_an_integral(a: float, b: float, name: str) -> None:
    grid = (np.arange(200_000) + 0.5) / 200_000
    value_K = VALUES[name](8)
    expected = beta_mean_of(Point(grid).group_value_P(value_K), grid, a, b)
    got = Beta(np.array([a]), np.array([b])).group_value_P(value_K)[0]
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (-2.0, 0.5), (3.0, 2.0)])
def test_expectations_under_logit_normal_equal_an_integral(mean: float, variance: float) -> None:
    z = mean + math.sqrt(variance) * np.linspace(-8, 8, 40_001)
    density = np.exp(-((z - mean) ** 2) / (2 * variance))
    rate = 1 / (1 + np.exp(-z))
    belief = LogitNormal(np.array([mean]), np.array([variance]))
    assert belief.mean_P[0] == pytest.approx((rate * density).sum() / density.sum(), abs=2e-4)
    mixed = float((Point(rate).group_value_P(mixed_K(8)) * density).sum() / density.sum())
    # Nine nodes for a plateau with two edges.
    assert belief.group_value_P(mixed_K(8))[0] == pytest.approx(mixed, abs=5e-3)
    assert belief.probability_above_P(0.5)[0] == pytest.approx(density[z > 0].sum() / density.sum(), abs=2e-3)
    assert belief.quantile_P(0.5)[0] == pytest.approx(1 / (1 + math.exp(-mean)))


def test_a_narrowed_belief_has_the_same_centre_and_a_share_of_the_deviation() -> None:
    beta = Beta(np.array([3.0]), np.array([1.0]))
    half = beta.narrowed(0.5)
    assert isinstance(half, Beta)
    # mean 3/4 either way; the variance 3/16 / 5 a quarter of that: a + b + 1 = 20.
    assert (half.mean_P[0], half.a_P[0] + half.b_P[0]) == pytest.approx((0.75, 19.0))
    logit = LogitNormal(np.array([0.4]), np.array([2.0])).narrowed(0.5)
    assert (logit.logit_P[0], logit.variance_P[0]) == (0.4, 0.5)
    # Without any deviation the value is that at the centre: p (1 - p).
    p = 1 / (1 + math.exp(-0.4))
    assert logit.narrowed(0.0).group_value_P(centered_K(8))[0] == pytest.approx(p * (1 - p), abs=1e-4)
    assert beta.narrowed(0.0).group_value_P(centered_K(8))[0] == pytest.approx(3 / 16)
    assert Point(np.array([0.3])).narrowed(0.5).mean_P.tolist() == [0.3]
