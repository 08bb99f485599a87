"""How fast a run goes, over its last minute: a fold over the lines of its metrics. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stream_grpo.pace.bottleneck import WINDOW_S, Shares, bottleneck

Line = Mapping[str, Any]
_GENERATED, _EVALUATION = (("ledger", "tokens", name) for name in ("generated", "evaluation"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A run over its last minute, and as it is now."""

    step: int
    num_steps: int
    num_tokens: int
    """Sampled for training so far."""
    max_tokens: int | None
    """So many end the run; None: steps alone do."""
    left_s: float | None
    """To the last step or the last token, whichever is nearer at the present pace."""
    sampled_per_s: float
    """Tokens that reached the buffer, a second."""
    trained_per_s: float
    queue: Mapping[str, int]
    """Groups in flight, buffered, leased."""
    age_mean: float
    age_max: int
    age_parts: Mapping[str, float]
    """Mean publish lag, in flight, in queue."""
    bottleneck: str
    alarms: tuple[str, ...] = ()
    """The newest alarms, each with its step."""

    @property
    def share_done(self) -> float:
        """Of the run, by steps or by tokens, whichever has come farther."""
        by_tokens = self.num_tokens / self.max_tokens if self.max_tokens else 0.0
        return min(1.0, max(self.step / max(1, self.num_steps), by_tokens))


class PaceWatch:
    """Follows the lines of a run."""

    def __init__(self, num_steps: int, *, max_tokens: int | None = None) -> None:
        """`num_steps` and `max_tokens`, sampled for training: of the whole run, which ends with either."""
        self._num_steps, self._max_tokens = num_steps, max_tokens
        self._by_part: dict[str, deque[Line]] = {}
        self._steps: deque[Line] = deque()
        self._last: Line | None = None
        self._alarms: deque[str] = deque(maxlen=3)

    def take(self, line: Line) -> None:
        """Take note of a line."""
        if line["event"] == "status":
            self._add(self._by_part.setdefault(line["part"], deque()), line)
        elif line["event"] == "step":
            if self._last is not None and line["step"] <= self._last["step"]:
                self._steps.clear()  # after a restore
            self._add(self._steps, line)
            self._last = line
        elif line["event"] == "alarm":
            self._alarms.append(f"step {line['step']}: {line['sentence']}")

    @staticmethod
    def _add(lines: deque[Line], line: Line) -> None:
        # A part that was started again counts from 0.
        if lines and line.get("busy_s", 0.0) < lines[-1].get("busy_s", 0.0):
            lines.clear()
        lines.append(line)
        # One line stays that is a whole window old.
        while len(lines) > 2 and lines[1]["time_s"] <= line["time_s"] - WINDOW_S:
            lines.popleft()

    def now(self) -> Pace | None:
        """The pace; None before the first step, and before two looks at a buffer."""
        last, buffers = self._last, self._by_part.get("buffer", deque())
        if last is None or len(buffers) < 2:
            return None
        num_tokens = int((_at(buffers[-1], _GENERATED) or 0) - (_at(buffers[-1], _EVALUATION) or 0))
        tokens = {name: _rate(buffers, "ledger", "tokens", name) for name in ("generated", "trained")}
        parts = {name: last.get(f"age_{name}_mean", 0.0) for name in ("publish_lag", "in_flight", "in_queue")}
        return Pace(
            step=last["step"],
            num_steps=self._num_steps,
            num_tokens=num_tokens,
            max_tokens=self._max_tokens,
            left_s=self._left_s(num_tokens),
            sampled_per_s=tokens["generated"],
            trained_per_s=tokens["trained"],
            queue={name: buffers[-1].get(name, 0) for name in ("in_flight", "buffered", "leased")},
            age_mean=last["age_mean"],
            age_max=last["age_max"],
            age_parts=parts,
            bottleneck=bottleneck(self.shares(), min(WINDOW_S, _span_s(buffers))),
            alarms=tuple(self._alarms),
        )

    def shares(self) -> Shares:
        """What both sides did in the last minute."""
        samplers = [lines for lines in self._by_part.values() if any("num_slots" in line for line in lines)]
        num = max(1, len(samplers))
        causes = sorted({name for lines in samplers for line in lines for name in line.get("idle_s", ())})
        learner = self._by_part.get("learner", ())
        loads = [(line.get("num_running"), line.get("num_slots")) for lines in samplers for line in lines]
        running = [min(1.0, taken / slots) for taken, slots in loads if taken is not None and slots]
        return Shares(
            learner_waited=_rate(learner, "waited_s"),
            learner_published=_rate(learner, "publish_s") + _rate(learner, "checkpoint_s"),
            sampler_idle={name: sum(_rate(lines, "idle_s", name) for lines in samplers) / num for name in causes},
            sampler_stalled=sum(_rate(lines, "stall_s") for lines in samplers) / num,
            slots_taken=sum(running) / len(running) if running else 1.0,
        )

    def _left_s(self, num_tokens: int) -> float | None:
        """Seconds to the nearer end; None where neither pace is known."""
        ends: list[float] = []
        if num := self._steps[-1]["step"] - self._steps[0]["step"]:
            ends.append((self._num_steps - self._steps[-1]["step"]) * _span_s(self._steps) / num)
        buffers = self._by_part["buffer"]
        per_s = _rate(buffers, *_GENERATED) - _rate(buffers, *_EVALUATION)
        if self._max_tokens is not None and per_s > 0:
            ends.append(max(0.0, (self._max_tokens - num_tokens) / per_s))
        return min(ends, default=None)


def _span_s(lines: Sequence[Line]) -> float:
    return float(lines[-1]["time_s"] - lines[0]["time_s"])


def _rate(lines: Sequence[Line], *path: str) -> float:
    """By how much a count grew a second, from the first to the last line that has it; 0 where that is not known."""
    known = [line for line in lines if _at(line, path) is not None]
    if len(known) < 2 or not (span_s := _span_s(known)):
        return 0.0
    first, last = (_at(line, path) or 0.0 for line in (known[0], known[-1]))
    return max(0.0, last - first) / span_s


def _at(line: Line, path: tuple[str, ...]) -> float | None:
    """The number there; None in a line that lacks it."""
    value: Any = line
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
