"""The launcher of a fake run: forks the parts, starts again what dies, stops in order; by the rules of `launch`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kills.fake_parts import buffer_client, run_part
from stream_grpo.config import Config
from stream_grpo.files import write_json
from stream_grpo.lifetime import become_part, end_with
from stream_grpo.parts_common import sampler_names
from stream_grpo.rundir import held
from stream_grpo.transport.channels import read_ledger

_POLL_S = 0.002
STOP_TIMEOUT_S = 10.0


def in_child(log: Path, work: Callable[[], int]) -> int:
    """Fork a process that does this and nothing else, its output in a log; the process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(config: Config) -> int:
    """Run a run until its last step or until SIGTERM; the exit code."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with held(config.run_dir):
        run = _Launcher(config)
        try:
            return run.supervise(stop)
        finally:
            run.kill_all()


class _Launcher:
    def __init__(self, config: Config) -> None:
        self._config, self._pids = config, dict[str, int]()
        for name in ("curator", "buffer", "learner", *sampler_names(config)):
            self._start(name)

    def _start(self, name: str) -> None:
        launcher = os.getpid()

        def work() -> int:
            _close(self._config.run_dir / "lock")
            end_with(launcher)
            become_part(self._config.run_dir)
            stop = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            run_part(self._config, name, stop)
            return 0

        self._pids[name] = in_child(self._config.run_dir / "logs" / f"{name}.log", work)

    def supervise(self, stop: threading.Event) -> int:
        """Until the learner has ended. A part that raised ends the run, one that was killed is started again."""
        while not stop.is_set():
            time.sleep(_POLL_S)
            for name, code in self._ended():
                if name == "learner" and code == 0:
                    return self._stop_others()
                if code != -signal.SIGKILL:
                    print(f"{name} ended with {code}: see its log", flush=True)
                    return 1
                self._start(name)
        return self._stop("learner") or self._stop_others()

    def _ended(self) -> list[tuple[str, int]]:
        found = []
        for name, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found.append((name, os.waitstatus_to_exitcode(status)))
                del self._pids[name]
        return found

    def _stop_others(self) -> int:
        code = max(self._stop(name) for name in sampler_names(self._config))
        client = buffer_client(self._config, "launcher")
        write_json(self._config.run_dir / "ledger.json", dict(read_ledger(client)))
        client.close()
        return max(code, self._stop("buffer"), self._stop("curator"))

    def _stop(self, name: str) -> int:
        """Ask a part to end; 0 where it did, in time and by itself."""
        if name not in self._pids:
            return 0
        os.kill(self._pids[name], signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            for ended, code in self._ended():
                if ended == name:
                    return abs(code)
            time.sleep(_POLL_S)
        print(f"{name} did not end within {STOP_TIMEOUT_S:.0f} s", flush=True)
        return 1

    def kill_all(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _close(path: Path) -> None:
    """Close an inherited file: its lock is the launcher's alone."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{entry}") == str(path):
                os.close(int(entry))


def fork_launcher(config: Config) -> int:
    """Start the launcher as a process of its own; its process id."""

    def work() -> NoReturn:
        os._exit(launch(config))

    return in_child(config.run_dir / "logs" / "launcher.log", work)
