"""A worker of environments: a process that holds them, answers one call after the other, and outlives no pool."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from stream_grpo.environments.instance import Call, Instances
from stream_grpo.environments.loading import load
from stream_grpo.environments.protocol import MAX_EVIDENCE_CHARACTERS
from stream_grpo.rewards.messages import encode

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Its one argument: JSON of socket, pool (its process id), name, options, paths, memory_bytes."""
    options = json.loads(sys.argv[1])
    _live_no_longer_than(options["pool"])
    os.dup2(2, 1)  # what an environment prints is no answer
    sys.path.extend(options["paths"])
    link = socket.socket(fileno=options["socket"])
    instances = Instances(load(options["name"], options["options"]))
    _limit_memory(options["memory_bytes"])
    with suppress(OSError):  # the pool has closed its end
        _serve(link, instances)
    os._exit(0)  # threads and loops of an environment are not waited for


def _live_no_longer_than(pool: int) -> None:
    """Be killed with the thread that started this process, which is the pool's own and lives as long as the pool."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pool:  # gone before the call
        os._exit(1)


def _limit_memory(memory_bytes: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(link: socket.socket, instances: Instances) -> None:
    link.sendall(encode({"ready": True}))
    for line in link.makefile("rb"):
        message = json.loads(line)
        for trajectory in message["drop"]:
            instances.drop(trajectory)
        for call in message["calls"]:
            link.sendall(answer_line(call, instances))


def answer_line(plain: dict[str, Any], instances: Instances) -> bytes:
    """The line that answers a call, whatever the environment made of it."""
    started = time.monotonic()

    def line(answer: dict[str, Any]) -> bytes:
        return encode(answer | {"trajectory": plain["trajectory"], "seconds": time.monotonic() - started})

    try:
        return line(instances.answer(Call.from_plain(plain)).as_plain())
    except BaseException as error:  # SystemExit included: an environment may be anyone's code
        says = traceback.format_exception_only(error)[-1].strip()[:MAX_EVIDENCE_CHARACTERS]
        return line({"error": says or type(error).__name__, "num_replayed": 0})


if __name__ == "__main__":
    main()
