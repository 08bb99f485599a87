"""Environments in worker processes with hard deadlines, while the caller does something else.

The pool's thread hands calls out, takes replies in and kills what is over its deadline. A worker has one call at
a time, or a few short ones, and keeps the environments of the trajectories that it served: the next call of one goes to
it, unless it is busy. Then another worker plays the trajectory's actions again. So does one after a worker was killed,
and what stands behind a call that takes long is handed out anew: neither a tool that hangs nor a worker that dies costs
another trajectory anything but time.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stream_grpo.background import WorkerPool
from stream_grpo.environments.instance import Call, Reply
from stream_grpo.environments.seat import Seat
from stream_grpo.errors import EnvironmentFailedError
from stream_grpo.rewards.timings import Timings

# A trajectory whose worker has been busy for longer with the call of another is played again elsewhere.
_PATIENCE_S = 0.1
# Work for about so long is handed out at once, so that a worker need not wait for the pool between two short calls.
_BATCH_S, _MAX_BATCH = 0.02, 32
START = "start"
"""How the beginning of an environment is called among its tools."""
ANSWER = "answer"
"""And how a step that calls none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a worker and of a call in it; a worker over a limit is killed from outside, whatever it is doing."""

    step_s: float = 10.0
    """Seconds for one step or reset; a replay has them for its reset and for each action."""
    load_s: float = 60.0
    """Seconds for a worker to start with the environment loaded."""
    memory_bytes: int = 4 << 30
    """Address space of a worker, libraries included."""
    max_retries: int = 1
    """How often a call is made again, by replay in another worker or a new one, after an error."""
    max_errors_in_row: int | None = 32
    """Errors in so many groups, retries included and without an answer between them, end the run; None: in any number
    they do not. A group is a problem with a seed."""


@dataclass(slots=True, eq=False)
class _Task:
    call: Call
    queued_at: float
    num_tries: int = 0
    waited_s: float = 0.0
    """In the queue, before its newest try."""
    num_steps: int = 1
    """Resets and steps that its newest try may take."""


@dataclass(slots=True)
class _Times:
    queue: Timings = field(default_factory=Timings)
    run: Timings = field(default_factory=Timings)


class EnvironmentPool(WorkerPool[Reply, Seat]):
    """Worker processes for one environment. All methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        limits: Limits | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        """`name`, `options`: as `loading.load` takes them; `paths`: where the user's modules are looked for after
        everything else, by default in the working directory."""
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}: a pool needs at least 1")
        super().__init__(
            thread_name="environment-pool",
            error=EnvironmentFailedError,
            what="the pool of environments",
            worker=f"worker of the environment {name!r}",
        )
        self._limits = limits or Limits()
        self._options = {
            "name": name,
            "options": dict(options or {}),
            "paths": [os.getcwd()] if paths is None else list(paths),
            "memory_bytes": self._limits.memory_bytes,
        }
        self._queue: deque[_Task] = deque()
        # In the order in which replies come; None: handed out anew since, its reply is not waited for.
        self._under_way: dict[Seat, deque[_Task | None]] = {}
        self._forgotten: set[str] = set()
        self._homes: dict[str, Seat] = {}
        self._times: dict[str, _Times] = {}
        self._all_times = Timings()
        # Groups, by problem and seed, of the errors since the newest answer.
        self._failed_in_row: set[tuple[str, int | None]] = set()
        self._num_calls = self._num_retries = self._num_errors = 0
        self._num_replayed = 0
        self._num_workers = num_workers
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Ask an environment; the reply comes from `poll` under the call's trajectory, which has one call at a time.

        Raises EnvironmentFailedError where the pool has failed or is closed.
        """
        with self._changed:
            self._check_open()
            self._forgotten.discard(call.trajectory)
            self._queue.append(_Task(call, time.monotonic()))
        self._wake()

    def forget(self, trajectory: str) -> None:
        """No more calls come for it, and no reply to one under way."""
        with self._changed:
            self._queue = deque(task for task in self._queue if task.call.trajectory != trajectory)
            self._finished = [(name, reply) for name, reply in self._finished if name != trajectory]
            if any(task.call.trajectory == trajectory for task in self._handed_out()):
                self._forgotten.add(trajectory)
            if (home := self._homes.pop(trajectory, None)) is not None:
                home.to_drop.append(trajectory)

    @property
    def num_open(self) -> int:
        """Calls without a reply."""
        return len(self._queue) + len(self._handed_out())

    def _handed_out(self) -> list[_Task]:
        return [task for tasks in self._under_way.values() for task in tasks if task is not None]

    def status(self) -> dict[str, Any]:
        """Queue, errors, kills, replays, and by tool the seconds in the queue and of the call; plain values."""
        with self._changed:
            return {
                "num_workers": self._num_workers,
                "num_queued": len(self._queue),
                "num_open": self.num_open,
                "num_calls": self._num_calls,
                "num_retries": self._num_retries,
                "num_errors": self._num_errors,
                "num_kills": self._num_kills,
                "num_restarts": self._num_restarts,
                "num_replayed": self._num_replayed,
                "tools": {
                    tool: {
                        "num": times.run.status()["num"],
                        "queue_p50_s": times.queue.percentile_s(50),
                        "queue_p99_s": times.queue.percentile_s(99),
                        "p50_s": times.run.percentile_s(50),
                        "p99_s": times.run.percentile_s(99),
                    }
                    for tool, times in self._times.items()
                },
            }

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for _ in range(self._num_workers):
            self._add(Seat(self._options))  # a worker ends with the thread that started it

    def _take_back(self) -> None:
        """Put back into the queue what stands behind a call that takes long."""
        now = time.monotonic()
        for seat, tasks in self._under_way.items():
            if now - seat.given_at < _PATIENCE_S:
                continue
            for place, task in enumerate(tasks):
                if place and task is not None:
                    tasks[place] = None
                    self._leave(task, seat)
                    self._queue.appendleft(task)

    def _hand_out(self) -> None:
        self._take_back()
        now = time.monotonic()
        idle = [seat for seat in self._workers if seat.is_ready and seat not in self._under_way]
        for number, seat in enumerate(idle):
            most = min(self._batch_size(), math.ceil(len(self._queue) / (len(idle) - number)))
            batch = list(islice((task for task in self._queue if self._may_go(task, seat, now)), most))
            if not batch:
                continue
            chosen = set(batch)
            self._queue = deque(task for task in self._queue if task not in chosen)
            calls = []
            for task in batch:
                if (home := self._homes.get(task.call.trajectory)) is not None and home is not seat:
                    self._leave(task, home)
                # Its home holds all that was played before.
                task.num_steps = 1 if home is seat else len(task.call.actions) + 1
                calls.append(task.call.newest_alone() if home is seat else task.call)
                self._homes[task.call.trajectory] = seat
                task.waited_s = now - task.queued_at
            self._under_way[seat] = deque(batch)
            try:
                most_steps = max(task.num_steps for task in batch)
                seat.give([call.as_plain() for call in calls], most_steps=most_steps)
            except OSError:
                self._replace(seat, "its worker ended")

    def _batch_size(self) -> int:
        """Calls that take about `_BATCH_S` together; one while nothing is known of them."""
        mean_s = self._all_times.mean_s
        return 1 if mean_s == 0.0 else max(1, min(_MAX_BATCH, int(_BATCH_S / mean_s)))

    def _leave(self, task: _Task, seat: Seat) -> None:
        """What this worker has of the trajectory is of no use any more."""
        self._homes.pop(task.call.trajectory, None)
        seat.to_drop.append(task.call.trajectory)

    def _may_go(self, task: _Task, seat: Seat, now: float) -> bool:
        home = self._homes.get(task.call.trajectory)
        if home is None or home is seat:
            return True
        return home in self._under_way and now - home.given_at >= _PATIENCE_S

    def _next_look(self) -> float:
        times = [self._due_at(seat) for seat in self._workers]
        now = time.monotonic()
        waits_for = {home for task in self._queue if (home := self._homes.get(task.call.trajectory)) in self._under_way}
        is_any_idle = any(seat.is_ready and seat not in self._under_way for seat in self._workers)
        if waits_for and is_any_idle:
            times.append(min(max(now, home.given_at + _PATIENCE_S) for home in waits_for if home is not None))
        # What stands behind a call is taken back once that takes long.
        times += [seat.given_at + _PATIENCE_S for seat, tasks in self._under_way.items() if any(list(tasks)[1:])]
        return min(times, default=math.inf)

    def _due_at(self, seat: Seat) -> float:
        """When something must have come from this worker."""
        if not seat.is_ready:
            return seat.started_at + self._limits.load_s
        if seat not in self._under_way:
            return math.inf
        task = self._under_way[seat][0]
        num_steps = seat.most_steps if task is None else task.num_steps
        return seat.given_at + self._limits.step_s * num_steps

    def _hear(self, seat: Seat) -> None:
        try:
            messages = seat.messages()
        except OSError:
            if not seat.is_ready:
                self._count_failed_start("ended before it was ready")
            self._replace(seat, "its worker ended")
            return
        for message in messages:
            if "ready" in message:
                seat.is_ready, self._num_failed_starts = True, 0
            elif (tasks := self._under_way.get(seat)) is not None:
                task, seat.given_at = tasks.popleft(), time.monotonic()
                if not tasks:
                    del self._under_way[seat]
                if task is not None:
                    self._answered(task, Reply.from_plain(message), message["seconds"])

    def _answered(self, task: _Task, reply: Reply, seconds: float) -> None:
        if reply.error:
            self._failed(task, reply.error)
            return
        tool = START if reply.step is None else (reply.step.tool or ANSWER)
        times = self._times.setdefault(tool, _Times())
        times.run.add(seconds)
        self._all_times.add(seconds)
        times.queue.add(task.waited_s)
        self._num_calls += 1
        self._num_replayed += reply.num_replayed
        self._failed_in_row.clear()
        self._settle(task, reply)

    def _failed(self, task: _Task, error: str) -> None:
        """Try a call again after an error, or let it be one."""
        trajectory = task.call.trajectory
        if (home := self._homes.get(trajectory)) is not None:
            self._leave(task, home)
        if trajectory not in self._forgotten and task.num_tries < self._limits.max_retries:
            task.num_tries += 1
            task.queued_at = time.monotonic()
            self._num_retries += 1
            self._queue.appendleft(task)
            return
        self._num_errors += 1
        if trajectory not in self._forgotten:
            self._count_in_row(task.call, error)
        self._settle(task, Reply(error=error))

    def _count_in_row(self, call: Call, error: str) -> None:
        """One bad row fails with all its rollouts, and its replicas with seeds of their own: it counts once."""
        self._failed_in_row.add((call.problem.problem_id, None if call.open_loop else call.seed))
        limit = self._limits.max_errors_in_row
        if limit is not None and len(self._failed_in_row) >= limit:
            raise EnvironmentFailedError(
                f"{len(self._failed_in_row)} groups of the environment {self._options['name']!r} in a row failed, "
                f"which is the limit; the last: {error}"
            )

    def _settle(self, task: _Task, reply: Reply) -> None:
        trajectory = task.call.trajectory
        if trajectory in self._forgotten:
            self._forgotten.discard(trajectory)
        else:
            self._finished.append((trajectory, reply))
        if reply.error or (reply.step is not None and reply.step.end is not None):
            self._homes.pop(trajectory, None)

    def _look_at_workers(self) -> None:
        now = time.monotonic()
        for seat in [seat for seat in self._workers if now >= self._due_at(seat)]:
            if not seat.is_ready:
                self._count_failed_start(f"was not ready within {self._limits.load_s:g} s")
                self._replace(seat, "its worker did not start")
                continue
            self._num_kills += 1
            self._replace(seat, f"not answered within {self._limits.step_s:g} s, its worker was killed")

    def _replace(self, seat: Seat, why: str) -> None:
        """Put a fresh worker in the place of one that has ended or is to end."""
        self._restart(seat)
        self._homes = {trajectory: home for trajectory, home in self._homes.items() if home is not seat}
        tasks = self._under_way.pop(seat, None)
        if not tasks:
            return
        guilty = tasks.popleft()
        self._queue.extendleft(task for task in reversed(tasks) if task is not None)
        if guilty is not None:
            self._failed(guilty, why)
