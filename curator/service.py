"""The curator's process: receive a question, answer it from the state, until told to stop.

    next      {group_ids}                -> picks     [batch of PICK_SCHEMA]
    get       {problem_ids}              -> problems  [batch of PROBLEM_SCHEMA], those that the pool has
    report    [batch of OUTCOME_SCHEMA]  -> reported  {next_sequence}
    position                             -> position  {next_sequence, durable_sequence}
    stats                                -> stats     {...}
    flush                                -> flushed   {durable_sequence}

Several runs may share a service, each with a curation of its own; a question then names its `run`. What is malformed or
refused is answered with the reason, and the service goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from curator.curation import Curation
from curator.errors import CuratorError
from curator.schema import (
    OUTCOME_SCHEMA,
    batch_from_bytes,
    batch_to_bytes,
    outcomes_from_batch,
    picks_to_batch,
    problems_to_batch,
)
from curator.wire import Message, Server

RECEIVE_TIMEOUT_S = 0.1
"""How late a stop may be noticed."""
MAX_IDS_PER_CALL = 65536
_STATUS_EVERY_S = 1.0


class Answer(NamedTuple):
    """What is replied."""

    kind: str
    fields: Mapping[str, Any]
    body: tuple[bytes, ...] = ()


class CuratorService:
    """One curation behind one socket, or those of several runs."""

    def __init__(
        self,
        curation: Curation | Mapping[str, Curation],
        server: Server | str,
        *,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve a curation, or several by the names of their runs; `server` is one, or the address to bind.

        `timer`: seconds. Raises WireError where the address is taken, ValueError for no curation at all.
        """
        self._curations = {"": curation} if isinstance(curation, Curation) else dict(curation)
        if not self._curations:
            raise ValueError("curation: none to serve")
        self._server = Server(server) if isinstance(server, str) else server
        self.address = self._server.address
        """Where clients connect."""
        self._answers: Mapping[str, Callable[[Message], Answer]] = {
            "next": self._next,
            "get": self._get,
            "report": self._report,
            "position": self._position,
            "stats": self._stats,
            "flush": self._flush,
        }
        self.num_refused = 0
        self._timer, self._next_status_at = timer, 0.0
        self._status = self._stats_of_all()

    def status(self) -> dict[str, Any]:
        """The curation's state in figures, of several by run, as of the last second; may be called from any thread."""
        return self._status

    def _stats_of_all(self, **further: Any) -> dict[str, Any]:
        stats = {run: {**curation.stats(), **further} for run, curation in self._curations.items()}
        return stats[""] if stats.keys() == {""} else stats

    def run(self, stop: threading.Event) -> None:
        """Answer until `stop` is set, then flush and close socket and pool.

        Raises PoolError where the last outcomes cannot be written.
        """
        try:
            while not stop.is_set():
                self._refresh_status()
                request = self._server.receive(RECEIVE_TIMEOUT_S)
                if request is None:
                    continue
                try:
                    answer = self.answer(request.message)
                except Exception as error:
                    # Whatever one request breaks must not end the service for all others.
                    self.num_refused += 1
                    self._server.refuse(request, _reason(error))
                else:
                    # Problems are the same when they are asked for again, and may be large.
                    is_small = answer.kind not in ("picks", "problems")
                    self._server.reply(request, answer.kind, answer.fields, answer.body, remember=is_small)
        finally:
            self._server.close()
            with ExitStack() as closing:
                for curation in self._curations.values():
                    closing.callback(curation.close)
            self._status = self._stats_of_all()

    def _refresh_status(self) -> None:
        now = self._timer()
        if now >= self._next_status_at:
            self._status = self._stats_of_all(wire_refused=self._server.refused)
            self._next_status_at = now + _STATUS_EVERY_S

    def answer(self, message: Message) -> Answer:
        """The answer to one question. Raises ValueError for a malformed one, CuratorError for a refused one."""
        if message.kind not in self._answers:
            raise ValueError(f"unknown kind '{message.kind}'; known: {', '.join(self._answers)}")
        return self._answers[message.kind](message)

    def _curation(self, message: Message) -> Curation:
        run = message.fields.get("run", "")
        if not isinstance(run, str) or run not in self._curations:
            raise ValueError(f"run = {run!r}: not here; known: {', '.join(map(repr, self._curations))}")
        return self._curations[run]

    def _next(self, message: Message) -> Answer:
        picks = self._curation(message).next(_ids(message, "group_ids"))
        return Answer("picks", {}, (batch_to_bytes(picks_to_batch(picks)),))

    def _get(self, message: Message) -> Answer:
        problems = self._curation(message).find(_ids(message, "problem_ids"))
        return Answer("problems", {}, (batch_to_bytes(problems_to_batch(problems)),))

    def _report(self, message: Message) -> Answer:
        if len(message.body) != 1:
            raise ValueError(f"report: expected one body, received {len(message.body)}")
        batch = batch_from_bytes(message.body[0], OUTCOME_SCHEMA)
        return Answer("reported", {"next_sequence": self._curation(message).report(outcomes_from_batch(batch))})

    def _position(self, message: Message) -> Answer:
        return Answer("position", self._curation(message).position()._asdict())

    def _stats(self, message: Message) -> Answer:
        return Answer("stats", self._curation(message).stats())

    def _flush(self, message: Message) -> Answer:
        return Answer("flushed", {"durable_sequence": self._curation(message).flush()})


def _ids(message: Message, name: str) -> list[str]:
    ids = message.fields.get(name)
    if not isinstance(ids, list) or not all(isinstance(each, str) and each for each in ids):
        raise ValueError(f"{name}: expected a list of texts that are not empty")
    if not 1 <= len(ids) <= MAX_IDS_PER_CALL:
        raise ValueError(f"{name}: {len(ids)} of them; expected 1 to {MAX_IDS_PER_CALL}")
    return ids


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CuratorError | ValueError) else f"{type(error).__name__}: {error}"
