"""Runs in which the age works out by itself, under one `max_policy_age` each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from recipes.verdict import interval
from time_to_score.scoring import Counts

from stream_grpo.experiments.cells import Cell, name_of


class Row(NamedTuple):
    """Runs of one `max_policy_age`, over their seeds."""

    max_policy_age: int
    num_seeds: int
    mean_age: float
    """Of the trained groups."""
    seconds: float
    """Of the loop, first sampling to last learner step."""
    least_s: float
    most_s: float
    """Over seeds."""
    rise: float
    """Of held-out pass@1."""
    low: float
    high: float
    """95 % interval of the rise, over seeds and problems."""
    score: float
    """Held-out pass@1 after training."""


def cells(ages: Iterable[int], seeds: Iterable[int]) -> list[Cell]:
    """Whole sweeps of a seed first."""
    ages = list(ages)
    return [
        Cell(
            name_of([f"age-{age}", f"seed-{seed}"]),
            {"stream.max_policy_age": str(age), "stream.publish_interval": "1", "run.seed": str(seed)},
        )
        for seed in seeds
        for age in ages
    ]


def result_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run that has ended, besides its scores."""
    return {
        "age": summary["age"]["mean"],
        "seconds": summary["loop_wall_s"],
        "steps": summary["steps"],
        "busy_s": summary["busy_s"],
        "trained_share": summary["trained_share"],
    }


def rows(
    results: Mapping[str, Mapping[str, Any]], before: Counts, ages: Sequence[int], seeds: Sequence[int]
) -> list[Row]:
    """`results`: by the name of their cell, with `counts`; `before`: of the weights that all begin with.

    An age without any result is left out.
    """
    found = []
    for age in ages:
        names = [cell.name for cell in cells([age], seeds)]
        if there := [results[name] for name in names if name in results]:
            found.append(row(age, there, before))
    return found


def row(age: int, results: Sequence[Mapping[str, Any]], before: Counts) -> Row:
    """Over seeds; the problems are the same in all of them. One that was not scored everywhere does not count."""
    everywhere = [before, *(result["counts"] for result in results)]
    problems = sorted(p for p in before if all(p in counts and counts[p][1] for counts in everywhere))
    rates = [[counts[p][0] / counts[p][1] for p in problems] for counts in everywhere]
    before_P, after_SP = np.array(rates[0]), np.array(rates[1:])
    low, high = interval(after_SP - before_P)
    seconds = [result["seconds"] for result in results]
    return Row(
        max_policy_age=age,
        num_seeds=len(results),
        mean_age=fmean(result["age"] for result in results),
        seconds=fmean(seconds),
        least_s=min(seconds),
        most_s=max(seconds),
        rise=float((after_SP - before_P).mean()),
        low=low,
        high=high,
        score=float(after_SP.mean()),
    )
