"""The requests of `stock` with a database: what the teacher writes who calls it, and what he reads. No torch.

The teacher works in the environment `records` itself, so that what he reads is what it says:

    move 42 bolt nut:
    {update stock set num=num-42 where item='bolt'}     <- an action
    =ok,                                                <- the observation
    {update stock set num=num+42 where item='nut'}
    =ok,
    done                                                <- the action after which the end state decides

He makes slips: another digit and another item with probability `error_rate` each, the other table in a statement with
half of it, a call without its closing mark with a quarter. Some he is told of, and then says it again: a call that
cannot be read, a query without rows or with an error. All else stays as it is: a model that samples his slips at the
same rate does a request at about (1 - error_rate)^n, for n digits and items copied, less for the tables.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from stream_grpo import stock
from stream_grpo.arithmetic_calls import PREFIX, SUFFIX, Part
from stream_grpo.environments.protocol import End, Step
from stream_grpo.environments.records import Records
from stream_grpo.rewards.messages import ProblemRow

OPEN, CLOSE = "{", "}"
"""The marks of a call; options `open` and `close` of the environment, whose `body` is `plain`."""
DONE = "done"
MAX_STEPS = 6
"""Actions of the teacher at most; `environment.max_steps`."""

TOKENS = (
    *(f"{kind} " for kind in stock.POOL_COUNTS),
    *("select ", "insert into ", "delete from ", "update ", " from ", " where ", " set ", " values("),
    *(stock.STOCK, stock.LEDGER, "item", "num", "id", *stock.ITEMS),
    *(DONE, "ok", "no rows", "error: ", "the call is not closed by ", "no such column: "),
    *"0123456789 =,:;+-*'()[]\n",
    *(OPEN, CLOSE),
)
"""Words and characters, a token each: all that a prompt, the teacher, or the environment's answer to him can hold."""


def parts_of(request: stock.Request, rng: random.Random, error_rate: float = 0.0) -> list[Part]:
    """Prompt, actions and observations of a teacher with slips."""
    teacher = _Teacher(request, rng, error_rate)
    teacher.work()
    return teacher.parts


class _Teacher:
    def __init__(self, request: stock.Request, rng: random.Random, error_rate: float) -> None:
        row: Mapping[str, Any] = stock.row_of(request)
        problem = ProblemRow(problem_id=row["id"], answer=row["answer"], verifier=row["verifier"], extra=row)
        self._database = Records(problem, open=OPEN, close=CLOSE, body="plain")
        self._database.reset(0, None)
        self._request, self._rng, self._error_rate = request, rng, error_rate
        self.parts = [Part(row["prompt"], is_action=False)]
        self._num_left, self._is_over = MAX_STEPS, False

    def work(self) -> None:
        """Read, change, and say that it is done; until then or until the environment ends it."""
        plan = stock.plan_of(self._request)
        known = ""
        while plan.read and not known and not self._is_over:
            known = self._read(*plan.read)
        for item, number in plan.changes:
            self._change(item, known if number is None else number)
        self._act(DONE)

    def _read(self, table: str, key: str) -> str:
        """The amount as it is shown; empty where the query gives none."""
        key = self._copied(key) if key.isdigit() else self._item(key)
        shown = self._act(self._marked(stock.read_by(self._table(table), key))).observation
        try:
            return str(json.loads(shown.partition("\n")[0])[0])
        except ValueError:
            return ""

    def _change(self, item: str, number: str) -> None:
        """One statement, said again as long as it cannot be read."""
        while not self._is_over:
            table = self._table(stock.STOCK)
            statement = stock.change_by(self._request.kind, table, self._item(item), self._copied(number))
            if not self._act(self._marked(statement)).failed:
                break

    def _act(self, action: str) -> Step:
        if self._is_over:
            return Step(end=End.MAX_STEPS)
        step = self._database.step(action)
        self._num_left -= 1
        self.parts.append(Part(action, is_action=True))
        self._is_over = step.end is not None or self._num_left == 0
        if not self._is_over:
            self.parts.append(Part(f"{PREFIX}{step.observation}{SUFFIX}", is_action=False))
        return step

    def _slips(self, share: float) -> bool:
        return self._rng.random() < share * self._error_rate

    def _marked(self, statement: str) -> str:
        return f"{OPEN}{statement}{'' if self._slips(0.25) else CLOSE}"

    def _table(self, name: str) -> str:
        return {stock.STOCK: stock.LEDGER, stock.LEDGER: stock.STOCK}[name] if self._slips(0.5) else name

    def _item(self, name: str) -> str:
        return self._rng.choice([item for item in stock.ITEMS if item != name]) if self._slips(1.0) else name

    def _copied(self, number: str) -> str:
        """The number with another digit here and there; never with a zero before others."""
        written = ""
        for digit in number:
            if digit.isdigit() and self._slips(1.0):
                is_first = not any(before.isdigit() for before in written)
                digit = self._rng.choice([d for d in "0123456789" if d != digit and not (is_first and d == "0")])
            written += digit
        return written
