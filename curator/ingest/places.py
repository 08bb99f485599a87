"""Where rows stand: a file and a number, in a few bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    path: Path
    row: int

    def __str__(self) -> str:
        return f"{self.path}:{self.row}"


class Places(Sequence[Place]):
    """Places in the order they were added; twelve bytes each."""

    def __init__(self) -> None:
        """Empty."""
        self._paths: list[Path] = []
        self._files = array("I")
        self._rows = array("Q")

    def append(self, place: Place) -> None:
        """Add one."""
        self.add(place.path, place.row)

    def add(self, path: Path, row: int) -> None:
        """Add one that no object is made of."""
        if not self._paths or self._paths[-1] is not path:
            # The paths of runs of rows; a file that comes a second time has a second number.
            self._paths.append(path)
        self._files.append(len(self._paths) - 1)
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Place: ...
    @overload
    def __getitem__(self, index: slice) -> list[Place]: ...
    def __getitem__(self, index: int | slice) -> Place | list[Place]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Place(self._paths[self._files[index]], self._rows[index])

    def __iter__(self) -> Iterator[Place]:
        return (Place(self._paths[file], row) for file, row in zip(self._files, self._rows, strict=True))
