"""Environments for tests, as a user would write them: `python:tests.environments.worlds.<name>`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import numpy as np

from stream_grpo.environments.protocol import End, Start, Step
from stream_grpo.rewards.messages import ProblemRow


class Counter:
    """Counts the actions; "end" ends it. Other actions do what they say."""

    def __init__(self, problem: ProblemRow, **options: Any) -> None:
        self._problem, self._options, self._num = problem, options, 0

    def reset(self, seed: int, snapshot: bytes | None) -> Start:
        self._seed = seed
        return Start(snapshot=snapshot or f"{self._problem.problem_id}/{seed}".encode(), observation="begin")

    def step(self, action: str) -> Step:
        self._num += 1
        verb, _, what = action.partition(" ")
        if verb == "sleep":
            time.sleep(float(what))
        elif verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "die-once":
            self._once(what)
        elif verb == "raise":
            raise ValueError("broken on purpose")
        elif verb == "big":
            return Step(observation="x" * (1 << 20))
        elif verb == "pid":
            return Step(observation="here", evidence=str(os.getpid()))
        elif verb == "odd":
            return Step(observation=str(time.monotonic_ns()))
        elif verb == "end":
            return Step(end=End.SUCCESS, milestones={"counted": float(self._num)})
        return Step(observation=f"{self._num} of seed {self._seed}", tool=verb)

    def _once(self, flag: str) -> None:
        """End the process, but only the first time that anybody asks with this file."""
        if not os.path.exists(flag):
            with open(flag, "w"):
                os.kill(os.getpid(), signal.SIGKILL)


class Asynchronous(Counter):
    """The same, with both methods async."""

    async def reset(self, seed: int, snapshot: bytes | None) -> Start:  # type: ignore[override]
        self._lock = asyncio.Lock()
        return super().reset(seed, snapshot)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        async with self._lock:  # of the loop on which it was made
            return super().step(action)


class Unplain(Counter):
    """Ends with numbers of NumPy; what else it answers JSON cannot hold."""

    def step(self, action: str) -> Step:
        if action == "end":
            one: Any = np.float32(1.0)
            return Step(end=End.SUCCESS, score=one, step_score=one, milestones={"all": one}, failed=one > 0)
        tool: Any = self
        return Step(tool=tool)


class Noisy:
    """Its end has the score of its action plus noise of standard deviation 1 by the seed."""

    def __init__(self, problem: ProblemRow) -> None: ...

    def reset(self, seed: int, snapshot: bytes | None) -> Start:
        self._random = random.Random(seed)
        return Start(snapshot=b"same")

    def step(self, action: str) -> Step:
        return Step(end=End.SUCCESS, score=float(action) + self._random.gauss(0.0, 1.0))


def broken(problem: ProblemRow) -> Counter:
    raise RuntimeError("cannot be made")


class TwoSteps:
    """The first action opens a door, the second says a number: what it is worth, twice behind the left door."""

    def __init__(self, problem: ProblemRow) -> None:
        self._door = ""

    def reset(self, seed: int, snapshot: bytes | None) -> Start:
        return Start(snapshot=b"doors")

    def step(self, action: str) -> Step:
        if not self._door:
            self._door = action
            return Step(observation=f"{action} is open", tool="door", step_score=0.5)
        worth = float(action) * (2.0 if self._door == "left" else 1.0)
        return Step(end=End.SUCCESS, score=worth, step_score=worth)


class Summing(Counter):
    """Every action is a sum between marks, as its grammar says."""

    @staticmethod
    def call_format(**options: Any) -> dict[str, Any]:
        """A structural tag: no action without a call."""
        body = {"type": "regex", "pattern": r"[0-9]{1,6}\+[0-9]{1,6}"}
        tag = {"type": "tag", "begin": "[", "content": body, "end": "]"}
        tags = {"type": "triggered_tags", "triggers": ["["], "tags": [tag], "at_least_one": True}
        return {"type": "structural_tag", "format": {**tags, "stop_after_first": True}}


class Unwritten(Counter):
    """Says how a call is written, and cannot."""

    @staticmethod
    def call_format(**options: Any) -> Any:
        raise ValueError("there is no such mark")


class Lost(Counter):
    """Looks for its marks where there are none."""

    @staticmethod
    def call_format(**options: Any) -> Any:
        return options["marks"]
