"""An event file for TensorBoard, written without it: scalars alone need few bytes of two formats.

A file is a row of records: the length as 8 bytes, the masked CRC32C of these, the data, its masked CRC32C (TensorFlow,
core/lib/io/record_writer.h). The data is an `Event`, a protocol buffer (core/util/event.proto): 1 wall_time as double,
2 step as int64, 3 file_version as text, 5 summary, a list of {1 tag, 2 simple_value as float}.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stream_grpo.sinks.sink import Rows, numbers

FOLDER = "tensorboard"
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits reversed."""


class TensorBoardSink:
    """One file for each start of a run; what an earlier start wrote stays beside it."""

    def __init__(self, run_dir: Path, now_s: float) -> None:
        """`now_s`: unix time, in the name of the file."""
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{now_s:.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._rows = Rows()
        self._newest_s = now_s
        """Unix time of the newest line."""
        self._write(_field(1, struct.pack("<d", now_s), kind=1) + _text(3, "brain.Event:2"))

    def write(self, line: Mapping[str, Any]) -> None:
        """The scalars that a line completes, at the newest learner step."""
        self._newest_s = line["time_s"]
        if row := self._rows.take(line):
            step = int(row.get("heldout/step", self._rows.step))
            self._write(event(self._newest_s, step, row))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary's numbers, at the time of the newest line, and close."""
        if summary:
            row = {f"summary/{name}": value for name, value in numbers(summary)}
            self._write(event(self._newest_s, self._rows.step, row))
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.write(record(data))
        self._file.flush()  # so that it is seen while the run goes on


def event(wall_time_s: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """An `Event` with a summary."""
    values = b"".join(
        _bytes(1, _text(1, tag) + _field(2, struct.pack("<f", _single(value)), kind=5))
        for tag, value in scalars.items()
    )
    time = _field(1, struct.pack("<d", wall_time_s), kind=1)
    return time + _field(2, _varint(step), kind=0) + _bytes(5, values)


def _single(value: float) -> float:
    """What fits into 4 bytes: beyond that it is the largest."""
    return max(-3.4e38, min(3.4e38, value))


def record(data: bytes) -> bytes:
    """One record of the file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def _table() -> tuple[int, ...]:
    values = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        values.append(byte)
    return tuple(values)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The CRC of RFC 3720, appendix B.4."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """As the format stores it: turned right by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _field(number: int, data: bytes, *, kind: int) -> bytes:
    return bytes([number << 3 | kind]) + data


def _bytes(number: int, data: bytes) -> bytes:
    return _field(number, _varint(len(data)) + data, kind=2)


def _text(number: int, text: str) -> bytes:
    return _bytes(number, text.encode())
