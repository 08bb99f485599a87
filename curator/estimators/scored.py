"""Pass rates of a pool that one policy has scored: the small call for curating without training."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from curator.estimators.belief import Belief, beta_of_counts
from curator.estimators.features import Features
from curator.estimators.item_response import ItemResponse, Prior


def rates_of_counts(num_passed_P: ArrayLike, num_scored_P: ArrayLike, features: Features | None = None) -> Belief:
    """What is believed of each problem's pass rate, by index, after so many passes of so many scored rollouts.

    Without features each problem stands for itself, with Jeffreys' prior. With them (`features_of`) problems of one
    domain, of like length, text or offline rate tell of one another: those with 0 scored rollouts are predicted too.
    Passes may be a sum of graded rewards. The result gives `mean_P`, `quantile_P(0.05)`, `probability_above_P(0.95)`
    and `group_value_P(mixed_K(8))`, the probability that the rewards of a group of 8 differ.

    Raises ValueError for counts that are no counts.
    """
    belief = beta_of_counts(num_passed_P, num_scored_P)
    if features is None:
        return belief
    model = ItemResponse(features, Prior(shared_drift=0.0, number_drift=0.0, own_drift=0.0, own_variance=2.0))
    passed_P, scored_P = np.asarray(num_passed_P, np.float64), np.asarray(num_scored_P)
    for index in np.flatnonzero(scored_P).tolist():
        model.observe(index, float(passed_P[index]), int(scored_P[index]), 0.0)
    return model.predict()
