"""The pool's end of one worker: it starts the process, hands it calls, kills it with all that it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import stream_grpo
from stream_grpo.rewards.messages import decode, encode

_PACKAGES = str(Path(stream_grpo.__file__).parents[1])
# A worker is one of many: one thread each.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_SEND_TIMEOUT_S = 10.0
_CHUNK_BYTES = 1 << 18


class Seat:
    """One worker process, replaced by `restart`. Belongs to the pool's thread, with whose end the process ends."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options`: of `worker.main`, without those of the process."""
        self._options = dict(options)
        self.to_drop: list[str] = []
        """Trajectories whose environments it need not hold any longer; told with the next call."""
        self.given_at = 0.0
        """When it began its present call, on the monotonic clock: was given it, or answered the one before."""
        self.most_steps = 1
        """Most resets and steps that one of the calls that it was given may take."""
        self.is_ready = False
        """Whether it has its environment loaded."""
        self.started_at: float
        self._link: socket.socket
        self._rest: bytes
        self._start()

    def fileno(self) -> int:
        """Of the socket, for a selector."""
        return self._link.fileno()

    def give(self, calls: Sequence[Mapping[str, Any]], *, most_steps: int) -> None:
        """Hand calls over, to be answered one after the other. Raises OSError where the worker does not take them."""
        self.given_at = time.monotonic()
        self.most_steps = most_steps
        kept = {call["trajectory"] for call in calls}
        dropped = [name for name in self.to_drop if name not in kept]
        self.to_drop.clear()
        self._link.sendall(encode({"drop": dropped, "calls": calls}))

    def messages(self) -> list[dict[str, Any]]:
        """What the worker has said since the last call; to be called when its socket can be read. Raises OSError."""
        chunk = self._link.recv(_CHUNK_BYTES)
        if not chunk:
            raise ConnectionResetError("the worker closed its socket")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [message for message in map(decode, lines) if message]

    def restart(self) -> None:
        """Put a fresh process in the place of this one."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the process and what it started at once, and wait for it."""
        self._link.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        self.is_ready, self._rest, self.started_at = False, b"", time.monotonic()
        self.to_drop.clear()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(_SEND_TIMEOUT_S)
        options = {**self._options, "socket": theirs.fileno(), "pool": os.getpid()}
        path = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
        with theirs:
            # A fresh interpreter, as of reward workers, in a session of its own: it is killed as a group.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stream_grpo.environments.worker", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,
            )
