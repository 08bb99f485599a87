"""Runs in which the age works out by itself, under one `max_policy_age` each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from stream_grpo.experiments.cells import Cell, name_of
from stream_grpo.files import read_object

MEASURED = "headline"


class Row(NamedTuple):
    """Runs of one `max_policy_age`, over their seeds."""

    max_policy_age: int
    num_seeds: int
    mean_age: float
    """Of the trained groups."""
    seconds: float
    """Of the loop, first sampling to last learner step."""
    rise: float
    """Of held-out pass@1."""
    low: float
    high: float
    """Mean over seeds of the ends of their 95 % intervals over problems."""
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


def rows(runs: Mapping[str, Path], ages: Sequence[int], seeds: Sequence[int]) -> list[Row]:
    """`runs`: folders by the name of their cell, all ended; those of an age without any are left out."""
    found = []
    for age in ages:
        names = [cell.name for cell in cells([age], seeds)]
        if summaries := [read_object(runs[name] / "summary.json") for name in names if name in runs]:
            found.append(row(age, summaries))
    return found


def row(age: int, summaries: Sequence[Mapping[str, Any]]) -> Row:
    """Means over runs."""
    rises = [summary["heldout_rise"] for summary in summaries]
    return Row(
        max_policy_age=age,
        num_seeds=len(summaries),
        mean_age=fmean(summary["age"]["mean"] for summary in summaries),
        seconds=fmean(summary["loop_wall_s"] for summary in summaries),
        rise=fmean(rise["mean"] for rise in rises),
        low=fmean(rise["low"] for rise in rises),
        high=fmean(rise["high"] for rise in rises),
        score=fmean(summary["heldout_after"][MEASURED]["pass_at_1"] for summary in summaries),
    )
