"""Which response is checked next, and what comes of one that a worker did not survive. Pure: no process, no clock.

    submitted -> queue -> with a worker -> decided ------------------------------> finished
                   ^            |-> error, unknown -> later (the policy) -> queue
                   |            |-> lost with its worker, without guilt --> queue
                   |            `-> out of time or memory -> waits for the gold -> finished
                   `--- the gold of its problem, first in the queue

A response on which the verifier runs out of time or memory is wrong if the verifier decides the gold of the same
problem within the limits, and an env_error otherwise: a policy must gain nothing by hanging its verifier, and lose
nothing by a verifier that hangs on its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stream_grpo.rewards.gold import gold_response
from stream_grpo.rewards.messages import ProblemRow, encode_task, result_from_plain
from stream_grpo.rewards.policy import UnscoredCount, UnscoredPolicy
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS
from stream_grpo.rewards.timings import Timings
from stream_grpo.types import Decision, RewardResult

# Work for about so long is handed out at once, so that a worker need not wait for the pool between two short tasks.
_BATCH_S, _MAX_BATCH = 0.05, 64
# Lost with so many workers without being under way, a task must have to do with it.
_MAX_LOSSES = 3


@dataclass(slots=True, eq=False)
class Task:
    """One response to be checked."""

    task_id: str
    problem: ProblemRow
    payload: bytes
    is_gold: bool = False
    num_tries: int = 0
    num_losses: int = 0

    @property
    def verifier(self) -> str:
        """The name of its verifier."""
        return self.problem.verifier

    @property
    def key(self) -> tuple[str, str]:
        """Of the problem's gold."""
        return self.problem.verifier, self.problem.problem_id


