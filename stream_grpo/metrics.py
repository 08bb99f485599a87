"""The file of a run's metrics: `metrics.jsonl`, written always.

Every process appends its own lines; a line is one JSON object with `time_s`, `source` and `event`. What a line may
carry stands in `registry`. The launcher follows the file and hands the lines on to the console and to other `sinks`, so
that no process waits for any of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends lines to a run's metrics. One write a line, so that several processes may share the file."""

    def __init__(self, run_dir: Path, source: str, clock: Callable[[], float] = time.time) -> None:
        self._file = os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # a line that a crash cut stays a line of its own
        self._source, self._clock = source, clock

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line. A number that is not finite is written as null: JSON has no other word for it."""
        line = {"time_s": self._clock(), "source": self._source, "event": event, **values}
        os.write(self._file, (json.dumps(_finite(line)) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsReader:
    """Follows a run's metrics from the start; whole lines only.

    What is no line of metrics is passed over: a crash cuts lines, and a power cut may leave a block of zeros.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._offset = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """The lines appended since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # A line without its end is still being written.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if (found := _decoded(line)) is not None:
                    yield found


def _decoded(line: bytes) -> dict[str, Any] | None:
    # ValueError: no JSON, no UTF-8, or a number of thousands of digits.
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            return found
    return None
