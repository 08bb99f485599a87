"""Policy versions as one time that never jumps: a restore goes back in steps, not in time."""

from __future__ import annotations


class PolicyClock:
    """The step of a version plus an offset for its branch, which begins where the branch before it had come.

    After a restore from step 500 to step 400 the first group of the new branch is of time 500, not of 400: it is as
    fresh as can be, and what the old branch showed afterwards still counts as late. A fold over groups.
    """

    folded = ("now", "_offsets")

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the newest group."""
        self._offsets: dict[int, float] = {}

    def time(self, branch: int, step: float) -> float:
        """The time of a group, whose mean step this is."""
        if branch not in self._offsets:
            self._offsets[branch] = self.now - step if self._offsets else 0.0
        time = step + self._offsets[branch]
        self.now = max(self.now, time)
        return time

    def advance(self, steps: float) -> None:
        """Let time pass without a group: the branches to come begin that much later."""
        self.now += steps
