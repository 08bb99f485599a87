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
        self._path_index: dict[Path, int] = {}
        self._files = array("I")
        self._rows = array("Q")

    def append(self, place: Place) -> None:
        """Add one."""
        index = self._path_index.setdefault(place.path, len(self._paths))
        if index == len(self._paths):
            self._paths.append(place.path)
        self._files.append(index)
        self._rows.append(place.row)

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
