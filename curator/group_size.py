"""How many rollouts the next group of a problem has, out of a few sizes: what pays best per token.

A group is one lesson on its problem, however large. It is one at all with the probability that its rewards differ,
E[1 - p^G - (1 - p)^G] over what is believed of p. And it is a lesson by a noisy measure: against the mean of all G
rewards (G - 1) / G of a reward's signal is left; against the mean of the others all of it, with G / (G - 1) times the
variance. Signal over noise, squared, is (G - 1) / G of that of a known baseline either way, and an advantage that is
divided by the group's deviation has both divided. A rollout costs the same in a group of any size, so that

    worth of a token in a group of G = E[1 - p^G - (1 - p)^G] (G - 1) / G^2

up to what is the problem's own. With p known the best of all sizes is 3 at p = 0.5, 5 at 0.1, 11 at 0.02 and 23 at
0.004. The choice is made of what is known before the group is sampled, so that it leaves the gradient of each group
what it is, and changes which share of a batch its problem has.

Pure numpy. S: sizes, P: problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes to choose from. Raises ValueError for ones that do not ascend, or below 2 where there are several."""
    if not sizes or any(a >= b for a, b in pairwise(sizes)) or (len(sizes) > 1 and sizes[0] < 2):
        raise ValueError(f"group_sizes = {list(sizes)}: expected whole numbers from 2 that ascend, as [4, 8, 16]")
    return tuple(sizes)


def token_worth(mixed_SP: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """mixed (G - 1) / G^2, [S, P]: of the probability that the rewards of a group of each size differ."""
    size_S = np.asarray(sizes, np.float64)
    worth_SP: NDArray[np.float64] = mixed_SP * ((size_S - 1.0) / np.square(size_S))[:, None]
    return worth_SP


def best_size(mixed_SP: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.int64]:
    """The place in `sizes` of the size that is worth most per token, [P]; of equal ones the smallest."""
    return np.asarray(np.argmax(token_worth(mixed_SP, sizes), axis=0), np.int64)


def of_place(value_SP: NDArray[np.float64], place_P: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values of the chosen sizes, [P]."""
    value_P: NDArray[np.float64] = np.take_along_axis(value_SP, place_P[None], axis=0)[0]
    return value_P
