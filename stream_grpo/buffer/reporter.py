"""Between the outbox and the curator's client: sends what the one has to say, gives it what the other answers."""

from __future__ import annotations

import logging

from curator.client import Curator, Positioned, Refused, Reported
from stream_grpo.buffer.outcomes import Outbox
from stream_grpo.buffer.stock import Reader
from stream_grpo.failpoints import failpoint

_POSITION_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class Reporter:
    """Reports outcomes without ever waiting."""

    def __init__(self, curator: Curator, outbox: Outbox, read: Reader) -> None:
        """`read`: gives the record of a group from the journal."""
        self._curator, self._outbox, self._read = curator, outbox, read
        self._next_position_at = 0.0

    def turn(self, now: float) -> None:
        """Take what was answered, send what is next. Raises JournalError where the curator is of another run."""
        outbox = self._outbox
        for answer in self._curator.poll(0.0):
            match answer:
                case Refused():
                    outbox.refused(answer.reason)
                    _log.warning("curator refused a report: %s", outbox.refusal)
                case Reported():
                    outbox.answered(answer.next_sequence)
                case Positioned():
                    outbox.answered(answer.next_sequence, answer.durable_sequence)
        if now >= self._next_position_at:
            self._next_position_at = now + _POSITION_EVERY_S
            outbox.ask_again()
        outgoing = outbox.next_message(self._read) if self._curator.has_credit else None
        if outgoing and outgoing.outcomes:
            failpoint("outcomes.report")
            self._curator.post_report(outgoing.outcomes)
        elif outgoing:
            self._curator.post_position()
