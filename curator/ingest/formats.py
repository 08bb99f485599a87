"""Rows of JSONL, JSON, CSV and Parquet files as plain values, with their numbers; a part of a file at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from curator.errors import PoolError, RowRefused
from curator.ingest.json_array import DECODER, elements

Row = dict[str, Any]
Rows = Iterator[tuple[int, "Row | RowRefused"]]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_BATCH_ROWS = 256
"""Rows may be megabytes large (tests of code problems), so few are in memory at once."""
MAX_CELL_CHARACTERS = 1 << 30
CELL_ERRORS = (ValueError, OverflowError, LookupError, pa.ArrowNotImplementedError)
"""What pyarrow raises for a value that Python cannot hold: text that is not UTF-8, years, zones, repeated names."""


class Reading(NamedTuple):
    """How a file is read."""

    drop: Sequence[str] = ()
    """Patterns of columns that are left out; of Parquet files they are not read at all."""
    advance: Callable[[int], None] = lambda num_bytes: None
    """Told how many further bytes of the file are done."""

    def drops(self, column: str) -> bool:
        """Whether a column is left out."""
        return any(fnmatchcase(column, pattern) for pattern in self.drop)


def read_rows(path: Path, reading: Reading = Reading()) -> Rows:  # noqa: B008  (an immutable value)
    """Rows with their numbers from 1: the line in JSONL, the place among the rows in all other formats.

    The format goes by the extension. A row that is no JSON object comes as a RowRefused in its place, so that one
    broken line does not hide the others.

    Raises PoolError for a file that cannot be read, or of another format.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise PoolError(f"{path}: unknown extension '{path.suffix}'; known: {', '.join(sorted(READERS))}")
    try:
        for number, row in reader(path, reading):
            if reading.drop and isinstance(row, dict):
                row = {name: value for name, value in row.items() if not reading.drops(name)}
            yield number, row
    except OSError as error:
        raise PoolError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_lines(path: Path, reading: Reading) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            reading.advance(len(line))
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row | RowRefused:
    try:
        return _as_row(DECODER.decode(line.decode("utf-8")))
    except UnicodeDecodeError:
        return RowRefused("not UTF-8")
    except RowRefused as refusal:
        return refusal
    except json.JSONDecodeError as error:
        return RowRefused(f"not JSON: {error.msg}")
    except (ValueError, RecursionError) as error:
        # Integers of thousands of digits, thousands of nested brackets.
        return RowRefused(f"not JSON that can be read: {type(error).__name__}")


def _read_json(path: Path, reading: Reading) -> Rows:
    with path.open("rb") as file:
        lead = file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip()
    if not lead.startswith(b"["):
        # Many files named .json hold one object a line.
        yield from _read_lines(path, reading)
        return
    for number, value in enumerate(elements(path, reading.advance), start=1):
        yield number, value if isinstance(value, RowRefused) else _as_row(value)


def _read_parquet(path: Path, reading: Reading) -> Rows:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise PoolError(f"{path}: two columns have the name '{_repeated(names)}'; rename one of them")
            columns = [name for name in names if not reading.drops(name)]
            bytes_per_row = path.stat().st_size / max(1, file.metadata.num_rows)
            first = 1
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns):
                yield from enumerate(_plain_rows(batch), start=first)
                first += batch.num_rows
                reading.advance(round(batch.num_rows * bytes_per_row))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise PoolError(f"{path}: not a Parquet file that can be read: {error}") from error


def _plain_rows(batch: pa.RecordBatch) -> Iterable[Row | RowRefused]:
    try:
        rows: list[Row] = batch.to_pylist()
    except CELL_ERRORS:
        return (_plain_row(batch, index) for index in range(batch.num_rows))
    return rows


def _plain_row(batch: pa.RecordBatch, index: int) -> Row | RowRefused:
    """A row of a batch in which some value is none of Python's."""
    try:
        return {name: _plain_cell(name, column[index]) for name, column in zip(batch.schema.names, batch, strict=True)}
    except RowRefused as refusal:
        return refusal


def _plain_cell(name: str, cell: pa.Scalar) -> Any:
    """A value; a time that Python has no word for is text. Raises RowRefused for text that is none, and the like."""
    try:
        return cell.as_py()
    except CELL_ERRORS as error:
        failure = error
    if pa.types.is_temporal(cell.type):
        try:
            return cell.cast(pa.string()).as_py()
        except pa.ArrowInvalid as error:
            failure = error
    raise RowRefused(
        f"column '{name}' of type {cell.type} holds a value that cannot be read ({type(failure).__name__}); to go "
        f"without the column, leave it out with --drop '{name}'"
    ) from failure


def _read_csv(path: Path, reading: Reading) -> Rows:
    yield from _read_cells(path, ",", reading)


def _read_tsv(path: Path, reading: Reading) -> Rows:
    yield from _read_cells(path, "\t", reading)


def _read_cells(path: Path, delimiter: str, reading: Reading) -> Rows:
    """Rows of text below a line of column names. An empty cell is no value."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    with path.open(encoding="utf-8-sig", newline="") as file:
        cells = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(cells, [])
            if len(set(names)) < len(names):
                raise PoolError(f"{path}:1: two columns have the name '{_repeated(names)}'")
            for number, row in enumerate(filter(None, cells), start=1):
                reading.advance(sum(map(len, row)) + len(row))
                if len(row) != len(names):
                    yield number, RowRefused("the row has more or fewer cells than the header")
                else:
                    yield number, {name: cell or None for name, cell in zip(names, row, strict=True)}
        except csv.Error as error:
            raise PoolError(f"{path}:{cells.line_num}: not CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise PoolError(f"{path}:{cells.line_num + 1}: not UTF-8") from error


def _repeated(names: Sequence[str]) -> str:
    return next(name for i, name in enumerate(names) if name in names[:i])


def _as_row(value: Any) -> Row | RowRefused:
    if isinstance(value, list) and value and all(isinstance(turn, dict) and "from" in turn for turn in value):
        # A question and its gold as two turns, without an object around them.
        return {"conversations": value}
    return value if isinstance(value, dict) else RowRefused(f"the row is a {type(value).__name__}, not an object")


READERS: dict[str, Callable[[Path, Reading], Rows]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}
