"""Which problems are asked no more, and which look broken: by posterior probability, so that both lapse by themselves.

Pure numpy. P: problems.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from curator.estimators.belief import Belief

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a problem retires, and when its failures are suspect."""

    solved_rate: float = 0.95
    hopeless_rate: float = 0.02
    certainty: float = 0.9
    """Posterior probability that the rate is beyond the limit."""
    min_groups: int = 2
    """One lucky group never retires a problem."""
    expected_rate: float = 0.3
    """A problem that fails is suspect only if others like it are expected to pass this often."""
    surprise: float = 0.01
    """And if so many failures in a row had at most this probability."""


def retired(belief: Belief, num_groups_P: NDArray[np.int64], limits: Limits = Limits()) -> tuple[Flags, Flags]:
    """(solved, hopeless): problems whose rate lies beyond a limit with the probability `certainty`.

    Solved: P(p > solved_rate) >= certainty; hopeless: P(p < hopeless_rate) >= certainty; either after `min_groups`.
    Nothing is stored: the floor still draws a retired problem now and then, and as the policy moves its posterior
    widens, so that either the draw or the doubt brings it back.
    """
    enough_P = num_groups_P >= limits.min_groups
    solved_P = enough_P & (belief.probability_above_P(limits.solved_rate) >= limits.certainty)
    hopeless_P = enough_P & (1.0 - belief.probability_above_P(limits.hopeless_rate) >= limits.certainty)
    return solved_P, hopeless_P


def suspects(
    others: Belief,
    has_passed_P: Flags,
    num_scored_P: NDArray[np.int64],
    num_groups_P: NDArray[np.int64],
    limits: Limits = Limits(),
) -> Flags:
    """Problems that always fail although all that is like them passes: a wrong gold, or a broken verifier.

    `others` is what is expected of each problem without its own groups (neighbours, domain, offline rate). After n
    failures of n rollouts, in `min_groups` or more, a problem is suspect where E[p] >= expected_rate and
    E[(1 - p)^n] <= surprise, both under `others`. They are for a person to look at.
    """
    never_P = ~has_passed_P & (num_groups_P >= limits.min_groups) & (others.mean_P >= limits.expected_rate)
    return never_P & (probability_of_none(others, np.where(never_P, num_scored_P, 0)) <= limits.surprise)


def probability_of_none(others: Belief, num_scored_P: NDArray[np.int64]) -> NDArray[np.float64]:
    """E[(1 - p)^n]: that none of n rollouts passes, n of each problem; above 64 it counts as 64, which says enough."""
    none_P = np.ones(len(num_scored_P))
    num_P = np.minimum(num_scored_P, _MOST_ROLLOUTS)
    # (1 - p)^n is the probability of no pass in a group of n: it is asked once for each n there is.
    for num in np.unique(num_P[num_P > 0]).tolist():
        none_K = np.zeros(num + 1)
        none_K[0] = 1.0
        none_P = np.where(num_P == num, others.group_value_P(none_K), none_P)
    return none_P


_MOST_ROLLOUTS = 64
