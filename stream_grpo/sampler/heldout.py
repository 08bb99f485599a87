"""Evaluation during training: a few held-out problems, sampled between the groups on one version of the weights.

Every `interval` learner steps, once weights are applied and proved, the requests of an evaluation join those of the
groups. Until all of them have ended and their tokens are in the buffer's account the weights stay as they are: newer
ones wait, sampling does not. Their scores may come later. The requests belong to no group, so that they can become no
outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stream_grpo.metrics import MetricsLog
from stream_grpo.sampler.generation import Engine
from stream_grpo.transport.channels import SamplerChannel
from stream_grpo.types import Forks, Generation, GenerationRequest, PolicyVersion, RewardResult, policy_age


class Run(Protocol):
    """One evaluation: what to sample, and what it comes to."""

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """All of them, in the order to be added."""

    @property
    def awaited(self) -> Collection[str]:
        """Ids of the requests without a generation yet."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens so far."""

    def take(self, generation: Generation) -> None:
        """Give one generation out to be scored. Raises EvaluationError for one of another version."""

    def take_scores(self, results: Iterable[tuple[str, RewardResult]]) -> list[tuple[str, RewardResult]]:
        """Count those of this evaluation, and give back the others."""

    @property
    def is_scored(self) -> bool:
        """Whether no generation and no score is missing."""

    def summary(self) -> Mapping[str, Any]:
        """The scores by domain, once it is scored."""

    def counts(self) -> Mapping[str, Sequence[int]]:
        """Passed and scored samples by problem id, once it is scored."""


@dataclass(slots=True)
class _UnderWay:
    version: PolicyVersion
    run: Run
    begun_at: float
    ended_at: float | None = None
    newest: PolicyVersion | None = None
    """Weights that wait."""
    newer_since: float | None = None
    is_reported: bool = False
    pinned_s: float = 0.0
    """How long weights have waited."""


class HeldoutEvaluation:
    """The evaluations of one sampler, one at a time. Belongs to the thread of the engine."""

    def __init__(
        self,
        engine: Engine,
        buffer: SamplerChannel,
        metrics: MetricsLog,
        begin: Callable[[PolicyVersion], Run],
        *,
        interval: int,
        num_steps: int,
        max_policy_age: int,
        evaluated: Iterable[PolicyVersion] = (),
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`interval` 0: never. `num_steps`: of the run, whose last weights are evaluated after it."""
        self._engine, self._buffer, self._metrics, self._begin = engine, buffer, metrics, begin
        self._interval, self._num_steps, self._max_policy_age = interval, num_steps, max_policy_age
        self._evaluated, self._timer = list(evaluated), timer
        self._under_way: _UnderWay | None = None
        self._to_write: list[_UnderWay] = []
        self._has_warned = False

    @property
    def is_running(self) -> bool:
        """Whether the weights must stay as they are."""
        return self._under_way is not None

    def is_due(self, version: PolicyVersion, forks: Forks) -> bool:
        """Whether `version` has reached a multiple of the interval that none it came by was evaluated at.

        floor(step / interval) > floor(step of the last evaluated ancestor / interval), 0 where there is none.
        """
        if not self._interval or version.step >= self._num_steps:
            return False
        # An ancestor is as many steps old as it is behind; one on a branch that a restore has left is older.
        earlier = reversed(self._evaluated)
        last = next((seen.step for seen in earlier if policy_age(seen, version, forks) == version.step - seen.step), 0)
        return version.step // self._interval > last // self._interval

    def applied(self, version: PolicyVersion, forks: Forks) -> None:
        """Begin an evaluation where one is due of the weights that were just proved."""
        if self.is_running or not self.is_due(version, forks):
            return
        self._under_way = _UnderWay(version, self._begin(version), self._timer())
        for request in self._under_way.run.requests:
            self._engine.add(request)

    def published(self, newest: PolicyVersion) -> None:
        """Note which weights are the newest: from the first that are newer than the pinned ones, weights wait."""
        if (current := self._under_way) is not None and newest != current.version:
            current.newest = newest
            current.newer_since = self._timer() if current.newer_since is None else current.newer_since

    def take(self, generations: Iterable[Generation]) -> list[Generation]:
        """Give those of the evaluation out to be scored, and give back the others. Raises EvaluationError."""
        if (current := self._under_way) is None or current.ended_at is not None:
            return list(generations)
        of_groups = []
        for generation in generations:
            if generation.request_id in current.run.awaited:
                current.run.take(generation)
            else:
                of_groups.append(generation)
        if not current.run.awaited:
            current.ended_at = self._timer()
        return of_groups

    def take_scores(self, results: Iterable[tuple[str, RewardResult]]) -> list[tuple[str, RewardResult]]:
        """Count those of evaluations, and give back the others."""
        others = list(results)
        for evaluation in [*self._to_write, *([self._under_way] if self._under_way else [])]:
            others = evaluation.run.take_scores(others)
        return others

    def turn(self) -> None:
        """Report the tokens of an evaluation that has ended, free the weights; write what is scored."""
        self._turn()
        for evaluation in [evaluation for evaluation in self._to_write if evaluation.run.is_scored]:
            self._to_write.remove(evaluation)
            self._write(evaluation)

    def _turn(self) -> None:
        if (current := self._under_way) is None or current.ended_at is None:
            return
        if not current.is_reported:
            if self._buffer.has_credit:
                self._buffer.report_evaluation(current.version, current.run.num_tokens)
                current.is_reported = True
        elif not self._buffer.waits_for_evaluation:
            if current.newer_since is not None:
                current.pinned_s = self._timer() - current.newer_since
            self._to_write.append(current)
            self._evaluated.append(current.version)
            self._under_way = None

    def stop(self) -> None:
        """Drop an evaluation whose samples are not complete; a complete one goes on to its account."""
        if (current := self._under_way) is not None and current.ended_at is None:
            self._engine.abort(list(current.run.awaited))
            self._under_way = None

    def _write(self, current: _UnderWay) -> None:
        assert current.ended_at is not None
        values = {
            "version": list(current.version),
            "branch": current.version.branch,
            "step": current.version.step,
            "heldout": current.run.summary(),
            "problems": current.run.counts(),
            "num_tokens": current.run.num_tokens,
            "seconds": current.ended_at - current.begun_at,
            "pinned_s": current.pinned_s,
        }
        self._metrics.write("evaluation", values)
        num_steps = current.newest.step - current.version.step if current.newest else 0
        if num_steps > self._max_policy_age / 2 and not self._has_warned:
            # Once: the settings decide how long it takes, and `pinned_s` shows it of every evaluation.
            self._has_warned = True
            self._metrics.write("warning", {"message": self._too_long(current.version, num_steps)})

    def _too_long(self, version: PolicyVersion, num_steps: int) -> str:
        return (
            f"the evaluation of step {version.step} took {num_steps} learner steps, more than half of "
            f"stream.max_policy_age = {self._max_policy_age}, so that the learner may have waited; lower "
            f"evaluation.interval_problems or interval_samples, or raise sampler.num_samplers: only the first waits"
        )
