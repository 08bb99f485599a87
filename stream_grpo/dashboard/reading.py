"""A run's metrics as the page needs them: folded as they come in, in memory that does not grow with the run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np

from stream_grpo.dashboard.flow import Flow
from stream_grpo.dashboard.lines import (
    AGES,
    AlarmLine,
    BufferStatus,
    CuratorStatus,
    EvaluationLine,
    Follower,
    LearnerStatus,
    Record,
    SamplerStatus,
    Score,
    StepLine,
    TokensByFate,
    WarningLine,
)
from stream_grpo.dashboard.thinning import Thinned

_FIGURES: tuple[tuple[str, str], ...] = (
    *((name, name) for name in ("time_s", "reward_mean", "response_tokens_mean", "age_max", "age_mean")),
    *((name, name) for name in ("age_publish_lag_mean", "age_in_flight_mean", "age_in_queue_mean")),
    *((name, name) for name in ("num_groups", "num_tokens", "step_s", "waited_s", "entropy", "grad_norm", "k3")),
    *((name, name) for name in ("ess", "mask_share", "clip_share_high", "abs_log_ratio")),
    *((f"tokens/{fate}", f"tokens.{fate}") for fate in TokensByFate.__struct_fields__),
    *((f"trained at age/{age}", f"by_age.bucket_{number}.num_tokens") for number, age in enumerate(AGES)),
)
"""What is kept of a step: its name, and where a line has it."""
_of_step = attrgetter(*(path for _, path in _FIGURES))
POOL_FIGURES = ("time_s", "problems", "seen", "solved", "useful", "too_hard")
_of_pool = attrgetter(*POOL_FIGURES)
RATE = "rate/"
"""What the name of a domain's pass rate begins with."""
MAX_DOMAINS = 48
"""Domains whose rates are followed: a picture has no room for more."""
EVALUATION_FIGURES = ("time_s", "pass_at_1", "low", "high", "num_problems")
HEADLINE = "headline"
"""Of an evaluation: the domains that were asked for, as `evaluation` writes them."""
MAX_LATE = 16
"""Evaluations that the scores of an earlier one may come after."""
MAX_NOTES = 100
"""Alarms, and warnings, that are kept: the newest."""


class RunReader:
    """Follows one run. Safe from several threads: whoever holds `lock` may read and look."""

    def __init__(
        self, run_dir: Path, timer: Callable[[], float] = time.monotonic, num_samples: int | None = None
    ) -> None:
        """`num_samples`: look at so many places of the file alone, see `Follower`."""
        self.run_dir, self.lock = run_dir, threading.Lock()
        self._timer, self._num_samples = timer, num_samples
        self._begin(first_start=0)

    def _begin(self, first_start: int) -> None:
        self.follower = Follower(self.run_dir, self._num_samples)
        self.start = first_start
        """Raised when the file turns out to be another one: whoever has read anything has to begin anew."""
        self.steps = Thinned(tuple(name for name, _ in _FIGURES))
        self.pool = Thinned(POOL_FIGURES)
        self.evaluations = Thinned(EVALUATION_FIGURES)
        self._evaluated: deque[EvaluationLine] = deque(maxlen=MAX_LATE)
        self.flow = Flow()
        self.alarms: deque[AlarmLine] = deque(maxlen=MAX_NOTES)
        self.warnings: deque[WarningLine] = deque(maxlen=MAX_NOTES)
        self.num_alarms, self.num_warnings = 0, 0
        self.step = 0
        self.newest: StepLine | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None

    def follow(self, budget_s: float = 1.0) -> bool:
        """Take in what is new, for about `budget_s`; whether nothing is left."""
        if self.follower.look():
            self._begin(self.start + 1)
            self.follower.look()
        until = self._timer() + budget_s
        while (records := self.follower.records()) is not None:
            self._take(records)
            if self._timer() > until:
                return self.follower.offset >= self.follower.size
        return True

    @property
    def num_bytes_left(self) -> int:
        """That were there when it last looked."""
        return self.follower.size - self.follower.offset

    @property
    def share_read(self) -> float:
        """Of the bytes that there are."""
        return self.follower.offset / self.follower.size if self.follower.size else 1.0

    def _take(self, records: Sequence[Record]) -> None:
        steps: list[StepLine] = []
        pool: list[tuple[int, CuratorStatus]] = []
        for record in records:
            self.first_s = record.time_s if self.first_s is None else self.first_s
            self.last_s = record.time_s
            if isinstance(record, StepLine):
                # After a restore a step is made again: what had come from there on is lost.
                if record.step <= self.step:
                    self._take_steps(steps)
                    self._take_pool(pool)
                    steps, pool = [], []
                    self._drop_from(record.step)
                steps.append(record)
                self.step = record.step
            elif isinstance(record, CuratorStatus):
                pool.append((self.step, record))
                self.flow.add_curator(record)
            else:
                self._take_other(record)
        self._take_steps(steps)
        self._take_pool(pool)

    def _take_steps(self, lines: Sequence[StepLine]) -> None:
        if not lines:
            return
        self.steps.add(np.array([line.step for line in lines], float), np.array(list(map(_of_step, lines)), float))
        self.newest = lines[-1]
        self.flow.add_steps(lines)

    def _drop_from(self, step: int) -> None:
        for table in (self.steps, self.pool, self.evaluations):
            table.drop_from(step)
        self._keep_evaluated(lambda line: line.step < step)

    def _keep_evaluated(self, is_kept: Callable[[EvaluationLine], bool]) -> None:
        self._evaluated = deque(filter(is_kept, self._evaluated), MAX_LATE)

    def _take_other(self, record: Record) -> None:
        match record:
            case BufferStatus():
                self.flow.add_buffer(record)
            case SamplerStatus():
                self.flow.add_sampler(record)
            case LearnerStatus():
                self.flow.add_learner(record)
            case EvaluationLine():
                self._take_evaluation(record)
            case AlarmLine():
                self.alarms.append(record)
                self.num_alarms += 1
            case WarningLine():
                self.warnings.append(record)
                self.num_warnings += 1

    def _take_pool(self, lines: Sequence[tuple[int, CuratorStatus]]) -> None:
        """Take statuses of the curator, each with the step that the learner was at."""
        if not lines:
            return
        named = dict.fromkeys(RATE + domain for _, line in lines for domain in line.domain_rates)
        new = [name for name in named if name not in self.pool.names]
        if new := new[: MAX_DOMAINS + len(POOL_FIGURES) - len(self.pool.names)]:
            self.pool.with_names((*self.pool.names, *new))
        domains = [name.removeprefix(RATE) for name in self.pool.names[len(POOL_FIGURES) :]]
        rows = [[*_of_pool(line), *map(line.domain_rates.get, domains)] for _, line in lines]
        self.pool.add(np.array([step for step, _ in lines], float), np.array(rows, float))

    def _take_evaluation(self, record: EvaluationLine) -> None:
        # Scoring takes its time, so that those of later steps may be there. One of the same step is of a restore, as
        # are later steps of an older branch: what is here of them is lost.
        later = [line for line in self._evaluated if line.step > record.step and line.version[0] >= record.version[0]]
        self._keep_evaluated(lambda line: line.step < record.step)
        self.evaluations.drop_from(record.step)
        for line in (record, *later):
            self._evaluated.append(line)
            self.evaluations.add(np.array([line.step], float), np.array([_evaluation_row(line)], float))


def _evaluation_row(line: EvaluationLine) -> list[float | None]:
    headline = line.heldout.get(HEADLINE, Score())
    return [line.time_s, *(getattr(headline, name) for name in EVALUATION_FIGURES[1:])]
