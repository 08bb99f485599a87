"""Reading the journal's files as a crash left them: which commits are whole, what is torn, what is damaged.

A crash leaves a file cut short. So the end of the log is torn where its last message is cut and no whole commit
follows; anything else that cannot be read is damage, and an error. Bytes of a segment that the log does not name were
never acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from stream_grpo.buffer.transitions import TRANSITION_SCHEMA, Transition, decode_transitions
from stream_grpo.errors import JournalError

_MESSAGE_START = b"\xff\xff\xff\xff"
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


def count_messages(data: bytes) -> int:
    """How many messages begin in these bytes, the last of them perhaps cut."""
    source, count = pa.BufferReader(data), 0
    while source.tell() < len(data):
        count += 1
        try:
            pa.ipc.read_message(source)
        except _BROKEN:
            break
    return count
