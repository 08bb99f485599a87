"""What a group teaches, by the number of its passes: one row of values for each advantage estimator.

A belief gives the expectation: `belief.group_value_P(mixed_K(8))`. Pure numpy. K: passes of a group, 0 to G.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mixed_K(group_size: int) -> Floats:
    """1 where rewards differ: the expectation is 1 - p^G - (1 - p)^G, the share of groups that can be trained on."""
    passes_K = np.arange(_checked(group_size) + 1)
    return ((passes_K > 0) & (passes_K < group_size)).astype(np.float64)


def centered_K(group_size: int) -> Floats:
    """k (G - k) / (G (G - 1)), the unbiased variance of the rewards: the expectation is p (1 - p).

    That is the squared length of the advantage r - mean of one rollout, up to (G - 1) / G: the signal of advantages
    that are centred and not scaled (`centered`, `rloo`). 0 for a group of one.
    """
    passes_K = np.arange(_checked(group_size) + 1, dtype=np.float64)
    return passes_K * (group_size - passes_K) / max(1, group_size * (group_size - 1))


def scaled_K(group_size: int) -> Floats:
    """sqrt(k (G - k)) / G, the deviation of the rewards: what a group moves along p when advantages are divided by it.

    The gradient of sum of A_i log pi with A_i = (r_i - mean) / std is that of the centred one over its deviation.
    """
    passes_K = np.arange(_checked(group_size) + 1, dtype=np.float64)
    return np.sqrt(passes_K * (group_size - passes_K)) / group_size


VALUES: Mapping[str, Callable[[int], Floats]] = {"mixed": mixed_K, "centered": centered_K, "scaled": scaled_K}
"""By the name of `curator.signal`."""


def _checked(group_size: int) -> int:
    if group_size < 1:
        raise ValueError(f"group_size = {group_size}: a group has at least one rollout")
    return group_size
