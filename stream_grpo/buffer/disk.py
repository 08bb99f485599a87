"""Room for the journal: whether it is enough to take groups, and a warning once a minute while it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Disk:
    """Compares free bytes with what must stay free, and the journal with what it may grow to. Both are asked anew."""

    def __init__(
        self,
        free_bytes: Callable[[], int],
        min_free_bytes: int,
        *,
        journal_bytes: Callable[[], int] = lambda: 0,
        max_bytes: int | None = None,
        reserve_bytes: int = 0,
    ) -> None:
        """`reserve_bytes` of `max_bytes` are for what comes in before the next look, and for the ends of groups."""
        self.free_bytes, self._min_free_bytes = free_bytes, min_free_bytes
        self._journal_bytes, self._max_bytes, self._reserve_bytes = journal_bytes, max_bytes, reserve_bytes
        self._next_warning_at = 0.0

    @property
    def has_room(self) -> bool:
        """Whether groups may be taken and tickets issued."""
        return self.free_bytes() >= self._min_free_bytes and not self._is_at_bound

    @property
    def _is_at_bound(self) -> bool:
        return self._max_bytes is not None and self._journal_bytes() + self._reserve_bytes > self._max_bytes

    def sentence(self) -> str:
        """That the disk is full, or the journal as large as it may be, in figures."""
        if self._max_bytes is not None and self._is_at_bound:
            found, most = self._journal_bytes() >> 20, self._max_bytes >> 20
            return (
                f"the journal holds {found} MiB of buffer.max_bytes = {most} MiB, {self._reserve_bytes >> 20} of them "
                f"in reserve, and none of it may go before the oldest kept checkpoint contains its groups and the "
                f"curator has their outcomes on disk; raise buffer.max_bytes, or lower learner.checkpoint_interval"
            )
        free, needed = self.free_bytes() >> 20, self._min_free_bytes >> 20
        return f"the journal's disk is full: {free} MiB are free, buffer.min_free_bytes asks for {needed} MiB"

    def warn(self, now: float) -> None:
        """Say so, at most once a minute."""
        if now >= self._next_warning_at:
            self._next_warning_at = now + _WARN_EVERY_S
            _log.warning("%s; groups are held and no tickets issued until there is room", self.sentence())
