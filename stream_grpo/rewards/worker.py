"""A reward worker: a process that loads the verifiers once, and forks a child that checks responses.

    pool --- starts, kills ---> keeper --- forks ---> child
      `-------- tasks and results: one socket --------'

The keeper has one thread and no state but loaded modules, so that a fork of it is safe and takes milliseconds: a child
that was killed is replaced without importing anything again. It never reads the socket, and it outlives no pool.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.code import CODE, CodeSettings, make_code_verifier
from stream_grpo.rewards.messages import ProblemRow, Progress, decode_batch, encode, result_to_plain
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS, Verifier
from stream_grpo.rewards.sandbox import Limits
from stream_grpo.rewards.user import PREFIX, load_user_verifier
from stream_grpo.types import RewardResult

KILL_SIGNAL = signal.SIGUSR1
"""Asks the keeper to kill its child: the one process that knows that the child's id is still the child's."""

_KEPT_SIGNALS = {signal.SIGCHLD, KILL_SIGNAL}
_LOOK_S = 1.0
# A result waits at most so long for others to be sent with it.
_FLUSH_S = 0.05
_MAX_TRACEBACK = 8000
_RESERVE_BYTES = 64 << 20
# What a first check would import.
_MODULES = {"reasoning_gym": "reasoning_gym", "json_schema": "jsonschema"}
# Gold and response that take a verifier through its slowest imports; of `math`, to sympy.
_SAMPLES = {"math": ("\\cos(x)+1", "\\boxed{1+\\sin(x+\\pi/2)}")}


def main() -> None:
    """Entry of the keeper. Its one argument: JSON of socket, progress, memory_bytes, preload, paths, code."""
    options = json.loads(sys.argv[1])
    pool = os.getppid()
    os.dup2(2, 1)  # what a verifier prints is no result
    sys.path.extend(options["paths"])
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_SIGNALS)
    link, progress = socket.socket(fileno=options["socket"]), Progress(options["progress"])
    loaded = _preload(options)
    gc.freeze()
    while os.getppid() == pool:
        progress.idle()
        child = os.fork()
        if child == 0:
            _child(link, progress, loaded, options["memory_bytes"])
        status = os.waitstatus_to_exitcode(_keep(child, pool))
        at = progress.read()
        try:  # the child may have ended within a line
            link.sendall(b"\n" + encode({"ended": child, "status": status, "at": at}))
        except OSError:  # the pool has closed its end
            return


def _preload(options: dict[str, Any]) -> dict[str, Verifier]:
    """The verifiers that can be loaded before any fork; a module of the user's that starts threads cannot."""
    loaded = {CODE: make_code_verifier(_code_settings(options["code"]))}
    for name in options["preload"]:
        with suppress(Exception, SystemExit):  # the child meets the same where it has a task to answer with it
            loaded[name] = load(name)
    ours = [name for name in options["preload"] if not name.startswith(PREFIX)]
    if len(os.listdir("/proc/self/task")) > 1 and ours != options["preload"]:
        again = json.dumps({**options, "preload": ours})
        os.execv(sys.executable, [sys.executable, "-P", "-m", "stream_grpo.rewards.worker", again])
    return loaded


def _code_settings(plain: dict[str, Any]) -> CodeSettings:
    return CodeSettings(**{**plain, "limits": Limits(**plain["limits"]), "packages": tuple(plain["packages"])})


def _keep(child: int, pool: int) -> int:
    """Wait until the child has ended, killing it when asked to or when the pool is gone; its wait status."""
    with suppress(OSError):
        os.setpgid(child, child)
    while True:
        got = signal.sigtimedwait(_KEPT_SIGNALS, _LOOK_S)
        if (got is not None and got.si_signo == KILL_SIGNAL) or os.getppid() != pool:
            _kill_group(child)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            _kill_group(child)  # what it has started ends with it
            return os.waitpid(child, 0)[1]


