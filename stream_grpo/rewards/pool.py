"""Checks responses in worker processes with hard limits, while the caller does something else.

The pool's thread hands tasks out, takes results in and kills what is over its limit. A worker has one task at a time,
or a few short ones. Which task is next, and what comes of it, is the `board`'s to say.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stream_grpo.background import WorkerPool
from stream_grpo.errors import RewardError
from stream_grpo.rewards.board import Board
from stream_grpo.rewards.code import CodeSettings
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.messages import NOTHING, UnderWay, row_of
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.rewards.slot import Slot
from stream_grpo.types import RewardResult

# The thread looks at the processes themselves at least so often while something is to be done.
_LOOK_S = 1.0


class RewardPool(WorkerPool[RewardResult, Slot]):
    """Worker processes for verifiers. All methods may be called from any thread."""

    def __init__(
        self,
        num_workers: int,
        limits: Limits | None = None,
        *,
        policy: UnscoredPolicy | None = None,
        preload: Iterable[str] = (),
        paths: Sequence[str] | None = None,
        code: CodeSettings | None = None,
    ) -> None:
        """`preload`: verifiers to load before the first task and once for all children of a worker, so that replacing
        one takes milliseconds; others are loaded by every child that meets them. `paths`: where the user's modules are
        looked for after everything else; by default the working directory. `code`: how that verifier runs programs.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}: a pool needs at least 1")
        super().__init__(thread_name="reward-pool", error=RewardError, what="the reward pool", worker="reward worker")
        self._limits = limits or Limits()
        self._board = Board(policy or UnscoredPolicy())
        self._finished = self._board.finished
        names, where = list(preload), [os.getcwd()] if paths is None else list(paths)
        for _ in range(num_workers):
            self._add(Slot(self._limits.memory_bytes, names, where, code))
        self._thread.start()

    def submit(
        self, task_id: str, verifier: str, response_text: str, problem: VerifiableProblem, *, is_cut: bool = False
    ) -> None:
        """Give one response to be checked by `verifier`; its result comes from `poll` under `task_id`.

        Raises RewardError where the pool has failed or is closed.
        """
        row = row_of(problem, verifier)
        with self._changed:
            self._check_open()
            try:
                self._board.submit(task_id, response_text, row, is_cut)
            except RewardError as error:
                self._failure = error
                raise
            is_waited_for = any(slot.is_idle for slot in self._workers) or self._board.num_open == 1
        if is_waited_for:
            self._wake()

    @property
    def num_open(self) -> int:
        """Responses submitted and not finished."""
        return self._board.num_open

    def status(self) -> dict[str, Any]:
        """Queue, decisions, what ran out of time or memory, kills and restarts, times by verifier; plain values."""
        with self._changed:
            return {
                **self._board.status(),
                "num_workers": len(self._workers),
                "num_kills": self._num_kills,
                "num_restarts": self._num_restarts,
            }

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        for slot in self._workers:
            if not slot.is_idle:
                continue
            batch = self._board.take_batch(len(self._workers), time.monotonic())
            if not batch:
                return
            try:
                slot.give(batch)
            except OSError:
                self._replace(slot)

    def _next_look(self) -> float:
        """When the workers are looked at; never where nothing is to be done before somebody submits."""
        if not self._board.num_open:
            return math.inf
        times = [time.monotonic() + _LOOK_S, *map(self._look_at, self._workers)]
        if (retry_at := self._board.next_retry_at()) is not None:
            times.append(retry_at)
        return min(times)

    def _look_at(self, slot: Slot) -> float:
        """When this worker may be over a limit."""
        due_at = self._due_at(slot)
        if slot.batch is None or slot.is_killed or slot.under_way().place >= 0:
            return due_at
        # It has not begun: its time begins any moment.
        return min(due_at, time.monotonic() + self._limits.of(slot.batch.tasks[0].verifier))

    def _due_at(self, slot: Slot) -> float:
        """When something must have come from this worker."""
        if slot.child is None:
            return slot.started_at + self._limits.load_s
        if slot.is_killed:
            return slot.killed_at + self._limits.load_s
        if slot.batch is None:
            return math.inf
        at = slot.under_way()
        if at.place < 0 or at.started_at == 0.0:
            return slot.batch.given_at + self._limits.load_s
        return at.started_at + self._limits.of(slot.batch.tasks[at.place].verifier)

    def _hear(self, slot: Slot) -> None:
        try:
            messages = slot.messages()
        except OSError:
            self._replace(slot)
            return
        now = time.monotonic()
        for message in messages:
            if "ready" in message:
                slot.child, self._num_failed_starts = message["ready"], 0
                self._board.loaded(message["versions"])
            elif "ended" in message:
                self._child_ended(slot, message)
            elif message.get("from") == slot.child:
                for answer in message["answers"]:
                    self._answered(slot, answer, now)

    def _answered(self, slot: Slot, answer: Mapping[str, Any], now: float) -> None:
        if slot.batch is None:
            return
        place = answer["place"]
        slot.batch.answered.add(place)
        self._board.answered(slot.batch.tasks[place], answer, now)
        if answer.get("exhausted") == "memory":
            slot.kill(NOTHING)  # a fresh process for what comes next
        if len(slot.batch.answered) == len(slot.batch.tasks):
            slot.batch = None

    def _look_at_workers(self) -> None:
        now = time.monotonic()
        for slot in self._workers:
            is_late = now >= self._due_at(slot)
            if slot.has_ended or (is_late and (slot.child is None or slot.is_killed)):
                self._replace(slot)
            elif slot.is_killed:
                slot.kill_again()
            elif is_late:
                self._num_kills += 1
                slot.kill(slot.under_way())

    def _child_ended(self, slot: Slot, message: Mapping[str, Any]) -> None:
        """Its keeper forks another at once."""
        self._num_restarts += 1
        if slot.child is None:
            self._count_failed_start("ended before it was ready")
        self._give_back(slot, UnderWay(*message["at"]), message["status"])
        slot.child, slot.is_killed, slot.started_at = None, False, time.monotonic()

    def _replace(self, slot: Slot) -> None:
        """The worker as a whole is gone or stuck."""
        if slot.child is None:
            is_late = time.monotonic() >= self._due_at(slot)
            self._count_failed_start(
                f"was not ready within {self._limits.load_s:g} s" if is_late else "ended before it was ready"
            )
        self._give_back(slot, slot.under_way(), -9)
        self._restart(slot)

    def _give_back(self, slot: Slot, at: UnderWay, status: int) -> None:
        """Judge what was under way when a worker ended; the rest of its batch is handed out again."""
        if slot.batch is None:
            return
        batch, slot.batch = slot.batch, None
        if slot.is_killed and slot.condemned is not None:
            at = slot.condemned  # it may have been quick enough to begin another since
        unanswered = batch.unanswered()
        guilty = batch.tasks[at.place] if at.place in unanswered else None
        now = time.monotonic()
        self._board.lost([batch.tasks[place] for place in unanswered if place != at.place], now)
        if guilty is None:
            return
        if not slot.is_killed:
            self._board.crashed(guilty, status, now)
        elif at.started_at == 0.0:
            self._board.not_loaded(guilty, self._limits.load_s)
        else:
            self._board.out_of_time(guilty, self._limits.of(guilty.verifier))
