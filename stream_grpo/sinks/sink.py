"""What a sink is, and all of a run's as one: one that fails is dropped, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the lines of a run in their order."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Take one line."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; an empty summary says that it was stopped."""


class Sinks:
    """Several sinks. Nothing that one of them raises gets out: it is said once, and that sink gets no further line."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` is told in a sentence which sink is dropped, and why."""
        self._warn = warn
        self._sinks: dict[str, Sink] = {}

    def open(self, name: str, make: Callable[[], Sink]) -> None:
        """Add one; where it cannot be made the run goes without it."""
        self._guarded(name, lambda: self._sinks.__setitem__(name, make()))

    def write(self, line: Mapping[str, Any]) -> None:
        """Give a line to all of them."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, lambda sink=sink: sink.write(line))  # type: ignore[misc]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End all of them."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, lambda sink=sink: sink.finish(summary))  # type: ignore[misc]
        self._sinks.clear()

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is: metrics are no reason to lose a run
            self._sinks.pop(name, None)
            self._warn(f"{name} is dropped, the run goes on: {type(error).__name__}: {error}")


BY_PROBLEM = frozenset({"by_problem", "never_fresh", "problems"})
"""Figures of single problems: over weeks these would be as many names as the pool has problems."""


def is_of_one_problem(path: Sequence[str]) -> bool:
    """Whether a figure, by the keys that lead to it, is one of a single problem."""
    return not BY_PROBLEM.isdisjoint(path[:-1])


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by name, keys joined by slashes; neither truth values, words, nor those of one problem."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key not in BY_PROBLEM:
                yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


class Rows:
    """Lines as rows by learner step: what a step says, and beside it the newest status of every part."""

    def __init__(self) -> None:
        self._statuses: dict[str, Mapping[str, Any]] = {}
        self.step = 0
        """The newest learner step."""

    def take(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The row that a line completes; empty for one that completes none."""
        match line["event"]:
            case "status":
                self._statuses[line["part"]] = line
            case "step":
                self.step = line["step"]
                beside, self._statuses = self._statuses, {}
                return dict(numbers({**line, **beside}))
            case "evaluation":
                headline = line["heldout"]["headline"]
                return dict(numbers({"heldout": {"branch": line["branch"], "step": line["step"], **headline}}))
            case "alarm":
                return {f"alarm/{line['name']}": 1.0}
        return {}