def _kill_group(child: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _child(link: socket.socket, progress: Progress, loaded: dict[str, Verifier], memory_bytes: int) -> None:
    """Serve until the pool closes the socket, or memory was used up and a fresh process is better. Never returns."""
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT_SIGNALS)
        _limit(resource.RLIMIT_AS, memory_bytes, reserve=_RESERVE_BYTES)
        _limit(resource.RLIMIT_CORE, 0)
        _serve(link, progress, loaded)
    except OSError:  # the pool has closed its end
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # never through the keeper's clean-up


def _limit(kind: int, value: int, reserve: int = 0) -> None:
    """Lower a limit for good; up to `reserve` more can still be asked for."""
    _, now = resource.getrlimit(kind)
    most = value + reserve if now == resource.RLIM_INFINITY else min(value + reserve, now)
    resource.setrlimit(kind, (min(value, most), most))


def _use_reserve() -> None:
    """What used up the memory may still hold it: room to say so."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _serve(link: socket.socket, progress: Progress, loaded: dict[str, Verifier]) -> None:
    me = os.getpid()
    link.sendall(encode({"ready": me, "versions": {name: verifier.version for name, verifier in loaded.items()}}))
    for line in link.makefile("rb"):
        tasks, unsent = decode_batch(line, me), list[dict[str, Any]]()
        sent_at = time.monotonic()
        for place, task in enumerate(tasks):
            answer = _answer(place, task, progress, loaded)
            unsent.append(answer)
            is_used_up, is_last = answer.get("exhausted") == "memory", place == len(tasks) - 1
            if is_last:
                progress.idle()  # before the pool can know, and give the next batch
            if is_used_up or is_last or time.monotonic() - sent_at > _FLUSH_S:
                link.sendall(encode({"from": me, "answers": unsent}))
                unsent, sent_at = [], time.monotonic()
            if is_used_up:
                return


def _answer(place: int, task: dict[str, Any], progress: Progress, loaded: dict[str, Verifier]) -> dict[str, Any]:
    """A result; or what was exhausted; or an error with its traceback."""
    answer: dict[str, Any] = {"place": place}
    started = time.monotonic()
    try:
        problem = ProblemRow(**task["problem"])
        name = problem.verifier
        if name not in loaded:
            progress.loads(place)
            loaded[name] = load(name)
        answer["version"] = loaded[name].version
        progress.checks(place)
        started = time.monotonic()
        answer["result"] = result_to_plain(_sound(loaded[name].check(task["response"], problem, task["is_cut"])))
    except MemoryError:
        _use_reserve()
        answer["exhausted"] = "memory"
    except RecursionError:
        answer["exhausted"] = "stack"
    except BaseException as error:  # SystemExit included: a verifier may be anyone's code
        evidence = traceback.format_exception_only(error)[-1].strip()[:MAX_EVIDENCE_CHARACTERS]
        answer |= {"error": evidence, "traceback": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]}
    answer["seconds"] = time.monotonic() - started
    return answer


def _sound(result: RewardResult) -> RewardResult:
    """The result itself. Raises TypeError or ValueError for one that is none."""
    if not isinstance(result, RewardResult):
        raise TypeError(f"the verifier returned {type(result).__name__}, not a RewardResult")
    if result.reward is not None and not math.isfinite(result.reward):
        raise ValueError(f"the verifier gave the reward {result.reward}, which is no finite number")
    return result


def load(name: str) -> Verifier:
    """The verifier of this name, with its first check behind it: that one pays for imports and tables.

    Raises ConfigError for a name that no verifier has, or a function of the user's that cannot be used.
    """
    if name.startswith(PREFIX):
        return load_user_verifier(name)
    from stream_grpo.rewards.verifiers import VERIFIERS

    if name not in VERIFIERS:
        raise ConfigError(f"no verifier is called {name!r}; known: {', '.join(sorted(VERIFIERS))}, {PREFIX}...")
    verifier = VERIFIERS[name]
    if name in _MODULES:
        import_module(_MODULES[name])
    gold, response = _SAMPLES.get(name, ("1", "\\boxed{1}"))
    with suppress(Exception):  # a verifier that needs more of its problem than a gold says so here
        verifier.check(response, ProblemRow(problem_id="first", answer=gold, verifier=name), False)
    return verifier


if __name__ == "__main__":
    main()