class Board:
    """All tasks that are not finished, and what is known of golds, times and versions."""

    def __init__(self, policy: UnscoredPolicy) -> None:
        self._queue: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._gold_works: dict[tuple[str, str], bool] = {}
        self._waits_for_gold: dict[tuple[str, str], list[tuple[Task, str]]] = {}
        self._unscored = UnscoredCount(policy)
        self._exhausted: Counter[str] = Counter()
        self._num_exhausted_failed = 0
        self._versions: dict[str, str] = {}
        self._timings: dict[str, Timings] = defaultdict(Timings)
        self.finished: list[tuple[str, RewardResult]] = []
        """Final results that nobody has taken yet."""
        self.num_open = 0
        """Tasks submitted and not finished."""

    def submit(self, task_id: str, response_text: str, problem: ProblemRow, is_cut: bool) -> None:
        """Put a task at the end of the queue."""
        self.num_open += 1
        try:
            self._queue.append(Task(task_id, problem, encode_task(response_text, problem, is_cut)))
        except ValueError as error:
            self._finish(Task(task_id, problem, b""), self._unscored_result(problem.verifier, str(error)), str(error))

    def take_batch(self, num_workers: int, now_s: float) -> list[Task]:
        """What one worker is to do next: one task, or a few short ones; empty where nothing waits.

        The time of a task is that of its verifier so far; of a verifier that is not known yet, and of a gold that is in
        question, one is given at a time.
        """
        while self._later and self._later[0][0] <= now_s:
            self._queue.append(heapq.heappop(self._later)[2])
        if not self._queue:
            return []
        batch = [self._queue.popleft()]
        expected_s = self._expected_s(batch[0])
        most = min(_MAX_BATCH, math.ceil(len(self._queue) / (2 * num_workers)))
        while self._queue and len(batch) < most:
            expected_s += self._expected_s(self._queue[0])
            if expected_s > _BATCH_S:
                break
            batch.append(self._queue.popleft())
        for task in batch:
            task.num_tries += 1
        return batch

    def loaded(self, versions: Mapping[str, str]) -> None:
        """Note the versions of verifiers, for the results that no verifier can give."""
        self._versions.update(versions)

    def next_retry_at(self) -> float | None:
        """When the queue gets longer by itself."""
        return self._later[0][0] if self._later else None

    def answered(self, task: Task, answer: Mapping[str, Any], now_s: float) -> None:
        """Take what a worker says of a task."""
        version = answer.get("version")
        if version is not None:
            self.loaded({task.verifier: version})
            if not task.is_gold:
                self._timings[task.verifier].add(answer["seconds"])
        if "exhausted" in answer:
            self._exhaust(task, answer["exhausted"])
        elif "error" in answer:
            result = self._unscored_result(task.verifier, answer["error"])
            self._decide(task, result, now_s, answer.get("traceback", ""))
        else:
            self._decide(task, result_from_plain(answer["result"]), now_s)

    def out_of_time(self, task: Task, limit_s: float) -> None:
        """The task was killed at its limit."""
        self._timings[task.verifier].add(limit_s)
        self._exhaust(task, "time")

    def not_loaded(self, task: Task, limit_s: float) -> None:
        """The task was killed while its verifier was being loaded."""
        self._finish(task, self._unscored_result(task.verifier, f"the verifier was not loaded within {limit_s:g} s"))

    def crashed(self, task: Task, status: int, now_s: float) -> None:
        """The worker ended by itself while the task was under way; status -n: by signal n."""
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        self._decide(task, self._unscored_result(task.verifier, f"the worker ended {how} during the check"), now_s)

    def lost(self, tasks: list[Task], now_s: float) -> None:
        """These were with a worker that ended, and not under way: they are next."""
        for task in reversed(tasks):
            task.num_tries -= 1
            task.num_losses += 1
            if task.num_losses < _MAX_LOSSES:
                self._queue.appendleft(task)
                continue
            evidence = f"{task.num_losses} workers ended with this response in hand"
            self._finish(task, self._unscored_result(task.verifier, evidence))

    def status(self) -> dict[str, Any]:
        """Counts in plain values; times by verifier in seconds."""
        unscored = self._unscored.status()
        num_finished = sum(unscored["decisions"].values())
        return {
            "num_queued": len(self._queue) + len(self._later),
            "num_open": self.num_open,
            "num_finished": num_finished,
            **unscored,
            "num_exhausted": dict(self._exhausted),
            "num_exhausted_failed": self._num_exhausted_failed,
            "exhausted_share": sum(self._exhausted.values()) / num_finished if num_finished else 0.0,
            "times": {name: timings.status() for name, timings in self._timings.items()},
        }

    # -- what comes of a task -----------------------------------------------------------------------------------------

    def _expected_s(self, task: Task) -> float:
        if task.is_gold or task.verifier not in self._timings:
            return math.inf
        return self._timings[task.verifier].mean_s

    def _decide(self, task: Task, result: RewardResult, now_s: float, details: str = "") -> None:
        if task.is_gold:
            self._gold_answered(task.key, result.reward is not None)
            return
        retry_at = self._unscored.retry_at(result.decision, num_tries=task.num_tries, now_s=now_s)
        if retry_at is None:
            self._finish(task, result, details)
        else:
            heapq.heappush(self._later, (retry_at, next(self._numbers), task))

    def _exhaust(self, task: Task, what: str) -> None:
        if task.is_gold:
            self._gold_answered(task.key, False)
            return
        self._exhausted[what] += 1
        if (works := self._gold_works.get(task.key)) is not None:
            self._end_exhausted(task, what, works)
            return
        waiting = self._waits_for_gold.setdefault(task.key, [])
        waiting.append((task, what))
        if len(waiting) == 1:
            payload = encode_task(gold_response(task.problem), task.problem, False)
            self._queue.appendleft(Task(task.task_id, task.problem, payload, is_gold=True))

    def _gold_answered(self, key: tuple[str, str], works: bool) -> None:
        self._gold_works[key] = works
        for task, what in self._waits_for_gold.pop(key, []):
            self._end_exhausted(task, what, works)

    def _end_exhausted(self, task: Task, what: str, gold_works: bool) -> None:
        if not gold_works:
            evidence = f"the verifier ran out of {what}, and the gold of this problem does not verify within the limits"
            self._finish(task, self._unscored_result(task.verifier, evidence))
            return
        self._num_exhausted_failed += 1
        evidence = f"the verifier ran out of {what} on this response; the gold verifies within the limits"
        self._finish(task, self._result(Decision.FAIL, 0.0, task.verifier, evidence))

    def _finish(self, task: Task, result: RewardResult, details: str = "") -> None:
        if task.is_gold:
            self._gold_answered(task.key, False)
            return
        self.num_open -= 1
        self.finished.append((task.task_id, result))
        self._unscored.settle(result, details)

    def _unscored_result(self, verifier: str, evidence: str) -> RewardResult:
        return self._result(Decision.ENV_ERROR, None, verifier, evidence)

    def _result(self, decision: Decision, reward: float | None, verifier: str, evidence: str) -> RewardResult:
        return RewardResult(
            decision=decision,
            reward=reward,
            verifier=verifier,
            verifier_version=self._versions.get(verifier, ""),
            evidence=evidence[:MAX_EVIDENCE_CHARACTERS],
        )
