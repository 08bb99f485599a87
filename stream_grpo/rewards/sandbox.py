"""Runs a program that nobody trusts: no network, nothing of the machine to read, limits, and nothing left behind.

A `Sandbox` is the caller's end. What runs inside stands in `rewards.inside`. An interpreter that waits to open boxes
is started once and used again by the next sandbox; a box itself is new for every program.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from stream_grpo.errors import SandboxError
from stream_grpo.rewards.inside.box import own_users
from stream_grpo.rewards.inside.wire import WireClosedError, read_message, write_message

_IMPORT_ROOT = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.append({root!r}); from stream_grpo.rewards.inside.launch import main; main()"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
HOME_PREFIX = "stream-grpo-box-"
"""Of the folders that a box without namespaces writes to."""

_SPARE_S = 20.0
"""Beyond a run's own limit: how long the box may take to open, to answer or to close before it counts as broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run of a program may use. Memory is per process; together at most `num_processes` times as much."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Per process, in whole seconds, at least 1."""
    memory_bytes: int = 2**30
    """Address space of each process."""
    disk_bytes: int = 2**26
    """Of the fresh folder together, and of every file."""
    output_bytes: int = 2**20
    num_processes: int = 16
    """Threads count."""
    num_files: int = 64
    long_integers: bool = False
    """Whether integers of more than 4300 digits may be turned into text and back."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What this machine gives: "namespaces" has everything; "process" lacks what `missing` names."""

    level: Literal["namespaces", "process"]
    missing: tuple[str, ...] = ()
    reason: str = ""
    """Why the stronger level cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """How one run of a program as a script ended."""

    end: Literal["exit", "wall", "output"]
    """By itself or by a signal; at the wall limit; at the limit on output."""
    status: int
    """Exit status; below 0 the signal that ended it."""
    stdout: str
    stderr: str
    """Its end."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertRun:
    """What the tests said of a program, or how it ended before they could."""

    end: Literal["exit", "wall", "output"]
    passed: bool
    evidence: str
    is_broken: bool
    """Whether the tests themselves cannot be run, whatever the program."""
    seconds: float


@functools.cache
def isolation() -> Isolation:
    """The strongest isolation that this machine allows, found by opening a box; asked twice before it says no."""
    reasons: list[str] = []
    for _ in range(2):
        try:
            with Sandbox("print('here')", limits=Limits(), level="namespaces") as sandbox:
                run = sandbox.run("")
            if run.stdout == "here\n":
                return Isolation("namespaces")
            reasons.append(f"a first program ended with status {run.status}: {run.stderr[-200:]}")
        except SandboxError as error:
            reasons.append(str(error))
    return Isolation("process", _missing_without_namespaces(), reasons[-1])


def _missing_without_namespaces() -> tuple[str, ...]:
    missing = ["network", "reading files", "total size of files"]
    if own_users(sees_machine=True) == (None, None):  # programs run as the user of this process
        missing += ["writing files", "signals to and memory of other processes of this user"]
        if os.geteuid() == 0:  # whom Linux exempts from that limit
            missing.append("number of processes")
    return tuple(missing)


def required_level(*, allow_weaker: bool) -> Literal["namespaces", "process"]:
    """The level to run at; raise SandboxError where the strongest is missing and no weaker one is allowed."""
    found = isolation()
    if found.missing and not allow_weaker:
        raise SandboxError(
            f"this machine cannot isolate {', '.join(found.missing)} of a program ({found.reason}); "
            "allow user namespaces, or allow weaker isolation where every program may be trusted"
        )
    return found.level


