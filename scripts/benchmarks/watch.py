"""Peak resident memory of the processes below this one, by what they are in a run."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_LOOK_S = 0.5


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Bytes by name, complete once the block has ended: the kernel's own high-water mark, looked at twice a second.

    Of a part of a run the name is that of its log, of any other process that of its program; the largest of a name.
    """
    peaks: dict[str, int] = {}
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(peaks, stop), daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        stop.set()
        watcher.join()


def _watch(peaks: dict[str, int], stop: threading.Event) -> None:
    me = psutil.Process()
    while not stop.wait(_LOOK_S):
        for process in me.children(recursive=True):
            # A process may end at any moment.
            try:
                name, peak = _name(process), _peak_bytes(process.pid)
            except (psutil.Error, OSError):
                continue
            peaks[name] = max(peaks.get(name, 0), peak)


def _peak_bytes(pid: int) -> int:
    found = re.search(r"^VmHWM:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return 1024 * int(found.group(1)) if found else 0


def _name(process: psutil.Process) -> str:
    log = Path(f"/proc/{process.pid}/fd/1").readlink()
    if log.suffix == ".log" and log.parent.name == "logs":
        return log.stem
    return "launcher" if "stream_grpo.cli" in process.cmdline() else str(process.name())
