"""How often a problem is solved, what groups of it would teach, and which problems deserve more samples. Pure.

A problem has an unknown pass rate p; k of n scored samples pass. Rates of a pool are taken as drawn from one Beta(a, b)
a domain, fitted to all its counts, so that what is known of a problem is Beta(a + k, b + n - k). With n = 0 that is the
domain's own spread, with a large n the counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""Two-sided 95 % of the normal distribution."""
GROUP_SIZES = (4, 8, 16, 32)
MIN_PROBLEMS_OF_A_PRIOR = 20
"""A domain with fewer has the prior of the whole pool."""
_MEANS = np.linspace(0.01, 0.99, 50)
_STRENGTHS = np.geomspace(0.1, 100.0, 40)


class Beta(NamedTuple):
    """A Beta distribution of a pass rate."""

    a: float
    b: float

    @property
    def mean(self) -> float:
        """a / (a + b)."""
        return self.a / (self.a + self.b)

    @property
    def variance(self) -> float:
        """m (1 - m) / (a + b + 1) with the mean m."""
        return self.mean * (1 - self.mean) / (self.a + self.b + 1)

    def after(self, passed: int, scored: int) -> Beta:
        """What is known once `passed` of `scored` further samples have passed."""
        return Beta(self.a + passed, self.b + scored - passed)


JEFFREYS = Beta(0.5, 0.5)


class Interval(NamedTuple):
    """Of a pass rate."""

    low: float
    high: float


def fit_prior(counts: Iterable[tuple[int, int]]) -> Beta:
    """The Beta(a, b) under which counts (passed, scored) are most likely, over a grid of means and strengths a + b.

    One problem adds log of Beta-binomial: sum_{i<k} log(a + i) + sum_{i<n-k} log(b + i) - sum_{i<n} log(a + b + i),
    but for a constant (Skellam 1948). Jeffreys' prior counts as one problem more, so that a domain in which all
    samples fail has no prior of certainty. Without any count it is Jeffreys' prior.
    """
    tally: dict[tuple[int, int], int] = {}
    for passed, scored in counts:
        if scored:
            tally[passed, scored] = tally.get((passed, scored), 0) + 1
    if not tally:
        return JEFFREYS
    mean, strength = (grid.ravel() for grid in np.meshgrid(_MEANS, _STRENGTHS))
    a, b = mean * strength, (1 - mean) * strength
    longest = max(scored for _, scored in tally)
    rises_a, rises_b, rises_n = (_log_rises(start, longest) for start in (a, b, strength))
    likelihood = -((mean - 0.5) ** 2) - (np.log(strength) ** 2) / 8
    for (passed, scored), num in tally.items():
        likelihood += num * (rises_a[passed] + rises_b[scored - passed] - rises_n[scored])
    best = int(np.argmax(likelihood))
    return Beta(float(a[best]), float(b[best]))


def _log_rises(start: NDArray[np.float64], longest: int) -> NDArray[np.float64]:
    """[N+1, S]: row n holds sum_{i<n} log(start + i)."""
    steps = np.log(start[None, :] + np.arange(longest)[:, None])
    return np.concatenate([np.zeros((1, start.size)), np.cumsum(steps, axis=0)])


def fit_priors(counts: Mapping[str, list[tuple[int, int]]]) -> dict[str, Beta]:
    """A prior for each domain of {domain: [(passed, scored)]}; small domains share that of the pool."""
    of_pool = fit_prior(count for domain in counts.values() for count in domain)
    return {
        domain: fit_prior(found) if sum(scored > 0 for _, scored in found) >= MIN_PROBLEMS_OF_A_PRIOR else of_pool
        for domain, found in counts.items()
    }


def wilson(passed: int, scored: int) -> Interval:
    """The 95 % interval of a pass rate by its score test (Wilson 1927); [0, 1] without samples.

    (q + z^2/2n +- z sqrt(q (1 - q) / n + z^2 / 4n^2)) / (1 + z^2/n), with the rate q = passed / n.
    """
    if scored == 0:
        return Interval(0.0, 1.0)
    rate, square = passed / scored, Z_95**2 / scored
    half = Z_95 * math.sqrt(rate * (1 - rate) / scored + square / (4 * scored))
    low, high = ((rate + square / 2 + sign * half) / (1 + square) for sign in (-1, 1))
    # At the ends the formula is exact but for rounding.
    return Interval(0.0 if passed == 0 else low, 1.0 if passed == scored else high)


def mixed(rate: float, group_size: int) -> float:
    """Chance that a group has both passes and failures at a known pass rate p: 1 - p^G - (1 - p)^G."""
    return 1.0 - rate**group_size - (1.0 - rate) ** group_size


def expected_mixed(known: Beta, group_size: int) -> float:
    """Posterior mean of `mixed`.

    For p ~ Beta(a, b) the moment E[p^G] = prod_{i<G} (a + i) / (a + b + i), as Beta(a + G, b) / Beta(a, b) cancels to
    that; E[(1 - p)^G] is the same with b for a. So E[mixed] = 1 - E[p^G] - E[(1 - p)^G].
    """
    total = known.a + known.b
    all_pass = math.prod((known.a + i) / (total + i) for i in range(group_size))
    all_fail = math.prod((known.b + i) / (total + i) for i in range(group_size))
    return 1.0 - all_pass - all_fail


def mixed_unbiased(passed: int, scored: int, group_size: int) -> float | None:
    """Unbiased estimate of `mixed` from k passes of n samples; None where n < G, since then there is none.

    Of the C(n, G) groups that can be made of the samples, C(k, G) pass as a whole and C(n - k, G) fail as a whole; each
    is a group of G independent samples, so that the share of the others has the mean 1 - p^G - (1 - p)^G (Hoeffding
    1948). `mixed` is a polynomial of degree G in p, and the mean of any function of n < G samples one of degree n.
    """
    if scored < group_size:
        return None
    alike = math.comb(passed, group_size) + math.comb(scored - passed, group_size)
    return 1.0 - alike / math.comb(scored, group_size)


def lowest_mixed(rate: Interval, group_size: int) -> float:
    """The smallest `mixed` of all rates in an interval: it rises up to 1/2 and falls from there, so at one end."""
    return min(mixed(rate.low, group_size), mixed(rate.high, group_size))


def more_samples(known: Beta, *, target_sd: float, most: int) -> int:
    """How many further samples a problem gets in the second stage: as many as bring the spread of its rate down.

    With m the mean and s = a + b the strength of what is known, t further samples leave a standard deviation of about
    sqrt(m (1 - m) / (s + t + 1)). So t = m (1 - m) / target_sd^2 - s - 1, at least 0 and at most `most`.

    m (1 - m) is large for problems whose groups would be mixed and for those of which little is known, and small for
    those solved or out of reach: these get none.
    """
    needed = known.mean * (1 - known.mean) / target_sd**2 - (known.a + known.b) - 1
    return min(most, max(0, math.ceil(needed)))
