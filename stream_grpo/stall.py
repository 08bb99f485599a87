"""Who waits for whom, said while nothing moves and before anybody gives up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stream_grpo.errors import StallError


def who_waits(statuses: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for everything that parts say they wait for, in `waits_for` of their status."""
    for name, status in statuses.items():
        for whom in status.get("waits_for", ()):
            yield f"{name} waits for {whom}"


class StallWatch:
    """Follows a text that is another one as soon as anything moves."""

    def __init__(self, stall_timeout_s: float, timer: Callable[[], float] = time.monotonic) -> None:
        """`stall_timeout_s`: after so long each part gives up by itself."""
        self._timeout_s, self._timer = stall_timeout_s, timer
        self._moved, self._moved_at = "", timer()
        self._has_said = False

    def look(self, moved: str, waits: Sequence[str]) -> str:
        """What is to be said now, once in every stall: after half of `stall_timeout_s` who waits for whom.

        Raises StallError with the same after twice `stall_timeout_s`, where no part has given up.
        """
        now = self._timer()
        if moved != self._moved:
            self._moved, self._moved_at, self._has_said = moved, now, False
        still_s = now - self._moved_at
        sentence = "; ".join([f"nothing has moved for {still_s:.0f} s: {moved}", *waits])
        if still_s > 2 * self._timeout_s:
            raise StallError(sentence)
        if still_s <= self._timeout_s / 2 or self._has_said:
            return ""
        self._has_said = True
        return sentence