class Sandbox:
    """A box for one program, to run it in on several inputs: each time in new processes and a new folder.

    The program is a text; `readable` are folders with further packages that it may import. Expected outputs are no
    argument: they never enter the box. Raises SandboxError for whatever is not the program's doing.
    """

    def __init__(
        self,
        program: str,
        *,
        limits: Limits,
        level: Literal["namespaces", "process"],
        readable: tuple[str, ...] = (),
        is_fresh: bool = False,
    ) -> None:
        """With `is_fresh` the interpreter starts anew, and with it the order of sets."""
        self._limits, self._is_fresh = limits, is_fresh
        self._setup = {
            "program": program,
            "limits": asdict(limits),
            "has_namespaces": level == "namespaces",
            "readable": list(readable),
            "home": None,
            "import_root": _IMPORT_ROOT,
        }
        self._home: str | None = None
        self._launcher: _Launcher

    def __enter__(self) -> Self:
        self._launcher = _Launcher() if self._is_fresh else _take()
        if not self._setup["has_namespaces"]:
            self._home = self._setup["home"] = tempfile.mkdtemp(prefix=HOME_PREFIX)
        try:
            self._launcher.ask({"kind": "open"}, self._setup, within_s=_SPARE_S)
        except BaseException:
            self._leave(reuse=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reuse = kind is None and not self._is_fresh
        try:
            if kind is None:
                self._launcher.ask({"kind": "close"}, within_s=_SPARE_S)
        except SandboxError:
            reuse = False
            raise
        finally:
            self._leave(reuse=reuse)

    def run(self, stdin: str) -> ScriptRun:
        """Run the program as a script on this input."""
        answer = self._launcher.ask({"kind": "script", "stdin": stdin}, within_s=self._limits.wall_s + _SPARE_S)
        return ScriptRun(**answer)

    def check(self, tests: str, *, entry_point: str | None = None, helpers: str = "") -> AssertRun:
        """Load the program and run the tests, which are in a process of their own, on its functions.

        `entry_point` names the function under test; it is needed where a built-in one has the same name, or with
        `helpers`: code whose other functions the tests use as they stand there, whatever the program makes of them.
        """
        answer = self._launcher.ask(
            {"kind": "assert"},
            {"tests": tests, "entry_point": entry_point, "helpers": helpers},
            within_s=self._limits.wall_s + _SPARE_S,
        )
        verdict: dict[str, Any] = {"passed": False, "evidence": "the tests ended without a verdict", "is_broken": False}
        if answer["verdict"] and answer["end"] == "exit":
            verdict = json.loads(answer["verdict"])
        return AssertRun(end=answer["end"], seconds=answer["seconds"], **verdict)

    def _leave(self, *, reuse: bool) -> None:
        if reuse:
            _idle.append(self._launcher)
        else:
            self._launcher.end()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)


class _Launcher:
    """The interpreter that opens boxes, one after the other, and the two pipes to it."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START.format(root=_IMPORT_ROOT)]
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                cwd="/",
                env=_ENVIRONMENT,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise SandboxError(f"the sandbox's interpreter {sys.executable} does not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, *messages: Any, within_s: float) -> dict[str, Any]:
        """Send the messages and read the one answer to them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        try:
            for message in messages:
                write_message(self._process.stdin.fileno(), message)
            answer: dict[str, Any] = read_message(self._process.stdout.fileno(), deadline)
        except (WireClosedError, ValueError) as error:
            raise SandboxError(f"the sandbox gave no answer within {within_s:g} s: {error}") from error
        if "error" in answer:
            raise SandboxError(f"the sandbox failed at {answer['error']}")
        return answer

    def end(self) -> None:
        """Close the pipes and wait for the end, by force if need be."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=_SPARE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_idle: list[_Launcher] = []


def _take() -> _Launcher:
    while _idle:
        try:
            launcher = _idle.pop()
        except IndexError:  # another thread was faster
            break
        if launcher.is_alive:
            return launcher
        launcher.end()
    return _Launcher()


def close_idle() -> None:
    """End the interpreters that wait for a next sandbox. They end by themselves with the process that uses them."""
    while _idle:
        _idle.pop().end()


atexit.register(close_idle)
os.register_at_fork(after_in_child=_idle.clear)  # in a forked process they are those of its parent
