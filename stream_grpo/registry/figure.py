"""One figure, and tables of them as text. Nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass

FREE = "*"
"""Stands in a name for any word: a domain, a bucket, a reason."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, or another field of a line."""

    line: str
    """Which lines carry it: an event, of a status the kind of part."""
    name: str
    """Keys of the line joined by slashes."""
    unit: str
    """Empty for what is no quantity."""
    meaning: str

    @property
    def words(self) -> tuple[str, ...]:
        """The keys, from the outermost in."""
        return tuple(self.name.split("/"))


def figures(line: str, table: str) -> tuple[Figure, ...]:
    """The rows of a table `name | unit | meaning`. Raises ValueError for a row of another form."""
    rows = [[cell.strip() for cell in row.split("|")] for row in table.strip().splitlines() if row.strip()]
    for row in rows:
        if len(row) != 3 or not row[0] or not row[2]:
            raise ValueError(f"table of {line} lines: {' | '.join(row)!r}: expected name | unit | meaning")
    return tuple(Figure(line, name, unit, meaning) for name, unit, meaning in rows)
