"""The processes of a sandbox.

    launcher     waits for "open"; lives as long as its caller, so that the interpreter starts once
      keeper     leaves the namespaces of the machine; waits for the first process
        first    number 1 of the box: starts each program, watches it, kills what it leaves
          ...    programs and tests, with no privileges

Only the first process reads what is to be run, and the tests of a program only after the program has been started:
no memory that a program inherits has ever held a test, or another program.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any

from stream_grpo.rewards.inside import box, kernel
from stream_grpo.rewards.inside.jobs import serve_jobs
from stream_grpo.rewards.inside.wire import WireClosedError, read_message, write_message

CONTROL_IN, CONTROL_OUT = 0, 1


def main() -> None:
    """Open one box after the other, each in processes of its own, until the caller is gone."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    while True:
        try:
            read_message(CONTROL_IN)
        except WireClosedError:
            return
        keeper = os.fork()
        if keeper == 0:
            _guarded(_keep)
        _, status = os.waitpid(keeper, 0)
        if status:
            sys.exit(1)


def _guarded(body: Any) -> None:
    """Run `body` as the whole of a forked process; tell the caller of the exception that ended it."""
    status = 0
    try:
        body()
    except WireClosedError:
        status = 1
    except BaseException as error:
        status = 1
        step = traceback.extract_tb(error.__traceback__)[-1].name
        write_message(CONTROL_OUT, {"error": f"{step}: {type(error).__name__}: {error}"})
    finally:
        os._exit(status)


def _keep() -> None:
    kernel.die_with_parent(signal.SIGKILL)
    setup = read_message(CONTROL_IN)
    program_uid, tests_uid = box.own_users(sees_machine=not setup["has_namespaces"])
    room = box.Box(
        home=setup["home"] or box.HOME,
        has_namespaces=setup["has_namespaces"],
        program_uid=program_uid,
        tests_uid=tests_uid,
    )
    if room.has_namespaces:
        box.enter_namespaces()
        if os.getuid() != 0:
            room = box.Box(home=room.home, has_namespaces=True, program_uid=None, tests_uid=None)
    first = os.fork()
    if first == 0:
        _guarded(lambda: _be_first(room, setup))
    _, status = os.waitpid(first, 0)
    os._exit(1 if status else 0)


def _be_first(room: box.Box, setup: dict[str, Any]) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    kernel.set_no_core_access()
    if room.has_namespaces:
        box.build_root(tuple(setup["readable"]), disk_bytes=setup["limits"]["disk_bytes"])
    else:
        kernel.adopt_orphans()
    os.environ["HOME"] = os.environ["TMPDIR"] = room.home
    packages = setup["readable"]
    if room.has_namespaces:
        packages = [box.packages_path(number) for number in range(len(packages))]
    sys.path[:] = [path for path in sys.path if path != setup["import_root"]] + packages
    sys.executable = getattr(sys, "_base_executable", sys.executable)
    write_message(CONTROL_OUT, {"ready": True})
    serve_jobs(room, setup, control_in=CONTROL_IN, control_out=CONTROL_OUT)
