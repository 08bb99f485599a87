"""The difference of two configurations on the same problems, with its interval. Pure numpy.

S seeds, P problems, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stream_grpo.evaluation import INTERVAL_PERCENTILES, NUM_RESAMPLES, ProblemScore, Rise


def paired_difference(
    first: Sequence[Mapping[str, ProblemScore]], other: Sequence[Mapping[str, ProblemScore]], seed: int
) -> Rise:
    """Mean difference of pass@1, other minus first, each problem paired with itself; both sides as means over seeds.

    Its 95 % percentile bootstrap (Efron 1979) draws problems with the rates of both sides, and of each side its seeds.
    With one seed a side only problems are drawn: what another seed would give is then not in the interval. With few it
    is there too little, by a factor of about sqrt(1 - 1/S).

    A problem that is without a scored sample in any run is left out. Raises ValueError where all are.
    """
    names = sorted(set.intersection(*(set(scores) for scores in (*first, *other))))
    first_SP, other_SP = _rates(first, names), _rates(other, names)
    known_P = ~np.isnan(first_SP).any(0) & ~np.isnan(other_SP).any(0)
    first_SP, other_SP = first_SP[:, known_P], other_SP[:, known_P]
    num_problems = int(known_P.sum())
    if not num_problems:
        raise ValueError("no problem was scored in every run")
    rng = np.random.default_rng(seed)
    # How often each problem is drawn is all that the mean of a resample depends on; likewise each seed.
    draws_RP = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), NUM_RESAMPLES) / num_problems
    means = [((_seed_draws(rng, len(rates_SP)) @ rates_SP) * draws_RP).sum(1) for rates_SP in (other_SP, first_SP)]
    low, high = np.percentile(means[0] - means[1], INTERVAL_PERCENTILES)
    mean = float(other_SP.mean() - first_SP.mean())
    return Rise(mean=mean, low=float(low), high=float(high), num_problems=num_problems)


def _rates(runs: Sequence[Mapping[str, ProblemScore]], names: Sequence[str]) -> NDArray[np.float64]:
    return np.array([[scores[name].pass_rate for name in names] for scores in runs], np.float64).reshape(len(runs), -1)


def _seed_draws(rng: np.random.Generator, num_seeds: int) -> NDArray[np.float64]:
    """[R, S] shares of the seeds in each resample."""
    draws: NDArray[np.float64] = (
        rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_RESAMPLES) / num_seeds
    )
    return draws


def mean_rate(scores: Mapping[str, ProblemScore]) -> float:
    """pass@1 over problems with a scored sample; nan where there is none."""
    rates = [score.pass_rate for score in scores.values() if score.num_scored]
    return sum(rates) / len(rates) if rates else math.nan
