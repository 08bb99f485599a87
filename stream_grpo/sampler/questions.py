"""Which problem a ticket is for, asked of the curator without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from curator.client import Curator, Found, Picked, Refused
from curator.schema import Problem
from curator.wire import RemoteError
from stream_grpo.types import Ticket


class Answered(NamedTuple):
    """What the curator says to a ticket."""

    ticket: Ticket
    problem: Problem | None
    """None: it has left the pool since an earlier owner of the ticket began with it."""
    group_size: int
    """Rollouts of the group; 0 where nobody has said."""


class Questions:
    """The questions of one sampler. A ticket that is issued again may have a problem, and asks for it by its id."""

    def __init__(self, curator: Curator) -> None:
        """Nothing asked yet."""
        self._curator = curator
        self._asked: dict[str, list[Ticket]] = {}

    @property
    def is_open(self) -> bool:
        """Whether an answer is missing."""
        return bool(self._asked)

    def ask(self, tickets: Iterable[Ticket]) -> None:
        """Ask for those of these tickets that were not asked for, all of a kind in one question."""
        # By identity: one that is issued again is another. Those asked for are held here, so that no id comes twice.
        asked = {id(ticket) for several in self._asked.values() for ticket in several}
        unasked = [ticket for ticket in tickets if id(ticket) not in asked]
        new, begun = [t for t in unasked if not t.problem_id], [t for t in unasked if t.problem_id]
        if new and self._curator.has_credit:
            self._asked[self._curator.post_next([ticket.group_id for ticket in new])] = new
        if begun and self._curator.has_credit:
            self._asked[self._curator.post_get(sorted({ticket.problem_id for ticket in begun}))] = begun

    def answers(self, timeout_s: float = 0.0) -> list[Answered]:
        """What was answered, waiting up to `timeout_s` for the first: each answer in the order of its group ids.

        Raises RemoteError where the curator refuses.
        """
        return [each for answer in self._curator.poll(timeout_s) for each in self._answered(answer)]

    def _answered(self, answer: object) -> Iterator[Answered]:
        if isinstance(answer, Refused):
            raise RemoteError(f"curator: {answer.reason}")
        if not isinstance(answer, Picked | Found):
            return
        asked = sorted(self._asked.pop(answer.id, []), key=lambda ticket: ticket.group_id)
        if isinstance(answer, Picked):
            picked = {pick.group_id: pick for pick in answer.picks}
            picks = [(ticket, picked[ticket.group_id]) for ticket in asked]
            yield from (Answered(ticket, pick.problem, pick.group_size) for ticket, pick in picks)
        else:
            found = {problem.problem_id: problem for problem in answer.problems}
            yield from (Answered(ticket, found.get(ticket.problem_id), ticket.group_size) for ticket in asked)
