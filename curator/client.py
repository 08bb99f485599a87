"""How a trainer talks to a curator in another process. Loads neither LanceDB nor the curator's state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from curator.schema import (
    PICK_SCHEMA,
    PROBLEM_SCHEMA,
    Outcome,
    Pick,
    Problem,
    batch_from_bytes,
    batch_to_bytes,
    outcomes_to_batch,
    picks_from_batch,
    problem_from_row,
)
from curator.wire import ERROR, Client, Keys, Message, RemoteError, WireError


@dataclass(frozen=True, slots=True)
class Picked:
    """The answer to `post_next`."""

    id: str
    picks: list[Pick]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `post_get`: those of the problems that are in the pool, in order."""

    id: str
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to `post_report`."""

    id: str
    next_sequence: int


@dataclass(frozen=True, slots=True)
class Positioned:
    """The answer to `post_position`."""

    id: str
    next_sequence: int
    durable_sequence: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to something the curator refuses."""

    id: str
    reason: str


class Curator:
    """Asks one curator. `next`, `get`, `report`, `position`, `stats` and `flush` wait; `post_...` do not.

    What was posted is answered by `poll`.

    The waiting methods are those of `curation.Curation`, which can stand in where the curator is embedded. They raise
    WireTimeout where no answer comes in time, and RemoteError with the reason where the curator refuses: of a gap in
    the outcomes it names the expected and the received sequence number, and `position` tells where to go on.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "trainer",
        run: str = "",
        keys: Keys | None = None,
        timeout_s: float = 30.0,
        resend_s: float = 2.0,
    ) -> None:
        """Connect. `name` appears in errors; `timeout_s` bounds every waiting method.

        `run` is whose posterior is asked, of a curator that serves several runs.
        """
        self._run = {"run": run} if run else {}
        self._client = Client(address, name=name, peer="curator", keys=keys, resend_s=resend_s)
        self._timeout_s = timeout_s

    def next(self, group_ids: Sequence[str]) -> list[Pick]:
        """One problem for each group, in order. A group asked for again keeps its problem."""
        return _picks(self._call("next", {"group_ids": list(group_ids)}))

    def get(self, problem_ids: Sequence[str]) -> list[Problem]:
        """The problems of these ids, in order. Nothing is picked by it. RemoteError names those not in the pool."""
        problems = _problems(self._call("get", {"problem_ids": list(problem_ids)}))
        missing = sorted(set(problem_ids) - {problem.problem_id for problem in problems})
        if missing:
            raise RemoteError(f"curator: {len(missing)} problems are not in the pool, first: {missing[0]!r}")
        return problems

    def report(self, outcomes: Iterable[Outcome]) -> int:
        """Outcomes in journal order; returns the sequence number expected next. Repeats are ignored."""
        return int(self._call("report", {}, (_outcome_bytes(outcomes),)).fields["next_sequence"])

    def position(self) -> tuple[int, int]:
        """(sequence expected next, sequence before which all outcomes are in the pool's table)."""
        fields = self._call("position").fields
        return int(fields["next_sequence"]), int(fields["durable_sequence"])

    def stats(self) -> dict[str, Any]:
        """The curator's state in figures."""
        return dict(self._call("stats").fields)

    def flush(self) -> int:
        """Make all outcomes durable; returns the durable sequence number."""
        return int(self._call("flush").fields["durable_sequence"])

    @property
    def has_credit(self) -> bool:
        """Whether one more `post_...` may be sent before an answer arrives."""
        return self._client.has_credit

    def post_next(self, group_ids: Sequence[str]) -> str:
        """Ask without waiting; `poll` gives Picked under the returned id. Raises WireError without credit."""
        return self._post("next", {"group_ids": list(group_ids)})

    def post_get(self, problem_ids: Sequence[str]) -> str:
        """Ask without waiting; `poll` gives Found under the returned id. Raises WireError without credit."""
        return self._post("get", {"problem_ids": list(problem_ids)})

    def post_report(self, outcomes: Iterable[Outcome]) -> str:
        """Report without waiting; `poll` gives Reported under the returned id. Raises WireError without credit."""
        return self._post("report", {}, (_outcome_bytes(outcomes),))

    def post_position(self) -> str:
        """Ask without waiting; `poll` gives Positioned under the returned id. Raises WireError without credit."""
        return self._post("position")

    def poll(self, timeout_s: float = 0.0) -> list[Picked | Found | Reported | Positioned | Refused]:
        """Answers to what was posted that have arrived, waiting up to `timeout_s` for the first."""
        return [_answer(message) for message in self._client.poll(timeout_s)]

    def _call(self, kind: str, fields: dict[str, Any] | None = None, body: Sequence[bytes] = ()) -> Message:
        return self._client.call(kind, {**(fields or {}), **self._run}, body, self._timeout_s)

    def _post(self, kind: str, fields: dict[str, Any] | None = None, body: Sequence[bytes] = ()) -> str:
        return self._client.post(kind, {**(fields or {}), **self._run}, body)

    def close(self) -> None:
        """Close at once; what is unanswered is the caller's to ask again."""
        self._client.close()


def _answer(message: Message) -> Picked | Found | Reported | Positioned | Refused:
    if message.kind == ERROR:
        return Refused(message.id, str(message.fields["reason"]))
    if message.kind == "picks":
        return Picked(message.id, _picks(message))
    if message.kind == "problems":
        return Found(message.id, _problems(message))
    if message.kind == "reported":
        return Reported(message.id, int(message.fields["next_sequence"]))
    if message.kind == "position":
        return Positioned(message.id, int(message.fields["next_sequence"]), int(message.fields["durable_sequence"]))
    raise WireError(f"curator answered with unknown kind '{message.kind}'")


def _picks(message: Message) -> list[Pick]:
    return picks_from_batch(batch_from_bytes(message.body[0], PICK_SCHEMA))


def _problems(message: Message) -> list[Problem]:
    return [problem_from_row(row) for row in batch_from_bytes(message.body[0], PROBLEM_SCHEMA).to_pylist()]


def _outcome_bytes(outcomes: Iterable[Outcome]) -> bytes:
    return batch_to_bytes(outcomes_to_batch(outcomes))
