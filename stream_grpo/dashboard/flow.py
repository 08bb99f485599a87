"""Who waits for whom: what each part did in the last minute of a run, and the bottleneck in words. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stream_grpo.dashboard.lines import BufferStatus, CuratorStatus, LearnerStatus, SamplerStatus, StepLine
from stream_grpo.pace.bottleneck import WINDOW_S, bottleneck
from stream_grpo.pace.watch import PaceWatch

_HELD_UP_BY = {
    "the curator": "curator",
    "sampling": "sampler",
    "scoring": "sampler",
    "taking up weights": "sampler",
    "the learner": "learner",
    "publishing": "learner",
}
"""In which box of the page it happens, by what `bottleneck` says is the bottleneck."""


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
        self._curator, self._buffer, self._learner, self._steps = Window(), Window(), Window(), Window()
        self._samplers: dict[str, tuple[Window, SamplerStatus]] = {}
        self._curator_now: CuratorStatus | None = None
        self._buffer_now: BufferStatus | None = None
        self._step_now: StepLine | None = None
        self._sums = dict.fromkeys(("steps", "groups", "tokens"), 0.0)
        self._watch = PaceWatch(num_steps=0)

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
        told = ("num_slots", "num_running", "busy_s", "stall_s", "idle_s")
        self._watch.take(_as_line(line.part, line, told))

    def add_learner(self, line: LearnerStatus) -> None:
        """Take a status of the learner."""
        self._learner.add(line.time_s, {"busy_s": line.busy_s, "waited_s": line.waited_s})
        self._watch.take(_as_line("learner", line, ("busy_s", "waited_s", "publish_s", "checkpoint_s")))

    def add_steps(self, lines: Sequence[StepLine]) -> None:
        """Take learner steps."""
        self._step_now = lines[-1]
        # Of many at once, those that have left the window already are passed over, but for the one it begins with.
        old = sum(line.time_s <= lines[-1].time_s - WINDOW_S for line in lines)
        for line in lines[max(0, old - 1) :]:
            gained = (1, line.num_groups, line.num_tokens)
            self._sums = {name: self._sums[name] + more for name, more in zip(self._sums, gained, strict=True)}
            self._steps.add(line.time_s, self._sums)

    def _bottleneck(self) -> str:
        """Who waits for whom, in the words of the console."""
        is_known = all(window.seconds > 0 for window in (self._buffer, self._learner))
        if not is_known or not self._samplers or self._step_now is None:
            return "too little has come in to say who waits for whom"
        return bottleneck(self._watch.shares(), min(WINDOW_S, self._buffer.seconds))

    def as_fields(self) -> dict[str, Any]:
        """Rates by part, and who holds up whom."""
        samplers = [window for window, _ in self._samplers.values()]
        now = [line for _, line in self._samplers.values()]
        sentence = self._bottleneck()
        buffer, curator, step = self._buffer_now, self._curator_now, self._step_now
        return {
            "window_s": max((w.seconds for w in (self._steps, *samplers)), default=0.0),
            "bottleneck": held_up_by(sentence),
            "sentence": f"{sentence[0].upper()}{sentence[1:]}.",
            "curator": {
                "picks_per_s": self._curator.rate("picks"),
                "problems": curator.problems if curator else None,
                "seen": curator.seen if curator else None,
            },
            "sampler": {
                "num_samplers": len(now),
                "tokens_per_s": _sum(_rates(samplers, "num_tokens")),
                "groups_per_s": _sum(_rates(samplers, "num_groups_done")),
                "busy_share": _mean(_rates(samplers, "busy_s")),
                "stall_share": _mean(_rates(samplers, "stall_s")),
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
                "steps_per_minute": _times(self._steps.rate("steps"), 60),
                "groups_per_s": self._steps.rate("groups"),
                "tokens_per_s": self._steps.rate("tokens"),
                "busy_share": self._learner.rate("busy_s"),
                "wait_share": self._learner.rate("waited_s"),
                "step": step.step if step else None,
            },
            "versions": sorted({f"{v[0]}.{v[1]}" for line in now if (v := line.version)})[:4],
        }


def held_up_by(sentence: str) -> str:
    """The box that a sentence of `bottleneck` is about: curator, sampler, learner, or "" for none of them."""
    return _HELD_UP_BY.get(sentence.partition(" is the bottleneck")[0], "")


def _as_line(part: str, line: SamplerStatus | LearnerStatus, names: Sequence[str]) -> Mapping[str, Any]:
    """A status as `PaceWatch` reads it."""
    return {"event": "status", "part": part, "time_s": line.time_s} | {name: getattr(line, name) for name in names}


def _rates(windows: Sequence[Window], name: str) -> list[float]:
    return [rate for window in windows if (rate := window.rate(name)) is not None]


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
