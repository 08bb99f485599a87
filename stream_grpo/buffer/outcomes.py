"""Outcomes for the curator: derived from the journal, sent in order, at most one report on its way. Pure.

The sequence of an outcome is the place of its record in the journal: 0, 1, 2, ... Refused copies and tickets without
rollouts make none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from curator.schema import Outcome, batch_to_bytes, outcomes_to_batch
from stream_grpo.buffer.facts import GroupFacts, batch_of_record, facts_of
from stream_grpo.buffer.stock import Reader
from stream_grpo.buffer.transitions import Location, Transition
from stream_grpo.errors import JournalError

BATCH = 256
"""Outcomes of one report at most."""

_PRUNE_ABOVE = 4096
"""With more sent outcomes remembered than this, the curator is asked which of them are durable."""


def outcome_of(sequence: int, facts: GroupFacts, fate: str) -> Outcome:
    """What the curator learns from a group."""
    newest = max(facts.versions, default=None)
    steps = [version.step for version in facts.versions]
    return Outcome(
        sequence=sequence,
        group_id=facts.group_id,
        problem_id=facts.problem_id,
        domain=facts.domain,
        num_passed=facts.num_passed,
        num_failed=facts.num_failed,
        num_unscored=facts.num_unscored,
        mean_reward=sum(facts.rewards) / len(facts.rewards) if facts.rewards else math.nan,
        reward_spread=facts.spread,
        num_truncated=facts.num_truncated,
        branch=newest.branch if newest else -1,
        min_step=min(steps, default=-1),
        max_step=max(steps, default=-1),
        mean_step=facts.mean_step,
        num_tokens=facts.num_tokens,
        seconds=facts.seconds,
        fate=fate,
    )


class Outgoing(NamedTuple):
    """A message for the curator."""

    kind: str
    fields: Mapping[str, Any]
    body: tuple[bytes, ...]


class _Entry(NamedTuple):
    sequence: int
    location: Location
    group_id: str
    fate: str


class Outbox:
    """What the curator has not yet acknowledged. A fold over transitions and the curator's answers."""

    def __init__(self) -> None:
        """The curator's position is unknown until it answers."""
        self._entries: deque[_Entry] = deque()
        self._count = 0
        self._visible = 0
        self._next: int | None = None
        self._awaiting = ""
        self._should_ask = False
        self._has_reader = True
        self.refusal = ""
        """Why the curator refused the last report; empty once one is taken."""

    def apply(self, row: Transition) -> None:
        """Follow a transition: a record that came in makes an outcome."""
        if row.location and not self._has_reader:
            self._count += 1
        elif row.location:
            self._entries.append(_Entry(self._count, row.location, row.group_id, row.kind.value))
            self._count += 1

    def committed(self) -> None:
        """All that was applied is durable and may be sent."""
        self._visible = self._count

    def close(self) -> None:
        """Without a curator nobody waits for outcomes: the journal alone keeps them."""
        self._has_reader = False
        self._entries.clear()

    @property
    def num_acknowledged(self) -> int:
        """Outcomes that the curator has taken; -1 while its position is unknown."""
        return -1 if self._next is None else self._next

    @property
    def num_outcomes(self) -> int:
        """Outcomes of the run so far."""
        return self._count

    @property
    def all_acknowledged(self) -> bool:
        """Whether the curator has taken every outcome there is."""
        return self._next == self._count or not self._has_reader

    @property
    def is_waiting(self) -> bool:
        """Whether a message is on its way."""
        return bool(self._awaiting)

    def next_message(self, read: Reader) -> Outgoing | None:
        """What to send now, if anything: a question for the position, or a report of up to BATCH outcomes."""
        if self._awaiting:
            return None
        if self._next is None or self._should_ask:
            self._awaiting, self._should_ask = "position", False
            return Outgoing("position", {}, ())
        if self._next >= self._visible:
            return None
        first = self._next - self._entries[0].sequence
        entries = [self._entries[i] for i in range(first, min(first + BATCH, first + self._visible - self._next))]
        outcomes = [
            outcome_of(entry.sequence, facts_of(batch_of_record(read(entry.location, entry.group_id))), entry.fate)
            for entry in entries
        ]
        self._awaiting = "report"
        return Outgoing("report", {}, (batch_to_bytes(outcomes_to_batch(outcomes)),))

    def answered(self, fields: Mapping[str, Any]) -> None:
        """Take the curator's answer.

        Raises JournalError where the curator stands where this journal cannot go on from.
        """
        if self._awaiting == "report":
            self.refusal = ""
        self._awaiting = ""
        position = int(fields["next_sequence"])
        if position > self._count:
            raise JournalError(
                f"the curator has taken {position} outcomes, the journal has {self._count}: it belongs to another run"
            )
        if position < (self._entries[0].sequence if self._entries else self._count):
            raise JournalError(
                f"the curator asks for outcome {position}, which it had reported as durable; a buffer that starts "
                f"again sends it from the journal"
            )
        self._next = position
        durable = min(int(fields.get("durable_sequence", 0)), position)
        while self._entries and self._entries[0].sequence < durable:
            self._entries.popleft()
        sent = position - self._entries[0].sequence if self._entries else 0
        self._should_ask = sent > _PRUNE_ABOVE and "durable_sequence" not in fields

    def ask_again(self) -> None:
        """Ask for the position with the next message: a curator that died has forgotten what it had not written."""
        self._should_ask = True

    def refused(self, reason: str) -> None:
        """The curator refused a message, as it does where outcomes are missing in between: ask where it stands."""
        self.refusal, self._awaiting, self._next = reason, "", None
