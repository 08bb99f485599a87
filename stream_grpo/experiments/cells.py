"""Cells: runs that differ in some settings. One that has ended is kept, one that was interrupted goes on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stream_grpo.config import Config
from stream_grpo.config_file import differences, load, load_run
from stream_grpo.errors import ConfigError, StreamGrpoError
from stream_grpo.rundir import with_absolute_paths

MAX_NAME = 90
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
SHOWN_LINES = 15
"""Last lines of the log of a cell that failed."""


class CellFailed(StreamGrpoError):
    """A cell's process ended with an error; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A run: its folder's name, and what differs from the configuration as `section.name` -> TOML text."""

    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Cells of one configuration under one folder."""

    file: Path
    """A TOML file."""
    overrides: tuple[str, ...]
    """Of all cells, before their own."""
    root: Path
    """Folder of their run folders and logs."""
    num_cores: int = 0
    """The first so many cores that this process may use; 0: all."""

    def config(self, cell: Cell) -> Config:
        """Of one cell, checked. Raises ConfigError."""
        return with_absolute_paths(load(self.file, self._overrides(cell)))

    def _overrides(self, cell: Cell) -> list[str]:
        own = [f"{key}={value}" for key, value in cell.settings.items()]
        return [*self.overrides, *own, f"run.name={cell.name}", f"run.root={self.root.resolve()}"]

    def check(self, cells: Iterable[Cell]) -> None:
        """Make the folder of the cells. Raise ConfigError where that, or a cell, cannot be, before any is run."""
        cells = list(cells)
        check_names(cells)
        for cell in cells:
            try:
                self._is_done(cell, self.config(cell))
            except ConfigError as error:
                raise ConfigError(f"cell {cell.name}: {error}") from error
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.root}: no folder can be made there: {error.strerror}") from error
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {self.root}: nothing may be written there; name another folder")

    def _is_done(self, cell: Cell, config: Config) -> bool:
        run = config.run_dir
        if not (run / "config.toml").exists():
            return False
        if found := differences(config, load_run(run)):
            raise ConfigError(
                f"{run}: there is a run of other settings: {'; '.join(found[:3])}; choose another folder, or remove it"
            )
        return (run / "summary.json").exists()

    def made(self, cell: Cell, say: Callable[[str], None]) -> Path:
        """The folder of a cell's run, which has ended. Raises CellFailed where it cannot come to its end."""
        config = self.config(cell)
        run, log = config.run_dir, self.root / f"{cell.name}.log"
        if self._is_done(cell, config):
            say(f"{cell.name}: kept, it has ended")
            return run
        self.root.mkdir(parents=True, exist_ok=True)
        if (run / "config.toml").exists():
            say(f"{cell.name}: goes on, log in {log}")
            arguments = ["train", "--resume", str(run)]
        else:
            say(f"{cell.name}: begins, log in {log}")
            arguments = ["train", str(self.file)]
            arguments += [part for override in self._overrides(cell) for part in ("--set", override)]
        call(arguments, log, self.num_cores)
        return run


def check_names(cells: Iterable[Cell]) -> None:
    """Raise ConfigError for two cells of one name, and for settings that name or place a run: each has its own."""
    seen = set[str]()
    for cell in cells:
        if given := sorted({"run.name", "run.root"} & cell.settings.keys()):
            raise ConfigError(f"{given[0]}: every cell has its own; vary another setting")
        if cell.name in seen:
            raise ConfigError(f"two cells are called {cell.name!r}: their settings are the same; leave one out")
        seen.add(cell.name)


def call(arguments: Sequence[str], log: Path, num_cores: int = 0) -> None:
    """Run the `stream-grpo` command in a process of its own, its output into a file. Raises CellFailed.

    Where this process dies the other is told to stop, as service managers tell it, and leaves a checkpoint.
    """
    cores = sorted(os.sched_getaffinity(0))[: num_cores or None]

    def begin() -> None:
        os.sched_setaffinity(0, cores)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("ab") as file:
        begun = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "stream_grpo.cli", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=begin,
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C has reached it too: it leaves a checkpoint
            raise
    if code:
        end = log.read_bytes()[begun:].decode(errors="replace").splitlines()[-SHOWN_LINES:]
        raise CellFailed(
            "\n".join([f"stream-grpo {arguments[0]} ended with exit code {code}; the end of {log}:", *end])
        )


def name_of(parts: Iterable[str]) -> str:
    """Parts as the name of a run: what may not stand in one becomes a dash; a long one ends in its hash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).strip("-._")
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
