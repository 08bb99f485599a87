"""The buffer's loop: receive, decide, make durable, answer. Knows nothing of Ray."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from curator.client import Curator
from curator.wire import ERROR, Request, Server
from stream_grpo.buffer.book import GRACE_S, Book, Refusal, Rules
from stream_grpo.buffer.disk import Disk
from stream_grpo.buffer.intake import Intake
from stream_grpo.buffer.journal import Journal
from stream_grpo.buffer.leases import Leases
from stream_grpo.buffer.reporter import Reporter
from stream_grpo.buffer.requests import (
    count_of,
    counts_of,
    forks_in,
    list_of,
    optional_count_of,
    record_of,
    text_of,
    texts_of,
    tokens_of,
    version_in,
)
from stream_grpo.buffer.retention import Limits
from stream_grpo.buffer.signal import WINDOW
from stream_grpo.buffer.status import account, figures
from stream_grpo.buffer.tickets import block_size
from stream_grpo.config_stream import Buffer, Stream
from stream_grpo.errors import LedgerError
from stream_grpo.failpoints import failpoint
from stream_grpo.transport.channels import tickets_to_plain

TICKETS_WAIT_S = 0.5
"""A request for tickets is held back so long before it is answered with a cause."""
LEASE_WAIT_S = 1.0
"""A lease is held back so long before it is answered with a cause."""
_IDLE_S = 0.02
_STATUS_EVERY_S = 0.1
_RETIRE_EVERY_S = 1.0
_NONE_SEEN = (-1, -1, False)
_log = logging.getLogger(__name__)


def credits_for(stream: Stream, default: int = 64) -> int:
    """Credits that the buffer's server must grant a client.

    At `max_policy_age` 0 inserts are acknowledged once their whole block has come in, so the largest block must fit.
    """
    if stream.max_policy_age > 0:
        return default
    return max(default, block_size(stream.groups_per_step, 1 / (WINDOW + 2)) + 8)


@dataclass(slots=True)
class _Waiting:
    """A request that is held back until it can be granted or its time is over."""

    request: Request
    asked_by: str
    until_s: float
    grant: Callable[[bool], bool]
    """Tries to answer; told whether time is over, in which case it must. True when answered."""


class BufferProcess:
    """Owns journal and book. `run` belongs to one thread; `status` may be called from any."""

    def __init__(
        self,
        server: Server,
        curator: Curator | None,
        *,
        directory: Path,
        stream: Stream,
        buffer: Buffer,
        seed: int,
        config_hash: str | None = None,
        vocab_size: int | None = None,
        signal_tolerance: float | None = 1e-6,
        counts_steps: bool = False,
        clock: Callable[[], float] = time.time,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Open or begin the journal in `directory` and rebuild everything from it.

        `server` must grant `credits_for(stream)`; without a curator outcomes are kept in the journal alone. Groups of
        another `config_hash`, or with token ids from `vocab_size` on, are invalid; None takes any. `counts_steps`: step
        scores that differ are signal too. `free_bytes`: room on the disk. Raises JournalError where the journal cannot
        be taken up again.
        """
        self._server, self._clock, self._settings = server, clock, buffer
        self._journal = Journal(directory, segment_bytes=buffer.segment_bytes, log_bytes=buffer.log_bytes)
        rules = Rules(
            groups_per_step=stream.groups_per_step,
            max_policy_age=stream.max_policy_age,
            sample_deadline_s=stream.sample_deadline_s,
            max_groups_without_signal=stream.max_groups_without_signal,
            run_seed=seed,
            signal_tolerance=signal_tolerance,
            counts_steps=counts_steps,
            config_hash=config_hash,
            vocab_size=vocab_size,
            too_old=stream.too_old,
            max_requeues=stream.max_requeues,
            selector=stream.selector,
            max_uses=stream.max_uses,
            reused_per_step=stream.reused_per_step,
            rescores=stream.on_reward_change == "rescore",
            ticket_timeout_s=stream.ticket_timeout_s,
            uniform_group_version=stream.uniform_group_version,
        )
        self._book = Book(self._journal, rules, now=clock())
        outbox = self._book.outbox
        self._reporter = Reporter(curator, outbox, self._journal.read) if curator else None
        if curator is None:
            outbox.close()
        self._intake, self._leases = Intake(self._book, now=clock()), Leases(self._book)
        self._disk = Disk(
            free_bytes or (lambda: shutil.disk_usage(directory).free),
            buffer.min_free_bytes,
            journal_bytes=lambda: self._journal.num_bytes + self._intake.staged_bytes,
            max_bytes=buffer.max_bytes,
            reserve_bytes=buffer.reserve_bytes,
        )
        self._limits = Limits(num_groups=buffer.retain_groups, num_bytes=buffer.retain_bytes, age_s=buffer.retain_age_s)
        self._handlers: Mapping[str, Callable[[Request, float], None]] = {
            "hello": self._hello,
            "goodbye": self._goodbye,
            "tickets": self._tickets,
            "heartbeat": self._heartbeat,
            "partial": self._partial,
            "insert": self._insert,
            "evaluated": self._evaluated,
            "start": self._start,
            "lease": self._lease,
            "trained": self._trained,
            "checkpointed": self._checkpointed,
            "ledger": self._ledger,
        }
        self._unsent: list[tuple[str, Callable[[], None]]] = []
        self._waiting: list[_Waiting] = []
        self._seen_state = _NONE_SEEN
        self._pending_since: float | None = None
        self._next_status_at = self._next_retire_at = 0.0
        self._status = figures(self._book, self._journal)

    @property
    def address(self) -> str:
        """Where samplers and the learner connect."""
        return self._server.address

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set; what was taken is then durable and answered.

        Raises JournalError where the disk does not take what must be durable, LedgerError where the account has a gap.
        """
        try:
            while not stop.is_set():
                self.turn()
            self._commit()
        finally:
            self.close()

    def turn(self) -> None:
        """One turn of the loop."""
        request = self._server.receive(self._patience_s())
        now = self._clock()
        if request is not None:
            self._handle(request, now)
        self._watch_disk(now)
        self._intake.expire(now)
        self._intake.release_silent(now)
        self._serve_waiting(now)
        self._tell_inserts()
        if self._commit_is_due(now, is_idle=request is None):
            self._commit()
        if self._reporter:
            self._reporter.turn(now)
        if now >= self._next_retire_at:
            self._next_retire_at = now + _RETIRE_EVERY_S
            self._retire(now)
        if now >= self._next_status_at:
            self._status = {**figures(self._book, self._journal), "wire_refused": self._server.refused}
            self._next_status_at = now + _STATUS_EVERY_S

    def _patience_s(self) -> float:
        if self._journal.has_pending:
            return 0.0
        return 0.002 if self._book.outbox.is_waiting else _IDLE_S

    def close(self) -> None:
        """Close the journal. What is not committed is not written, as after a kill."""
        self._journal.close()

    # -- answering ----------------------------------------------------------------------------------------------------

    def _handle(self, request: Request, now: float) -> None:
        handler = self._handlers.get(request.message.kind)
        try:
            if handler is None:
                raise Refusal(f"unknown message '{request.message.kind}'; known: {', '.join(self._handlers)}")
            handler(request, now)
        except (Refusal, LedgerError) as error:
            self._answer(request, ERROR, {"reason": str(error)})

    def _answer(
        self, request: Request, kind: str, fields: Mapping[str, Any] | None = None, body: Sequence[bytes] = ()
    ) -> None:
        """Answer once all that the answer may rest on is durable."""
        # What holds groups is large and the same for a repeat, so it need not be remembered.
        is_small = not body and kind != "batch"
        send = partial(self._server.reply, request, kind, fields, body, remember=is_small)
        if self._journal.has_pending:
            self._unsent.append((kind, send))
        else:
            send()

    def _tell_inserts(self) -> None:
        for taken in self._intake.take_answers():
            assert isinstance(taken.asked_by, Request)
            self._answer(taken.asked_by, "taken", {"fate": taken.fate.value, "reason": taken.reason})

    def _commit_is_due(self, now: float, *, is_idle: bool) -> bool:
        """At once when nothing else is waiting, else `group_commit_s` after the oldest that waits."""
        if not self._journal.has_pending:
            return False
        if self._pending_since is None:
            self._pending_since = now
        return is_idle or now - self._pending_since >= self._settings.group_commit_s

    def _commit(self) -> None:
        self._journal.commit()
        self._pending_since = None
        self._book.outbox.committed()
        unsent, self._unsent = self._unsent, []
        for kind, send in unsent:
            failpoint(f"answer.{kind}")
            send()
        if self._journal.log_is_full:
            self._journal.begin_log(self._book.snapshot(self._clock(), closes_log=self._journal.log_number))

    def _retire(self, now: float) -> None:
        """Delete what is beyond retention and needed by nobody: the log says so first."""
        leaving = self._book.remove_segments(self._limits, closed_below=self._journal.segment_number, now=now)
        if leaving:
            self._commit()
        for number in leaving:
            self._journal.remove_segment(number)
        for number in self._book.retention.removable_logs():
            self._journal.remove_log(number)
            self._book.retention.forget_log(number)

    @property
    def _checkpoint_wanted(self) -> bool:
        """Whether the learner shall make a checkpoint before its next is due, so that segments may go."""
        return self._journal.num_bytes > self._settings.checkpoint_above_bytes and self._book.needs_checkpoint(
            closed_below=self._journal.segment_number
        )

    def _hold(self, waiting: _Waiting) -> None:
        if not waiting.grant(False):
            self._waiting.append(waiting)
            # What it waits for may have come since: it is tried once more before anything has to change.
            self._seen_state = _NONE_SEEN

    def _serve_waiting(self, now: float) -> None:
        """Try held requests again where something has changed, and end those whose time is over."""
        if not self._waiting:
            return
        state = (self._journal.num_appended, self._book.outbox.num_acknowledged, self._disk.has_room)
        has_changed, self._seen_state = state != self._seen_state, state
        still: list[_Waiting] = []
        for waiting in self._waiting:
            is_over = now >= waiting.until_s
            try:
                if not ((has_changed or is_over) and waiting.grant(is_over)):
                    still.append(waiting)
            except (Refusal, LedgerError) as error:
                self._answer(waiting.request, ERROR, {"reason": str(error)})
        self._waiting = still

    # -- samplers -----------------------------------------------------------------------------------------------------

    def _hello(self, request: Request, now: float) -> None:
        sampler_id = text_of(request.message, "sampler_id")
        # What an earlier incarnation still asks for would go to nobody.
        self._waiting = [waiting for waiting in self._waiting if waiting.asked_by != sampler_id]
        self._answer(request, "welcome", {"epoch": self._intake.hello(sampler_id, now)})

    def _goodbye(self, request: Request, now: float) -> None:
        sampler_id, incarnation = text_of(request.message, "sampler_id"), count_of(request.message, "incarnation")
        self._waiting = [waiting for waiting in self._waiting if waiting.asked_by != sampler_id]
        self._intake.goodbye(sampler_id, incarnation, now)
        self._answer(request, "noted")

    def _tickets(self, request: Request, now: float) -> None:
        message = request.message
        sampler_id, version = text_of(message, "sampler_id"), version_in(message)
        num_wanted = count_of(message, "num_wanted")
        self._intake.name_problems(texts_of(message, "problems"), now, counts_of(message, "group_sizes"))
        if num_wanted == 0:
            self._answer(request, "tickets", {"tickets": [], "cause": ""})
            return
        request_id = f"{request.sender.decode(errors='replace')}/{message.id}"

        def grant(is_over: bool) -> bool:
            if self._disk.has_room:
                tickets, cause = self._intake.issue(sampler_id, version, num_wanted, request_id, self._clock())
            else:
                tickets, cause = [], self._disk.sentence()
            if tickets or is_over:
                plain, body = tickets_to_plain(tickets)
                self._answer(request, "tickets", {"tickets": plain, "cause": cause}, body)
            return bool(tickets) or is_over

        self._hold(_Waiting(request, sampler_id, now + TICKETS_WAIT_S, grant))

    def _heartbeat(self, request: Request, now: float) -> None:
        message = request.message
        sampler_id, incarnation = text_of(message, "sampler_id"), count_of(message, "incarnation")
        self._intake.owners.heartbeat(sampler_id, incarnation, counts_of(message, "tokens"), now)
        self._answer(request, "noted")

    def _partial(self, request: Request, now: float) -> None:
        """A partial is never held back: while the disk is full it is passed over, and a later one has its tokens."""
        data = record_of(request.message)
        why = self._intake.partial(data, now) if self._disk.has_room else self._disk.sentence()
        self._answer(request, "noted", {"is_kept": not why, "reason": why})

    def _insert(self, request: Request, now: float) -> None:
        data = record_of(request.message)

        def grant(is_over: bool) -> bool:
            has_room = self._disk.has_room
            if has_room:
                before = self._book.signal.num_without
                self._intake.insert(request, data, self._clock())
                self._warn_without_signal(before)
            return has_room

        # Of no sampler: whoever handed a group over may begin anew while it is held.
        self._hold(_Waiting(request, "", math.inf, grant))

    def _evaluated(self, request: Request, now: float) -> None:
        message = request.message
        sampler_id, version = text_of(message, "sampler_id"), version_in(message)
        self._intake.evaluated(sampler_id, version, count_of(message, "num_tokens"), now)
        self._answer(request, "noted")

    def _warn_without_signal(self, before: int) -> None:
        signal, limit = self._book.signal, self._book.rules.max_groups_without_signal
        if any(before < mark <= signal.num_without for mark in (limit // 4, limit // 2)):
            _log.warning("%s; the run ends at %d", signal.sentence(), limit)

    def _watch_disk(self, now: float) -> None:
        """While the disk is full, say so, and end no ticket: its group may be among those that are held."""
        if self._disk.has_room:
            return
        self._book.tickets.extend_deadlines(now + GRACE_S)
        self._disk.warn(now)

    # -- the learner --------------------------------------------------------------------------------------------------

    def _start(self, request: Request, now: float) -> None:
        self._leases.start(version_in(request.message), forks_in(request.message), now)
        self._intake.settle(now)
        self._answer(request, "started")

    def _lease(self, request: Request, now: float) -> None:
        version, num_groups = version_in(request.message), count_of(request.message, "num_groups")
        self._intake.aim_at(optional_count_of(request.message, "target_policy_age"))

        def grant(is_over: bool) -> bool:
            batch = self._leases.lease(version, num_groups, self._clock())
            if batch.groups or is_over:
                cause = batch.cause
                if cause and not self._disk.has_room:
                    cause = f"{self._disk.sentence()}; {cause}"
                fields = {
                    "cause": cause,
                    "ages": batch.ages,
                    "staleness": list(map(list, batch.staleness)),
                    "checkpoint_wanted": self._checkpoint_wanted,
                }
                self._answer(request, "batch", fields, batch.records)
            return bool(batch.groups) or is_over

        self._hold(_Waiting(request, "learner", now + LEASE_WAIT_S, grant))

    def _trained(self, request: Request, now: float) -> None:
        tokens = tokens_of(request.message)
        self._leases.trained(version_in(request.message), list_of(request.message, "group_ids"), tokens, now)
        ends = {"ends": dict(self._book.ledger.ends)}
        self._answer(request, "counted", account(self._book) | ends | {"checkpoint_wanted": self._checkpoint_wanted})

    def _checkpointed(self, request: Request, now: float) -> None:
        self._leases.checkpointed(version_in(request.message), now)
        self._answer(request, "noted")

    def _ledger(self, request: Request, now: float) -> None:
        self._answer(request, "ledger", account(self._book))

    # -- status -------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What the launcher shows, as of the last tenth of a second."""
        return self._status
