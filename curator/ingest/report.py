"""Import of files: problems, and an account of every row that did not become one."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from curator.errors import PoolError, RowRefused
from curator.ingest.formats import read_rows
from curator.ingest.rows import ReadRow, content_id, read_row, with_mapping
from curator.schema import Problem

MAX_SHOWN = 10
"""Refused rows that an error or the text of a report shows by place."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    path: Path
    row: int

    def __str__(self) -> str:
        return f"{self.path}:{self.row}"


@dataclass(slots=True)
class ImportReport:
    """What became of the rows: rows = kept + refused + duplicates."""

    problems: list[Problem] = field(default_factory=list)
    num_rows: int = 0
    refused: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """Reason -> where."""
    duplicates: list[tuple[Place, Place]] = field(default_factory=list)
    """A dropped row, and the equal one that is kept."""
    columns_used: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Field of a problem -> column -> rows that had it from there."""
    columns_ignored: Counter[str] = field(default_factory=Counter)
    """Columns that no field was read from, by rows; they are in `extra`."""
    columns_dropped: Counter[str] = field(default_factory=Counter)
    """Columns of binary values, by rows; they are not in `extra`."""

    @property
    def num_kept(self) -> int:
        """Problems."""
        return len(self.problems)

    @property
    def num_refused(self) -> int:
        """Rows that could not become a problem."""
        return sum(map(len, self.refused.values()))

    @property
    def num_duplicates(self) -> int:
        """Rows dropped because an equal one is kept."""
        return len(self.duplicates)

    @property
    def verifiers(self) -> Counter[str]:
        """Problems by verifier; whoever runs verifiers knows which of them exist."""
        return Counter(problem.verifier for problem in self.problems)

    def text(self) -> str:
        """The report for a terminal."""
        lines = [
            f"{self.num_rows} rows: {self.num_kept} kept, {self.num_refused} refused, {self.num_duplicates} duplicates",
            *(f"{name} from {_counts(counts)}" for name, counts in self.columns_used.items()),
            f"verifiers: {_counts(self.verifiers)}",
            f"passed on, not read: {_counts(self.columns_ignored)}",
        ]
        if self.columns_dropped:
            lines.append(f"dropped, binary: {_counts(self.columns_dropped)}")
        return "\n".join(lines + self.refusals())

    def refusals(self) -> list[str]:
        """One line a reason: how many rows, why, and where the first ones are."""
        return [
            f"{len(places)} refused: {reason} ({', '.join(map(str, places[:MAX_SHOWN]))}"
            f"{', ...' if len(places) > MAX_SHOWN else ''})"
            for reason, places in self.refused.items()
        ]


def import_files(
    paths: Iterable[Path],
    *,
    default_verifier: str | None = None,
    mapping: Mapping[str, str] | None = None,
    max_refused_share: float = 0.05,
) -> ImportReport:
    """Read problems from files, in the order given.

    A row equal to an earlier one of the same id (prompt, gold and verifier; `extra` may differ) is a duplicate: it is
    dropped and counted.

    Raises PoolError where a file cannot be read or has no rows, where two rows of one id differ, and where more than
    `max_refused_share` of all rows are refused, with the first reasons and places; ValueError for a mapping of an
    unknown field.
    """
    with_mapping(mapping or {})
    report = ImportReport()
    seen: dict[str, tuple[bytes, Place]] = {}
    for path in paths:
        before = report.num_rows
        for number, row in read_rows(path):
            place = Place(path, number)
            report.num_rows += 1
            try:
                if isinstance(row, RowRefused):
                    raise row
                read = read_row(row, default_verifier=default_verifier, mapping=mapping)
            except RowRefused as refusal:
                report.refused[str(refusal)].append(place)
                continue
            _count_columns(row, read, report)
            _keep(read.problem, place, seen, report)
        if report.num_rows == before:
            raise PoolError(f"{path}: holds no rows")
    _check_share(report, max_refused_share)
    return report


def _keep(problem: Problem, place: Place, seen: dict[str, tuple[bytes, Place]], report: ImportReport) -> None:
    content = hashlib.sha256(f"{content_id(problem.prompt, problem.answer)} {problem.verifier}".encode()).digest()
    kept = seen.setdefault(problem.problem_id, (content, place))
    if kept[1] == place:
        report.problems.append(problem)
    elif kept[0] == content:
        report.duplicates.append((place, kept[1]))
    else:
        raise PoolError(
            f"{place}: id '{problem.problem_id}' is also the id of {kept[1]}, whose prompt, gold or verifier differs"
        )


def _count_columns(row: Mapping[str, object], read: ReadRow, report: ImportReport) -> None:
    for name, column in read.used.items():
        report.columns_used[name][column] += 1
    roots = {column if column in row else column.partition(".")[0] for column in read.used.values()}
    report.columns_dropped.update(read.dropped)
    report.columns_ignored.update(row.keys() - roots - set(read.dropped))


def _check_share(report: ImportReport, max_refused_share: float) -> None:
    if report.num_rows and report.num_refused > max_refused_share * report.num_rows:
        raise PoolError(
            f"{report.num_refused} of {report.num_rows} rows refused, more than the allowed share of "
            f"{max_refused_share:g}:\n" + "\n".join(report.refusals()[:MAX_SHOWN])
        )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common()) or "none"
