"""Which problem next: probabilities from the expected signal, and reproducible draws.

Pure numpy. P: problems, by index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Part(NamedTuple):
    """One way to draw, and its share of the draws."""

    share: float
    q_P: NDArray[np.float64]
    """Probability of each problem at a draw of this part; sums to 1."""


def mixture(parts: Sequence[Part]) -> NDArray[np.float64]:
    """Probability of each problem at the next draw: the sum of share q over the parts."""
    q_P: NDArray[np.float64] = np.sum([part.share * part.q_P for part in parts], axis=0)
    return q_P


def selection_parts(
    signal_P: NDArray[np.float64], in_flight_P: NDArray[np.bool_], exploration: float, sharpness: float = 1.0
) -> list[Part]:
    """Draws by signal^s / sum(signal^s), s the sharpness, and a share e of draws that are uniform.

    At s = 1 a problem of half the signal is drawn half as often; above, the best are preferred more strongly.
    Over the n problems that are not in flight; 0 for the others. Uniform over these n where their signal is 0
    throughout. Where every problem is in flight, all count as free: a pool smaller than what is in flight must not
    stall. `signal_P` [P] finite, not negative; `in_flight_P` [P]; `exploration` is e in [0, 1];
    `sharpness` is s >= 0.

    Raises ValueError for an empty pool, a negative or infinite signal, e outside [0, 1] or a negative s.
    """
    if not 0 <= exploration <= 1:
        raise ValueError(f"exploration = {exploration}: expected in [0, 1]")
    if sharpness < 0:
        raise ValueError(f"sharpness = {sharpness}: expected 0 or more")
    _, uniform_P, share_P = _free_shares(signal_P, in_flight_P, sharpness)
    if not share_P.any():
        return [Part(1.0, uniform_P)]
    return [Part(1.0 - exploration, share_P / share_P.sum()), Part(exploration, uniform_P)]


def selection_probabilities(
    signal_P: NDArray[np.float64], in_flight_P: NDArray[np.bool_], exploration: float, sharpness: float = 1.0
) -> NDArray[np.float64]:
    """Probability of each problem at the next draw: q = (1 - e) signal^s / sum(signal^s) + e / n.

    See `selection_parts`, which says what is refused.
    """
    return mixture(selection_parts(signal_P, in_flight_P, exploration, sharpness))


def _free_shares(
    value_P: NDArray[np.float64], in_flight_P: NDArray[np.bool_], sharpness: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
    """Which are free, uniform probabilities over these, and their values to a power over the largest's."""
    if value_P.size == 0:
        raise ValueError("no problems to choose from")
    if not np.all(np.isfinite(value_P) & (value_P >= 0)):
        raise ValueError("an expected signal or worth is finite and not negative")
    free_P = np.ones(value_P.size, np.bool_) if in_flight_P.all() else ~in_flight_P
    uniform_P: NDArray[np.float64] = free_P / np.count_nonzero(free_P)
    free_value_P = np.where(free_P, value_P, 0.0)
    largest = float(free_value_P.max())
    if largest == 0:
        return free_P, uniform_P, np.zeros(value_P.size)
    # Divided by the largest first: the sum of subnormal values has no inverse.
    return free_P, uniform_P, np.where(free_P, np.power(free_value_P / largest, sharpness), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the next draw is divided. What neither floor nor unseen take goes by worth."""

    sharpness: float = 8.0
    """Worth counts to this power."""
    floor: float = 0.05
    """Uniform over all problems, so that none is forgotten, whatever is believed of it."""
    unseen: float = 0.05
    """Uniform over the problems never sampled."""
    domain: float = 0.5
    """Part of what goes by worth that is divided equally between domains; the rest goes wherever the worth is."""

    def __post_init__(self) -> None:
        for name in ("floor", "unseen", "domain"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected in [0, 1]")
        if self.floor + self.unseen > 1:
            raise ValueError(f"floor + unseen = {self.floor + self.unseen}: expected at most 1")
        if not self.sharpness >= 0:
            raise ValueError(f"sharpness = {self.sharpness}: expected 0 or more")


def shared_parts(
    worth_P: NDArray[np.float64],
    in_flight_P: NDArray[np.bool_],
    is_unseen_P: NDArray[np.bool_],
    domain_P: NDArray[np.int64],
    shares: Shares = Shares(),
) -> list[Part]:
    """Draws by worth, with a floor, the unseen and the domains in mind. Together:

        q = (1 - floor - unseen) w + floor / n + unseen [is unseen] / n_unseen
        w = (1 - domain) u / sum(u) + domain u / (sum of u in its domain) / (domains with u > 0),    u = worth^sharpness

    Over the n problems that are not in flight, 0 for the others; where all are in flight, all count as free. Without a
    free unseen problem its share goes by worth, and without any worth all is uniform. Probabilities by the expected
    value need no draw from the posterior: what is uncertain is expected to be worth something for that alone.

    Raises ValueError for an empty pool, or a worth that is negative or infinite.
    """
    free_P, uniform_P, share_P = _free_shares(worth_P, in_flight_P, shares.sharpness)
    if not share_P.any():
        return [Part(1.0, uniform_P)]
    sum_D = np.bincount(domain_P, share_P).astype(np.float64)
    by_domain_P = share_P / _or_1(sum_D)[domain_P] / np.count_nonzero(sum_D)
    by_worth_P = (1.0 - shares.domain) * share_P / share_P.sum() + shares.domain * by_domain_P
    free_unseen_P = free_P & is_unseen_P
    unseen = shares.unseen if free_unseen_P.any() else 0.0
    parts = [Part(1.0 - shares.floor - unseen, by_worth_P), Part(shares.floor, uniform_P)]
    return [*parts, Part(unseen, free_unseen_P / np.count_nonzero(free_unseen_P))] if unseen else parts


def shared_probabilities(
    worth_P: NDArray[np.float64],
    in_flight_P: NDArray[np.bool_],
    is_unseen_P: NDArray[np.bool_],
    domain_P: NDArray[np.int64],
    shares: Shares = Shares(),
) -> NDArray[np.float64]:
    """Probability of each problem at the next draw: the mixture of `shared_parts`."""
    return mixture(shared_parts(worth_P, in_flight_P, is_unseen_P, domain_P, shares))


def _or_1(sum_D: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(sum_D > 0, sum_D, 1.0)


def candidates(num_problems: int, limit: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices among which the next draw is made: all, or a random part of a pool of more than `limit`, ascending.

    One problem of each of `limit` equal stretches of the pool, so each has the probability limit / num_problems,
    or hardly less.
    """
    if num_problems <= limit:
        return np.arange(num_problems)
    edges = np.linspace(0, num_problems, limit + 1)
    # The stretches differ in whole numbers by 1; drawn on the real line each problem is as likely as another.
    drawn = (edges[:-1] + rng.random(limit) * (num_problems / limit)).astype(np.int64)
    drawn = np.minimum(drawn, num_problems - 1)
    # They ascend already; two of neighbouring stretches may be the same.
    return drawn[np.diff(drawn, prepend=-1) > 0]


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
        first = _smallest(rings, num)
        rounds.append(support[first].astype(np.int64))
        num -= first.size
    return np.concatenate(rounds)


def _smallest(value: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """Where the `num` smallest are, the smallest first, equal ones in their order: a sort of these alone."""
    if num >= value.size:
        return np.argsort(value, kind="stable")
    among = np.flatnonzero(value <= np.partition(value, num - 1)[num - 1])
    return among[np.argsort(value[among], kind="stable")[:num]]


def draw_parts(parts: Sequence[Part], num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`num` different problems, or as many as have a positive probability, in the order drawn.

    How many each part draws is decided first, by the shares. Drawn from the mixture without replacement instead, the
    best problems of a block would soon be gone, and the rest of it would be left to the floor. What a part cannot
    fill, the next ones do.
    """
    left_P = mixture(parts) > 0
    num = min(num, int(np.count_nonzero(left_P)))
    shares = np.array([part.share for part in parts])
    counts = rng.multinomial(num, shares / shares.sum()).tolist()
    drawn: list[NDArray[np.int64]] = []
    missing = 0
    # Twice around: what the last parts cannot fill, the first ones may.
    for part, count in (*zip(parts, counts, strict=True), *((part, 0) for part in parts)):
        q_P = np.where(left_P, part.q_P, 0.0)
        wanted = count + missing
        taken = min(wanted, int(np.count_nonzero(q_P))) if part.share > 0 else 0
        missing = wanted - taken
        if taken:
            drawn.append(draw(q_P, taken, rng))
            left_P[drawn[-1]] = False
    return np.concatenate(drawn)


def draw_rng(seed: int, group_id: str) -> np.random.Generator:
    """The random numbers of the draw that begins with a group: the same in every process, whatever was drawn before."""
    digest = hashlib.sha256(f"{seed}/{group_id}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
