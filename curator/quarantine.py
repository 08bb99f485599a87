"""Problems that are put aside because they look broken: not drawn any more, until they are put back.

They stay in the table of problems, so that a run that began with them goes on; a table `quarantine` beside it names
them, with what was seen of each. A curator reads it when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from curator.chooser import Chooser, Rules
from curator.difficulty import counts
from curator.errors import PoolError
from curator.estimators.features import text_of
from curator.pool import Pool
from curator.pool_features import features_of_pool
from curator.schema import outcomes_from_batch

QUARANTINE_TABLE = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A problem as a reviewer sees it, and what speaks against it."""

    problem_id: str
    domain: str
    prompt: str
    answer: str
    verifier: str
    groups: int = 0
    scored: int = 0
    """Rollouts of those groups; none of them earned anything. 0 where a person named the problem."""
    expected_rate: float = 0.0
    """Pass rate that is expected of it by what is like it: domain, text, offline rate."""
    surprise: float = 1.0
    """Probability of so many failures, were it as those are."""


_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("problem_id", "domain", "prompt", "answer", "verifier")),
        *(pa.field(name, pa.int64()) for name in ("groups", "scored")),
        *(pa.field(name, pa.float64()) for name in ("expected_rate", "surprise")),
    ]
)


def suspects_of(pool: Pool, *, group_size: int, text_numbers: int) -> list[Entry]:
    """Problems that the pool's outcomes speak against, the most surprising first, without those put aside.

    Reads alone. The item-response model folds the outcomes anew; see `standing.suspects` for the rule.
    """
    chooser = Chooser(
        pool.domain_numbers, group_size, Rules(estimator="item_response"), features_of_pool(pool, text_numbers)
    )
    for batch in pool.outcomes().to_batches(max_chunksize=4096):
        for outcome in filter(counts, outcomes_from_batch(batch)):
            if (index := pool.index_of(outcome.problem_id)) is not None:
                chooser.observe(index, outcome)
    aside = set(quarantined_ids(pool))
    found = sorted(chooser.suspects(), key=lambda suspect: suspect.surprise)
    entries = _entries(pool, [suspect.problem for suspect in found])
    return [
        Entry(
            **{
                **asdict(entry),
                "groups": suspect.num_groups,
                "scored": suspect.num_scored,
                "expected_rate": suspect.expected_rate,
                "surprise": suspect.surprise,
            }
        )
        for entry, suspect in zip(entries, found, strict=True)
        if entry.problem_id not in aside
    ]


def quarantined_ids(pool: Pool) -> list[str]:
    """Ids of the problems put aside."""
    table = pool.further_table(QUARANTINE_TABLE)
    ids: list[str] = [] if table is None else table["problem_id"].to_pylist()
    return ids


def quarantined(pool: Pool) -> list[Entry]:
    """The problems put aside, by id."""
    return sorted(_kept(pool).values(), key=lambda entry: entry.problem_id)


def put_aside(pool: Pool, problem_ids: Sequence[str], suspects: Iterable[Entry] = ()) -> int:
    """Put problems aside, with what is known of those among `suspects`; how many were not there before.

    Raises PoolError for an id that the pool lacks, for what would leave nothing to draw, and where another process
    writes to the pool.
    """
    pool.become_writer()
    kept, known = _kept(pool), {entry.problem_id: entry for entry in suspects}
    new = [each for each in dict.fromkeys(problem_ids) if each not in kept]
    index = [pool.index_of(each) for each in new]
    if None in index:
        raise PoolError(f"{pool.path}: no problem has the id {new[index.index(None)]!r}")
    entries = _entries(pool, [each for each in index if each is not None])
    kept |= {entry.problem_id: known.get(entry.problem_id, entry) for entry in entries}
    if all(each in kept for each in pool.problem_ids):
        raise PoolError(f"{pool.path}: all its problems would be put aside; leave one to draw")
    _keep(pool, kept.values())
    return len(new)


def put_back(pool: Pool, problem_ids: Sequence[str]) -> int:
    """Let problems be drawn again; how many. Raises PoolError for one not in quarantine, and as `put_aside`."""
    pool.become_writer()
    kept = _kept(pool)
    if unknown := [each for each in problem_ids if each not in kept]:
        raise PoolError(f"{pool.path}: {unknown[0]!r} is not in quarantine")
    left = [entry for problem_id, entry in kept.items() if problem_id not in set(problem_ids)]
    _keep(pool, left)
    return len(kept) - len(left)


def _entries(pool: Pool, index: Sequence[int]) -> list[Entry]:
    return [
        Entry(
            problem_id=problem.problem_id,
            domain=problem.domain,
            prompt=text_of(problem.prompt),
            answer=problem.answer,
            verifier=problem.verifier,
        )
        for problem in (pool.take(index) if index else [])
    ]


def _kept(pool: Pool) -> dict[str, Entry]:
    table = pool.further_table(QUARANTINE_TABLE)
    rows: list[dict[str, Any]] = [] if table is None else table.select(_SCHEMA.names).to_pylist()
    return {row["problem_id"]: Entry(**row) for row in rows}


def _keep(pool: Pool, entries: Iterable[Entry]) -> None:
    pool.keep_further_table(QUARANTINE_TABLE, pa.Table.from_pylist([asdict(e) for e in entries], schema=_SCHEMA))
