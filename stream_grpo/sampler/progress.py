"""What the buffer hears of groups while they are made: that they are held, and what they have so far."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from stream_grpo.config_stream import Stream
from stream_grpo.sampler.generation import Engine
from stream_grpo.sampler.rollout import GroupInProgress
from stream_grpo.transport.channels import SamplerChannel
from stream_grpo.types import Generation, RolloutGroup

_HEARTBEAT_S = 2.0
# Of the timeout of a ticket, so that a heartbeat or two may be late.
_HEARTBEAT_SHARE = 0.2
_log = logging.getLogger(__name__)

Record = Callable[[GroupInProgress, Sequence[Generation]], RolloutGroup]


class Progress:
    """Sends heartbeats and partials without ever waiting. Belongs to the thread of the engine."""

    def __init__(
        self,
        stream: Stream,
        engine: Engine,
        buffer: SamplerChannel,
        held: Callable[[], Iterable[str]],
        record: Record,
        timer: Callable[[], float] = time.perf_counter,
        *,
        keeps_partials: bool = True,
    ) -> None:
        """`held`: ids of all groups that are this sampler's, those that wait for the buffer included.

        `record`: makes what is handed over of a group and the generations of its unfinished requests.
        `keeps_partials`: whether another could go on from a partial; else none is handed over.
        """
        self._engine, self._buffer, self._timer = engine, buffer, timer
        self._held, self._record = held, record
        self._heartbeat_s = min(_HEARTBEAT_S, _HEARTBEAT_SHARE * stream.ticket_timeout_s)
        # At age 0 a block that was interrupted is sampled anew by its seeds, so that it stays the same block.
        self._interval_s = stream.partial_interval_s if stream.max_policy_age > 0 and keeps_partials else 0.0
        self._next_heartbeat_at = 0.0
        # When the next partial of a group is due, the soonest first. Each group has its own time, so that one that ends
        # within the interval costs none.
        self._due_at: dict[str, float] = {}
        # Sampled tokens of each group when it was last looked at and when it was last handed over.
        self._seen: dict[str, int] = {}
        self._handed_over: dict[str, int] = {}
        self.num_partials = 0
        """Partials handed over."""
        self.num_not_kept = 0
        """Those of them that the buffer did not keep."""

    def begin(self, group: GroupInProgress) -> None:
        """A group is in progress; what it brings along the buffer has."""
        self._handed_over[group.ticket.group_id] = group.num_tokens
        self._wait_an_interval(group.ticket.group_id)

    def turn(self, groups: Mapping[str, GroupInProgress]) -> None:
        """Now and then say which groups are held, and hand over what those in progress have so far."""
        now = self._timer()
        self._forget_not_kept()
        if now >= self._next_heartbeat_at and self._buffer.has_credit and not self._buffer.waits_for_heartbeat:
            self._next_heartbeat_at = now + self._heartbeat_s
            self._beat(groups)
        # One a turn: of long rollouts each takes as long as an engine step.
        self._send(groups, until=now, at_most=1)

    def last_turn(self, groups: Mapping[str, GroupInProgress]) -> None:
        """Hand over all that credits allow: the groups go on elsewhere, or after a resume."""
        self._send(groups, until=math.inf, at_most=len(groups))

    def _forget_not_kept(self) -> None:
        """What the buffer did not keep is new to it when its turn comes again, as after a disk that was full."""
        for group_id, reason in self._buffer.take_not_kept().items():
            self._handed_over.pop(group_id, None)
            self.num_not_kept += 1
            _log.log(
                logging.WARNING if self.num_not_kept == 1 else logging.DEBUG,
                "%s: the buffer does not keep what there is of it so far: %s",
                group_id,
                reason,
            )

    def _beat(self, groups: Mapping[str, GroupInProgress]) -> None:
        self._seen |= {group_id: self._num_tokens(group) for group_id, group in groups.items()}
        # A group that is finished has the tokens that it was last seen with, or a few more.
        self._seen = {group_id: self._seen.get(group_id, 0) for group_id in self._held()}
        self._handed_over = {group_id: n for group_id, n in self._handed_over.items() if group_id in self._seen}
        if self._seen:
            self._buffer.heartbeat(self._seen)

    def _send(self, groups: Mapping[str, GroupInProgress], *, until: float, at_most: int) -> None:
        """Hand over what is due until then, of at most so many groups."""
        for group_id, due_at in list(self._due_at.items()):
            if due_at > until or not at_most or not self._buffer.has_credit:
                return
            group = groups.get(group_id)
            if group is None:
                del self._due_at[group_id]
                continue
            self._wait_an_interval(group_id)
            if not self._buffer.waits_for_partial(group_id):
                at_most -= self._hand_over(group)

    def _wait_an_interval(self, group_id: str) -> None:
        if self._interval_s:
            self._due_at.pop(group_id, None)
            self._due_at[group_id] = self._timer() + self._interval_s

    def _hand_over(self, group: GroupInProgress) -> bool:
        """Whether the group had anything new."""
        group_id, num_tokens = group.ticket.group_id, self._num_tokens(group)
        if num_tokens == self._handed_over.get(group_id, 0):
            return False
        running = self._engine.progress([request.request_id for request in group.unfinished])
        self._buffer.hand_over_partial(self._record(group, running))
        self._handed_over[group_id] = num_tokens
        self.num_partials += 1
        return True

    def _num_tokens(self, group: GroupInProgress) -> int:
        return group.num_tokens + self._engine.num_sampled(request.request_id for request in group.unfinished)
