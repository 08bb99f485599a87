"""Outcomes for the curator: derived from the journal, sent in order, at most one report on its way. Pure.

The sequence of an outcome is the place in the journal of the row that makes it, among those alone that do: of records,
of tickets that end without one, and of requeues. The latter two have counts of 0: they tell the curator that a problem
has left flight, or is to be picked next. Refused copies make none.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from curator.schema import Outcome
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


def outcome_of_ticket(sequence: int, group_id: str, problem_id: str, fate: str) -> Outcome:
    """What the curator learns of a ticket that ended without a record; `problem_id` is empty where nobody named it."""
    return Outcome(
        sequence=sequence,
        group_id=group_id,
        problem_id=problem_id,
        domain="",
        num_passed=0,
        num_failed=0,
        num_unscored=0,
        mean_reward=math.nan,
        reward_spread=0.0,
        num_truncated=0,
        branch=-1,
        min_step=-1,
        max_step=-1,
        mean_step=-1.0,
        num_tokens=0,
        seconds=0.0,
        fate=fate,
    )


class Outgoing(NamedTuple):
    """What to send to the curator: outcomes to report, or none, to ask for its position."""

    outcomes: tuple[Outcome, ...]


class Entry(NamedTuple):
    """An outcome that the curator may still ask for, by the row that makes it."""

    sequence: int
    location: Location | None
    group_id: str
    problem_id: str
    fate: str

    def outcome(self, read: Reader) -> Outcome:
        """As the curator is told it; a record is read for it."""
        if self.location is None:
            return outcome_of_ticket(self.sequence, self.group_id, self.problem_id, self.fate)
        return outcome_of(self.sequence, facts_of(batch_of_record(read(self.location, self.group_id))), self.fate)


class Outbox:
    """What the curator has not yet acknowledged. A fold over transitions and the curator's answers."""

    folded = ("_entries", "_count")

    def __init__(self) -> None:
        """The curator's position is unknown until it answers."""
        self._entries: deque[Entry] = deque()
        self._kept: dict[int, Outcome] = {}
        """By sequence: outcomes whose record need not be read again."""
        self._count = 0
        self._visible = 0
        self._next: int | None = None
        self._is_waiting = False
        self._should_ask = False
        self._has_reader = True
        self.refusal = ""
        """Why the curator refused the last report; empty once one is taken."""

    def apply(self, row: Transition) -> None:
        """Follow a transition."""
        if not row.makes_outcome:
            return
        if self._has_reader:
            self._entries.append(Entry(self._count, row.location, row.group_id, row.problem_id, row.kind.value))
        self._count += 1

    def keep(self, facts: GroupFacts) -> None:
        """The facts of the record that made the newest outcome: it need not be read again."""
        if self._entries:
            newest = self._entries[-1]
            self._kept[newest.sequence] = outcome_of(newest.sequence, facts, newest.fate)

    def segments(self) -> set[int]:
        """Segments with records that the curator may still ask for."""
        return {entry.location.segment for entry in self._entries if entry.location}

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
        return self._is_waiting

    def next_message(self, read: Reader) -> Outgoing | None:
        """What to send now, if anything: a question for the position, or a report of up to BATCH outcomes."""
        if self._is_waiting:
            return None
        if self._next is None or self._should_ask:
            self._is_waiting, self._should_ask = True, False
            return Outgoing(())
        if self._next >= self._visible:
            return None
        first = self._next - self._entries[0].sequence
        entries = [self._entries[i] for i in range(first, min(first + BATCH, first + self._visible - self._next))]
        self._is_waiting = True
        return Outgoing(tuple(self._kept.get(entry.sequence) or entry.outcome(read) for entry in entries))

    def answered(self, position: int, durable: int | None = None) -> None:
        """Take the curator's answer: the sequence it expects next and, to a question, the one it has on disk.

        Raises JournalError where the curator stands where this journal cannot go on from.
        """
        if durable is None:
            self.refusal = ""
        self._is_waiting = False
        if position > self._count:
            raise JournalError(
                f"the curator has taken {position} outcomes, the journal has {self._count}: it belongs to another run"
            )
        if position < (self._entries[0].sequence if self._entries else self._count):
            raise JournalError(
                f"the curator asks for outcome {position}, which it had reported as durable: its pool is older than "
                f"this journal; put back a newer copy of it"
            )
        self._next = position
        while self._entries and self._entries[0].sequence < min(durable or 0, position):
            self._kept.pop(self._entries.popleft().sequence, None)
        sent = position - self._entries[0].sequence if self._entries else 0
        self._should_ask = sent > _PRUNE_ABOVE and durable is None

    def ask_again(self) -> None:
        """Ask for the position with the next message: a curator that died has forgotten what it had not written."""
        self._should_ask = True

    def refused(self, reason: str) -> None:
        """The curator refused a message, as it does where outcomes are missing in between: ask where it stands."""
        self.refusal, self._is_waiting, self._next = reason, False, None
