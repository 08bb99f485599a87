"""The journal: rollout groups in append-only segments and the log of transitions beside them. Survives any kill.

    journal/segment-000001.arrow   the schema of groups, then the record bytes as they were received
    journal/transitions.arrow      the schema of transitions, then one record batch per commit

Both are plain Arrow streams. A commit writes segment bytes, fsync, log, fsync; only then may anything be acknowledged.
So the log never names a record that is not on disk, and what the log does not name was never acknowledged.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stream_grpo.buffer.recovery import check_schema, commits, count_messages
from stream_grpo.buffer.transitions import TRANSITION_SCHEMA, Location, Transition, encode_transitions
from stream_grpo.errors import JournalError
from stream_grpo.failpoints import failpoint
from stream_grpo.files import sync
from stream_grpo.transport.codec import GROUP_SCHEMA

LOG_NAME = "transitions.arrow"
_SEGMENT_HEADER: bytes = GROUP_SCHEMA.serialize().to_pybytes()
_LOG_HEADER: bytes = TRANSITION_SCHEMA.serialize().to_pybytes()
_log = logging.getLogger(__name__)


def segment_name(number: int) -> str:
    """File name of a segment; numbers begin at 1."""
    return f"segment-{number:06d}.arrow"


class _AppendOnly:
    """A file that grows at its end. Every write is made durable before it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        os.fsync(self._file.fileno())
        self.size += len(data)

    def cut(self, size: int) -> None:
        os.ftruncate(self._file.fileno(), size)
        os.fsync(self._file.fileno())
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        return _pread(self._file.fileno(), offset, length)

    def lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise JournalError(f"{self.path}: another process has this journal open") from error

    def close(self) -> None:
        self._file.close()


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes; one call of the system gives at most 2 GiB."""
    parts = []
    while length and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


class Journal:
    """Appends are kept in memory until `commit`; `replay` gives every transition, `read` any committed record."""

    def __init__(self, directory: Path, *, segment_bytes: int) -> None:
        """Open or begin the journal of a run, cutting what a crash left incomplete.

        Raises JournalError for another schema version, damage, missing bytes, or a journal that is in use.
        """
        self._directory, self._segment_bytes = directory, segment_bytes
        self._rows: list[Transition] = []
        self._records: list[bytes] = []
        self._broken = ""
        self.num_appended = 0
        """Transitions appended since the journal was opened."""
        self.num_commits, self.commit_s, self.longest_commit_s = 0, 0.0, 0.0
        directory.mkdir(parents=True, exist_ok=True)
        self._log = _AppendOnly(directory / LOG_NAME)
        self._log.lock()
        try:
            self.num_incomplete = self._recover()
            """Groups that a crash left incomplete, none of them acknowledged."""
        except BaseException:
            self._log.close()
            raise

    def _recover(self) -> int:
        data = self._log.read(0, self._log.size)
        if _LOG_HEADER.startswith(data) and data != _LOG_HEADER:
            self._begin_log()
            data = _LOG_HEADER
        end = check_schema(self._log.path, data, TRANSITION_SCHEMA)
        newest: dict[int, list[Transition]] = {}
        ends: dict[int, Transition] = {}
        for rows, end in commits(self._log.path, data):  # noqa: B007
            for row in rows:
                if row.length:
                    ends[row.segment] = row
                    newest = newest if row.segment in newest else {row.segment: []}
                    newest[row.segment].append(row)
        num_incomplete = self._cut_segments(ends)
        if end < len(data):
            self._log.cut(end)
        if num_incomplete or end < len(data):
            _log.warning(
                "%s: repaired after a crash: %d bytes cut from the end of %s, and %d groups that it does not name from "
                "the segments; a crash leaves such bytes only of what was not yet acknowledged",
                self._directory,
                len(data) - end,
                LOG_NAME,
                num_incomplete,
            )
        self._open_newest(ends)
        for row in (row for rows in newest.values() for row in rows):
            self.read(Location(row.segment, row.offset, row.length, row.crc32), row.group_id)
        return num_incomplete

    def _begin_log(self) -> None:
        """A new log, or one that was cut while it was new: before any segment was begun."""
        if any(path.stat().st_size for path in self._directory.glob("segment-*.arrow")):
            raise JournalError(
                f"{self._log.path}: missing, empty or cut within its first {len(_LOG_HEADER)} bytes, and segments of "
                f"groups lie beside it, of which it alone says what counts; put back a copy of it, or begin another run"
            )
        self._log.cut(0)
        self._log.append(_LOG_HEADER)
        sync(self._directory)

    def _cut_segments(self, ends: dict[int, Transition]) -> int:
        """Cut what the log does not name; how many groups that were."""
        num_incomplete = 0
        for path in sorted(self._directory.glob("segment-*.arrow")):
            last = ends.get(int(path.stem.removeprefix("segment-")))
            end = last.offset + last.length if last else 0
            size = path.stat().st_size
            if size > end:
                start = end or len(_SEGMENT_HEADER)
                num_incomplete += count_messages(path.read_bytes()[start:])
                with path.open("r+b") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())
            if not end:
                path.unlink()
                sync(self._directory)
        for number, row in ends.items():
            self._check_segment(number, row)
        return num_incomplete

    def _check_segment(self, number: int, last: Transition) -> None:
        path = self._directory / segment_name(number)
        size = path.stat().st_size if path.exists() else 0
        if size < last.offset + last.length:
            raise JournalError(
                f"{path}: ends at {size}, but the log names a record of group {last.group_id} at offset {last.offset} "
                f"of {last.length} bytes: acknowledged data is missing"
            )
        with path.open("rb") as file:
            check_schema(path, file.read(len(_SEGMENT_HEADER)), GROUP_SCHEMA)

    def _open_newest(self, ends: dict[int, Transition]) -> None:
        self._number = max(ends, default=1)
        last = ends.get(self._number)
        self._segment = _AppendOnly(self._directory / segment_name(self._number)) if last else None
        self._closed_bytes = sum(row.offset + row.length for number, row in ends.items() if number != self._number)
        self._roll()

    def _roll(self) -> None:
        if self._segment and self._segment.size >= self._segment_bytes:
            self._closed_bytes += self._segment.size
            self._segment.close()
            self._segment = None
            self._number += 1
        self._next_offset = self._segment.size if self._segment else len(_SEGMENT_HEADER)

    @property
    def has_pending(self) -> bool:
        """Whether something waits for `commit`."""
        return bool(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, log included."""
        return self._closed_bytes + (self._segment.size if self._segment else 0) + self._log.size

    def replay(self) -> Iterator[Transition]:
        """Every committed transition, oldest first."""
        for rows, _ in commits(self._log.path, self._log.read(0, self._log.size)):
            yield from rows

    def append(self, transition: Transition) -> None:
        """Add a transition to the next commit."""
        self._rows.append(transition)
        self.num_appended += 1

    def append_group(self, data: bytes, transition: Transition) -> Transition:
        """Add a record and its transition to the next commit; returns the transition with the record's location."""
        placed = replace(
            transition, segment=self._number, offset=self._next_offset, length=len(data), crc32=zlib.crc32(data)
        )
        self._records.append(data)
        self._next_offset += len(data)
        self.append(placed)
        return placed

    def commit(self) -> None:
        """Make all that was appended durable: segment, then log, one fsync each.

        Raises JournalError where the disk does not take it; nothing is acknowledged then, and nothing is written after.
        """
        if self._broken:
            raise JournalError(self._broken)
        if not self._rows:
            return
        began = time.perf_counter()
        try:
            if self._records:
                self._write_records()
                failpoint("journal.segment_written")
            self._log.append(encode_transitions(self._rows))
        except OSError as error:
            self._broken = (
                f"{self._directory}: cannot be written: {error.strerror}; {len(self._records)} groups were not "
                f"acknowledged, what was acknowledged is on disk"
            )
            raise JournalError(self._broken) from error
        failpoint("journal.log_written")
        self._rows.clear()
        self._records.clear()
        self._roll()
        self.num_commits += 1
        self.commit_s += time.perf_counter() - began
        self.longest_commit_s = max(self.longest_commit_s, time.perf_counter() - began)

    def _write_records(self) -> None:
        if self._segment is None:
            self._segment = _AppendOnly(self._directory / segment_name(self._number))
            self._segment.append(_SEGMENT_HEADER + b"".join(self._records))
            sync(self._directory)
        else:
            self._segment.append(b"".join(self._records))

    def read(self, location: Location, group_id: str = "") -> bytes:
        """A committed record. Raises JournalError, naming segment, offset and group, where its bytes are damaged."""
        path = self._directory / segment_name(location.segment)
        if self._segment and location.segment == self._number:
            data = self._segment.read(location.offset, location.length)
        else:
            with path.open("rb") as file:
                data = _pread(file.fileno(), location.offset, location.length)
        if len(data) != location.length or zlib.crc32(data) != location.crc32:
            raise JournalError(
                f"{path}: the record of group {group_id or 'unknown'} at offset {location.offset} is damaged: "
                f"{location.length} bytes with CRC32 {location.crc32:#010x} were written"
            )
        return data

    def close(self) -> None:
        """Close the files. What was not committed is not written, as after a kill."""
        self._log.close()
        if self._segment:
            self._segment.close()
