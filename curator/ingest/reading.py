"""All rows of an import, once: those that become problems one after the other, and what became of the others.

Of a row that is read nothing is kept but 32 bytes of hashes and its place, so that a million rows fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from curator.dedup import digest
from curator.errors import PoolError, RowRefused
from curator.ingest.account import Conflict, ImportReport
from curator.ingest.formats import Reading, Row, Rows, read_rows
from curator.ingest.layouts import recognise
from curator.ingest.places import Place, Places
from curator.ingest.rows import ReadRow, RowReader
from curator.schema import Problem

MAX_SHAPES = 1000
"""Sets of columns that are counted before they are added up; a file usually has one."""


class Source(NamedTuple):
    """Where rows come from."""

    path: Path
    rows: Rows


def file_sources(paths: Iterable[Path], reading: Reading = Reading()) -> Iterator[Source]:  # noqa: B008
    """The files of an import, in the order given."""
    return (Source(path, read_rows(path, reading)) for path in paths)


class ProblemReading:
    """Iterate once over the rows that become problems, then `settle` which of them stay."""

    def __init__(
        self,
        sources: Iterable[Source],
        reader: RowReader,
        report: ImportReport,
        check: Callable[[Problem], None] | None = None,
    ) -> None:
        """`check` may raise RowRefused for a problem that is well formed and yet cannot be used."""
        self._sources, self._reader, self._check = sources, reader, check
        self.report = report
        self.places = Places()
        """Of the rows that became problems, in their order."""
        self._digests = bytearray()
        self._shapes: dict[_Shape, int] = {}
        self._layouts: dict[_Shape, str] = {}

    def __iter__(self) -> Iterator[ReadRow]:
        """Rows that became problems. Raises PoolError where a file cannot be read or has no rows."""
        for path, rows in self._sources:
            before = self.report.num_rows
            for number, row in rows:
                self.report.num_rows += 1
                try:
                    read = self._read(row)
                except RowRefused as refusal:
                    self.report.refuse(str(refusal), Place(path, number))
                    continue
                self.places.add(path, number)
                yield read
            if self.report.num_rows == before:
                raise PoolError(f"{path}: holds no rows")
        self._add_up_columns()

    def _read(self, row: Row | RowRefused) -> ReadRow:
        if isinstance(row, RowRefused):
            raise row
        read = self._reader.read(row)
        if self._check is not None:
            self._check(read.problem)
        self._digests += digest(read.problem.problem_id) + _content(read.stored)
        self._count(row, read)
        return read

    def settle(self, problem_id: Callable[[int], str]) -> NDArray[np.bool_]:
        """Which problems stay: of those of one id the first. Notes duplicates and conflicts in the report.

        `problem_id`: that of the problem at some place in the order in which they were read.
        """
        digests = np.frombuffer(self._digests, np.uint64).reshape(-1, 4)
        first = _first_of_id(digests[:, :2])
        is_first: NDArray[np.bool_] = first == np.arange(len(first))
        is_equal = (digests[:, 2:] == digests[first, 2:]).all(axis=1)
        for index in np.flatnonzero(~is_first).tolist():
            place, kept = self.places[index], self.places[int(first[index])]
            if is_equal[index]:
                self.report.duplicates.append(place, kept)
            else:
                self.report.conflicts.append(Conflict(place, kept, problem_id(index)))
        return is_first

    def _count(self, row: Mapping[str, Any], read: ReadRow) -> None:
        shape = _Shape(tuple(row), tuple(read.used.items()), read.dropped)
        if shape not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                self._add_up_columns()
            self._shapes[shape], self._layouts[shape] = 0, recognise(row).name
        self._shapes[shape] += 1

    def _add_up_columns(self) -> None:
        for shape, count in self._shapes.items():
            self.report.layouts[self._layouts[shape]] += count
            self.report.count_columns(shape.columns, dict(shape.used), shape.dropped, count)
        self._shapes.clear()
        self._layouts.clear()


class _Shape(NamedTuple):
    columns: tuple[str, ...]
    used: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]


def _content(stored: Mapping[str, Any]) -> bytes:
    """Of prompt, gold and verifier: what else a row has may differ between equal problems."""
    parts = (stored["prompt"], stored["answer"], stored["verifier"])
    return digest("".join(f"{len(part)}:{part}" for part in parts))


def _first_of_id(ids: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each row the first one with the same id, which may be itself."""
    order = np.lexsort((ids[:, 1], ids[:, 0]))  # stable: rows of one id stay in their order
    is_new = np.ones(len(ids), bool)
    is_new[1:] = (ids[order][1:] != ids[order][:-1]).any(axis=1)
    starts = np.maximum.accumulate(np.where(is_new, np.arange(len(ids)), 0))
    first = np.empty(len(ids), np.int64)
    first[order] = order[starts]
    return first
