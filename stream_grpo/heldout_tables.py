"""What a headline hides: held-out pass@k by domain, and pass@1 by the length of answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stream_grpo.evaluation import (
    ALL,
    HEADLINE,
    ProblemScore,
    as_dicts,
    bootstrap_interval,
    by_domain,
    derived_seed,
    pass_at_k,
    summarize,
)


def pass_at_powers(
    scores: Sequence[ProblemScore], seed: int, headline_domains: Iterable[str] = ()
) -> dict[str, dict[str, dict[str, Any]]]:
    """Unbiased pass@1, 2, 4, 8, ... of every row of a summary, with 95 % intervals over problems; plain JSON values.

    {domain: {k: {value, low, high, num_problems}}}. The largest k is at most the samples of a problem; a problem with
    fewer than k that were scored says nothing of pass@k and is left out of it. Raises ValueError as `summarize` does.
    """
    most = max((score.num_scored for score in scores), default=0)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return {
        name: {str(k): _row(part, k, derived_seed(seed, name, k)) for k in powers}
        for name, part in by_domain(scores, headline_domains).items()
    }


def _row(scores: Sequence[ProblemScore], k: int, seed: int) -> dict[str, Any]:
    ordered = sorted((score for score in scores if score.num_scored >= k), key=lambda score: score.problem_id)
    if not ordered:
        return {"value": None, "low": None, "high": None, "num_problems": 0}
    values = np.array([pass_at_k(score.num_scored, score.num_passed, k) for score in ordered])
    low, high = bootstrap_interval(values, seed)
    return {"value": float(values.mean()), "low": low, "high": high, "num_problems": len(ordered)}


def length_buckets(scores: Iterable[ProblemScore]) -> dict[str, str]:
    """The bucket of each problem by the mean tokens of its samples; upper ends are powers of two, as in "33-64"."""
    return {score.problem_id: _bucket(score) for score in scores}


def _bucket(score: ProblemScore) -> str:
    mean = math.ceil(score.num_tokens / max(1, score.num_scored + score.num_unscored))
    upper = 1 << max(0, mean - 1).bit_length()
    return f"{upper // 2 + 1}-{upper}" if upper > 2 else {1: "0-1", 2: "2"}[upper]


def by_length(scores: Sequence[ProblemScore], buckets: Mapping[str, str], seed: int) -> dict[str, dict[str, Any]]:
    """pass@1 of the problems of each bucket with its interval, shortest first; plain JSON values.

    With the buckets of one evaluation, two of them speak of the same problems in every row. A problem without a bucket
    is in none.
    """
    known = [replace(s, domain=buckets[s.problem_id]) for s in scores if s.problem_id in buckets]
    rows = as_dicts(summarize(known, seed))
    order = sorted(rows.keys() - {ALL, HEADLINE}, key=lambda label: int(label.rpartition("-")[2]))
    return {label: rows[label] for label in order}


def report_lines(summary: Mapping[str, Any]) -> list[str]:
    """What the end of a run says of pass@k and of lengths, before and after training."""
    powers, lengths = summary["heldout_pass_at_k"], summary["heldout_by_length"]
    if not powers:
        return []
    pass_at_k = [
        f"@{k} {_percent(row['value'])} to {_percent(powers['after'][HEADLINE].get(k, {}).get('value'))}"
        for k, row in powers["before"][HEADLINE].items()
    ]
    by_tokens = [
        f"{label} {_percent(row['pass_at_1'])} to {_percent(lengths['after'].get(label, {}).get('pass_at_1'))}"
        for label, row in lengths["before"].items()
    ]
    return ["pass     " + ", ".join(pass_at_k), "lengths  in tokens before: " + ", ".join(by_tokens)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
