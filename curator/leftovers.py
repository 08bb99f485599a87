"""Folders of unfinished work, beside what it is to become: gone at the end, and after a kill gone with the next one.

The one who works in a folder holds a lock on it, which the kernel drops when its holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, gone at the end unless it was renamed; those of the prefix that nobody holds go first.

    Raises OSError where `parent` is not there or cannot be written.
    """
    with ExitStack() as held:
        with _locked(parent):
            # Between the making of a folder and its lock no other process may look.
            remove_leftovers(parent, prefix)
            folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
            held.enter_context(_locked(folder))
        # `mkdtemp` is for the owner alone; what is renamed to stay has the rights of every other folder.
        folder.chmod(0o777 & ~_umask())
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the folders of a prefix whose makers have died; one that cannot be locked or removed stays."""
    for folder in parent.iterdir():
        if not folder.name.startswith(prefix) or not folder.is_dir():
            continue
        try:
            with _locked(folder, fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # In use, of another user, or gone by now.
            continue


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's own; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
