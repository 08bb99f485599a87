"""Functions of probability that numpy lacks, over arrays. Pure numpy, float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def sigmoid(z: ArrayLike) -> Floats:
    """1 / (1 + exp(-z)), without overflow."""
    p: Floats = 0.5 * (1.0 + np.tanh(0.5 * np.asarray(z, np.float64)))
    return p


def normal_cdf(x: Floats) -> Floats:
    """Distribution function of N(0, 1), within 1e-7: Abramowitz and Stegun 1964, formula 26.2.17."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(x))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi) * series
    return np.where(x >= 0, 1.0 - upper, upper)


def binomial_KP(rate_P: Floats, group_size: int) -> Floats:
    """Probability of k passes among G rollouts of pass rate p: [G + 1, P]."""
    up_KP = np.ones((group_size + 1, *rate_P.shape))
    down_KP = np.ones_like(up_KP)
    for k in range(1, group_size + 1):
        up_KP[k] = up_KP[k - 1] * rate_P
        down_KP[k] = down_KP[k - 1] * (1.0 - rate_P)
    ways_K = np.array([math.comb(group_size, k) for k in range(group_size + 1)], np.float64)
    return ways_K.reshape(-1, *[1] * rate_P.ndim) * up_KP * down_KP[::-1]


def log_gamma(x: Floats) -> Floats:
    """log Gamma(x) for x > 0, within 1e-13 relative to 1 + |result|: Stirling's series at x + 10."""
    shifted = x + 10.0
    steps = sum(np.log(x + k) for k in range(10))
    inverse = 1.0 / shifted
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188))))
    result: Floats = (shifted - 0.5) * np.log(shifted) - shifted + 0.5 * math.log(2 * math.pi) + series - steps
    return result


def beta_cdf(x: ArrayLike, a: Floats, b: Floats) -> Floats:
    """Regularised incomplete beta function I_x(a, b), x in [0, 1], within 1e-10 for a + b up to 1e5.

    Continued fraction by Lentz's method (Press et al., Numerical Recipes, 6.4), of the side where it converges fast:
    I_x(a, b) = 1 - I_{1-x}(b, a).
    """
    x, a, b = np.broadcast_arrays(np.asarray(x, np.float64), a, b)
    swap = x > (a + 1.0) / (a + b + 2.0)
    left, first, second = np.where(swap, 1.0 - x, x), np.where(swap, b, a), np.where(swap, a, b)
    with np.errstate(divide="ignore"):
        log_front = log_gamma(a + b) - log_gamma(a) - log_gamma(b) + first * np.log(left) + second * np.log1p(-left)
    # `left` is 1 only where x and its swap are: then the front is 0 by the limit.
    front = np.where(left < 1, np.exp(log_front), 0.0)
    lower = front * _beta_fraction(left, first, second) / first
    return np.where(swap, 1.0 - lower, lower)


def _beta_fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    tiny = 1e-300
    c = np.ones_like(x)
    d = 1.0 / _away_from_0(1.0 - (a + b) * x / (a + 1.0), tiny)
    h = d
    for m in range(1, 1000):
        step = np.ones_like(x)
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d = 1.0 / _away_from_0(1.0 + numerator * d, tiny)
            c = _away_from_0(1.0 + numerator / c, tiny)
            step = c * d
            h = h * step
        if np.all(np.abs(step - 1.0) < 1e-14):
            break
    return h


def _away_from_0(x: Floats, tiny: float) -> Floats:
    return np.where(np.abs(x) < tiny, tiny, x)


def beta_quantile(share: float, a: Floats, b: Floats) -> Floats:
    """x with I_x(a, b) = share, by bisection to 1e-12."""
    low, high = np.zeros_like(a), np.ones_like(a)
    for _ in range(40):
        middle = 0.5 * (low + high)
        is_below = beta_cdf(middle, a, b) < share
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)
