"""Who waits for whom: what each part did in the last minute of a run, and the bottleneck in words. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stream_grpo.dashboard.lines import BufferStatus, CuratorStatus, SamplerStatus, StepLine

WINDOW_S = 60.0
NOTABLE_SHARE = 0.15
"""A side that waits less than this is not held up by the other."""


class Window:
    """Counters of one part, over about the last minute that it has told of."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, time_s: float, counters: Mapping[str, float]) -> None:
        """Take what the counters stand at. One that has gone back was started anew: its past says nothing."""
        if self._seen and any(value < self._seen[-1][1].get(name, value) for name, value in counters.items()):
            self._seen.clear()
        self._seen.append((time_s, counters))
        while len(self._seen) > 2 and self._seen[1][0] <= time_s - self._window_s:
            self._seen.popleft()

    @property
    def seconds(self) -> float:
        """What the window spans."""
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    @property
    def newest_s(self) -> float:
        """Unix time of the newest; minus infinity where there is none."""
        return self._seen[-1][0] if self._seen else float("-inf")

    def rate(self, name: str) -> float | None:
        """What a counter gained a second; None where it was seen once or never."""
        if self.seconds <= 0:
            return None
        return (self._seen[-1][1][name] - self._seen[0][1][name]) / self.seconds


class Flow:
    """What the parts say, as it comes in."""

    def __init__(self) -> None:
        self._curator, self._buffer, self._learner = Window(), Window(), Window()
        self._samplers: dict[str, tuple[Window, SamplerStatus]] = {}
        self._curator_now: CuratorStatus | None = None
        self._buffer_now: BufferStatus | None = None
        self._step_now: StepLine | None = None
        self._sums = dict.fromkeys(("steps", "groups", "tokens", "step_s", "waited_s"), 0.0)

    def add_curator(self, line: CuratorStatus) -> None:
        """Take a status of the curator."""
        self._curator_now = line
        self._curator.add(line.time_s, {"picks": line.picks})

    def add_buffer(self, line: BufferStatus) -> None:
        """Take a status of the buffer."""
        self._buffer_now = line
        self._buffer.add(line.time_s, {"outcomes": line.outcomes})

    def add_sampler(self, line: SamplerStatus) -> None:
        """Take a status of one sampler."""
        window = self._samplers[line.part][0] if line.part in self._samplers else Window()
        names = ("busy_s", "stall_s", "num_tokens", "num_groups_done")
        window.add(line.time_s, {name: getattr(line, name) for name in names})
        self._samplers[line.part] = window, line

    def add_steps(self, lines: Sequence[StepLine]) -> None:
        """Take learner steps."""
        self._step_now = lines[-1]
        # Of many at once, those that have left the window already are passed over, but for the one it begins with.
        old = sum(line.time_s <= lines[-1].time_s - WINDOW_S for line in lines)
        for line in lines[max(0, old - 1) :]:
            gained = (1, line.num_groups, line.num_tokens, line.step_s, line.waited_s)
            self._sums = {name: self._sums[name] + more for name, more in zip(self._sums, gained, strict=True)}
            self._learner.add(line.time_s, self._sums)

    def as_fields(self) -> dict[str, Any]:
        """Rates by part, and who holds up whom."""
        samplers = [window for window, _ in self._samplers.values()]
        now = [line for _, line in self._samplers.values()]
        busy, stall = _mean(_rates(samplers, "busy_s")), _mean(_rates(samplers, "stall_s"))
        waited, learning = self._learner.rate("waited_s"), self._learner.rate("step_s")
        where, sentence = bottleneck(waited, None if busy is None else 1 - min(1.0, busy))
        buffer, curator, step = self._buffer_now, self._curator_now, self._step_now
        return {
            "window_s": max((w.seconds for w in (self._learner, *samplers)), default=0.0),
            "bottleneck": where,
            "sentence": sentence,
            "curator": {
                "picks_per_s": self._curator.rate("picks"),
                "problems": curator.problems if curator else None,
                "seen": curator.seen if curator else None,
            },
            "sampler": {
                "num_samplers": len(now),
                "tokens_per_s": _sum(_rates(samplers, "num_tokens")),
                "groups_per_s": _sum(_rates(samplers, "num_groups_done")),
                "busy_share": busy,
                "stall_share": stall,
                "num_running": sum(line.num_running for line in now),
                "waits_for": sorted({whom for line in now for whom in line.waits_for})[:4],
            },
            "buffer": {
                "buffered": buffer.buffered if buffer else None,
                "in_flight": buffer.in_flight if buffer else None,
                "leased": buffer.leased if buffer else None,
                "outcomes_per_s": self._buffer.rate("outcomes"),
            },
            "learner": {
                "steps_per_minute": _times(self._learner.rate("steps"), 60),
                "groups_per_s": self._learner.rate("groups"),
                "tokens_per_s": self._learner.rate("tokens"),
                "busy_share": learning,
                "wait_share": waited,
                "step": step.step if step else None,
            },
            "versions": sorted({f"{v[0]}.{v[1]}" for line in now if (v := line.version)})[:4],
        }


def bottleneck(learner_waits: float | None, samplers_idle: float | None) -> tuple[str, str]:
    """The part that holds up the others, and a sentence; the shares are of the last minute, 0 to 1."""
    if learner_waits is None or samplers_idle is None:
        return "", "Too little has come in to say who waits for whom."
    waits = f"the learner waited {learner_waits:.0%} of the last minute"
    idle = f"the samplers were idle {samplers_idle:.0%} of it"
    if max(learner_waits, samplers_idle) < NOTABLE_SHARE:
        return "", f"Sampling and learning keep up with each other: {waits}, and {idle}."
    if learner_waits >= samplers_idle:
        return "sampler", f"Sampling is the bottleneck: {waits}, and {idle}."
    return "learner", f"Learning is the bottleneck: {idle}, and {waits}.".replace("of it", "of the last minute", 1)


def _rates(windows: Sequence[Window], name: str) -> list[float]:
    return [rate for window in windows if (rate := window.rate(name)) is not None]


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
