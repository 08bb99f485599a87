"""Which segments of a journal may leave the disk, and when the learner is asked for a checkpoint so that more may.

A segment is *settled* once a checkpoint became the oldest kept one while no group of it could still change: a group
that was trained is then contained in every checkpoint there is, and any other end came before. What is settled, told
to the curator for good, and beyond the limits is *removable*, oldest first; nothing else ever is.

A fold over transitions. A segment is `removed` in the log before its file goes, so that a missing file is either
explained or an error.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stream_grpo.buffer.transitions import Kind, Transition


@dataclass(slots=True)
class Segment:
    """What the log says of a segment."""

    end: int = 0
    """Bytes up to the end of its last record."""
    num_groups: int = 0
    newest_s: float = 0.0
    """Unix time at which its last group came in; 0 where it has partials alone."""
    is_settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of what is settled is kept to look at. Whatever is beyond any of them may go; None: no such limit."""

    num_groups: int | None = None
    """Newest groups; the segment that holds the first of them stays whole."""
    num_bytes: int | None = None
    """Bytes of newest segments at most."""
    age_s: float | None = None
    """Seconds since the last record of a segment came in."""


class Retention:
    """The segments of a journal and the logs beside them."""

    folded = ("segments", "newest", "logs")

    def __init__(self) -> None:
        """No segment yet."""
        self.segments: dict[int, Segment] = {}
        """Those on disk, lowest number first."""
        self.newest = 0
        """The highest number that any record was written under; numbers are never used again."""
        self.logs: dict[int, int] = {}
        """Closed logs, and the newest segment that each may name."""

    def apply(self, row: Transition) -> None:
        """Follow a transition."""
        if row.length:
            # A partial holds its segment only while it is the newest of its group.
            is_group = row.kind is not Kind.PARTIAL
            segment = self.segments.setdefault(row.segment, Segment(is_settled=True))
            segment.end, segment.is_settled = row.offset + row.length, segment.is_settled and not is_group
            segment.newest_s = row.time_s if is_group else segment.newest_s
            segment.num_groups += is_group
            self.newest = max(self.newest, row.segment)
        elif row.kind is Kind.REMOVED:
            self.segments.pop(row.segment, None)

    def settle(self, in_use: Collection[int]) -> None:
        """A checkpoint became the oldest kept one: all segments but those `in_use` hold nothing that may change."""
        for number, segment in self.segments.items():
            segment.is_settled |= number not in in_use

    def close_log(self, number: int) -> None:
        """The log of this number ends here."""
        self.logs[number] = self.newest

    def removable(self, limits: Limits, in_use: Collection[int], *, closed_below: int, now: float) -> list[int]:
        """Segments that may go now, oldest first, none of them open or `in_use`."""
        kept_bytes = sum(segment.end for segment in self.segments.values())
        newer_groups = sum(segment.num_groups for segment in self.segments.values())
        found = []
        for number, segment in self.segments.items():
            newer_groups -= segment.num_groups
            is_beyond = (
                _exceeds(kept_bytes, limits.num_bytes)
                or (limits.num_groups is not None and newer_groups >= limits.num_groups)
                or _exceeds(now - segment.newest_s, limits.age_s)
            )
            if number >= closed_below or number in in_use or not (segment.is_settled and is_beyond):
                break
            kept_bytes -= segment.end
            found.append(number)
        return found

    def removable_logs(self) -> list[int]:
        """Closed logs that name no segment which is still there."""
        oldest = next(iter(self.segments), self.newest + 1)
        return [number for number, newest in self.logs.items() if newest < oldest]

    def forget_log(self, number: int) -> None:
        """A closed log was deleted."""
        self.logs.pop(number, None)

    def needs_checkpoint(self, live: Collection[int], *, closed_below: int) -> bool:
        """Whether a checkpoint, once it is the oldest kept one, settles the oldest segment.

        `live`: segments with a group that is still to be trained.
        """
        oldest = next(iter(self.segments), closed_below)
        return oldest < closed_below and oldest not in live and not self.segments[oldest].is_settled


def _exceeds(value: float, limit: float | None) -> bool:
    return limit is not None and value > limit
