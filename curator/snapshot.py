"""The state of a fold as one file, so that a restart folds only what came after it. The outcomes stay the truth.

    curator.state 1                        the format
    <sha256 of all that follows>
    {header}                               a line of JSON: of what it is, plain values of the state, arrays by name
    bytes of the arrays, one after the other

A file that is torn, of another format, of other settings or problems, or of other outcomes is never used: whoever reads
it is told why, and folds all outcomes. It is written whole beside the old one and then takes its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from curator.errors import SnapshotError

FORMAT = "curator.state 1"
"""Raised by one whenever what is folded, or how, changes."""
_WRITING = ".writing"
_LONGEST_LINE = 256
"""Of the first two; what is no such file may have no lines at all."""
_BLOCK = 4096


class Fold(Protocol):
    """What has a state."""

    @property
    def folded(self) -> tuple[str, ...]:
        """Attributes that hold it: arrays of fixed shapes, mappings with plain keys and values, plain values."""


class Snapshot(NamedTuple):
    """What a file holds, checked."""

    header: Mapping[str, Any]
    """As it was given to `write`."""
    plain: Mapping[str, Any]
    """Plain values of the folds by name."""
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    """Types and shapes of their arrays, in the order of their bytes."""
    path: Path
    start: int
    """Where these bytes begin in it."""


def write(path: Path, header: Mapping[str, Any], folds: Mapping[str, Fold]) -> None:
    """Write the state of some folds; whenever the process dies, the old file or the new one is there.

    Raises OSError.
    """
    plain, arrays = _state(folds)
    listed = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps({"of": header, "plain": plain, "arrays": listed}).encode() + b"\n"
    parts: list[bytes | memoryview] = [head, *map(_bytes_of, arrays.values())]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    beside = path.with_name(path.name + _WRITING)
    with beside.open("wb") as file:
        file.write(f"{FORMAT}\n{digest.hexdigest()}\n".encode())
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def read(path: Path) -> Snapshot | None:
    """What `write` wrote; None where there is no file. Raises SnapshotError with the reason where it cannot be used."""
    try:
        with path.open("rb") as file:
            written, expected = (file.readline(_LONGEST_LINE).rstrip(b"\n") for _ in range(2))
            if written != FORMAT.encode():
                raise SnapshotError(f"its format is {written[:40]!r}, not {FORMAT!r}")
            begin = file.tell()
            if hashlib.file_digest(file, "sha256").hexdigest().encode() != expected:
                raise SnapshotError(f"it is torn: its {file.tell() - begin} bytes do not have their checksum")
            file.seek(begin)
            header = json.loads(file.readline())
            arrays = {name: (dtype, tuple(shape)) for name, dtype, shape in header["arrays"]}
            return Snapshot(header["of"], header["plain"], arrays, path, file.tell())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"it cannot be read: {error}") from error


def restore(snapshot: Snapshot, folds: Mapping[str, Fold]) -> None:
    """Give folds the state of a snapshot. Raises SnapshotError, and changes nothing, where it is of other folds.

    The bytes are read into the arrays as they are: they are many, and none are kept.
    """
    plain, arrays = _state(folds)
    if snapshot.plain.keys() != plain.keys() or snapshot.arrays != _shapes(arrays):
        raise SnapshotError("its arrays have other names or shapes")
    with snapshot.path.open("rb") as file:
        file.seek(snapshot.start)
        for name in snapshot.arrays:
            file.readinto(_bytes_of(arrays[name]))
    for name, value in snapshot.plain.items():
        fold, attribute = name.split(".")
        of = type(getattr(folds[fold], attribute))
        setattr(folds[fold], attribute, of(dict(value)) if issubclass(of, dict) else value)


def _state(folds: Mapping[str, Fold]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Plain values, and arrays as they are in memory, each by the names of its fold and attribute."""
    values = {
        f"{name}.{attribute}": getattr(fold, attribute) for name, fold in folds.items() for attribute in fold.folded
    }
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    # JSON would make texts of the keys of a mapping.
    plain = {
        name: list(value.items()) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in arrays
    }
    return plain, arrays


def _shapes(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype.str, array.shape) for name, array in arrays.items()}


def digest_of(texts: Iterable[Sequence[str]], arrays: Iterable[NDArray[Any]]) -> str:
    """A hash of lists of texts and of arrays."""
    digest = hashlib.sha256()
    for each in texts:
        for start in range(0, len(each), _BLOCK):
            # What divides texts is in none of them as JSON.
            digest.update(json.dumps(each[start : start + _BLOCK], ensure_ascii=False).encode())
        digest.update(b"\n")
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(_bytes_of(array))
    return digest.hexdigest()


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's bytes, not copied where they lie in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _sync_folder(folder: Path) -> None:
    # A file system without it keeps the rename all the same, or the old file.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
