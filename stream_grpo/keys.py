"""The CURVE keys of a run: who may speak with its buffer, its curator and whoever gives out its weights.

Two pairs, as files that their owner alone may read: `server.json` for those that listen, and `client.json` for those
that connect. A process of the run that only connects needs the second alone.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from curator.wire import Keys
from stream_grpo.errors import ConfigError
from stream_grpo.files import read_object, sync

FOLDER = "keys"
"""In the folder of a run."""
SERVER_FILE, CLIENT_FILE = "server.json", "client.json"


def make(folder: Path) -> None:
    """Write new keys; those that were there are no longer valid.

    Raises ConfigError where they cannot be written, or the folder holds anything else.
    """
    if others := _others_in(folder):
        raise ConfigError(f"{folder}: holds {', '.join(others)}, which are no keys; name a new folder, or a run")
    server = Keys.generate()
    client = Keys.generate(server_public=server.public)
    building = folder.with_name(f".{folder.name}.making")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(mode=0o700)
        _write(building / SERVER_FILE, replace(server, clients=frozenset({client.public})))
        _write(building / CLIENT_FILE, client)
        sync(building)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise ConfigError(f"{folder}: keys cannot be written: {error.strerror}") from error


def server_keys(folder: Path) -> Keys:
    """For a socket that is bound. Raises ConfigError."""
    return _read(folder / SERVER_FILE)


def client_keys(folder: Path) -> Keys:
    """For a socket that connects. Raises ConfigError."""
    return _read(folder / CLIENT_FILE)


def _others_in(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    if not folder.is_dir():
        return ["a file of this name"]
    return sorted(path.name for path in folder.iterdir() if path.name not in (SERVER_FILE, CLIENT_FILE))


def _write(path: Path, keys: Keys) -> None:
    plain = {
        "public": keys.public.decode(),
        "secret": keys.secret.decode(),
        "server_public": keys.server_public and keys.server_public.decode(),
        "clients": keys.clients and [key.decode() for key in sorted(keys.clients)],
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(plain, file)
        file.flush()
        os.fsync(descriptor)


def _read(path: Path) -> Keys:
    try:
        plain = read_object(path)
        server_public, clients = plain["server_public"], plain["clients"]
        return Keys(
            public=plain["public"].encode(),
            secret=plain["secret"].encode(),
            server_public=server_public and server_public.encode(),
            clients=clients and frozenset(key.encode() for key in clients),
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: no keys there ({error}); make them with: stream-grpo keys RUN") from error
