"""What the results say: the rise of every preset at every lag with its interval, and which preset is the default.

S seeds, P held-out problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

DECIDING_LAGS = (4, 16)
NUM_RESAMPLES = 2000
PERCENTILES = (2.5, 97.5)


class Row(NamedTuple):
    """A preset at a lag, over its seeds."""

    preset: str
    lag: int
    num_seeds: int
    rise: float
    low: float
    high: float
    """95 % interval of the rise; see `interval`."""
    reward: float | None
    """Mean of the last tenth of the steps, over all rollouts sampled in them."""
    ess: float | None
    clip_share: float | None
    """Tokens without gradient because the ratio left its bounds; None where the weight has none."""
    mask_share: float | None
    """Tokens that were rejected; None where nothing rejects any."""
    age: float | None
    num_ended_early: int


def interval(differences_SP: Any) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean rise: seeds and problems are both drawn with replacement.

    Both are crossed, every seed is measured on every problem, so that a draw is a set of seeds and a set of problems
    (Owen 2007, "The pigeonhole bootstrap"). With one seed it is the bootstrap over problems alone.
    """
    values_SP = np.asarray(differences_SP, np.float64)
    num_seeds, num_problems = values_SP.shape
    rng = np.random.default_rng(0)
    seeds = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_RESAMPLES)
    problems = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), NUM_RESAMPLES)
    means = np.einsum("rs,sp,rp->r", seeds, values_SP, problems) / values_SP.size
    low, high = np.percentile(means, PERCENTILES)
    return float(low), float(high)


def rows(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row for each preset and lag, lag by lag, the best lower bound first."""
    parts: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for result in results:
        parts.setdefault((result["preset"], result["lag"]), []).append(result)
    table = [_row(preset, lag, part) for (preset, lag), part in parts.items()]
    return sorted(table, key=lambda row: (row.lag, -row.low, row.preset))


def _row(preset: str, lag: int, results: Sequence[Mapping[str, Any]]) -> Row:
    differences_SP = [(np.array(r["passed_after"]) - np.array(r["passed_before"])) / r["num_samples"] for r in results]
    low, high = interval(differences_SP)
    return Row(
        preset=preset,
        lag=lag,
        num_seeds=len(results),
        rise=float(np.mean(differences_SP)),
        low=low,
        high=high,
        reward=_mean(_mean(r["rewards"][-max(1, len(r["rewards"]) // 10) :]) for r in results),
        ess=_mean(r.get("ess") for r in results),
        clip_share=_mean(
            r["clip_share_low"] + r["clip_share_high"] if "clip_share_low" in r else None for r in results
        ),
        mask_share=_mean(r.get("mask_share") for r in results),
        age=_mean(r["age"] for r in results),
        num_ended_early=sum(r["ended_early"] is not None for r in results),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def best(table: Iterable[Row], lags: Sequence[int]) -> list[str]:
    """Presets that were measured at all these lags, by the smallest of their lower bounds, the largest of them first.

    A preset is as good as the lag that it bears worst; one that came to a stop anywhere is not among them.
    """
    lows: dict[str, dict[int, float]] = {}
    for row in table:
        lows.setdefault(row.preset, {})[row.lag] = row.low if not row.num_ended_early else -np.inf
    worst = {preset: min(by_lag[lag] for lag in lags) for preset, by_lag in lows.items() if set(lags) <= by_lag.keys()}
    return sorted((preset for preset in worst if worst[preset] > -np.inf), key=lambda preset: (-worst[preset], preset))


def markdown(table: Iterable[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| lag | preset | seeds | rise | 95 % | reward at the end | ess | clipped | masked | mean age | ended early |",
        "|---:|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        means = (row.reward, row.ess, row.clip_share, row.mask_share)
        cells = [str(row.lag), row.preset, str(row.num_seeds), f"{row.rise:+.3f}", f"{row.low:+.3f} to {row.high:+.3f}"]
        cells += ["-" if value is None else f"{value:.3f}" for value in means]
        cells += ["-" if row.age is None else f"{row.age:g}", str(row.num_ended_early)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
