"""Reading the journal's files as a crash left them: which commits are whole, what is torn, what is damaged.

A crash leaves a file cut short. So the end of the newest log is torn where its last message is cut and no whole commit
follows; anything else that cannot be read is damage, and an error. Bytes of a segment that no log names were never
acknowledged, if a crash left them: then they are at the end of the newest segment, or in the one after it. Elsewhere
they say that a log lost what was acknowledged, which is an error too. Whole records among them are set aside, never
deleted, since a crash cannot be told from a log that was cut by something else.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from stream_grpo.buffer import layout
from stream_grpo.buffer.retention import Retention
from stream_grpo.buffer.snapshot import set_folds
from stream_grpo.buffer.transitions import TRANSITION_SCHEMA, Kind, Location, Transition, decode_transitions
from stream_grpo.errors import JournalError
from stream_grpo.files import replace_with, sync
from stream_grpo.transport.codec import GROUP_SCHEMA

LOG_HEADER: bytes = TRANSITION_SCHEMA.serialize().to_pybytes()
SEGMENT_HEADER: bytes = GROUP_SCHEMA.serialize().to_pybytes()
_MESSAGE_START = b"\xff\xff\xff\xff"
_TAIL_BYTES = 16 << 10
"""Many times what the commit of one short row takes."""
_BROKEN = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError)


def check_schema(path: Path, data: bytes, expected: pa.Schema) -> int:
    """Bytes of the schema message at the start of a file. Raises JournalError where it is another one, naming both."""
    try:
        source = pa.BufferReader(data)
        found = pa.ipc.read_schema(source)
        end = int(source.tell())
    except _BROKEN as error:
        raise JournalError(f"{path}: its schema cannot be read: {error}") from error
    if not found.equals(expected, check_metadata=True):
        raise JournalError(f"{path}: written as {_name(found)}, this program reads {_name(expected)}")
    return end


def _name(schema: pa.Schema) -> str:
    metadata = schema.metadata or {}
    name, version = (metadata.get(key, b"unknown").decode(errors="replace") for key in (b"schema", b"schema_version"))
    return f"{name} version {version} ({len(schema)} columns)"


def commits(path: Path, data: bytes) -> Iterator[tuple[list[Transition], int]]:
    """The whole commits of a log, each with the offset at which it ends.

    Raises JournalError, naming the offset, for damage that no crash explains.
    """
    position = check_schema(path, data, TRANSITION_SCHEMA)
    view = memoryview(data)
    while position < len(data):
        if _is_torn(view[position:]):
            later = _next_whole_commit(data, position + 8)
            if later is None:
                return
            raise JournalError(f"{path}: damaged at offset {position}, and a whole commit follows at offset {later}")
        try:
            rows, length = _read_commit(view[position:])
        except _BROKEN as error:
            raise JournalError(f"{path}: damaged at offset {position}: {error}") from error
        position += length
        yield rows, position


def rows_of(path: Path) -> Iterator[Transition]:
    """The rows of a log, also while it is written to: a commit that is not all there yet is not among them."""
    for rows, _ in commits(path, path.read_bytes()):
        yield from rows


def last_row(path: Path) -> Transition | None:
    """The last row of a log, where its last commit is whole and no longer than a few rows; else None."""
    with path.open("rb") as file:
        offset = max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES)
        data = layout.pread(file.fileno(), offset, _TAIL_BYTES)
    position = data.rfind(_MESSAGE_START)
    while position >= 0:
        # Most places that look like the start of a message are in the middle of one.
        with suppress(*_BROKEN):
            rows, length = _read_commit(memoryview(data)[position:])
            if position + length == len(data):
                return rows[-1]
        position = data.rfind(_MESSAGE_START, 0, position + len(_MESSAGE_START) - 1)
    return None


def _read_commit(data: memoryview) -> tuple[list[Transition], int]:
    source = pa.BufferReader(pa.py_buffer(data))
    message = pa.ipc.read_message(source)
    batch = pa.ipc.read_record_batch(message, TRANSITION_SCHEMA)
    batch.validate(full=True)
    return decode_transitions(batch), int(source.tell())


def _is_torn(rest: memoryview) -> bool:
    """Whether these bytes are the beginning of a message that is not all there."""
    if len(rest) < 8:
        return True
    if bytes(rest[:4]) != _MESSAGE_START:
        # Sectors that the disk never wrote read as zeros.
        return not any(rest)
    metadata_length = int.from_bytes(rest[4:8], "little", signed=True)
    if metadata_length > len(rest) - 8:
        return True
    source = pa.BufferReader(pa.py_buffer(rest))
    try:
        pa.ipc.read_message(source)
    except OSError as error:
        return not isinstance(error, pa.ArrowException) and "message body" in str(error)
    except _BROKEN:
        return False
    return False


def _next_whole_commit(data: bytes, start: int) -> int | None:
    position = data.find(_MESSAGE_START, start)
    while position >= 0:
        try:
            if _read_commit(memoryview(data)[position:])[0]:
                return position
        except _BROKEN:
            pass
        position = data.find(_MESSAGE_START, position + 1)
    return None


def check_first(log: Path, row: Transition | None) -> None:
    """Raises JournalError where the first row of a log, None if there is none, is not that of the log of its number."""
    snapshot = row if row and row.kind is Kind.SNAPSHOT else None
    number, found = layout.number_of(log), snapshot.segment if snapshot else 1
    if number == found:
        return
    if found == 1 and not row:
        raise JournalError(f"{log}: does not begin with a snapshot, it has no whole row; put back a copy of it")
    raise JournalError(
        f"{log}: begins as {layout.log_name(found)} does, so that one was copied over it; put back a copy of its own"
        if snapshot
        else f"{log}: does not begin with a snapshot, as {layout.LOG_NAME} does; put back a copy of its own"
    )


def retained(log: Path, rows: Iterable[Transition]) -> Retention:
    """The files that a log says are there, from its snapshot and all rows after it."""
    retention = Retention()
    for row in rows:
        if row.kind is Kind.SNAPSHOT:
            set_folds({"retention": retention}, row)
        else:
            retention.apply(row)
    return retention


def repair_segments(directory: Path, retention: Retention) -> int:
    """Make the segments what the log says they are; returns how many groups were incomplete or not acknowledged.

    Raises JournalError for missing bytes, and for unnamed ones that no crash explains.
    """
    found = layout.segments(directory)
    for number, segment in retention.segments.items():
        _check_segment(directory / layout.segment_name(number), segment.end)
    removed = {number for number in found if number <= retention.newest} - retention.segments.keys()
    ends = {number: retention.segments[number].end if number in retention.segments else 0 for number in found}
    unnamed = [n for n, path in found.items() if n not in removed and path.stat().st_size > ends[n]]
    for number in unnamed:
        if number not in (retention.newest, retention.newest + 1) or len(unnamed) > 1:
            raise JournalError(
                f"{found[number]}: holds bytes after offset {ends[number]} that no log names, and no crash leaves such "
                f"in {len(unnamed)} segments or before the newest: the log has lost acknowledged groups; put back a "
                f"copy of it, or begin another run"
            )
    num_incomplete = sum(_cut_segment(number, found[number], ends[number]) for number in unnamed)
    for number, path in found.items():
        if not ends[number]:
            path.unlink()
    sync(directory)
    return num_incomplete


def _check_segment(path: Path, end: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size < end:
        raise JournalError(
            f"{path}: ends at {size}, but the log names a record that ends at {end}: acknowledged data is missing"
        )
    with path.open("rb") as file:
        check_schema(path, file.read(len(SEGMENT_HEADER)), GROUP_SCHEMA)


def _cut_segment(number: int, path: Path, end: int) -> int:
    """Cut a segment at `end`, whole records behind it set aside before; returns how many began there."""
    with path.open("r+b") as file:
        file.seek(end or len(SEGMENT_HEADER))
        data = file.read()
        num_begun, end_of_whole = whole_messages(data)
        if end_of_whole:
            aside = path.with_name(layout.unnamed_name(number))
            earlier = aside.read_bytes() if aside.exists() else SEGMENT_HEADER
            replace_with(aside, earlier + data[:end_of_whole])
        file.truncate(end)
        os.fsync(file.fileno())
    return num_begun


def read_record(directory: Path, location: Location, group_id: str = "") -> bytes:
    """A record. Raises JournalError, naming segment, offset and group, where its bytes are damaged."""
    path = directory / layout.segment_name(location.segment)
    with path.open("rb") as file:
        data = layout.pread(file.fileno(), location.offset, location.length)
    if len(data) != location.length or zlib.crc32(data) != location.crc32:
        raise JournalError(
            f"{path}: the record of group {group_id or 'unknown'} at offset {location.offset} is damaged: "
            f"{location.length} bytes with CRC32 {location.crc32:#010x} were written"
        )
    return data


def whole_messages(data: bytes) -> tuple[int, int]:
    """How many messages begin in these bytes, the last of them perhaps cut, and where the last whole one ends."""
    source, count, end = pa.BufferReader(data), 0, 0
    while end < len(data):
        count += 1
        try:
            pa.ipc.read_message(source)
        except _BROKEN:
            break
        end = source.tell()
    return count, end
