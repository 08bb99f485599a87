"""Judges and reward models behind URLs: many requests at a time in one thread, while the caller does something else.

The thread runs an event loop and waits for replies, which takes no process and next to no time of the interpreter. An
endpoint has places of its own, so that one that hangs holds up nothing but what is to be judged by it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stream_grpo.background import Background
from stream_grpo.config_http import PREFIX, Endpoint, Judge
from stream_grpo.errors import RewardError
from stream_grpo.rewards.chat_judge import ChatGrades
from stream_grpo.rewards.http_client import EndpointClient
from stream_grpo.rewards.judging import Answer, EndpointError, JudgeFunction, Results
from stream_grpo.rewards.messages import ProblemRow, decode, encode_task, row_of
from stream_grpo.rewards.pairwise import PairPreferences
from stream_grpo.rewards.policy import UnscoredCount, UnscoredPolicy
from stream_grpo.rewards.process_reward import StepScores
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.rewards.score_model import ModelScores
from stream_grpo.rewards.timings import Timings
from stream_grpo.types import RewardResult

MakeClient = Callable[[Endpoint], EndpointClient]

_JUDGES: Mapping[str, Callable[[str, Any], JudgeFunction]] = {
    "chat": ChatGrades,
    "score": ModelScores,
    "process": StepScores,
    "pairwise": PairPreferences,
}


class HttpRewards(Background[RewardResult]):
    """The judges of a run by name. All methods may be called from any thread."""

    def __init__(
        self,
        judges: Mapping[str, Judge],
        *,
        policy: UnscoredPolicy | None = None,
        make_client: MakeClient = EndpointClient,
    ) -> None:
        """`judges`: by the name after `http:`. The policy's retries are not used: every endpoint has its own."""
        super().__init__(thread_name="http-rewards", error=RewardError, closed="the judges are closed")
        self._settings = {f"{PREFIX}{name}": judge for name, judge in judges.items()}
        self._judges = {name: _JUDGES[judge.kind](name, judge) for name, judge in self._settings.items()}
        self._make_client, self._clients = make_client, dict[str, EndpointClient]()
        self._unscored = UnscoredCount(policy or UnscoredPolicy())
        self._timings: dict[str, Timings] = defaultdict(Timings)
        self._num_open = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread.start()

    def submit(self, verifier: str, problem: VerifiableProblem, answers: Sequence[Answer]) -> None:
        """Give responses of one problem: one, or all of its group to a judge that compares them.

        Raises RewardError where too many could not be scored, or after `close`.
        """
        with self._changed:
            self._check_open()
            self._num_open += len(answers)
            self._loop.call_soon_threadsafe(self._start, verifier, problem, answers)

    @property
    def num_open(self) -> int:
        """Responses submitted and not finished."""
        return self._num_open

    def status(self) -> dict[str, Any]:
        """Decisions, and by verifier: requests that wait, run and were repeated, and times in seconds; plain values."""
        with self._changed:
            clients = dict(self._clients)
            return {
                "num_open": self._num_open,
                **self._unscored.status(),
                "num_queued": sum(client.num_waiting for client in clients.values()),
                "requests": {
                    name: {"num_queued": c.num_waiting, "num_running": c.num_running, "num_retries": c.num_retries}
                    for name, c in clients.items()
                },
                "times": {name: timings.status() for name, timings in self._timings.items()},
            }

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def _start(self, verifier: str, problem: VerifiableProblem, answers: Sequence[Answer]) -> None:
        task = self._loop.create_task(self._judge(verifier, problem, answers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _judge(self, verifier: str, problem: VerifiableProblem, answers: Sequence[Answer]) -> None:
        started = time.monotonic()
        try:
            row = _plain_row(problem, verifier)
            results = await self._judges[verifier](row, answers, self._client(verifier).post)
        except EndpointError as error:
            results = [self._failed(verifier, f"{self._settings[verifier].url}: {error}")] * len(answers)
        except Exception as error:  # nobody else would hear of it
            results = [self._failed(verifier, f"{type(error).__name__}: {error}")] * len(answers)
        with self._changed:
            self._timings[verifier].add(time.monotonic() - started)
            self._num_open -= len(answers)
            for answer, result in zip(answers, results, strict=True):
                self._finished.append((answer.task_id, result))
                self._settle(result)
            self._changed.notify_all()

    def _client(self, verifier: str) -> EndpointClient:
        """Made when first asked: a key that nobody needs may be missing. Raises ConfigError for one that is."""
        if verifier not in self._clients:
            self._clients[verifier] = self._make_client(self._settings[verifier])
        return self._clients[verifier]

    def _failed(self, verifier: str, evidence: str) -> RewardResult:
        return Results(verifier, self._settings[verifier].version).env_error(evidence)

    def _settle(self, result: RewardResult) -> None:
        try:
            self._unscored.settle(result)
        except RewardError as error:
            self._failure = self._failure or error


def _plain_row(problem: VerifiableProblem, verifier: str) -> ProblemRow:
    """The problem as JSON holds it. Raises ValueError for a column that JSON cannot hold."""
    return ProblemRow(**decode(encode_task("", row_of(problem, verifier), False))["problem"])
