"""Resident memory of the processes below this one, by what they are in a run: the peak, and whether it grows."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.page import table

_LOOK_S, _KEEP_S = 0.5, 5.0
START_SHARE, MIN_SPAN_S = 1 / 3, 60.0
"""The share of a process's life in which it may still grow, and the seconds after that from which a slope is told."""
LEAST_SHOWN_BYTES = 16 << 20

Figures = dict[str, dict[str, float | None]]
"""By process: `peak_bytes`, `bytes_per_hour` or None, `span_s` that it was looked at."""


@contextmanager
def watched_memory() -> Iterator[Figures]:
    """What is told of every process below this one; complete once the block has ended.

    The peak is the kernel's own high-water mark, looked at twice a second; of several processes of a name the largest.
    Of a part of a run the name is that of its log, of any other process that of its program.
    """
    found: Figures = {}
    peaks: dict[str, int] = {}
    series: dict[str, list[tuple[float, float]]] = {}
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(peaks, series, stop), daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        stop.set()
        watcher.join()
        found.update(figures(peaks, series))


def figures(peaks: Mapping[str, int], series: Mapping[str, Sequence[tuple[float, float]]]) -> Figures:
    """`series`: of each name pairs of seconds and resident bytes, those of all its processes at that time together."""
    return {
        name: {
            "peak_bytes": peak,
            "bytes_per_hour": slope_per_hour(series.get(name, ())),
            "span_s": series[name][-1][0] - series[name][0][0] if series.get(name) else 0.0,
        }
        for name, peak in peaks.items()
    }


def slope_per_hour(series: Sequence[tuple[float, float]]) -> float | None:
    """Bytes an hour, by least squares over what comes after the first third; None for less than a minute of that."""
    if len(series) < 2:
        return None
    seconds, resident = np.array(series, np.float64).T
    settled = seconds >= seconds[0] + START_SHARE * (seconds[-1] - seconds[0])
    x, y = seconds[settled], resident[settled]
    if len(x) < 2 or x[-1] - x[0] < MIN_SPAN_S:
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(3600 * (x @ y) / (x @ x))


def memory_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The largest first; what is under 16 MiB is left out."""
    rows = []
    for name, figure in sorted(found.items(), key=lambda item: -item[1]["peak_bytes"]):
        if figure["peak_bytes"] < LEAST_SHOWN_BYTES:
            continue
        slope = figure["bytes_per_hour"]
        told = "" if slope is None else f"{slope / 2**20:+,.0f} MiB over {figure['span_s'] / 60:.0f} min"
        rows.append((name, f"{figure['peak_bytes'] / 2**20:,.0f} MiB", told))
    return table(("process", "peak resident", "growth an hour, start left out"), rows)


def _watch(peaks: dict[str, int], series: dict[str, list[tuple[float, float]]], stop: threading.Event) -> None:
    me = psutil.Process()
    kept_at = -_KEEP_S
    while not stop.wait(_LOOK_S):
        now, resident = time.monotonic(), dict[str, float]()
        for process in me.children(recursive=True):
            # A process may end at any moment.
            try:
                name, (peak, rss) = _name(process), _bytes(process.pid)
            except (psutil.Error, OSError):
                continue
            peaks[name] = max(peaks.get(name, 0), peak)
            resident[name] = resident.get(name, 0.0) + rss
        if now - kept_at >= _KEEP_S:
            kept_at = now
            for name, value in resident.items():
                series.setdefault(name, []).append((now, value))


def _bytes(pid: int) -> tuple[int, int]:
    """High-water mark and resident bytes of now; 0 for a process that has ended and is not waited for."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmHWM|VmRSS):\s*(\d+) kB$", text, flags=re.MULTILINE))
    return 1024 * int(found.get("VmHWM", 0)), 1024 * int(found.get("VmRSS", 0))


def _name(process: psutil.Process) -> str:
    log = Path(f"/proc/{process.pid}/fd/1").readlink()
    if log.suffix == ".log" and log.parent.name == "logs":
        return log.stem
    line = process.cmdline()
    if "stream_grpo.cli" in line:
        return "launcher"
    return "trl" if any(part.endswith("trl_run.py") for part in line) else str(process.name())
