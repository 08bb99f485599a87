"""Holds responses back until all of their group are there, for a judge that compares them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stream_grpo.rewards.judging import Answer


class Place(NamedTuple):
    """The group that a response is of."""

    group: str
    """A group that is made again has another name."""
    size: int
    """Responses of the group, those that the engine did not end included."""


@dataclass(slots=True)
class _Group:
    answers: list[Answer] = field(default_factory=list)
    num_missing: int = 0


class Gathering:
    """The groups that wait for responses."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def add(self, answer: Answer | None, place: Place | None) -> list[Answer]:
        """The answers of the group, by task id, where this is its last response; else none.

        `answer` None: a response that is not judged. Without a place an answer is a group of its own.
        """
        if place is None:
            return [] if answer is None else [answer]
        group = self._groups.setdefault(place.group, _Group())
        if answer is None:
            group.num_missing += 1
        else:
            group.answers.append(answer)
        if len(group.answers) + group.num_missing < place.size:
            return []
        return sorted(self._groups.pop(place.group).answers)

    def forget(self, group: str) -> int:
        """Drop a group; how many answers of it waited."""
        return len(self._groups.pop(group, _Group()).answers)
