"""Results on disk: one JSON line under each key, with the settings, the machine and the day that it was made with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.made import made_with


class Results:
    """A file that grows by a line for every piece of a measurement. One process writes to it."""

    def __init__(self, path: Path) -> None:
        """Read what is there; of lines with one key the last counts.

        Raises SystemExit for a line that is no result. A last one that a killed process left half written is cut off.
        """
        self.path = path
        self._lines: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole, end, torn = text.rpartition("\n")
        if torn:
            path.write_text(whole + end, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                found = json.loads(line)
                self._lines[found["key"]] = found
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"{path}, line {number}: not a result: {error!r}; remove the line") from error

    def find(self, key: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """What is there under a key. Raises SystemExit where it was made with other settings than are given."""
        found = self._lines.get(key)
        if found is not None and settings is not None and (said := differing(found["settings"], settings)):
            raise SystemExit(
                f"{self.path}: {key} was made with other settings ({said}); choose another --root, or remove the line"
            )
        return found

    def add(self, key: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line; returns it."""
        plain = json.loads(json.dumps(settings))  # as it will be read again: tuples are lists
        line = {"key": key, "settings": plain, "made": made_with(), **values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._lines[key] = line
        return line

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All of them, in the order of their first lines."""
        return iter(self._lines.values())


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The names of the settings that differ, and their values where these are short; "" where none does."""
    wanted = json.loads(json.dumps(wanted))
    parts = []
    for name in sorted({*found, *wanted}):
        old, new = found.get(name), wanted.get(name)
        if old != new:
            said = f"{name}: {old} is there, {new} is asked for"
            parts.append(said if len(said) < 80 else name)
    return "; ".join(parts)
