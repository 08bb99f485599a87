"""A task on a small SQLite database: the policy changes it by SQL, and the end state is what is verified.

Of a row, beside its prompt: `setup`, the statements that make the start state; `goal`, queries with the rows that they
must give at the end; `milestones`, the same by name, each worth its share as soon as it holds; `protected`, tables that
must not be written to: an attempt ends the trajectory as safety_blocked, whatever else it has done.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from stream_grpo.environments.calls import CallFormat, Malformed, find_call
from stream_grpo.environments.protocol import End, Start, Step
from stream_grpo.rewards.messages import ProblemRow

NAME, VERSION = "records", "2"
TOOL = "sql"
_WRITES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_DROP_TABLE})
_ALTER = sqlite3.SQLITE_ALTER_TABLE
# What reaches beyond the database, or hides what was done: a temporary object stands before a table of its name.
_NEVER = frozenset(
    {
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
    }
)
_NEVER_CALLED = frozenset({"load_extension", "readfile", "writefile", "randomblob", "random", "zeroblob"})
# Instructions between two looks, and looks in all: a limit that is the same on every machine.
_INSTRUCTIONS, _MAX_LOOKS = 1000, 1000
_MAX_ROWS = 20
# Of one value, row or statement, from the start state on.
_MAX_BYTES = 1 << 20


class Records:
    """One database in memory, for one trajectory."""

    def __init__(
        self,
        problem: ProblemRow,
        *,
        open: str = "<tool_call>",
        close: str = "</tool_call>",
        body: Literal["json", "plain"] = "json",
    ) -> None:
        """`open`, `close`, `body`: see `calls.CallFormat`. Raises ValueError for a row without `setup` or `goal`."""
        self._form = self.call_format(open=open, close=close, body=body)
        self._problem = problem
        self._goal = _checks(_column(problem, "goal"), problem.problem_id)
        self._milestones = {
            str(name): _checks([check], problem.problem_id)
            for name, check in dict(_plain(problem.extra.get("milestones")) or {}).items()
        }
        self._protected = frozenset(str(name).lower() for name in _plain(problem.extra.get("protected")) or ())
        self._reached: set[str] = set()
        self._blocked, self._num_looks = "", 0

    @staticmethod
    def call_format(
        *,
        open: str = "<tool_call>",
        close: str = "</tool_call>",
        body: Literal["json", "plain"] = "json",
    ) -> CallFormat:
        """How a call is written with these options. Raises ValueError for marks that cannot be."""
        return CallFormat(open=open, close=close, body=body, tools={TOOL: "query"})

    def reset(self, seed: int, snapshot: bytes | None) -> Start:
        """The start state of the row, or that of the snapshot: the statements that make it."""
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.executescript(_column(self._problem, "setup") if snapshot is None else snapshot.decode())
        self._reached = {name for name, checks in self._milestones.items() if self._holds(checks)}
        start = "\n".join(self._database.iterdump())
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_BYTES)
        self._database.set_authorizer(self._authorize)
        self._database.set_progress_handler(self._look, _INSTRUCTIONS)
        return Start(snapshot=start.encode())

    def step(self, action: str) -> Step:
        """The rows that a query gives, or its error; an action without a call ends the trajectory."""
        call = find_call(action, self._form)
        if call is None:
            return self._judged(action)
        if isinstance(call, Malformed):
            observation = f"error: {call.reason}"
            return Step(observation=observation, step_score=0.0, milestones=self._scores(), failed=True)
        self._blocked, self._num_looks = "", 0
        observation = self._query(call.arguments["query"])
        if self._blocked:
            evidence = f"tried to write to the protected table {self._blocked}"
            return Step(end=End.SAFETY_BLOCKED, tool=TOOL, evidence=evidence, milestones=self._scores())
        before = len(self._reached)
        self._reached |= {name for name, checks in self._milestones.items() if self._holds(checks)}
        gained = (len(self._reached) - before) / max(1, len(self._milestones))
        failed = observation.startswith("error: ")
        scores = self._scores()
        return Step(observation=observation, tool=TOOL, step_score=gained, milestones=scores, failed=failed)

    def _judged(self, action: str) -> Step:
        missing = [query for query, rows in self._goal if not self._holds([(query, rows)])]
        self._reached |= {name for name, checks in self._milestones.items() if self._holds(checks)}
        end = End.POLICY_FAILURE if missing else End.SUCCESS
        evidence = f"does not hold: {missing[0]}" if missing else "the end state is the one asked for"
        return Step(end=end, evidence=evidence, step_score=float(not missing), milestones=self._scores())

    def _scores(self) -> dict[str, float]:
        return {name: float(name in self._reached) for name in self._milestones}

    def _query(self, query: str) -> str:
        try:
            cursor = self._database.execute(query)
            rows = cursor.fetchmany(_MAX_ROWS + 1)
            if cursor.description is None:
                return "ok"
            shown = [json.dumps(row, ensure_ascii=False, default=repr) for row in rows[:_MAX_ROWS]]
            return "\n".join([*shown, *(["..."] if len(rows) > _MAX_ROWS else [])]) or "no rows"
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            return f"error: {error}"
        except MemoryError:  # rows of many long values
            return "error: the rows are too large"

    def _holds(self, checks: Iterable[tuple[str, list[list[Any]]]]) -> bool:
        """Whether all queries give their rows; one that cannot be asked of this state does not hold."""
        self._num_looks = 0
        try:
            return all([list(row) for row in self._database.execute(query)] == rows for query, rows in checks)
        except (sqlite3.Error, MemoryError):
            return False

    def _authorize(self, action: int, first: str | None, second: str | None, *_: object) -> int:
        if action in _NEVER or (action == sqlite3.SQLITE_FUNCTION and second in _NEVER_CALLED):
            return sqlite3.SQLITE_DENY
        table = second if action == _ALTER else first
        if (action in _WRITES or action == _ALTER) and (table or "").lower() in self._protected:
            self._blocked = table or ""
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def _look(self) -> int:
        self._num_looks += 1
        return int(self._num_looks > _MAX_LOOKS)


def _column(problem: ProblemRow, name: str) -> Any:
    if (value := _plain(problem.extra.get(name))) is None:
        raise ValueError(f"problem {problem.problem_id} has no column {name!r}, which the environment {NAME!r} needs")
    return value


def _plain(value: Any) -> Any:
    """A column as JSON would hold it: what a table had no other way to keep stands in it as text."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        return json.loads(value)
    return value


def _checks(checks: Any, problem_id: str) -> list[tuple[str, list[list[Any]]]]:
    """Pairs of query and rows, or objects with these two names. Raises ValueError for anything else."""
    try:
        pairs = [(c["query"], c["rows"]) if isinstance(c, Mapping) else tuple(c) for c in checks]
        return [(str(query), [list(row) for row in rows]) for query, rows in pairs]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"problem {problem_id}: goal and milestones are queries with the rows that they must give, "
            f'[["select ...", [[1]]]]: {error!r}'
        ) from error
