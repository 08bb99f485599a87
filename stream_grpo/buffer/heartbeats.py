"""When the owners of tickets were last heard of. In memory alone: after a start all of them have just spoken."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from stream_grpo.types import Ticket


class _Beat(NamedTuple):
    at_s: float
    num_tokens: int


class Heartbeats:
    """The last word of every ticket's owner."""

    def __init__(self, timeout_s: float, now: float) -> None:
        """`timeout_s`: how long an owner may be silent; `now`: when the buffer started, in unix seconds."""
        self._timeout_s, self._started_at_s = timeout_s, now
        self._beats: dict[str, _Beat] = {}
        self._next_look_at_s = now

    def heard(self, group_id: str, now: float, num_tokens: int) -> None:
        """The owner of a group in flight has spoken; `num_tokens` are those that it has sampled, 0 for unknown."""
        self._beats[group_id] = _Beat(now, max(num_tokens, self.num_tokens(group_id)))

    def num_tokens(self, group_id: str) -> int:
        """The sampled tokens that the owner of a group has named."""
        beat = self._beats.get(group_id)
        return beat.num_tokens if beat else 0

    def is_silent(self, ticket: Ticket, now: float) -> bool:
        """Whether nothing was heard of a ticket for too long, counted from its issue and from the start at first."""
        beat = self._beats.get(ticket.group_id)
        last = max(ticket.issued_at_s, self._started_at_s, beat.at_s if beat else 0.0)
        return now - last > self._timeout_s

    def is_time_to_look(self, now: float) -> bool:
        """Whether a tenth of the timeout has passed since this last said so."""
        if now < self._next_look_at_s:
            return False
        self._next_look_at_s = now + self._timeout_s / 10
        return True

    def forget(self, group_id: str) -> None:
        """The group has a new owner."""
        self._beats.pop(group_id, None)

    def keep_only(self, group_ids: Container[str]) -> None:
        """Forget all other groups: they have ended."""
        self._beats = {group_id: beat for group_id, beat in self._beats.items() if group_id in group_ids}
