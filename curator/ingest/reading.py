"""All rows of an import, once: those that become problems one after the other, and what became of the others.

Of a row that is read nothing is kept but 32 bytes of hashes and its place, so that a million rows fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import is_normalized, normalize

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

DIGEST_BYTES = 32
"""Of id and content of one row."""
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
        self._composed: dict[int, bytes] = {}
        """Of the few ids that are not in the form NFC: the digest of that form."""
        self._shapes: dict[_Shape, int] = {}
        self._layouts: dict[_Shape, str] = {}

    def __iter__(self) -> Iterator[ReadRow]:
        """Rows that became problems.

        Raises PoolError where a file cannot be read or has no rows, and where no row has a column that was named.
        """
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
        self._reader.check_names()

    def _read(self, row: Row | RowRefused) -> ReadRow:
        if isinstance(row, RowRefused):
            raise row
        read = self._reader.read(row)
        if self._check is not None:
            self._check(read.problem)
        problem_id = read.problem.problem_id
        if not is_normalized("NFC", problem_id):
            self._composed[len(self._digests) // DIGEST_BYTES] = digest(normalize("NFC", problem_id))
        self._digests += digest(problem_id) + _content(read.stored)
        self._count(row, read)
        return read

    def settle(self, problem_ids: Callable[[NDArray[np.bool_]], Sequence[str]]) -> NDArray[np.bool_]:
        """Which problems stay: of those of one id the first. Notes duplicates, conflicts and forms in the report.

        `problem_ids`: those of a mask over the problems in the order in which they were read; asked for once.
        """
        digests = np.frombuffer(self._digests, np.uint64).reshape(-1, 4)
        first = _first_of_id(digests[:, :2])
        is_first: NDArray[np.bool_] = first == np.arange(len(first))
        is_equal = (digests[:, 2:] == digests[first, 2:]).all(axis=1)
        for index in np.flatnonzero(~is_first & is_equal).tolist():
            self.report.duplicates.append(self.places[index], self.places[int(first[index])])
        in_conflict = np.flatnonzero(~is_first & ~is_equal).tolist()
        if in_conflict:
            for index, problem_id in zip(in_conflict, problem_ids(~is_first & ~is_equal), strict=True):
                self.report.conflicts.append(Conflict(self.places[index], self.places[int(first[index])], problem_id))
        self._note_forms(digests[:, :2], is_first)
        return is_first

    def _note_forms(self, ids: NDArray[np.uint64], is_first: NDArray[np.bool_]) -> None:
        """Note ids that look the same as an earlier one and are written in other characters."""
        if not self._composed:
            return
        forms = ids.copy()
        forms[list(self._composed)] = np.frombuffer(b"".join(self._composed.values()), np.uint64).reshape(-1, 2)
        first = _first_of_id(forms)
        is_other = is_first & (first != np.arange(len(first))) & (ids != ids[first]).any(axis=1)
        for index in np.flatnonzero(is_other).tolist():
            self.report.id_forms.append(self.places[index], self.places[int(first[index])])

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
