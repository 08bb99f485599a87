"""The loop of the box's first process: start a program, watch it, kill what is left, answer."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stream_grpo.rewards.inside import box, kernel
from stream_grpo.rewards.inside.asserts import run_tests
from stream_grpo.rewards.inside.program import run_script, serve_program
from stream_grpo.rewards.inside.wire import WireClosedError, read_message, write_message

STDERR_BYTES = 4000
"""What is kept of the end of the error stream."""


@dataclass
class Capture:
    """What came out of one pipe: at most `limit` bytes, its beginning or its end."""

    limit: int
    keeps_end: bool = False
    data: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    def add(self, part: bytes) -> None:
        """Keep what is within the limit."""
        self.data += part
        if self.keeps_end:
            del self.data[: -self.limit]
        elif len(self.data) > self.limit:
            del self.data[self.limit :]
            self.is_over = True


@dataclass(frozen=True)
class Child:
    """A started process and the pipes that it writes to."""

    pid: int
    pid_fd: int
    captures: dict[int, Capture]


def serve_jobs(room: box.Box, setup: dict[str, Any], *, control_in: int, control_out: int) -> None:
    """Answer jobs until the message "close" comes; end at once if the caller is gone."""
    limits = setup["limits"]
    while True:
        job = read_message(control_in)
        if job["kind"] == "close":
            write_message(control_out, {"closed": True})
            return
        box.renew_home(room, disk_bytes=limits["disk_bytes"])
        try:
            run = _run_script if job["kind"] == "script" else _run_asserts
            answer = run(room, setup["program"], limits, job, control_in)
        finally:
            box.kill_all(room)
        write_message(control_out, answer)


def _run_script(
    room: box.Box, program: str, limits: dict[str, Any], job: dict[str, Any], control_in: int
) -> dict[str, Any]:
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(job["stdin"].encode("utf-8", "replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    child = _start(lambda: run_script(program), room.program_uid, limits, stdin=stdin)
    os.close(stdin)
    return _watched(room, child, {}, limits, control_in)


def _run_asserts(
    room: box.Box, program: str, limits: dict[str, Any], job: dict[str, Any], control_in: int
) -> dict[str, Any]:
    to_program, to_tests = os.pipe(), os.pipe()
    program_side = _start(
        lambda: serve_program(program, to_program[0], to_tests[1]),
        room.program_uid,
        limits,
        keep=(to_program[0], to_tests[1]),
    )
    os.close(to_program[0])
    os.close(to_tests[1])
    job = read_message(control_in)  # only now: the program's memory is a copy of this one's, as of its start
    verdict = os.pipe()
    tests_side = _start(
        lambda: run_tests(job, to_tests[0], to_program[1], verdict[1]),
        room.tests_uid,
        limits,
        keep=(to_tests[0], to_program[1], verdict[1]),
        is_readable=False,
    )
    for fd in (to_program[1], to_tests[0], verdict[1]):
        os.close(fd)
    answers = {verdict[0]: Capture(limits["output_bytes"])}
    result = _watched(room, tests_side, answers | program_side.captures, limits, control_in)
    os.close(program_side.pid_fd)
    return result | {"verdict": bytes(answers[verdict[0]].data).decode()}


def _start(
    body: Callable[[], None],
    uid: int | None,
    limits: dict[str, Any],
    *,
    stdin: int | None = None,
    keep: tuple[int, ...] = (),
    is_readable: bool = True,
) -> Child:
    """Fork a process without privileges, with only the given files open, that runs `body` and ends."""
    out, err = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(os.open("/dev/null", os.O_RDONLY) if stdin is None else stdin, 0)
            os.dup2(out[1], 1)
            os.dup2(err[1], 2)
            _close_all_but(keep)
            _limit(limits)
            kernel.drop_privileges(uid)
            if not is_readable:
                kernel.set_no_core_access()
            body()
        finally:
            os._exit(1)
    os.close(out[1])
    os.close(err[1])
    captures = {out[0]: Capture(limits["output_bytes"]), err[0]: Capture(STDERR_BYTES, keeps_end=True)}
    return Child(pid, os.pidfd_open(pid), captures)


def _close_all_but(keep: tuple[int, ...]) -> None:
    before = 2
    for fd in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(before + 1, fd)
        before = fd


def _limit(limits: dict[str, Any]) -> None:
    cpu_s = max(1, round(limits["cpu_s"]))
    kernel.set_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    kernel.set_limit(resource.RLIMIT_AS, limits["memory_bytes"])
    kernel.set_limit(resource.RLIMIT_NPROC, limits["num_processes"])
    kernel.set_limit(resource.RLIMIT_NOFILE, limits["num_files"])
    kernel.set_limit(resource.RLIMIT_FSIZE, limits["disk_bytes"])
    kernel.set_limit(resource.RLIMIT_CORE, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the caller may have blocked some
    sys.set_int_max_str_digits(0 if limits["long_integers"] else sys.int_info.default_max_str_digits)


def _watched(
    room: box.Box, child: Child, more: dict[int, Capture], limits: dict[str, Any], control_in: int
) -> dict[str, Any]:
    """Read what the child and its company write until it ends or a limit is reached; then kill them all."""
    started = time.monotonic()
    captures = child.captures | more
    end = _watch(child.pid_fd, captures, started + limits["wall_s"], control_in)
    seconds = time.monotonic() - started
    if end != "exit":
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    box.kill_all(room)
    for fd, capture in captures.items():
        os.set_blocking(fd, False)
        while not capture.is_over and (part := _read(fd)):
            capture.add(part)
        os.close(fd)
    os.close(child.pid_fd)
    if any(capture.is_over for capture in captures.values()):
        end = "output"
    out, err = (bytes(capture.data).decode("utf-8", "replace") for capture in child.captures.values())
    return {
        "end": end,
        "status": os.waitstatus_to_exitcode(status),
        "stdout": out,
        "stderr": err,
        "seconds": seconds,
    }


def _watch(pid_fd: int, captures: dict[int, Capture], deadline: float, control_in: int) -> str:
    """Wait for the end of the process: "exit", "wall" at the deadline, "output" once a pipe gave more than allowed."""
    waiting = select.poll()
    waiting.register(control_in, 0)  # nothing but the end of the caller
    for fd in (pid_fd, *captures):
        waiting.register(fd, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        for fd, event in waiting.poll(left * 1000 + 1):
            if fd == control_in and event & (select.POLLHUP | select.POLLERR):
                raise WireClosedError("the caller is gone")
            if fd == pid_fd:
                return "exit"
            if fd in captures:
                part = _read(fd)
                captures[fd].add(part)
                if captures[fd].is_over:
                    return "output"
                if not part:
                    waiting.unregister(fd)
    return "wall"


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return b""
