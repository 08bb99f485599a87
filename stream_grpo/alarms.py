"""Alarms of a run: a fold over the lines of its metrics. Each is raised once, until it has cleared. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stream_grpo.alarm_checks import CHECKS, LOOKED_AT, MIN_PAIRS, Seen
from stream_grpo.config_alarms import Alarms as Limits
from stream_grpo.registry.names import kind_of

MISMATCH: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.05}
"""What `alarms.mismatch` is by default, in nats."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that a person should look at."""

    name: str
    sentence: str
    cause: str
    step: int
    """Newest learner step when it was raised."""

    def as_fields(self) -> dict[str, Any]:
        """The fields of its line of metrics."""
        return asdict(self)


class Alarms:
    """Takes lines in their order, and gives the alarms that they raise."""

    def __init__(self, limits: Limits, dtype: Literal["float32", "bfloat16"]) -> None:
        """`dtype`: that of the model, by which engines differ."""
        self._limits = limits.model_copy(update={"mismatch": limits.mismatch or MISMATCH[dtype]})
        self._seen = Seen(deque(maxlen=2 * limits.window))
        self._true_at: dict[str, int] = {}
        """Of every raised alarm the newest step at which it was true."""
        self._true: set[str] = set()
        """The alarms that are true now."""

    @property
    def raised(self) -> frozenset[str]:
        """The names of the alarms that have not cleared."""
        return frozenset(self._true_at)

    def take(self, line: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that a line raises."""
        if not self._note(line):
            return []
        step, kind = self._step, kind_of(line)
        checks = {name: check for name, check in CHECKS.items() if kind in LOOKED_AT[name]}
        found = {name: finding for name, check in checks.items() if (finding := check(self._seen, self._limits))}
        raised = [
            Alarm(name, finding.sentence, finding.cause, step)
            for name, finding in found.items()
            if name not in self._true_at
        ]
        # On what the line does not touch, a check says what it said before.
        self._true = (self._true - checks.keys()) | found.keys()
        self._true_at |= dict.fromkeys(self._true, step)
        self._true_at = {name: at for name, at in self._true_at.items() if step - at < self._limits.window}
        return raised

    @property
    def _step(self) -> int:
        return int(self._seen.steps[-1]["step"]) if self._seen.steps else 0

    def _note(self, line: Mapping[str, Any]) -> bool:
        """Whether the line says anything that a check looks at."""
        match line["event"]:
            case "step":
                self._note_step(line)
            case "status":
                self._note_status(line)
            case "evaluation":
                self._note_evaluation(line)
            case _:
                return False
        return True

    def _note_step(self, line: Mapping[str, Any]) -> None:
        steps = self._seen.steps
        # After a restore a step is made again: what had come from there on is lost.
        while steps and steps[-1]["step"] >= line["step"]:
            steps.pop()
        steps.append(line)
        if "scored_groups" in (curator := self._seen.parts.get("curator", {})):
            self._seen.curator_then = curator
        self._true_at = {name: min(at, line["step"]) for name, at in self._true_at.items()}

    def _note_status(self, line: Mapping[str, Any]) -> None:
        seen, part = self._seen, line["part"]
        seen.parts[part] = line
        if part == "curator" and "scored_groups" in line:
            then = seen.curator_then.get("scored_groups")
            if then is None or line["scored_groups"] < then:  # the first, or of a curator that counts anew
                seen.curator_then = line
        hidden = (line.get("rewards") or {}).get("hidden") or {}
        if hidden.get("overrated") is not None and hidden["num_pairs"] >= MIN_PAIRS:
            lowest = seen.overrated_lowest.get(part, hidden["overrated"])
            seen.overrated_lowest[part] = min(lowest, hidden["overrated"])

    def _note_evaluation(self, line: Mapping[str, Any]) -> None:
        seen = self._seen
        if seen.heldout is not None:
            for name, score in seen.heldout["heldout"].items():
                best = seen.heldout_best.get(name, score)
                seen.heldout_best[name] = max(best, score, key=lambda row: row["pass_at_1"] or 0.0)
        seen.heldout = line


class SafeAlarms:
    """Alarms that end no run: where a check raises, that is said once, and no further line is looked at."""

    def __init__(self, alarms: Alarms, warn: Callable[[str], None]) -> None:
        """`warn` is told in a sentence that there are no alarms any more, and why."""
        self._alarms: Alarms | None = alarms
        self._warn = warn

    def take(self, line: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that a line raises."""
        if self._alarms is None:
            return []
        try:
            return self._alarms.take(line)
        except Exception as error:  # whatever it is: what watches a run is no reason to lose it
            self._alarms = None
            self._warn(f"alarms are off, the run goes on: {type(error).__name__}: {error}")
            return []
