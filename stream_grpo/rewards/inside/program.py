"""What the process of a program does: run it as a script, or load it and serve its functions to the tests."""

from __future__ import annotations

import os
import sys
import types

from stream_grpo.rewards.inside.peer import program_peer
from stream_grpo.rewards.inside.values import PROGRAM_MODULE

FILE_NAME = "solution.py"


def run_script(source: str) -> None:
    """Run the source as `python solution.py` would, and end this process with its exit status."""
    module = _module("__main__")
    status = 0
    try:
        exec(_compiled(source), module.__dict__)
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException as error:
        status = 1
        _print_traceback(error)
    finally:
        os._exit(_finish(status))


def serve_program(source: str, read_fd: int, write_fd: int) -> None:
    """Load the source as a module, then answer the tests' calls until they close the pipe."""
    module = _module(PROGRAM_MODULE)
    failure: BaseException | None = None
    try:
        exec(_compiled(source), module.__dict__)
    except BaseException as error:
        _print_traceback(error)
        failure = error
    program_peer(read_fd, write_fd, module.__dict__, failure).serve()
    os._exit(0)


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = FILE_NAME
    sys.modules["__main__"] = sys.modules[name] = module
    sys.argv[:] = [FILE_NAME]
    sys.path.insert(0, os.getcwd())
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    return module


def _compiled(source: str) -> types.CodeType:
    with open(FILE_NAME, "w", encoding="utf-8", errors="replace") as file:
        file.write(source)
    return compile(source, FILE_NAME, "exec", dont_inherit=True)


def _print_traceback(error: BaseException) -> None:
    import traceback  # not at the top: most programs need none, and every box would pay for it

    outside = error.__traceback__
    traceback.print_exception(error.with_traceback(outside.tb_next if outside else None))


def _exit_status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


def _finish(status: int) -> int:
    """What the interpreter does at its end: threads are waited for, exit functions called, streams flushed."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit = sys.modules.get("atexit")
        if atexit is not None:
            atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        _print_traceback(error)
        return status or 1
    return status
