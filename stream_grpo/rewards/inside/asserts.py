"""What the process of the tests does: run them on the program's functions, and write one verdict."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import linecache
import os
import sys
import types
from typing import Any

from stream_grpo.rewards.inside.peer import CannotCrossError, Peer, is_from_program, tests_peer
from stream_grpo.rewards.inside.wire import WireClosedError

FILE_NAME = "tests.py"
MAX_EVIDENCE_CHARACTERS = 400
_USUAL_ALIASES = {"np": "numpy", "pd": "pandas"}


class Names(dict[str, Any]):
    """The global names of the tests: their own, then Python's, then those of the program.

    A program may not replace a built-in function that the tests use, unless it is the one they are about.
    """

    def __init__(self, peer: Peer, entry_point: str | None) -> None:
        super().__init__(__name__="tests")
        self._peer = peer
        if entry_point is not None and hasattr(builtins, entry_point):
            self[entry_point] = self.__missing__(entry_point, is_asked=True)

    def __missing__(self, name: str, is_asked: bool = False) -> Any:
        if hasattr(builtins, name) and not is_asked:
            raise KeyError(name)
        kind, value = self._peer.ask("name", name)
        if kind == "module":
            value = self._import(value, name)
        self[name] = value
        return value

    def _import(self, module: str, name: str) -> Any:
        """What the program imported, under its own name only: it could offer another module as `math`."""
        if module not in (name, _USUAL_ALIASES.get(name)):
            raise KeyError(name)
        try:
            return importlib.import_module(module)
        except ImportError:
            raise KeyError(name) from None


def run_tests(job: dict[str, Any], read_fd: int, write_fd: int, verdict_fd: int) -> None:
    """Run the job's tests and end this process; the verdict is {"passed", "evidence", "is_broken"}.

    "is_broken" says that the tests themselves cannot be run: a syntax error, an import that is not there, or an
    argument that cannot be given to another process. That is never the program's fault.
    """
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    source, entry_point = job["tests"], job["entry_point"]
    try:
        code = compile(source, FILE_NAME, "exec", dont_inherit=True)
        helpers = compile(_functions(job["helpers"], entry_point), "helpers.py", "exec", dont_inherit=True)
    except BaseException as error:
        _end(verdict_fd, passed=False, evidence=f"{type(error).__name__}: {error}", is_broken=True)
    linecache.cache[FILE_NAME] = (len(source), None, source.splitlines(keepends=True), FILE_NAME)
    try:
        names = Names(tests_peer(read_fd, write_fd), entry_point)
        exec(helpers, names)
        exec(code, names)
    except BaseException as error:
        is_broken = isinstance(error, (ImportError, CannotCrossError)) and not is_from_program(error)
        _end(verdict_fd, passed=False, evidence=_shown(error), is_broken=is_broken)
    _end(verdict_fd, passed=True, evidence="", is_broken=False)


def _functions(source: str, entry_point: str | None) -> ast.Module:
    """The helpers' imports and functions without the one under test; its classes stay with the program."""
    kept = (ast.FunctionDef, ast.Import, ast.ImportFrom)
    body = [part for part in ast.parse(source).body if isinstance(part, kept)]
    return ast.Module([part for part in body if getattr(part, "name", None) != entry_point], type_ignores=[])


def _end(verdict_fd: int, *, passed: bool, evidence: str, is_broken: bool) -> None:
    verdict = {"passed": passed, "evidence": evidence[:MAX_EVIDENCE_CHARACTERS], "is_broken": is_broken}
    os.write(verdict_fd, json.dumps(verdict).encode())  # short enough to be written at once
    os._exit(0)


def _shown(error: BaseException) -> str:
    """The line of the tests that failed, and why."""
    if isinstance(error, WireClosedError):
        reason = "the program ended before it answered"
    else:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
    frame: types.TracebackType | None = error.__traceback__
    line = ""
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == FILE_NAME:
            line = linecache.getline(FILE_NAME, frame.tb_lineno).strip()
        frame = frame.tb_next
    return f"{line}: {reason}" if line else reason
