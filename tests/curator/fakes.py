"""Builders of problems and outcomes."""

from __future__ import annotations

from pathlib import Path

from curator.curation import Curation
from curator.pool import Pool
from curator.schema import Outcome, Problem


def make_problems(num: int) -> list[Problem]:
    return [
        Problem(problem_id=f"p{i:04d}", prompt=f"{i}+1=", answer=str(i + 1), verifier="exact", domain="add")
        for i in range(num)
    ]


def make_pool(path: Path, num: int = 5) -> Pool:
    return Pool.create(path, make_problems(num))


def make_outcome(
    sequence: int,
    problem_id: str = "p0000",
    *,
    passed: int = 1,
    failed: int = 1,
    unscored: int = 0,
    truncated: int = 0,
    fate: str = "accepted",
    group_id: str | None = None,
    mean: float | None = None,
) -> Outcome:
    scored = passed + failed
    computed = passed / scored if scored else float("nan")
    return Outcome(
        sequence=sequence,
        group_id=f"g{sequence}" if group_id is None else group_id,
        problem_id=problem_id,
        domain="add",
        num_passed=passed,
        num_failed=failed,
        num_unscored=unscored,
        mean_reward=computed if mean is None else mean,
        reward_spread=1.0 if passed and failed else 0.0,
        num_truncated=truncated,
        branch=0,
        min_step=sequence,
        max_step=sequence,
        mean_step=float(sequence),
        num_tokens=10,
        seconds=0.5,
        fate=fate,
    )


def make_curation(pool: Pool, *, flush_outcomes: int = 512, exploration: float = 0.1, seed: int = 0) -> Curation:
    """With the sliding rate, whose probabilities can be computed by hand."""
    return Curation(
        pool,
        group_size=4,
        estimator="sliding_rate",
        flush_outcomes=flush_outcomes,
        exploration=exploration,
        seed=seed,
    )
