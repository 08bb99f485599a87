"""The results on disk, one JSON line a cell, each under the hash of the settings that it was made with."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.plan import BenchError, Cell
from stream_grpo.config import Config
from stream_grpo.files import sha256

SECTIONS = ("curator", "sampler", "stream", "learner", "algo", "weights", "evaluation")
"""Sections of a configuration that a result depends on, paths left out."""


def settings_hash(cell: Cell, config: Config) -> str:
    """Of a cell, its configuration with all choices of the recipe, and the files of model and problems."""
    sections = config.model_dump(mode="json", include={*SECTIONS}, exclude={"evaluation": {"files"}})
    files = [*sorted(config.model.path.iterdir()), *config.pool.files, *config.evaluation.files]
    meaning = [cell, sections, config.model.dtype, [_sha256(file) for file in files if file.is_file()]]
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _sha256(path: Path) -> str:
    return sha256(path)


class Results:
    """A file that grows by a line for every finished cell. One process writes to it."""

    def __init__(self, path: Path, hash_of: Callable[[Cell], str]) -> None:
        """Read what is there. `hash_of`: of what the result of a cell must have been made with to count.

        Raises BenchError for a line that is no result; a last one that a killed run left half written is cut off.
        """
        self._path, self._hash_of = path, hash_of
        self._lines: dict[Cell, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        whole, end, torn = text.rpartition("\n")
        if torn:
            path.write_text(whole + end)
        for number, line in enumerate(whole.splitlines(), start=1):
            self._take(line, number)

    def _take(self, line: str, number: int) -> None:
        try:
            result = json.loads(line)
            self._lines[Cell(*(result[name] for name in Cell._fields))] = result
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{self._path}, line {number}: not a result: {error!r}; remove the line") from error

    def add(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Append the result of a cell."""
        line = {**cell._asdict(), "settings": self._hash_of(cell), **result}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lines[cell] = line

    def _has(self, cell: Cell) -> bool:
        return cell in self._lines and self._lines[cell]["settings"] == self._hash_of(cell)

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those of the cells that have no result of today's settings, in order."""
        return [cell for cell in cells if not self._has(cell)]

    def of(self, cells: Iterable[Cell]) -> list[dict[str, Any]]:
        """The results of those of the cells that have one, in order."""
        return [self._lines[cell] for cell in cells if self._has(cell)]

    def num_outdated(self, cells: Iterable[Cell]) -> int:
        """How many of the cells have a result of other settings alone."""
        return sum(cell in self._lines and not self._has(cell) for cell in cells)
