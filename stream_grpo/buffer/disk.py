"""Room on the journal's disk: whether it is enough to take groups, and a warning once a minute while it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Disk:
    """Compares free bytes with what must stay free. `free_bytes` is asked anew each time."""

    def __init__(self, free_bytes: Callable[[], int], min_free_bytes: int) -> None:
        self.free_bytes, self._min_free_bytes = free_bytes, min_free_bytes
        self._next_warning_at = 0.0

    @property
    def has_room(self) -> bool:
        """Whether groups may be taken and tickets issued."""
        return self.free_bytes() >= self._min_free_bytes

    def sentence(self) -> str:
        """That the disk is full, in figures."""
        free, needed = self.free_bytes() >> 20, self._min_free_bytes >> 20
        return f"the journal's disk is full: {free} MiB are free, buffer.min_free_bytes asks for {needed} MiB"

    def warn(self, now: float) -> None:
        """Say so, at most once a minute."""
        if now >= self._next_warning_at:
            self._next_warning_at = now + _WARN_EVERY_S
            _log.warning("%s; groups are held and no tickets issued until there is room", self.sentence())
