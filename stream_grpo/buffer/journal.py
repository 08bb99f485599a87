"""The journal: rollout groups in append-only segments and logs of transitions beside them. Survives any kill.

`layout` names the files, all of them plain Arrow streams. A commit writes segment bytes, fsync, log, fsync; only then
may anything be acknowledged. So no log names a record that is not on disk, and what no log names was never
acknowledged.

A log that has grown is followed by another, which begins with a snapshot of all that the earlier ones say. It gets its
name once it is whole, and the segments begin anew with it: a log and the segments it names leave the disk together.
`chain` is how a log that is gone is noticed.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stream_grpo.buffer import layout
from stream_grpo.buffer.chain import check_former, check_newest, close_former, followed
from stream_grpo.buffer.layout import AppendOnly, Lock
from stream_grpo.buffer.recovery import (
    LOG_HEADER,
    SEGMENT_HEADER,
    check_first,
    check_schema,
    commits,
    read_record,
    repair_segments,
    retained,
)
from stream_grpo.buffer.retention import Retention
from stream_grpo.buffer.transitions import TRANSITION_SCHEMA, Location, Transition, encode_transitions
from stream_grpo.errors import JournalError
from stream_grpo.failpoints import failpoint
from stream_grpo.files import replace_with, sync

_log = logging.getLogger(__name__)


class Journal:
    """Appends are kept in memory until `commit`; `replay` gives the newest log, `read` any committed record."""

    def __init__(self, directory: Path, *, segment_bytes: int, log_bytes: int = 16 << 20) -> None:
        """Open or begin the journal of a run, cutting what a crash left incomplete.

        Raises JournalError for another schema version, damage, missing bytes, or a journal that is in use.
        """
        self._directory, self._segment_bytes, self._log_bytes = directory, segment_bytes, log_bytes
        self._rows: list[Transition] = []
        self._records: list[bytes] = []
        self._broken = ""
        self.num_appended = 0
        """Transitions appended since the journal was opened."""
        self.num_commits, self.commit_s, self.longest_commit_s = 0, 0.0, 0.0
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(directory)
        self.log_number = max(layout.logs(directory), default=1)
        """Number of the log that is written to; the first is 1."""
        self._log = AppendOnly(directory / layout.log_name(self.log_number))
        try:
            self.num_incomplete = self._recover()
            """Groups that a crash left incomplete, none of them acknowledged."""
        except BaseException:
            self._log.close()
            self._lock.release()
            raise

    def _recover(self) -> int:
        for unfinished in layout.unfinished(self._directory):
            unfinished.unlink()
        strays = layout.strays(self._directory)
        if strays:
            _log.warning("%s: left alone, no journal names a file so: %s", self._directory, ", ".join(strays))
        data = self._log.read(0, self._log.size)
        if LOG_HEADER.startswith(data) and data != LOG_HEADER:
            self._begin()
            data = LOG_HEADER
        end = check_schema(self._log.path, data, TRANSITION_SCHEMA)
        rows: list[Transition] = []
        self._log_start = len(data)
        for committed, end in commits(self._log.path, data):
            self._log_start = self._log_start if rows else end
            rows += committed
        check_first(self._log.path, rows[0] if rows else None)
        check_newest(self._log.path, rows)
        retention = retained(self._log.path, rows)
        close_former(self._log.path, rows, time.time())
        check_former(self._log.path, retention)
        num_incomplete = repair_segments(self._directory, retention)
        if end < len(data):
            self._log.cut(end)
        if num_incomplete or end < len(data):
            _log.warning(
                "%s: repaired after a crash: %d bytes cut from the end of %s, and %d groups that it does not name from "
                "the segments; a crash leaves such bytes only of what was not yet acknowledged",
                self._directory,
                len(data) - end,
                self._log.path.name,
                num_incomplete,
            )
        self._open_newest(retention)
        for row in rows:
            # Of the segments before it nothing was written to since the last start.
            if row.location and row.segment == retention.newest and row.segment in retention.segments:
                self.read(row.location, row.group_id)
        return num_incomplete

    def _begin(self) -> None:
        """A new log, or one that was cut while it was new: before any segment was begun."""
        single = self._directory / layout.SINGLE_LOG_NAME
        if single.exists():
            check_schema(single, single.read_bytes(), TRANSITION_SCHEMA)
        if self.log_number > 1 or any(path.stat().st_size for path in layout.segments(self._directory).values()):
            raise JournalError(
                f"{self._log.path}: missing, empty or cut within its first {len(LOG_HEADER)} bytes, and segments of "
                f"groups lie beside it, of which it alone says what counts; put back a copy of it, or begin another run"
            )
        self._log.cut(0)
        self._log.append(LOG_HEADER)
        sync(self._directory)

    def _open_newest(self, retention: Retention) -> None:
        newest = retention.newest
        self.segment_number = max(newest, 1)
        """Number of the segment that the next record goes to."""
        self._segment: AppendOnly | None = None
        if newest and (newest not in retention.segments or newest <= max(retention.logs.values(), default=0)):
            self.segment_number += 1
        elif newest:
            self._segment = AppendOnly(self._directory / layout.segment_name(newest))
        files = [*layout.segments(self._directory).values(), *layout.logs(self._directory).values()]
        files += layout.unnamed(self._directory).values()
        opened = (self._log.path, self._segment.path if self._segment else None)
        self._closed_bytes = {path.name: path.stat().st_size for path in files if path not in opened}
        self._roll()

    def _roll(self) -> None:
        if self._segment and self._segment.size >= self._segment_bytes:
            self._close_segment()
        self._next_offset = self._segment.size if self._segment else len(SEGMENT_HEADER)

    def _close_segment(self) -> None:
        if self._segment:
            self._closed_bytes[self._segment.path.name] = self._segment.size
            self._segment.close()
            self._segment = None
            self.segment_number += 1

    @property
    def has_pending(self) -> bool:
        """Whether something waits for `commit`."""
        return bool(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, and of the records that wait for `commit`."""
        in_segment = self._next_offset if self._segment or self._records else 0
        return sum(self._closed_bytes.values()) + in_segment + self._log.size

    def replay(self) -> Iterator[Transition]:
        """Every committed transition, oldest first; of the earlier logs there is the snapshot alone."""
        for rows, _ in commits(self._log.path, self._log.read(0, self._log.size)):
            yield from rows

    def append(self, transition: Transition) -> None:
        """Add a transition to the next commit."""
        self._rows.append(transition)
        self.num_appended += 1

    def append_group(self, data: bytes, transition: Transition) -> Transition:
        """Add a record and its transition to the next commit; returns the transition with the record's location.

        The CRC32 is taken from the transition where that has it.
        """
        crc32 = transition.crc32 or zlib.crc32(data)
        placed = replace(
            transition, segment=self.segment_number, offset=self._next_offset, length=len(data), crc32=crc32
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
            raise self._break(error) from error
        failpoint("journal.log_written")
        self._rows.clear()
        self._records.clear()
        self._roll()
        self.num_commits += 1
        self.commit_s += time.perf_counter() - began
        self.longest_commit_s = max(self.longest_commit_s, time.perf_counter() - began)

    def _write_records(self) -> None:
        if self._segment is None:
            self._segment = AppendOnly(self._directory / layout.segment_name(self.segment_number))
            self._segment.append(SEGMENT_HEADER + b"".join(self._records))
            sync(self._directory)
        else:
            self._segment.append(b"".join(self._records))

    def _break(self, error: OSError) -> JournalError:
        self._broken = (
            f"{self._directory}: cannot be written: {error.strerror}; {len(self._records)} groups were not "
            f"acknowledged, what was acknowledged is on disk"
        )
        return JournalError(self._broken)

    @property
    def log_is_full(self) -> bool:
        """Whether `begin_log` is due: so many bytes of rows have come after the log's snapshot."""
        return self._log.size - self._log_start >= self._log_bytes

    def begin_log(self, snapshot: Transition) -> None:
        """Begin the next log with a snapshot of all that was committed; nothing may wait for `commit`.

        Then the log before ends by naming it. Raises JournalError as `commit` does.
        """
        assert not self._rows
        path = self._directory / layout.log_name(self.log_number + 1)
        try:
            replace_with(path, LOG_HEADER + encode_transitions([snapshot]))
            # In this order: a log that ends so has lost something if there is none after it.
            self._log.append(followed(self.log_number + 1, snapshot.time_s))
            following = AppendOnly(path)
        except OSError as error:
            raise self._break(error) from error
        self._closed_bytes[self._log.path.name] = self._log.size
        self._log.close()
        self._log, self._log_start = following, following.size
        self.log_number += 1
        self._close_segment()
        self._roll()

    def remove_segment(self, number: int) -> None:
        """Delete a segment whose `removed` row is committed, and what a crash left of it."""
        self._remove(layout.segment_name(number))
        self._remove(layout.unnamed_name(number))

    def remove_log(self, number: int) -> None:
        """Delete a closed log."""
        self._remove(layout.log_name(number))

    def _remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)
        self._closed_bytes.pop(name, None)

    def read(self, location: Location, group_id: str = "") -> bytes:
        """A committed record. Raises JournalError, naming segment, offset and group, where its bytes are damaged."""
        return read_record(self._directory, location, group_id)

    def close(self) -> None:
        """Close the files. What was not committed is not written, as after a kill."""
        self._log.close()
        if self._segment:
            self._segment.close()
        self._lock.release()
