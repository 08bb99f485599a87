"""How long the processes of a run live: no longer than their launcher, and a new start waits for what is left of them.

A part that outlived its launcher would train, publish and write checkpoints beside the one that a resumed run starts.
The launcher in turn looks after the processes of its own Ray, without which nothing can be started again.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from stream_grpo.errors import StallError

PARTS_LOCK = "parts.lock"
_POLL_S = 0.02


def end_with(pid: int) -> None:
    """Kill this process as soon as process `pid` of this machine is dead, whatever it does then. Returns at once."""
    threading.Thread(target=_follow, args=(pid,), name="lifetime", daemon=True).start()


def _follow(pid: int) -> None:
    with suppress(ProcessLookupError):
        try:
            # Readable once the process has ended, before anybody has taken note of it.
            select.select([os.pidfd_open(pid)], [], [])
        except (AttributeError, PermissionError):
            # A kernel or a sandbox without it.
            while True:
                os.kill(pid, 0)
                time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def become_part(run_dir: Path) -> None:
    """Count as a process of this run until death: `wait_for_parts` of a later start waits for it."""
    # Never closed: the kernel drops the lock with the process, however it dies.
    descriptor = os.open(run_dir / PARTS_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def wait_for_parts(run_dir: Path, timeout_s: float = 60.0) -> None:
    """Wait until no process of an earlier start of this run lives. Raises StallError where one still does."""
    deadline = time.monotonic() + timeout_s
    with (run_dir / PARTS_LOCK).open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    raise StallError(
                        f"{run_dir}: processes of an earlier start still live after {timeout_s:.0f} s; end them: "
                        f"they hold {lock.name}"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return


def children(programs: Collection[str]) -> dict[str, int]:
    """The living children of this process that run one of these programs: process id by program."""
    found: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # a process may end while it is looked at
            program = Path((entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")).name
            if program in programs and _state_and_parent(int(entry.name))[1] == os.getpid():
                found[program] = int(entry.name)
    return found


def is_alive(pid: int) -> bool:
    """Whether a child of this process has not ended."""
    try:
        return _state_and_parent(pid)[0] not in "ZX"
    except OSError:
        return False


def _state_and_parent(pid: int) -> tuple[str, int]:
    # After the name, which is in parentheses and may hold anything.
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)
