"""What is believed of pass rates: a distribution for each problem, and what it says of the next group.

Pure numpy. P: problems; K: number of passes in a group of G rollouts, 0 to G; J: nodes of a quadrature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from curator.estimators.functions import (
    beta_cdf,
    beta_quantile,
    binomial_KP,
    normal_cdf,
    sigmoid,
)

Floats = NDArray[np.float64]

_NODES_J, _WEIGHTS_J = np.polynomial.hermite_e.hermegauss(9)
_WEIGHTS_J = _WEIGHTS_J / _WEIGHTS_J.sum()
_LARGEST_LOGIT, _PER_LOGIT = 20.0, 50
_LOGIT_GRID = np.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, int(2 * _LARGEST_LOGIT * _PER_LOGIT) + 1)


class Belief(Protocol):
    """The pass rates of some problems, each with its uncertainty. Results have the shape [P]."""

    @property
    def mean_P(self) -> Floats:
        """Expected pass rate."""

    def quantile_P(self, share: float) -> Floats:
        """Pass rate below which the true one lies with probability `share`, in (0, 1)."""

    def probability_above_P(self, rate: float) -> Floats:
        """Probability that the true pass rate is above `rate`, in (0, 1)."""

    def group_value_P(self, value_K: Floats) -> Floats:
        """Expected value of the next group, of which one with k passes is worth `value_K[k]`: sum over k of
        v_k E[Bin(k; G, p)], with G = len(value_K) - 1."""

    def narrowed(self, share: float) -> Belief:
        """The same with a deviation of `share` of it, in [0, 1], about the same centre."""


@dataclass(frozen=True, slots=True)
class Point:
    """Rates held for certain."""

    mean_P: Floats

    def quantile_P(self, share: float) -> Floats:
        """The rate itself."""
        return self.mean_P

    def probability_above_P(self, rate: float) -> Floats:
        """0 or 1."""
        return (self.mean_P > rate).astype(np.float64)

    def group_value_P(self, value_K: Floats) -> Floats:
        """See Belief."""
        return value_K @ binomial_KP(self.mean_P, len(value_K) - 1)

    def narrowed(self, share: float) -> Point:
        """See Belief. There is nothing to narrow."""
        return self


@dataclass(frozen=True, slots=True)
class Beta:
    """p ~ Beta(a, b)."""

    a_P: Floats
    b_P: Floats

    @property
    def mean_P(self) -> Floats:
        """a / (a + b)."""
        return self.a_P / (self.a_P + self.b_P)

    def quantile_P(self, share: float) -> Floats:
        """By bisection of the distribution function."""
        return beta_quantile(share, self.a_P, self.b_P)

    def probability_above_P(self, rate: float) -> Floats:
        """1 - I_rate(a, b)."""
        return 1.0 - beta_cdf(rate, self.a_P, self.b_P)

    def group_value_P(self, value_K: Floats) -> Floats:
        """By the Beta-binomial distribution: E[Bin(k; G, p)] = C(G, k) (a)_k (b)_{G-k} / (a + b)_G, where
        (x)_k = x (x + 1) ... (x + k - 1)."""
        group_size = len(value_K) - 1
        rising_a = _rising(self.a_P, group_size)
        rising_b = _rising(self.b_P, group_size)
        total = _rising(self.a_P + self.b_P, group_size)[group_size]
        expected = np.zeros_like(total)
        for k, value in enumerate(value_K.tolist()):
            if value:
                expected += value * math.comb(group_size, k) * (rising_a[k] * (rising_b[group_size - k] / total))
        return expected

    def narrowed(self, share: float) -> Beta | Point:
        """See Belief. About the mean, whose variance is mean (1 - mean) / (a + b + 1)."""
        if share == 0:
            return Point(self.mean_P)
        total_P = (self.a_P + self.b_P + 1.0) / share**2 - 1.0
        return Beta(self.mean_P * total_P, (1.0 - self.mean_P) * total_P)


@dataclass(frozen=True, slots=True)
class LogitNormal:
    """logit p ~ N(mean, variance). Expectations by Gauss and Hermite's quadrature of 9 nodes."""

    logit_P: Floats
    variance_P: Floats

    def _rate_JP(self) -> Floats:
        return sigmoid(self.logit_P + np.sqrt(self.variance_P) * _NODES_J[:, None])

    @property
    def mean_P(self) -> Floats:
        """E[sigmoid(z)]."""
        mean_P: Floats = _WEIGHTS_J @ self._rate_JP()
        return mean_P

    def quantile_P(self, share: float) -> Floats:
        """The sigmoid of the quantile of the logit: a monotone map keeps quantiles."""
        return sigmoid(self.logit_P + np.sqrt(self.variance_P) * NormalDist().inv_cdf(share))

    def probability_above_P(self, rate: float) -> Floats:
        """P(z > logit(rate))."""
        above_P = self.logit_P - math.log(rate / (1.0 - rate))
        return normal_cdf(above_P / np.sqrt(np.maximum(self.variance_P, 1e-300)))

    def group_value_P(self, value_K: Floats) -> Floats:
        """See Belief. The value is interpolated between logits 0.02 apart, within 1e-4 of the largest value."""
        value_of_logit = value_K @ binomial_KP(sigmoid(_LOGIT_GRID), len(value_K) - 1)
        logit_JP = self.logit_P + np.sqrt(self.variance_P) * _NODES_J[:, None]
        expected_P: Floats = _WEIGHTS_J @ _on_grid(logit_JP, value_of_logit)
        return expected_P

    def narrowed(self, share: float) -> LogitNormal:
        """See Belief. About the median."""
        return LogitNormal(self.logit_P, share**2 * self.variance_P)


def _on_grid(logit: Floats, value_of_logit: Floats) -> Floats:
    """A function given on the grid, linear in between and constant beyond: `np.interp`, which would search the grid."""
    place = (np.clip(logit, -_LARGEST_LOGIT, _LARGEST_LOGIT) + _LARGEST_LOGIT) * _PER_LOGIT
    below = place.astype(np.int32)
    value: Floats = value_of_logit[below] + (place - below) * np.diff(value_of_logit, append=value_of_logit[-1])[below]
    return value


def _rising(x: Floats, largest: int) -> list[Floats]:
    """Rising factorials (x)_0 to (x)_largest."""
    factorials = [np.ones_like(x)]
    for k in range(largest):
        factorials.append(factorials[-1] * (x + k))
    return factorials


def beta_of_counts(num_passed_P: ArrayLike, num_scored_P: ArrayLike, prior: float = 0.5) -> Beta:
    """Posterior of pass rates after so many passes of so many scored rollouts of one policy.

    Beta(k + prior, n - k + prior); at 1/2 that is Jeffreys' prior. Counts may be fractions, as graded rewards give
    them. Unscored rollouts are in neither count.

    Raises ValueError for counts that are no counts, or a prior that is not positive.
    """
    passed_P, scored_P = np.asarray(num_passed_P, np.float64), np.asarray(num_scored_P, np.float64)
    if not np.all((passed_P >= 0) & (passed_P <= scored_P) & np.isfinite(scored_P)):
        raise ValueError("counts: expected 0 <= passed <= scored")
    if not prior > 0:
        raise ValueError(f"prior = {prior}: expected above 0")
    return Beta(passed_P + prior, scored_P - passed_P + prior)
