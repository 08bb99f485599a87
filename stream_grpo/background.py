"""Work that goes on in a thread of its own while the caller does something else.

`Background` is what the caller sees: results by task, one error for whoever asks once it has failed, an end.
`WorkerPool` is one whose thread hands work to processes, hears them, and looks at those that may be over a limit:
limits hold whatever the caller's thread is busy with.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, Protocol, Self, TypeVar

from stream_grpo.errors import StreamGrpoError

_MAX_FAILED_STARTS = 3

Result = TypeVar("Result")


class Background(ABC, Generic[Result]):
    """Results that a thread makes. All methods may be called from any thread.

    What both sides touch is touched with `_changed` held. A subclass starts `_thread` once it is set up.
    """

    def __init__(self, *, thread_name: str, error: type[StreamGrpoError], closed: str) -> None:
        """`error`: what is raised where it has failed, and, with `closed` as its message, after `close`."""
        self._error, self._closed = error, closed
        self._changed = threading.Condition()
        self._finished: list[tuple[str, Result]] = []
        self._failure: StreamGrpoError | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    @property
    @abstractmethod
    def num_open(self) -> int:
        """What was submitted and is not finished."""

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Result]]:
        """What is finished and was not yet returned, in the order of finishing; waits up to `timeout_s` for some where
        any is due.

        Raises the error of its kind where it has failed or is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished or self._failure or self._is_closing or not self.num_open, timeout=timeout_s
            )
            self._check_open()
            done = self._finished.copy()
            self._finished.clear()
            return done

    def close(self) -> None:
        """End all that is under way, whatever it waits for. May be called twice."""
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
            self._changed.notify_all()
        if is_first:
            self._wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise self._error(self._closed)

    @abstractmethod
    def _wake(self) -> None:
        """Have the thread look at what has changed."""

    @abstractmethod
    def _run(self) -> None:
        """The thread, until it is closing."""


class Worker(Protocol):
    """The pool's end of a process."""

    def fileno(self) -> int:
        """Of the socket that can be read when the process has said something."""

    def restart(self) -> None:
        """Put a fresh process in the place of this one."""

    def close(self) -> None:
        """End the process at once."""


AnyWorker = TypeVar("AnyWorker", bound=Worker)


class WorkerPool(Background[Result], Generic[Result, AnyWorker]):
    """Worker processes, served by one thread, to which the methods with an underscore belong."""

    def __init__(self, *, thread_name: str, error: type[StreamGrpoError], what: str, worker: str) -> None:
        """`what`: the pool in an error, `worker`: one of its workers."""
        super().__init__(thread_name=thread_name, error=error, closed=f"{what} is closed")
        self._what, self._worker_name = what, worker
        self._workers: list[AnyWorker] = []
        self._num_kills = self._num_restarts = self._num_failed_starts = 0
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)

    @abstractmethod
    def _hand_out(self) -> None:
        """Give workers what waits."""

    @abstractmethod
    def _next_look(self) -> float:
        """When a worker may be over a limit, on the monotonic clock; inf: never before something happens."""

    @abstractmethod
    def _hear(self, worker: AnyWorker) -> None:
        """Take what a worker has said, or that it has ended."""

    @abstractmethod
    def _look_at_workers(self) -> None:
        """Deal with those that are over a limit."""

    def _begin(self) -> None:
        """What the thread does first: nothing for a pool whose workers are there before it."""

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread will wake anyway; closed: it has ended
            self._bell.send(b"\0")

    def _run(self) -> None:
        try:
            self._begin()
            while not self._is_closing:
                self._turn()
        except self._error as error:
            self._failure = error
        except Exception as error:  # nobody else would hear of it
            self._failure = self._error(f"{self._what} failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        finally:
            self._end()

    def _turn(self) -> None:
        with self._changed:
            self._hand_out()
            look_at = self._next_look()
        events = self._selector.select(None if look_at == math.inf else max(0.0, look_at - time.monotonic()))
        with self._changed:
            for key, _ in events:
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._ear.recv(4096)
                else:
                    self._hear(key.data)
            if time.monotonic() >= look_at:
                self._look_at_workers()
            if self._finished:
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._selector.close()
            for worker in self._workers:
                worker.close()
            self._bell.close()
            self._ear.close()
            self._changed.notify_all()

    def _add(self, worker: AnyWorker) -> None:
        self._workers.append(worker)
        self._selector.register(worker, selectors.EVENT_READ, worker)

    def _restart(self, worker: AnyWorker) -> None:
        """Put a fresh process in the place of one that has ended or is to end."""
        self._num_restarts += 1
        self._selector.unregister(worker)
        worker.restart()
        self._selector.register(worker, selectors.EVENT_READ, worker)

    def _count_failed_start(self, how: str) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= _MAX_FAILED_STARTS:
            raise self._error(
                f"no {self._worker_name} starts: the last of {_MAX_FAILED_STARTS} {how}; its stderr says more"
            )
