"""Which problem next: probabilities from the expected signal, and reproducible draws.

Pure numpy. P: problems, by index.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def selection_probabilities(
    signal_P: NDArray[np.float64], in_flight_P: NDArray[np.bool_], exploration: float, sharpness: float = 1.0
) -> NDArray[np.float64]:
    """Probability of each problem at the next draw: q = (1 - e) signal^s / sum(signal^s) + e / n, s the sharpness.

    At s = 1 a problem of half the signal is drawn half as often; above, the best are preferred more strongly.
    Over the n problems that are not in flight; 0 for the others. Uniform over these n where their signal is 0
    throughout. Where every problem is in flight, all count as free: a pool smaller than what is in flight must not
    stall. `signal_P` [P] finite, not negative; `in_flight_P` [P]; `exploration` is e in [0, 1];
    `sharpness` is s >= 0.

    Raises ValueError for an empty pool, a negative or infinite signal, e outside [0, 1] or a negative s.
    """
    if signal_P.size == 0:
        raise ValueError("no problems to choose from")
    if not np.all(np.isfinite(signal_P) & (signal_P >= 0)):
        raise ValueError("an expected signal is finite and not negative")
    if not 0 <= exploration <= 1:
        raise ValueError(f"exploration = {exploration}: expected in [0, 1]")
    if sharpness < 0:
        raise ValueError(f"sharpness = {sharpness}: expected 0 or more")
    free_P = np.ones(signal_P.size, np.bool_) if in_flight_P.all() else ~in_flight_P
    uniform_P: NDArray[np.float64] = free_P / np.count_nonzero(free_P)
    free_signal_P = np.where(free_P, signal_P, 0.0)
    largest = free_signal_P.max()
    if largest == 0:
        return uniform_P
    # Divided by the largest first: the sum of subnormal signals has no inverse.
    share_P = np.where(free_P, (free_signal_P / largest) ** sharpness, 0.0)
    q_P: NDArray[np.float64] = (1.0 - exploration) * (share_P / share_P.sum()) + exploration * uniform_P
    return q_P


def draw(q_P: NDArray[np.float64], num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`num` problems, one after the other by probability q, in the order drawn.

    Without replacement as long as problems with q > 0 are left, then from all of these again. Drawing one after the
    other is the same as a race of exponential clocks of rate q: the first to ring are the draw (Efraimidis and
    Spirakis 2006, "Weighted random sampling with a reservoir").

    Raises ValueError where no probability is positive.
    """
    support = np.flatnonzero(q_P > 0)
    if support.size == 0:
        raise ValueError("no problem has a positive probability")
    rounds: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    while num > 0:
        # A clock of a rate near 0 may ring later than any number: then it rings last.
        with np.errstate(over="ignore"):
            rings = rng.standard_exponential(support.size) / q_P[support]
        first = np.argsort(rings, kind="stable")[:num]
        rounds.append(support[first].astype(np.int64))
        num -= first.size
    return np.concatenate(rounds)


def draw_rng(seed: int, group_id: str) -> np.random.Generator:
    """The random numbers of the draw that begins with a group: the same in every process, whatever was drawn before."""
    digest = hashlib.sha256(f"{seed}/{group_id}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
