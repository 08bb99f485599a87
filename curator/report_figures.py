"""What a pool's outcomes say, as numbers: difficulty by domain, how it moved, why groups had no signal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from curator.errors import PoolError
from curator.pool import Pool

MAX_DOMAINS = 12
"""Shown by name, the largest; all further ones are one row."""
OTHERS, NO_DOMAIN = "(others)", "(none)"
NUM_RATE_BINS = 10
MAX_STEP_BINS = 20
MAX_QUARANTINED = 200
SIGNAL, TOO_EASY, TOO_HARD, CUT, UNSCORED, COARSE = (
    "signal",
    "too easy: all passed",
    "too hard: all failed",
    "cut: all failed, half of them or more at the length limit",
    "verifier: too few answers could be scored",
    "coarse: passes and failures with equal rewards",
)
CAUSES = (SIGNAL, TOO_EASY, TOO_HARD, CUT, UNSCORED, COARSE)
CUT_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainFigures:
    """The problems of one domain."""

    domain: str
    num_problems: int
    num_sampled: int
    """Problems with a scored answer."""
    num_groups: int
    num_tokens: int
    rate: float | None
    """Passed over scored; None where nothing was scored."""
    rate_bins: tuple[int, ...]
    """Sampled problems by their rate, NUM_RATE_BINS bins from 0 to 1."""
    causes: tuple[int, ...]
    """Groups by CAUSES."""
    moved: tuple[float | None, ...]
    """The rate in each bin of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """All that a report shows; JSON holds it as it is."""

    pool: str
    version: int
    num_problems: int
    num_outcomes: int
    rates_from: str
    """`outcomes`, or `scores` where the pool has none and was scored."""
    step_edges: tuple[float, ...]
    """Of the bins of steps."""
    domains: tuple[DomainFigures, ...]
    fates: Mapping[str, int]
    imported: Mapping[str, Any] | None
    """What the report of the import says of rows."""
    scored: Mapping[str, Any] | None
    """What `curator score` says of the problems."""
    quarantine: tuple[Mapping[str, Any], ...] | None
    """None where no list is kept."""

    def causes(self) -> dict[str, int]:
        """Groups of all domains by why they had signal or none."""
        return {cause: sum(domain.causes[i] for domain in self.domains) for i, cause in enumerate(CAUSES)}


def report_of(pool: Pool, *, scores: Path | None = None, import_report: Path | None = None) -> PoolReport:
    """The report of a pool. Raises PoolError for a file or a table that cannot be read."""
    outcomes = pool.outcomes()
    ids, domains = pool.problem_ids, pool.domains
    shown, of_problem = _shown_domains(domains)
    counts = _Counts(outcomes, {problem_id: i for i, problem_id in enumerate(ids)})
    scored = None if scores is None else _read_scores(scores)
    passed, total = counts.by_problem(len(ids))
    rates_from = "outcomes"
    if not outcomes.num_rows and scored is not None:
        rates_from = "scores"
        passed, total = _counts_of_scores(scored, {problem_id: i for i, problem_id in enumerate(ids)})
    edges = counts.step_edges()
    quarantine = pool.further_table("quarantine")
    return PoolReport(
        pool=str(pool.path),
        version=pool.version,
        num_problems=len(ids),
        num_outcomes=outcomes.num_rows,
        rates_from=rates_from,
        step_edges=tuple(edges.tolist()),
        domains=tuple(_domain(name, of_problem == i, passed, total, counts, edges) for i, name in enumerate(shown)),
        fates={str(fate["values"]): int(fate["counts"]) for fate in pc.value_counts(outcomes["fate"]).to_pylist()},
        imported=None if import_report is None else _read_import(import_report),
        scored=None if scored is None else _scored(scored),
        quarantine=None
        if quarantine is None
        else tuple(map(_without_nan, quarantine.slice(0, MAX_QUARANTINED).to_pylist())),
    )


def cause_of_groups(
    passed: NDArray[Any], failed: NDArray[Any], unscored: NDArray[Any], cut: NDArray[Any], spread: NDArray[Any]
) -> NDArray[np.int64]:
    """[N] index into CAUSES: why each group had signal or none.

    Signal is rewards that differ. Of one scored answer or none nothing can differ; that is the verifier's doing.
    """
    scored = passed + failed
    size = scored + unscored
    return np.select(
        [
            spread > 0,
            scored < 2,
            failed == 0,
            (passed == 0) & (cut >= CUT_SHARE * size),
            passed == 0,
        ],
        [CAUSES.index(cause) for cause in (SIGNAL, UNSCORED, TOO_EASY, CUT, TOO_HARD)],
        CAUSES.index(COARSE),
    ).astype(np.int64)


