"""A pool in figures, and one problem with what it has scored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow.compute as pc

from curator.errors import PoolError
from curator.pool import Pool
from curator.schema import outcomes_from_batch

MAX_LAST = 10


def problem_with_history(pool: Pool, problem_id: str) -> dict[str, Any]:
    """A problem as plain values, with its outcomes summed up and the last ones. Raises PoolError for an unknown id."""
    problem = pool.find(problem_id)
    if problem is None:
        raise PoolError(f"{pool.path}: no problem has the id '{problem_id}'")
    table = pool.outcomes()
    table = table.filter(pc.equal(table["problem_id"], problem_id))
    outcomes = [outcome for batch in table.to_batches() for outcome in outcomes_from_batch(batch)]
    return {
        "problem_id": problem.problem_id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "verifier": problem.verifier,
        "domain": problem.domain,
        "source": problem.source,
        "extra": problem.extra,
        "groups": len(outcomes),
        "passed": sum(outcome.num_passed for outcome in outcomes),
        "failed": sum(outcome.num_failed for outcome in outcomes),
        "unscored": sum(outcome.num_unscored for outcome in outcomes),
        "tokens": sum(outcome.num_tokens for outcome in outcomes),
        "fates": dict(Counter(outcome.fate for outcome in outcomes)),
        "last": [
            {
                "step": round(outcome.mean_step, 2),
                "passed": outcome.num_passed,
                "failed": outcome.num_failed,
                "unscored": outcome.num_unscored,
                "fate": outcome.fate,
            }
            for outcome in outcomes[-MAX_LAST:]
        ],
    }


def pool_in_figures(pool: Pool) -> dict[str, Any]:
    """How many problems a pool has, by verifier, domain and source, and how many outcomes."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("verifier", "domain", "source")}
    for batch in pool.problem_batches():
        for name, counter in counts.items():
            counter.update(batch[name].to_pylist())
    return {
        "pool": str(pool.path),
        "problems": pool.num_problems(),
        "version": pool.version,
        "versions": pool.versions(),
        **{f"{name}s": dict(counter.most_common()) for name, counter in counts.items()},
        "outcomes": pool.last_sequence() + 1,
    }
