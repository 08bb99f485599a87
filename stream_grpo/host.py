"""The process of a part, as an actor of Ray: the only class of that kind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from stream_grpo import parts
from stream_grpo.config import Config
from stream_grpo.errors import StreamGrpoError
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.lifetime import become_part, end_with
from stream_grpo.nodes import Home, node_id
from stream_grpo.parts_common import away


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=8)
class Host:
    """One process of the run: builds its part, runs its loop, answers while it runs."""

    def __init__(self, name: str, config: Config, home: Home, files: Mapping[str, bytes]) -> None:
        self._is_away = config.cluster.node_root is not None and node_id() != home.node_id
        if node_id() == home.node_id:
            # Ray ends the actors of a driver that died; not at once, and not where Ray died too.
            end_with(home.pid)
        self._config = away(config, name) if self._is_away else config
        self._stop = threading.Event()
        self._part: Any = None
        self._loop: Future[Any] | None = None
        if self._is_away:
            unpack(files, self._config.run_dir)
        log_dir = self._config.run_dir / "logs"
        self._sees_folder = log_dir.is_dir()
        if not self._sees_folder:
            return  # `build` says so: what is raised here, Ray tells nobody
        become_part(self._config.run_dir)
        log = os.open(log_dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        # Ctrl-C in a terminal reaches the whole group; the launcher alone decides who stops when.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def build(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Build the part and say how it is reached, and under which process id it runs, where."""
        node = ray.util.get_node_ip_address()
        if not self._sees_folder:
            raise StreamGrpoError(f"{self._config.run_dir}: not there on node {node}; all nodes must share run.root")
        # Who sees the run's folder reads weights there.
        chosen = {name: value for name, value in arguments.items() if name != "weights" or self._is_away}
        self._part = parts.BUILDERS[kind](self._config, **chosen)
        return {"address": getattr(self._part, "address", ""), "pid": os.getpid(), "node": node}

    def run(self) -> Any:
        """The part's loop; returns what the loop returns. One that runs already, as after a cut, is waited for."""
        if self._loop is not None:
            return self._loop.result()
        self._loop = Future()
        try:
            self._loop.set_result(self._part.run(self._stop))
        except BaseException as error:
            self._loop.set_exception(error)
            raise
        return self._loop.result()

    def status(self) -> dict[str, Any]:
        """The part's own account of itself."""
        status: dict[str, Any] = self._part.status()
        return status

    def leave(self, within_s: float) -> None:
        """Ask a sampler to come to its end by itself."""
        self._part.leave(within_s)

    def stop(self) -> None:
        """Ask the loop to end."""
        self._stop.set()


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what a part needs of the run's folder, readable by its owner alone: keys are among it.

    Weights that lie there are those of the manifest beside them. Under another, as that of a run of this name that was
    removed since, they go: they may have the same versions.
    """
    manifest = folder / MANIFEST_FILE
    if not manifest.exists() or manifest.read_bytes() != files.get(MANIFEST_FILE):
        shutil.rmtree(folder / "weights", ignore_errors=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    (folder / "logs").mkdir(exist_ok=True)
