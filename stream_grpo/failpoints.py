"""Places where a process can be told to kill itself, so that every window of a crash can be tried.

Off, a passage costs one test of a variable. On, the environment variable names a folder, and a file `<point>` in it
arms that point: its text is the number of the passage at which the process ends by SIGKILL, as it would by `kill -9`.
The file is gone before the process is, so that each kills once. Nothing is armed by accident: it takes the variable,
the folder and a file of that very name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

VARIABLE = "STREAM_GRPO_FAILPOINTS"

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "journal.segment_written": "buffer: the records of a commit are on disk, the log does not name them",
        "journal.log_written": "buffer: a commit is durable, nobody is answered",
        "answer.taken": "buffer: a group is durable, its sampler is not told",
        "answer.tickets": "buffer: tickets are journaled, their sampler is not told",
        "answer.batch": "buffer: groups are leased, the learner does not have them",
        "answer.counted": "buffer: a step is journaled as trained, the learner is not told",
        "learner.stepped": "learner: a step is made, the buffer does not know of it",
        "checkpoint.writing": "learner: the files of a checkpoint are there, its manifest is not",
        "checkpoint.renaming": "learner: a checkpoint is whole and in the index, and not visible",
        "checkpoint.renamed": "learner: a checkpoint is visible, the buffer does not know of it",
        "publish.renaming": "learner: weights are whole and not visible",
        "publish.pointing": "learner: weights are visible, `latest` names older ones",
        "sampler.weights_read": "sampler: weights are read, the engine has the ones before",
        "outcomes.report": "buffer: outcomes are about to be sent",
        "outcomes.flush": "curator: outcomes are learned, the table does not have them",
        "outcomes.flushed": "curator: outcomes are in the table, nobody is told",
    }
)
"""Every point: in which process, and what a kill there leaves behind."""

_folder = os.environ.get(VARIABLE)


def failpoint(name: str) -> None:
    """Pass a point. Does not return where it is armed and its time has come."""
    if _folder is not None:
        _pass(Path(_folder) / name)


def _pass(armed: Path) -> None:
    try:
        num_left = int(armed.read_text())
    except (OSError, ValueError):
        return
    if num_left > 1:
        armed.write_text(str(num_left - 1))
        return
    # Whoever removes the file is the one to die: there may be several samplers.
    with suppress(FileNotFoundError):
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def arm(folder: Path, name: str, passage: int = 1) -> None:
    """Arm a point for processes that were started with VARIABLE set to `folder`.

    Raises ValueError for an unknown point or a passage below 1.
    """
    if name not in POINTS or passage < 1:
        raise ValueError(f"failpoint {name!r}, passage {passage}: expected one of {', '.join(POINTS)}, from 1 on")
    beside = folder / f".{name}.new"
    beside.write_text(str(passage))
    beside.rename(folder / name)


def is_armed(folder: Path, name: str) -> bool:
    """Whether nobody has died of it yet."""
    return (folder / name).exists()


def disarm(folder: Path, name: str) -> bool:
    """Take a point back; whether it was still armed."""
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    return True


def use(folder: Path) -> None:
    """Let this process and those that it starts be armed from a folder, as VARIABLE does for one that starts."""
    global _folder
    _folder = os.environ[VARIABLE] = str(folder)


def armed_from() -> str:
    """The folder that may arm points in this process; empty where failpoints are off."""
    return _folder or ""
