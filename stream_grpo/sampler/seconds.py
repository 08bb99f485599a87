"""Where a sampler's seconds go: engine steps, weights, scoring, and waits with nothing to sample. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Seconds:
    """Durations in all, by what they were spent on. Written by one thread, read by any."""

    def __init__(self, timer: Callable[[], float]) -> None:
        """`timer`: seconds for durations."""
        self._timer = timer
        self.busy_s = 0.0
        """Engine steps with running requests."""
        self.stall_s = 0.0
        """Taking up weights."""
        self.score_s = 0.0
        """Of the sampler's own thread for scoring."""
        self.first_busy_at: float | None = None
        """Unix time of the first engine step with running requests."""
        self.num_engine_steps = 0
        self._idle_s = {"policy": 0.0, "buffer": 0.0, "curator": 0.0, "rewards": 0.0}
        # When the last response of a group was given out to be scored, and what its score took from then on, in all.
        self._given_out: dict[str, float] = {}
        self._score_wait_s, self._num_scored = 0.0, 0

    def as_fields(self) -> dict[str, Any]:
        """The fields of a status."""
        return {
            "busy_s": self.busy_s,
            "first_busy_at": self.first_busy_at,
            "num_engine_steps": self.num_engine_steps,
            "stall_s": self.stall_s,
            "score_s": self.score_s,
            "score_wait_s": self._score_wait_s,
            "num_groups_scored": self._num_scored,
            "idle_s": dict(self._idle_s),
        }

    @contextmanager
    def idle(self, cause: str) -> Iterator[None]:
        """Count a wait with nothing to sample as the `cause`'s; with none, nothing is counted."""
        started = self._timer()
        yield
        if cause:
            self._idle_s[cause] = self._idle_s.get(cause, 0.0) + self._timer() - started

    def given_out(self, group_id: str) -> None:
        """A response of the group is given out to be scored: its score is waited for from the last one on."""
        self._given_out[group_id] = self._timer()

    def scored(self, group_id: str) -> None:
        """The group has its last score; nothing is counted for one of which nothing was given out."""
        if (given_out := self._given_out.pop(group_id, None)) is not None:
            self._score_wait_s += self._timer() - given_out
            self._num_scored += 1

    def forget(self, group_id: str) -> None:
        """No score of the group is waited for any more."""
        self._given_out.pop(group_id, None)
