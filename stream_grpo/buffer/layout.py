"""The files of a journal: their names, and a file that only grows.

    journal/lock                        held by the process that writes
    journal/transitions-000001.arrow    a log: the schema of transitions, then one record batch per commit
    journal/transitions-000002.arrow    the next one; its first row is a snapshot of all that came before
    journal/segment-000001.arrow        the schema of groups, then the record bytes as they were received
    journal/unnamed-000001.arrow        records that a crash left in segment 1 and no log names, set aside

All but the lock are plain Arrow streams.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from stream_grpo.errors import JournalError

LOCK_NAME = "lock"
_NAME = re.compile(r"(segment|transitions|unnamed)-(\d{6,})\.arrow")


def segment_name(number: int) -> str:
    """File name of a segment; numbers begin at 1."""
    return f"segment-{number:06d}.arrow"


def log_name(number: int) -> str:
    """File name of a log; numbers begin at 1."""
    return f"transitions-{number:06d}.arrow"


def unnamed_name(number: int) -> str:
    """File name of records that no log names, set aside from the segment of this number."""
    return f"unnamed-{number:06d}.arrow"


LOG_NAME = log_name(1)
"""The first log of a run."""

SINGLE_LOG_NAME = "transitions.arrow"
"""The only log of a run whose schema is of a version below 4: there is none that is read."""


def segments(directory: Path) -> dict[int, Path]:
    """The segments that are there, by number, lowest first."""
    return _numbered(directory, "segment")


def logs(directory: Path) -> dict[int, Path]:
    """The logs that are there, by number, lowest first."""
    return _numbered(directory, "transitions")


def unnamed(directory: Path) -> dict[int, Path]:
    """What was set aside, by number, lowest first."""
    return _numbered(directory, "unnamed")


def _numbered(directory: Path, what: str) -> dict[int, Path]:
    found = [(number_of(path), path) for path in directory.iterdir() if _kind_of(path.name) == what]
    return dict(sorted(found))


def number_of(path: Path) -> int:
    """The number in the name of a segment or a log; 0 where it has none."""
    match = _NAME.fullmatch(path.name)
    return int(match[2]) if match else 0


def _kind_of(name: str) -> str:
    """What a file of this name is; empty where no journal gives a file that name, as one with a digit too many."""
    match = _NAME.fullmatch(name)
    return match[1] if match and int(match[2]) and name == f"{match[1]}-{int(match[2]):06d}.arrow" else ""


def unfinished(directory: Path) -> list[Path]:
    """Files that a crash left before they got their names."""
    return [path for path in directory.glob(".*.tmp") if _kind_of(path.name[1:-4])]


def strays(directory: Path) -> list[str]:
    """Names of what is there and is no file of a journal."""
    ours = {LOCK_NAME, SINGLE_LOG_NAME, *(path.name for path in unfinished(directory))}
    return sorted(path.name for path in directory.iterdir() if not _kind_of(path.name) and path.name not in ours)


class AppendOnly:
    """A file that grows at its end. Every write is made durable before it returns."""

    def __init__(self, path: Path) -> None:
        """Open the file, or begin an empty one."""
        self.path = path
        self._file = path.open("a+b", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        """Write at the end and sync."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        os.fsync(self._file.fileno())
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        os.ftruncate(self._file.fileno(), size)
        os.fsync(self._file.fileno())
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`."""
        return pread(self._file.fileno(), offset, length)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Lock:
    """What the one process that writes a journal holds."""

    def __init__(self, directory: Path) -> None:
        """Take it. Raises JournalError where another process has it."""
        self._file = (directory / LOCK_NAME).open("wb")
        try:
            # The kernel drops the lock when its holder dies, however it dies.
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise JournalError(f"{directory}: another process has this journal open") from error

    def release(self) -> None:
        """Give it back."""
        self._file.close()


def pread(descriptor: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes; one call of the system gives at most 2 GiB."""
    parts = []
    while length and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)
