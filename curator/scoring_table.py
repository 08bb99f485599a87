"""A scored pool as a table: one row a problem, for Parquet and for what is said at the end."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from curator.errors import PoolError
from curator.schema import Problem
from curator.scoring import GROUP_SIZES, Beta, expected_mixed, lowest_mixed, mixed_unbiased, wilson
from curator.scoring_run import Tally, priors_of
from curator.verdicts import CREDIT_KEYS, Rule, credit_of, credits, verdict

SCORE_SCHEMA = pa.schema(
    [
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("verifier", pa.string(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("passed", pa.int32(), nullable=False),
        pa.field("unscored", pa.int32(), nullable=False),
        pa.field("rate", pa.float64()),
        pa.field("rate_low", pa.float64(), nullable=False),
        pa.field("rate_high", pa.float64(), nullable=False),
        pa.field("posterior_rate", pa.float64(), nullable=False),
        pa.field("reward_variance", pa.float64()),
        *(pa.field(f"mixed_{size}", pa.float64(), nullable=False) for size in GROUP_SIZES),
        *(pa.field(f"mixed_{size}_unbiased", pa.float64()) for size in GROUP_SIZES),
        pa.field("signal_low", pa.float64(), nullable=False),
        pa.field("truncated_share", pa.float64()),
        pa.field("unique_texts", pa.int32(), nullable=False),
        pa.field("unique_answers", pa.int32(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("keep", pa.bool_(), nullable=False),
        pa.field("why", pa.string(), nullable=False),
        pa.field("credit", pa.string()),
    ],
    metadata={"schema": "curator.score", "schema_version": "1"},
)
"""See docs/score.md for the columns."""


def score_rows(
    problems: Sequence[Problem], tallies: Mapping[str, Tally], rule: Rule, credit_keys: Sequence[str] = CREDIT_KEYS
) -> list[dict[str, Any]]:
    """The rows of SCORE_SCHEMA, in the order of the problems."""
    priors = priors_of(problems, tallies)
    return [
        _row(problem, tallies[problem.problem_id], priors[problem.domain], rule, credit_keys) for problem in problems
    ]


def _row(problem: Problem, tally: Tally, prior: Beta, rule: Rule, credit_keys: Sequence[str]) -> dict[str, Any]:
    known = prior.after(tally.passed, tally.scored)
    interval = wilson(tally.passed, tally.scored)
    credit = credit_of(problem, credit_keys)
    keep, why = verdict(tally, known, rule, is_synthetic=credit is not None)
    return {
        "problem_id": problem.problem_id,
        "domain": problem.domain,
        "verifier": problem.verifier,
        "attempts": tally.attempts,
        "passed": tally.passed,
        "unscored": tally.unscored,
        "rate": tally.passed / tally.scored if tally.scored else None,
        "rate_low": interval.low,
        "rate_high": interval.high,
        "posterior_rate": known.mean,
        "reward_variance": variance(tally.rewards),
        **{f"mixed_{size}": expected_mixed(known, size) for size in GROUP_SIZES},
        **{f"mixed_{size}_unbiased": mixed_unbiased(tally.passed, tally.scored, size) for size in GROUP_SIZES},
        "signal_low": lowest_mixed(interval, rule.group_size),
        "truncated_share": tally.num_cut / tally.attempts if tally.attempts else None,
        "unique_texts": len(tally.texts),
        "unique_answers": len(tally.answers),
        "tokens": tally.num_tokens,
        "keep": keep,
        "why": why,
        "credit": credit,
    }


def variance(rewards: Sequence[float]) -> float | None:
    """Unbiased: sum (r - mean)^2 / (n - 1); None for fewer than two."""
    if len(rewards) < 2:
        return None
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)


def write_scores(rows: Sequence[Mapping[str, Any]], path: Path, header: Mapping[str, Any]) -> None:
    """Write the rows as Parquet, whole or not at all; `header` goes into its metadata. Raises PoolError."""
    schema = SCORE_SCHEMA.with_metadata({**SCORE_SCHEMA.metadata, "scoring": json.dumps(header)})
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows), schema), beside)
        beside.replace(path)
    except OSError as error:
        raise PoolError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def summary(rows: Sequence[dict[str, Any]], screen: int) -> dict[str, Any]:
    """A scored pool in figures."""
    reasons = Counter(str(row["why"]).partition(":")[0] for row in rows if not row["keep"])
    attempts = sum(row["attempts"] for row in rows)
    return {
        "problems": len(rows),
        "kept": sum(row["keep"] for row in rows),
        "dropped": dict(reasons.most_common()),
        "samples": attempts,
        "samples_of_second_stage": sum(max(0, row["attempts"] - screen) for row in rows),
        "unscored": sum(row["unscored"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "expected_mixed_share": {
            str(size): round(sum(row[f"mixed_{size}"] for row in rows) / max(1, len(rows)), 4) for size in GROUP_SIZES
        },
        "credits": [credit._asdict() for credit in credits(rows)],
    }


def summary_text(figures: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    dropped = ", ".join(f"{why} ({num})" for why, num in figures["dropped"].items()) or "none"
    shares = ", ".join(f"{share:.0%} of {size}" for size, share in figures["expected_mixed_share"].items())
    lines = [
        f"{figures['problems']} problems: {figures['kept']} kept; dropped: {dropped}",
        f"{figures['samples']} samples, {figures['samples_of_second_stage']} of them in the second stage, "
        f"{figures['unscored']} unscored, {figures['tokens']} tokens",
        f"groups with signal to expect, problems drawn alike: {shares}",
    ]
    lines += [
        f"{credit['name']}: {credit['num_kept']} of {credit['num_problems']} kept, signal at least "
        f"{credit['signal']:.3f} on average, {credit['num_tokens']} tokens"
        for credit in figures["credits"][:20]
    ]
    return "\n".join(lines)
