"""The clock of a run over all its starts, from its lines of metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Start(NamedTuple):
    """One start of a run, in Unix time."""

    begun_s: float
    """Its first engine step with a running request."""
    ended_s: float
    """The end of its newest learner step; where it has none, its beginning."""


class Clock:
    """Seconds of training: from the first sampling of each start to its last learner step, loading left out."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.num_steps, self.num_tokens = 0, 0
        """Learner steps of the newest state, and generated tokens in all."""
        self._busy: dict[tuple[str, float], float] = {}
        self._learner_s = 0.0

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take lines in their order."""
        for line in lines:
            if line["event"] == "step":
                self._step(line)
            elif line["event"] == "status" and line.get("first_busy_at"):
                self._busy[line["part"], line["first_busy_at"]] = line["busy_s"]
                if not self.starts or self._is_later(line["first_busy_at"]):
                    self.starts.append(Start(line["first_busy_at"], line["first_busy_at"]))

    def _is_later(self, begun_s: float) -> bool:
        """Whether a sampler that began then is of another start: it is told of again in every status of its own."""
        newest = self.starts[-1]
        return begun_s > newest.begun_s and begun_s >= newest.ended_s

    def _step(self, line: Mapping[str, Any]) -> None:
        self.num_steps, self.num_tokens = line["step"], line["tokens"]["generated"]
        self._learner_s += line["step_s"]
        if self.starts:
            self.starts[-1] = self.starts[-1]._replace(ended_s=line["time_s"])

    def at(self, time_s: float) -> float:
        """Seconds of training at a Unix time; within a start it runs, also beyond the newest step."""
        total = 0.0
        for number, start in enumerate(self.starts):
            is_newest = number == len(self.starts) - 1
            end = time_s if is_newest else min(time_s, start.ended_s)
            total += max(0.0, end - start.begun_s)
        return total

    @property
    def seconds(self) -> float:
        """At the end of the newest step."""
        return sum(start.ended_s - start.begun_s for start in self.starts)

    def loop(self) -> dict[str, float]:
        """Where the seconds went, as `time_to_score.training.loop_of` has it."""
        return {
            "wall_s": self.seconds,
            "steps": self.num_steps,
            "sampler_s": sum(self._busy.values()),
            "learner_s": self._learner_s,
            "tokens": self.num_tokens,
        }
