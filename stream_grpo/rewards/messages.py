"""What pool and worker tell each other: JSON, one message a line, and a page of shared memory with what is under way.

Nothing is pickled: a response is text that a model wrote, and a problem is a row that somebody published.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.types import Decision, RewardResult, StepScore


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRow:
    """A problem as a worker sees it."""

    problem_id: str
    answer: str
    verifier: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt: Any = None
    """Text, or chat messages; None where the problem had none."""
    source: str = ""


def row_of(problem: VerifiableProblem, verifier: str) -> ProblemRow:
    """The problem as a worker sees it, checked by a verifier that may be another than its own."""
    if isinstance(problem, ProblemRow) and problem.verifier == verifier:
        return problem
    return ProblemRow(
        problem_id=problem.problem_id,
        answer=problem.answer,
        verifier=verifier,
        extra=problem.extra,
        prompt=getattr(problem, "prompt", None),
        source=getattr(problem, "source", ""),
    )


def encode_task(response_text: str, problem: ProblemRow, is_cut: bool) -> bytes:
    """One task as JSON without a line end. Raises ValueError for a problem with a column that JSON cannot hold."""
    row = {name: getattr(problem, name) for name in ProblemRow.__slots__}
    try:
        text = _ENCODER.encode({"response": response_text, "is_cut": is_cut, "problem": row})
    except (TypeError, ValueError) as error:
        raise ValueError(f"problem {problem.problem_id}: a column cannot be handed to a worker: {error}") from error
    return text.encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not plain data")


_ENCODER = json.JSONEncoder(default=_plain)


def encode_batch(to: int, tasks: list[bytes]) -> bytes:
    """The line that hands tasks to the worker with this process id."""
    return b'{"to":%d,"tasks":[%s]}\n' % (to, b",".join(tasks))


def decode_batch(line: bytes, me: int) -> list[dict[str, Any]]:
    """The tasks of a line; none where it is for a worker that has ended, or the rest of a line that one had begun."""
    message = decode(line)
    return message["tasks"] if message.get("to") == me else []


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as a line; a column of a problem may hold what `_plain` makes plain."""
    return _ENCODER.encode(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line; empty for what a killed worker left of one."""
    try:
        message = json.loads(line.decode("ascii"))  # as it was encoded; of bytes the parser guesses the encoding
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def result_to_plain(result: RewardResult) -> dict[str, Any]:
    """A result as JSON holds it."""
    return {
        "decision": result.decision.value,
        "reward": result.reward,
        "verifier": result.verifier,
        "verifier_version": result.verifier_version,
        "components": {name: float(value) for name, value in result.components.items()},
        "evidence": result.evidence,
        "steps": [[int(end), float(score)] for end, score in result.steps],
    }


def result_from_plain(plain: Mapping[str, Any]) -> RewardResult:
    """The inverse of `result_to_plain`."""
    return RewardResult(
        decision=_DECISIONS[plain["decision"]],
        reward=plain["reward"],
        verifier=plain["verifier"],
        verifier_version=plain["verifier_version"],
        components=plain["components"],
        evidence=plain["evidence"],
        steps=tuple(StepScore(*step) for step in plain["steps"]),
    )


_DECISIONS = {decision.value: decision for decision in Decision}


class UnderWay(NamedTuple):
    """What a worker does: the place of a task in its batch, and since when it is checked."""

    place: int
    """-1: nothing."""
    started_at: float
    """On the monotonic clock, which all processes of a machine share; 0 while the verifier is being loaded."""


_LAYOUT = struct.Struct("<qd")
NOTHING = UnderWay(-1, 0.0)


class Progress:
    """A page that a worker writes and the pool reads: a worker that was killed need not have said where it was."""

    def __init__(self, file: int | None = None) -> None:
        """`file`: the descriptor of an existing page; by default a new one."""
        self.file = os.memfd_create("reward-progress", 0) if file is None else file
        if file is None:
            os.ftruncate(self.file, mmap.PAGESIZE)
        self._page = mmap.mmap(self.file, mmap.PAGESIZE)
        if file is None:
            self.idle()

    def loads(self, place: int) -> None:
        """The verifier of a task is being loaded."""
        _LAYOUT.pack_into(self._page, 0, place, 0.0)

    def checks(self, place: int) -> None:
        """The check of a task begins."""
        _LAYOUT.pack_into(self._page, 0, place, time.monotonic())

    def idle(self) -> None:
        """Nothing is under way."""
        _LAYOUT.pack_into(self._page, 0, *NOTHING)

    def read(self) -> UnderWay:
        """What is under way. Two equal readings in a row: one alone could fall into the middle of a write."""
        before, now = None, UnderWay(*_LAYOUT.unpack_from(self._page, 0))
        while now != before:
            before, now = now, UnderWay(*_LAYOUT.unpack_from(self._page, 0))
        return now

    def close(self) -> None:
        """Give page and descriptor back."""
        self._page.close()
        os.close(self.file)
