"""Gives published weights out in pieces, to samplers that do not see the folder of the run.

    newest                      -> newest    version, or none while nothing is published
    manifest  version           -> manifest  num_bytes; body: manifest.json
    piece     version, offset   -> piece     body: at most PIECE_BYTES from there

A version that is pruned meanwhile is refused as gone; whoever pulls it asks for the newest again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from curator.wire import Request, Server
from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.manifest import LATEST_FILE, MANIFEST_FILE, TENSORS_FILE, folder_name, parse_folder_name

PIECE_BYTES = 8 << 20
_RECEIVE_S = 0.1


class WeightsService:
    """A folder of published weights behind one socket. Reads it, and never writes."""

    def __init__(self, directory: Path, server: Server) -> None:
        self._directory, self._server = directory, server
        self._handlers: Mapping[str, Callable[[Request], None]] = {
            "newest": self._newest,
            "manifest": self._manifest,
            "piece": self._piece,
        }
        self._num_bytes = 0

    @property
    def address(self) -> str:
        """Where samplers connect."""
        return self._server.address

    def run(self, stop: threading.Event) -> None:
        """Answer until `stop` is set."""
        try:
            while not stop.is_set():
                self.turn(_RECEIVE_S)
        finally:
            self._server.close()

    def turn(self, timeout_s: float) -> None:
        """Answer one request, where one comes in time. What is refused harms nobody else."""
        if (request := self._server.receive(timeout_s)) is None:
            return
        handler = self._handlers.get(request.message.kind)
        if handler is None:
            self._server.refuse(
                request, f"unknown message '{request.message.kind}'; known: {', '.join(self._handlers)}"
            )
            return
        try:
            handler(request)
        except FileNotFoundError:
            self._server.refuse(request, "gone: a newer version has taken its place")
        except (WeightsError, OSError, KeyError, TypeError, ValueError) as error:
            self._server.refuse(request, f"{request.message.kind}: {error!r}")

    def status(self) -> dict[str, Any]:
        """What has gone out, and what was turned away."""
        return {"bytes_given": self._num_bytes, "wire_refused": self._server.refused}

    def _newest(self, request: Request) -> None:
        pointer = self._directory / LATEST_FILE
        version = list(parse_folder_name(pointer.read_text().strip())) if pointer.exists() else None
        self._server.reply(request, "newest", {"version": version}, remember=False)

    def _manifest(self, request: Request) -> None:
        folder = self._folder(request)
        num_bytes, text = (folder / TENSORS_FILE).stat().st_size, (folder / MANIFEST_FILE).read_bytes()
        self._server.reply(request, "manifest", {"num_bytes": num_bytes}, (text,), remember=False)

    def _piece(self, request: Request) -> None:
        offset = request.message.fields["offset"]
        if type(offset) is not int or offset < 0:
            raise ValueError(f"offset = {offset!r}: expected a count")
        with (self._folder(request) / TENSORS_FILE).open("rb") as file:
            file.seek(offset)
            piece = file.read(PIECE_BYTES)
        self._num_bytes += len(piece)
        self._server.reply(request, "piece", {}, (piece,), remember=False)

    def _folder(self, request: Request) -> Path:
        branch, step = request.message.fields["version"]
        # Numbers alone make the name, so that no request leaves the folder.
        return self._directory / folder_name(PolicyVersion(int(branch), int(step)))
