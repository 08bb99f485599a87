"""Names that an import was given, of columns and verifiers, and whether any row has had them.

An optional column with a slip in its name would otherwise be missed in silence: its field is empty, or read from a
column that was not meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from curator.errors import PoolError
from curator.ingest.fields import FROM_CONTENT
from curator.ingest.layouts import MISSING, lookup

MAX_NAMES = 1000
"""Names that are remembered to find the nearest one."""


class NamesMet:
    """Which of the names given have been met so far; costs nothing once all have."""

    def __init__(self, mapping: Mapping[str, str], pass_rate: str | None, verifiers: Iterable[str]) -> None:
        """Columns by field, the column of the pass rate, and verifiers to be renamed."""
        given = {f"--map {field}={column} (mapping.{field})": column for field, column in mapping.items()}
        self._columns = {what: column for what, column in given.items() if column != FROM_CONTENT}
        if pass_rate is not None:
            self._columns[f"--pass-rate {pass_rate}"] = pass_rate
        self._verifiers = set(verifiers)
        self._column_names: dict[str, None] = {}
        self._verifier_names: dict[str, None] = {}

    def note(self, row: Mapping[str, Any]) -> None:
        """A row; that a column is null in it does not matter."""
        if not self._columns:
            return
        if len(self._column_names) < MAX_NAMES:
            self._column_names.update(dict.fromkeys(_paths(row)))
        for what, column in list(self._columns.items()):
            if lookup(row, column) is not MISSING:
                del self._columns[what]

    def note_verifier(self, verifier: str | None) -> None:
        """The name of a verifier as the data has it."""
        if not self._verifiers or verifier is None:
            return
        if len(self._verifier_names) < MAX_NAMES:
            self._verifier_names[verifier] = None
        self._verifiers.discard(verifier)

    def check(self) -> None:
        """Raise PoolError for the first name that no row has had, with the nearest one."""
        for what, column in self._columns.items():
            raise PoolError(f"{what}: no row has such a column; {_nearest(column, self._column_names)}")
        for name in sorted(self._verifiers):
            raise PoolError(
                f"--rename-verifier {name}: no row names such a verifier; {_nearest(name, self._verifier_names)}"
            )


def _paths(row: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Columns, and those inside objects with their dots."""
    for name, value in row.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping) and before.count(".") < 3:
            yield from _paths(value, f"{before}{name}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"the nearest is '{close[0]}'" if close else f"there are {', '.join(map(repr, names[:20])) or 'none'}"
