"""Finds the processes of a run in /proc, by the log they write or the variable they inherited, and ends them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WORKER_MODULE = "stream_grpo.rewards.worker"
RAY_PROGRAMS = {"raylet": "raylet", "gcs": "gcs_server"}


@dataclass(frozen=True, slots=True)
class Found:
    """A process of the run."""

    pid: int
    parent: int
    command: str
    log: str
    """What its standard output goes to."""


def find(run_dir: Path, variable: str) -> list[Found]:
    """The living processes that write a log of the run, or have `variable` (NAME=value) in their environment."""
    logs, found = f"{run_dir / 'logs'}/", []
    for entry in os.listdir("/proc"):
        # A process may end while it is looked at.
        with suppress(OSError, IndexError):
            if not entry.isdecimal() or int(entry) == os.getpid():
                continue
            log = os.readlink(f"/proc/{entry}/fd/1")
            if not log.startswith(logs) and variable.encode() not in Path(f"/proc/{entry}/environ").read_bytes():
                continue
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Found(int(entry), int(parent), command, log))
    return found


def pids_of(who: str, processes: Iterable[Found], run_dir: Path) -> list[int]:
    """The processes of a part: its own, not those that it started. Of `all` everything; of a sampler each of them."""
    processes = list(processes)
    if who == "all":
        return [process.pid for process in processes]
    if who == "reward worker":
        return [process.pid for process in processes if WORKER_MODULE in process.command]
    if who in RAY_PROGRAMS:
        return [p.pid for p in processes if Path(p.command.split(" ")[0]).name == RAY_PROGRAMS[who]]
    logs = {f"{run_dir / 'logs' / name}.log" for name in _log_names(who, run_dir)}
    mine = [process for process in processes if process.log in logs]
    started = {process.pid: process.log for process in mine}
    return sorted(process.pid for process in mine if started.get(process.parent) != process.log)


def _log_names(who: str, run_dir: Path) -> list[str]:
    if who != "sampler":
        return [who]
    return [path.stem for path in (run_dir / "logs").glob("sampler-*.log")]


def end(pids: Iterable[int], timeout_s: float = 10.0) -> int:
    """SIGKILL them all at once and wait until they are dead; how many of them had lived. Raises TimeoutError."""
    watched = []
    for pid in pids:
        with suppress(ProcessLookupError):
            watched.append((pid, os.pidfd_open(pid)))
    for pid, _ in watched:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    for pid, descriptor in watched:
        # Readable once the process has ended.
        is_dead = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
        os.close(descriptor)
        if not is_dead:
            raise TimeoutError(f"process {pid} lives {timeout_s:.0f} s after SIGKILL")
    return len(watched)
