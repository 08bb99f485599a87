"""The pool's end of one reward worker: it starts the process, hands it tasks, and says what has become of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import stream_grpo
from stream_grpo.rewards.board import Task
from stream_grpo.rewards.code import CodeSettings
from stream_grpo.rewards.messages import Progress, UnderWay, decode, encode_batch
from stream_grpo.rewards.worker import KILL_SIGNAL

_PACKAGES = str(Path(stream_grpo.__file__).parents[1])
# A worker is one of many: one thread each.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# The worker reads whatever it is sent, at once; one that does not is no worker any more.
_SEND_TIMEOUT_S = 10.0
_CHUNK_BYTES = 1 << 18
_KILL_AGAIN_S = 1.0


@dataclass(slots=True)
class InHand:
    """The batch that a worker has."""

    tasks: Sequence[Task]
    given_at: float
    """On the monotonic clock."""
    answered: set[int] = field(default_factory=set)

    def unanswered(self) -> list[int]:
        """Places in the batch, in order."""
        return [index for index in range(len(self.tasks)) if index not in self.answered]


class Slot:
    """One worker process, replaced by `restart` where it does not come back by itself."""

    def __init__(
        self, memory_bytes: int, preload: Sequence[str], paths: Sequence[str], code: CodeSettings | None = None
    ) -> None:
        self._options = {
            "memory_bytes": memory_bytes,
            "preload": list(preload),
            "paths": list(paths),
            "code": asdict(code or CodeSettings()),
        }
        self.child: int | None = None
        """The process that checks; None while there is none that is ready."""
        self.batch: InHand | None = None
        self.is_killed = False
        """Whether the child was killed by us and its end is awaited."""
        self.condemned: UnderWay | None = None
        """What it was killed for."""
        self.killed_at = 0.0
        """On the monotonic clock."""
        self._signalled_at = 0.0
        self._link: socket.socket
        self._rest: bytes
        self._start()

    def fileno(self) -> int:
        """Of the socket, for a selector."""
        return self._link.fileno()

    @property
    def is_idle(self) -> bool:
        """Whether it can be given a batch."""
        return self.child is not None and self.batch is None and not self.is_killed

    @property
    def has_ended(self) -> bool:
        """Whether the process itself is gone, and not only its child."""
        return self._process.poll() is not None

    def give(self, tasks: Sequence[Task]) -> None:
        """Hand a batch over. Raises OSError where the worker does not take it."""
        assert self.child is not None
        self.batch = InHand(tasks, time.monotonic())
        self._link.sendall(encode_batch(self.child, [task.payload for task in tasks]))

    def messages(self) -> list[dict[str, Any]]:
        """What the worker has said since the last call; to be called when its socket can be read. Raises OSError."""
        chunk = self._link.recv(_CHUNK_BYTES)
        if not chunk:
            raise ConnectionResetError("the worker closed its socket")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [message for message in map(decode, lines) if message]

    def under_way(self) -> UnderWay:
        """Which task of the batch is under way, and since when."""
        return self._progress.read()

    def kill(self, condemned: UnderWay | None) -> None:
        """Kill the child with all it started; the keeper says when it has ended, and forks another."""
        self.is_killed, self.condemned, self.killed_at = True, condemned, time.monotonic()
        self._signal()

    def kill_again(self) -> None:
        """Repeat a kill that was not obeyed within a second."""
        if time.monotonic() - self._signalled_at > _KILL_AGAIN_S:
            self._signal()

    def _signal(self) -> None:
        self._signalled_at = time.monotonic()
        self._process.send_signal(KILL_SIGNAL)

    def restart(self) -> None:
        """Put a fresh process in the place of this one."""
        self.close()
        self._start()

    def close(self) -> None:
        """End child and process at once, and wait for it."""
        if self.child is not None and self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child, signal.SIGKILL)
        self._link.close()
        self._process.kill()
        self._process.wait()
        self._progress.close()

    def _start(self) -> None:
        self.child, self.batch, self.is_killed, self.condemned, self._rest = None, None, False, None, b""
        self.started_at = time.monotonic()
        self._progress = Progress()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(_SEND_TIMEOUT_S)
        options = {**self._options, "socket": theirs.fileno(), "progress": self._progress.file}
        path = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
        with theirs:
            # A fresh interpreter: neither ZeroMQ nor vLLM nor CUDA survive a fork of the sampler. A session of its own:
            # Ctrl-C is for the sampler alone. -P: no file of the working directory hides a module.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stream_grpo.rewards.worker", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._progress.file),
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,
            )
