"""Messages between the sandbox and its caller: four bytes of length, then JSON. Nothing is read beyond a message."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

MAX_MESSAGE_BYTES = 256 * 2**20
"""A longer message is an error on the reading side, before any of it is held in memory."""


class WireClosedError(Exception):
    """The other side is gone, or the time to wait for it is up."""


def write_message(fd: int, message: Any) -> None:
    """Write one message in full; raise WireClosedError if nobody reads any more."""
    body = json.dumps(message, separators=(",", ":")).encode()
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BrokenPipeError:
            raise WireClosedError("the reader is gone") from None


def read_message(fd: int, deadline: float | None = None) -> Any:
    """Read one message; raise WireClosedError at the end of the stream or at `deadline` (time.monotonic)."""
    size = int.from_bytes(_read_exactly(fd, 4, deadline), "big")
    if size > MAX_MESSAGE_BYTES:
        raise WireClosedError(f"a message of {size} bytes is longer than {MAX_MESSAGE_BYTES}")
    return json.loads(_read_exactly(fd, size, deadline))


def _read_exactly(fd: int, size: int, deadline: float | None) -> bytes:
    parts = []
    while size:
        if deadline is not None:
            ready = select.poll()
            ready.register(fd, select.POLLIN)
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise WireClosedError("no message before the deadline")
        part = os.read(fd, min(size, 2**20))
        if not part:
            raise WireClosedError("the writer is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
