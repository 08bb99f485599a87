"""The log of a scoring: what every sample scored, appended batch by batch, so that a killed run goes on where it was.

JSON lines. The first says what is scored by what; each other one is a batch, and is durable once it is written. A
killed process loses the batch it was writing at most: a torn last line is cut off when the log is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from curator.errors import PoolError

SCHEMA_VERSION = 1


class Scored(NamedTuple):
    """One sample as it stands in the log."""

    problem_id: str
    number: int
    passed: bool | None
    reward: float | None
    num_tokens: int
    is_cut: bool
    text_digest: str
    """Of the whole answer; of answers no text is kept."""
    answer_digest: str
    """Of what it says in the end, see `answers.final_answer`."""
    why: str
    """Of one that is not scored: why."""


class ScoringLog:
    """Open for one writer."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Begin a log, or go on with one of the same header.

        Raises PoolError where the file is another's, is of another header, is damaged, or cannot be written.
        """
        self.path = path
        self._header = {"schema": "curator.scoring", "schema_version": SCHEMA_VERSION, **header}
        try:
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise PoolError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise PoolError(f"{path}: another process writes to this log") from error
        self.scored = list(self._resumed())
        """Of all batches so far."""

    def append(self, batch: Iterable[Scored]) -> None:
        """Add a batch; it is durable on return. Raises PoolError where the disk is full."""
        self._write([list(scored) for scored in batch])

    def close(self) -> None:
        """Let another process write."""
        self._file.close()

    def _resumed(self) -> Iterator[Scored]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        torn = lines.pop()
        if torn:
            self._file.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            self._write(self._header)
            return
        self._check(self._parsed(lines[0], 1))
        for number, line in enumerate(lines[1:], start=2):
            for values in self._parsed(line, number):
                yield Scored(*values)

    def _check(self, header: Any) -> None:
        if not isinstance(header, dict) or header.get("schema") != self._header["schema"]:
            raise PoolError(f"{self.path}:1: no log of a scoring; name another file with --log")
        for key in {**self._header, **header}:
            ours, theirs = self._header.get(key), header.get(key)
            if ours != theirs:
                raise PoolError(
                    f"{self.path}: begun with another {key}: {_difference(theirs, ours)}; score into another file with "
                    "--log FILE, or go on with what it was begun with"
                )

    def _parsed(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise PoolError(f"{self.path}:{number}: damaged: {error}; remove the file to score anew") from error

    def _write(self, value: Any) -> None:
        try:
            self._file.write(json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise PoolError(f"{self.path}: cannot be written: {error.strerror}") from error


def _difference(theirs: Any, ours: Any) -> str:
    """What differs, key by key where both are objects."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
        return ", ".join(f"{key} {theirs.get(key)!r:.80} there, {ours.get(key)!r:.80} now" for key in keys)
    return f"{theirs!r:.80} there, {ours!r:.80} now"