class _Counts:
    """The outcomes of problems that the pool has, as arrays [N]."""

    def __init__(self, outcomes: pa.Table, index: Mapping[str, int]) -> None:
        places = np.array([index.get(name, -1) for name in outcomes["problem_id"].to_pylist()], np.int64)
        known = places >= 0
        self.problem = places[known]
        columns = (
            "num_passed",
            "num_failed",
            "num_unscored",
            "num_truncated",
            "reward_spread",
            "mean_step",
            "num_tokens",
        )
        values = [outcomes[name].to_numpy()[known] for name in columns]
        self.passed, self.failed, unscored, cut, spread, self.step, self.tokens = values
        self.cause = cause_of_groups(self.passed, self.failed, unscored, cut, spread)

    def by_problem(self, num: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[P] passed, [P] scored."""
        passed = np.bincount(self.problem, self.passed, num).astype(np.float64)
        return passed, passed + np.bincount(self.problem, self.failed, num)

    def step_edges(self) -> NDArray[np.float64]:
        """Bins of at least one step each, over all steps that sampled."""
        steps = self.step[np.isfinite(self.step)]
        if not steps.size:
            return np.zeros(0)
        low, high = float(np.floor(steps.min())), float(np.floor(steps.max())) + 1
        return np.linspace(low, high, min(MAX_STEP_BINS, int(high - low)) + 1)


def _domain(
    name: str,
    member: NDArray[np.bool_],
    passed: NDArray[np.float64],
    total: NDArray[np.float64],
    counts: _Counts,
    edges: NDArray[np.float64],
) -> DomainFigures:
    sampled = member & (total > 0)
    groups = member[counts.problem] if counts.problem.size else np.zeros(0, bool)
    bins = np.clip((passed[sampled] / total[sampled] * NUM_RATE_BINS).astype(int), 0, NUM_RATE_BINS - 1)
    all_passed, all_scored = float(passed[member].sum()), float(total[member].sum())
    return DomainFigures(
        domain=name,
        num_problems=int(member.sum()),
        num_sampled=int(sampled.sum()),
        num_groups=int(groups.sum()),
        num_tokens=int(counts.tokens[groups].sum()),
        rate=all_passed / all_scored if all_scored else None,
        rate_bins=tuple(np.bincount(bins, minlength=NUM_RATE_BINS).tolist()),
        causes=tuple(np.bincount(counts.cause[groups], minlength=len(CAUSES)).tolist()),
        moved=_moved(counts, groups, edges),
    )


def _moved(counts: _Counts, groups: NDArray[np.bool_], edges: NDArray[np.float64]) -> tuple[float | None, ...]:
    if edges.size < 2:
        return ()
    passed, _ = np.histogram(counts.step[groups], edges, weights=counts.passed[groups])
    failed, _ = np.histogram(counts.step[groups], edges, weights=counts.failed[groups])
    return tuple(float(p / (p + f)) if p + f else None for p, f in zip(passed, failed, strict=True))


def _shown_domains(domains: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Names in the order of the alphabet, further ones last as one; and [P] which of them each problem is of."""
    names, inverse, counts = np.unique(np.array(domains, dtype=object), return_inverse=True, return_counts=True)
    by_size = np.argsort(-counts, kind="stable")
    kept = np.sort(by_size[:MAX_DOMAINS])
    place = np.full(len(names), len(kept))
    place[kept] = np.arange(len(kept))
    shown = [str(names[i]) or NO_DOMAIN for i in kept]
    return shown + ([OTHERS] if len(names) > len(kept) else []), place[inverse]


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no word for a number that is none.
    return {name: None if value != value else value for name, value in row.items()}


def _read_scores(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
        table.select(["problem_id", "passed", "attempts", "unscored", "keep", "why"])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise PoolError(f"{path}: no table of `curator score`: {error}") from error
    return table


def _counts_of_scores(table: pa.Table, index: Mapping[str, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    passed, total = np.zeros(len(index)), np.zeros(len(index))
    for row in table.select(["problem_id", "passed", "attempts", "unscored"]).to_pylist():
        if (place := index.get(row["problem_id"])) is not None:
            passed[place], total[place] = row["passed"], row["attempts"] - row["unscored"]
    return passed, total


def _scored(table: pa.Table) -> dict[str, Any]:
    """Problems kept, and those dropped by reason."""
    dropped: dict[str, int] = {}
    for keep, why in zip(table["keep"].to_pylist(), table["why"].to_pylist(), strict=True):
        if not keep:
            reason = str(why).partition(":")[0]
            dropped[reason] = dropped.get(reason, 0) + 1
    return {"problems": table.num_rows, "kept": table.num_rows - sum(dropped.values()), "dropped": dropped}


def _read_import(path: Path) -> dict[str, Any]:
    """What became of the rows, from the file that `curator import --report` wrote."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        removed: dict[str, int] = {}
        for entry in plain["removed"]:
            removed[entry["why"]] = removed.get(entry["why"], 0) + 1
        return {
            "rows": plain["rows"],
            "kept": plain["kept"],
            "refused": {reason: len(places) for reason, places in plain["refused"].items()},
            "duplicates of the same id": len(plain["duplicates"]),
            "removed": removed,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PoolError(f"{path}: no report of `curator import --report FILE`: {error!r}") from error
