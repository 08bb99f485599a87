"""One scale from comparisons in pairs. Pure numpy.

N responses. `wins` [N, N]: how often row was preferred to column; half of a tie each.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_STEPS = 100
_TOLERANCE = 1e-12


class Triads(NamedTuple):
    """Of three responses that were all compared, each two with a winner."""

    num: int
    num_circular: int
    """a over b, b over c, c over a: no scale can say that."""


def bradley_terry(wins: NDArray[np.float64], *, prior: float) -> NDArray[np.float64]:
    """Strength s of every response, [N], in (0, 1): how probably it is preferred to one in the middle of the scale.

    P(i over j) = sigmoid(t_i - t_j), s_i = sigmoid(t_i)        (Bradley & Terry 1952, Biometrika 39)

    t is the maximum of sum_ij wins_ij log P(i over j) + prior sum_i [log sigmoid(t_i) + log sigmoid(-t_i)]: every
    response also wins and loses `prior` comparisons with an opponent of t = 0, so that one that won all, or was never
    compared, has a finite t, and that t has a zero. Strictly concave, by Newton's method with halved steps.

    Raises ValueError for wins that are not square or below 0, and for a prior that is not above 0.
    """
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1] or (wins < 0).any() or wins.diagonal().any():
        raise ValueError(f"wins of shape {wins.shape}: expected [N, N], at least 0, nothing on the diagonal")
    if not prior > 0:
        raise ValueError(f"prior = {prior:g}: expected a number above 0")
    t, games = np.zeros(len(wins)), wins + wins.T
    for _ in range(_MAX_STEPS):
        p_over, s = _sigmoid(t[:, None] - t[None, :]), _sigmoid(t)
        gradient = (wins - games * p_over).sum(1) + prior * (1 - 2 * s)
        curvature = games * p_over * (1 - p_over)
        hessian = np.diag(curvature.sum(1) + 2 * prior * s * (1 - s)) - curvature
        step = np.linalg.solve(hessian, gradient)
        size, value = 1.0, _log_posterior(t, wins, prior)
        while size > _TOLERANCE and _log_posterior(t + size * step, wins, prior) < value:
            size /= 2
        t = t + size * step
        if np.abs(size * step).max(initial=0.0) < _TOLERANCE:
            break
    return _sigmoid(t)


def triads(wins: NDArray[np.float64]) -> Triads:
    """How many triads there are, and how many are circular (Kendall & Babington Smith 1940, Biometrika 31)."""
    over = wins > wins.T
    decided = over | over.T
    num = num_circular = 0
    for i, j, k in combinations(range(len(wins)), 3):
        if decided[i, j] and decided[j, k] and decided[i, k]:
            num += 1
            num_circular += bool(over[i, j] == over[j, k] == over[k, i])
    return Triads(num, num_circular)


def _log_posterior(t: NDArray[np.float64], wins: NDArray[np.float64], prior: float) -> float:
    pairs = -np.logaddexp(0, t[None, :] - t[:, None])
    middle = -np.logaddexp(0, t) - np.logaddexp(0, -t)
    return float((wins * pairs).sum() + prior * middle.sum())


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.exp(-np.logaddexp(0, -x))
    return values
