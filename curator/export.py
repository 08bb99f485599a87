"""Problems and outcomes of a pool as files that anything opens, and that `curator import` reads back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from curator.errors import PoolError
from curator.schema import OUTCOME_SCHEMA, PROBLEM_SCHEMA, problem_from_row


def export_problems(batches: Iterable[pa.RecordBatch], path: Path) -> int:
    """Write problems, batches of PROBLEM_SCHEMA, and return their number.

    Parquet holds the columns of the pool's table: messages and `extra` are JSON text. JSONL holds them as objects.

    Raises PoolError for a file that exists, another extension, and a disk that cannot be written.
    """
    return _export(batches, path, PROBLEM_SCHEMA, _plain_problem)


def export_outcomes(outcomes: pa.Table, path: Path) -> int:
    """As `export_problems`, of outcomes."""
    return _export(outcomes.to_batches(), path, OUTCOME_SCHEMA, _plain_outcome)


def _export(
    batches: Iterable[pa.RecordBatch],
    path: Path,
    schema: pa.Schema,
    plain: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> int:
    if path.suffix not in (".parquet", ".jsonl"):
        raise PoolError(f"{path}: unknown extension '{path.suffix}'; known: .jsonl, .parquet")
    num_rows = 0
    try:
        # A file that exists may be the only copy of something.
        with path.open("xb") as file:
            if path.suffix == ".parquet":
                with pq.ParquetWriter(file, schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                        num_rows += batch.num_rows
                return num_rows
            for batch in batches:
                for row in batch.to_pylist():
                    file.write(json.dumps(plain(row), ensure_ascii=False).encode() + b"\n")
                    num_rows += 1
    except OSError as error:
        raise PoolError(f"{path}: cannot be written: {error.strerror or error}") from error
    return num_rows


def _plain_problem(row: Mapping[str, Any]) -> dict[str, Any]:
    problem = problem_from_row(row)
    return {
        "problem_id": problem.problem_id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "verifier": problem.verifier,
        "domain": problem.domain,
        "source": problem.source,
        "extra": problem.extra,
    }


def _plain_outcome(row: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no word for a number that is none.
    return {name: None if value != value else value for name, value in row.items()}
