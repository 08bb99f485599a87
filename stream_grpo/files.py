"""Files that are whole or not there, and their hashes. Standard library alone."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file whose bytes are durable when this returns; its name is once its folder is synced."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_with(path: Path, data: bytes) -> None:
    """Give a file another content: after a crash at any moment it has the earlier or this one. Durable on return."""
    beside = path.with_name(f".{path.name}.tmp")
    write_synced(beside, data)
    beside.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Give a file a value as JSON, whole or not at all."""
    replace_with(path, json.dumps(value, indent=1).encode())


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError naming the file and what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: " + (f"not JSON: {error}" if path.stat().st_size else "empty")) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON {type(value).__name__} where an object is expected")
    return value
