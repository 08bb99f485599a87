"""Rows of JSONL, JSON and Parquet files as plain Python values, with their row numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from curator.errors import PoolError, RowRefused

Row = dict[str, Any]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_BATCH_ROWS = 256
"""Rows may be megabytes large (tests of code problems), so few are in memory at once."""


class WrittenFloat(float):
    """A float of a JSON file that prints as it is written there: a gold of `1.10` stays `1.10`."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Parse, and keep the text."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def read_rows(path: Path) -> Iterator[tuple[int, Row | RowRefused]]:
    """Rows with their numbers from 1: the line in JSONL, the place in a JSON array or a Parquet file.

    The format goes by the extension. A row that is no JSON object comes as a RowRefused in its place, so that one
    broken line does not hide the others.

    Raises PoolError for a file that cannot be read, or of another format.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise PoolError(f"{path}: unknown extension '{path.suffix}'; known: {', '.join(sorted(READERS))}")
    try:
        yield from reader(path)
    except OSError as error:
        raise PoolError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_lines(path: Path) -> Iterator[tuple[int, Row | RowRefused]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row | RowRefused:
    try:
        return _as_row(_loads(line.decode("utf-8")))
    except UnicodeDecodeError:
        return RowRefused("not UTF-8")
    except json.JSONDecodeError as error:
        return RowRefused(f"not JSON: {error.msg}")
    except (ValueError, RecursionError) as error:
        # Integers of thousands of digits, thousands of nested brackets.
        return RowRefused(f"not JSON that can be read: {type(error).__name__}")


def _read_json(path: Path) -> Iterator[tuple[int, Row | RowRefused]]:
    with path.open("rb") as file:
        lead = file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip()
    if not lead.startswith(b"["):
        # Many files named .json hold one object a line.
        yield from _read_lines(path)
        return
    try:
        rows = _loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise PoolError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise PoolError(f"{path}: not JSON that can be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield number, _as_row(row)


def _read_parquet(path: Path) -> Iterator[tuple[int, Row | RowRefused]]:
    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=PARQUET_BATCH_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from enumerate(rows, start=1)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise PoolError(f"{path}: not a Parquet file that can be read: {error}") from error


def _loads(text: str) -> Any:
    return json.loads(text, parse_float=WrittenFloat)


def _as_row(value: Any) -> Row | RowRefused:
    return value if isinstance(value, dict) else RowRefused(f"the row is a {type(value).__name__}, not an object")


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Row | RowRefused]]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
