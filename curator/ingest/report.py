"""Import of files into memory, as a trainer does it for its own pool; `importer` is for pools of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import compress
from pathlib import Path

from curator.errors import PoolError
from curator.ingest.account import MAX_SHOWN, ImportReport
from curator.ingest.reading import ProblemReading, file_sources
from curator.ingest.rows import RowReader


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

    Raises PoolError where a file cannot be read or has no rows, where two rows of one id differ, where no row has a
    column of the mapping, and where more than `max_refused_share` of all rows are refused, with the first reasons and
    places; ValueError for a mapping of an unknown field.
    """
    report = ImportReport()
    reader = RowReader(default_verifier=default_verifier, mapping=mapping)
    reading = ProblemReading(file_sources(paths), reader, report)
    problems = [read.problem for read in reading]
    keep = reading.settle(lambda mask: [problem.problem_id for problem in compress(problems, mask)])
    report.problems = list(compress(problems, keep))
    report.num_kept = len(report.problems)
    report.verifiers = Counter(problem.verifier for problem in report.problems)
    check_conflicts(report)
    check_refused_share(report, max_refused_share)
    return report


def check_conflicts(report: ImportReport) -> None:
    """Raise PoolError where two rows of one id differ."""
    if report.conflicts:
        more = f" (and {len(report.conflicts) - 1} more)" if len(report.conflicts) > 1 else ""
        raise PoolError(
            f"{report.conflicts[0]}{more}; name another column with mapping.problem_id, or no column at all, "
            'mapping.problem_id = "(content)", to make ids of prompt and gold'
        )


def check_refused_share(report: ImportReport, max_refused_share: float) -> None:
    """Raise PoolError where more rows are refused than the share that is allowed."""
    if report.num_rows and report.num_refused > max_refused_share * report.num_rows:
        raise PoolError(
            f"{report.num_refused} of {report.num_rows} rows refused, more than the allowed share of "
            f"{max_refused_share:g}:\n" + "\n".join(report.refusals()[:MAX_SHOWN])
        )
