"""Where numbers go: `metrics.jsonl` always, W&B when asked. The only file that imports wandb.

Every process appends its own lines; a line is one JSON object with `time_s`, `source` and `event`. The launcher follows
the file and hands the learner's steps on to the console and to W&B, so that no process waits for either.
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
    """Follows a run's metrics from the start; whole lines only. A line that a crash cut is passed over."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._offset = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """The lines appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # A line without its end is still being written.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)


class WandbSink:
    """W&B: one row a learner step. `mode` is offline, online or disabled."""

    def __init__(self, run_dir: Path, name: str, project: str, mode: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # The child process of W&B takes a group of its own: Ctrl-C reaches the launcher alone.
        self._run = wandb.init(
            project=project,
            name=name,
            mode=mode,  # type: ignore[arg-type]
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(x_disable_stats=True, console="off", disable_git=True, disable_code=True),
        )

        # What is evaluated is some steps old by then: its figures have an axis of their own.
        self._run.define_metric("heldout/*", step_metric="heldout/step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One row; nested values are joined by a slash."""
        self._run.log(dict(_flat(values)), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and end."""
        self._run.summary.update(dict(_flat(summary)))
        self._run.finish()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value
