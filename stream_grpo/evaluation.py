"""Held-out pass@k with intervals, and the rise from before to after paired by problem. No torch, no engine of its own.

Intervals are 95 % percentile bootstraps over problems (Efron 1979): the samples of one problem are not independent of
each other, the problems are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_grpo.environments.outcome import scored
from stream_grpo.errors import EvaluationError
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.rewards.verifiers import VerifiableProblem
from stream_grpo.types import Decision, Episode, Generation, GenerationRequest, PolicyVersion, RewardResult

ALL, HEADLINE = "all", "headline"
"""The two rows of a summary that are no domain."""

NUM_RESAMPLES = 2000
"""Of every bootstrap."""

INTERVAL_PERCENTILES = (2.5, 97.5)


_DRAIN_WAIT_S = 1.0


class EvaluatedProblem(VerifiableProblem, Protocol):
    """What an evaluation reads of a problem."""

    @property
    def domain(self) -> str:
        """The row of the summary that the problem counts in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemScore:
    """What the samples of one problem scored."""

    problem_id: str
    domain: str
    num_scored: int
    """Samples that passed or failed."""
    num_passed: int
    num_unscored: int = 0
    """Samples without a reward: aborted, or an error of verifier or engine. In no rate."""
    num_tokens: int = 0
    """Sampled tokens, those of unscored samples included."""

    @property
    def pass_rate(self) -> float:
        """Passed over scored; nan where nothing was scored."""
        return self.num_passed / self.num_scored if self.num_scored else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainScore:
    """pass@1 of some problems with its 95 % interval. All three are nan where no problem was scored."""

    pass_at_1: float
    low: float
    high: float
    num_problems: int
    """Problems with at least one scored sample."""
    num_unscored: int = 0
    """Samples without a reward."""

    def as_dict(self) -> dict[str, float | int | None]:
        """The row of a run summary, ready for JSON: nan, which JSON does not know, becomes None."""
        figures = {"pass_at_1": self.pass_at_1, "low": self.low, "high": self.high}
        return {name: None if math.isnan(value) else value for name, value in figures.items()} | {
            "num_problems": self.num_problems
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """Mean difference of pass@1, after minus before, with its 95 % interval."""

    mean: float
    low: float
    high: float
    num_problems: int
    """Problems scored on both sides."""

    def as_dict(self) -> dict[str, float | int]:
        """The same as plain values."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "num_problems": self.num_problems}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples passes, estimated without bias from c passes among n samples.

    pass@k = 1 - C(n - c, k) / C(n, k)        (Chen et al. 2021, arXiv 2107.03374)

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} passes among {n} samples: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def summarize(
    counts: Sequence[ProblemScore], seed: int, headline_domains: Iterable[str] = ()
) -> dict[str, DomainScore]:
    """pass@1 per domain, over "all" problems, and over those of the headline's domains (empty: all) as "headline".

    Every problem with a scored sample has the same weight.

    Raises ValueError for a headline domain that no problem has, or a domain called "all" or "headline".
    """
    parts = by_domain(counts, headline_domains)
    return {name: _domain_score(part, derived_seed(seed, name)) for name, part in parts.items()}


def by_domain(counts: Sequence[ProblemScore], headline_domains: Iterable[str] = ()) -> dict[str, list[ProblemScore]]:
    """The scores of each row of a summary: every domain, then "all", then "headline". Raises as `summarize` does."""
    domains = sorted({score.domain for score in counts})
    headline = set(headline_domains) or set(domains)
    if unknown := sorted(headline - set(domains)):
        raise ValueError(f"headline domains without a problem: {unknown}; there are {domains}")
    if taken := {ALL, HEADLINE} & set(domains):
        raise ValueError(f"a domain cannot be called {sorted(taken)}: that is a row of the summary")
    parts = {domain: [s for s in counts if s.domain == domain] for domain in domains}
    return parts | {ALL: list(counts), HEADLINE: [s for s in counts if s.domain in headline]}


def as_dicts(summary: Mapping[str, DomainScore]) -> dict[str, dict[str, float | int | None]]:
    """A summary as plain JSON values: {domain: {pass_at_1, low, high, num_problems}}."""
    return {name: score.as_dict() for name, score in summary.items()}


def paired_rise(before: Sequence[ProblemScore], after: Sequence[ProblemScore], seed: int) -> Rise:
    """Mean rise of pass@1 over problems, each paired with itself; the bootstrap draws problems with both their rates.

    Problems without a scored sample on one side have no difference and are left out of mean and count.

    Raises ValueError when the two do not hold the same problems, or no problem was scored on both sides.
    """
    rates_before, rates_after = _rates_by_id(before), _rates_by_id(after)
    if rates_before.keys() != rates_after.keys():
        odd = sorted(rates_before.keys() ^ rates_after.keys())
        raise ValueError(f"before and after hold different problems: {len(odd)} are on one side only, first {odd[0]!r}")
    # Sorted, so that the interval does not depend on the order in which problems were given.
    differences = np.array([rates_after[i] - rates_before[i] for i in sorted(rates_before)], dtype=np.float64)
    differences = differences[~np.isnan(differences)]
    if not differences.size:
        raise ValueError("no problem was scored both before and after")
    low, high = bootstrap_interval(differences, seed)
    return Rise(mean=float(differences.mean()), low=low, high=high, num_problems=differences.size)


P = TypeVar("P", bound=EvaluatedProblem)


class EvaluationRun(Generic[P]):
    """One evaluation under way: the requests to sample, what came of them so far, and the scores at the end.

    The seed of a sample depends on `seed`, problem id and sample number alone: two evaluations of the same problems
    use the same seeds. Request ids begin with "eval/", which no group's id does; an id with the version is that under
    which a response is scored.
    """

    def __init__(
        self,
        problems: Sequence[P],
        prompt_ids_of: Callable[[P], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        scoring: Scoring,
        *,
        num_samples: int,
        seed: int,
        max_new_tokens: int,
        version: PolicyVersion | None = None,
        has_environment: bool = False,
    ) -> None:
        """`decode` leaves special tokens out; `version`: of the weights that sample, None takes any single one.
        `has_environment`: whether samples are trajectories, which all begin in the same state of a problem.

        Raises ValueError for a problem id that occurs twice.
        """
        if len({problem.problem_id for problem in problems}) != len(problems):
            raise ValueError("a problem id occurs twice among the problems to evaluate")
        self._problems, self._decode, self._scoring = problems, decode, scoring
        self._seed, self._label = seed, "" if version is None else f"@{version}"
        self._versions = set() if version is None else {version}
        self._tallies = [_Tally() for _ in problems]
        self._owners: dict[str, int] = {}
        self._out: dict[str, int] = {}
        self.requests: list[GenerationRequest] = []
        """All of them, problem by problem."""
        for index, problem in enumerate(problems):
            prompt_ids = tuple(prompt_ids_of(problem))
            episode = None
            if has_environment:
                environment_seed = derived_seed(seed, problem.problem_id, "environment")
                episode = Episode(group=f"eval/{index}", seed=environment_seed, problem=problem)
            for sample in range(num_samples):
                request = GenerationRequest(
                    request_id=f"eval/{index}/{sample}",
                    prompt_ids=prompt_ids,
                    seed=derived_seed(seed, problem.problem_id, sample),
                    max_new_tokens=max_new_tokens,
                    episode=episode,
                )
                self.requests.append(request)
                self._owners[request.request_id] = index

    @property
    def awaited(self) -> Collection[str]:
        """Ids of the requests without a generation yet."""
        return self._owners.keys()

    @property
    def is_scored(self) -> bool:
        """Whether no generation and no score is missing."""
        return not self._owners and not self._out

    @property
    def num_tokens(self) -> int:
        """Sampled tokens so far."""
        return sum(tally.num_tokens for tally in self._tallies)

    def take(self, generation: Generation) -> None:
        """Give one generation out to be scored; they may come in any order.

        Raises EvaluationError for one that was not asked for or comes twice, and when more than one policy version
        took part, a kept KV cache of older weights included.
        """
        if generation.request_id not in self._owners:
            raise EvaluationError(f"generation {generation.request_id!r} was not asked for, or came twice")
        index = self._owners.pop(generation.request_id)
        _refuse_second_version(generation, self._versions)
        num_tokens = generation.num_sampled
        self._tallies[index].num_tokens += num_tokens
        task_id = f"{generation.request_id}{self._label}"
        self._out[task_id] = index
        problem, text = scored(self._problems[index], generation, self._decode)
        self._scoring.submit(task_id, problem, text, generation.end_reason, num_tokens=num_tokens)

    def take_scores(self, results: Iterable[tuple[str, RewardResult]]) -> list[tuple[str, RewardResult]]:
        """Count those of this evaluation, and give back the others."""
        others = []
        for task_id, result in results:
            if (index := self._out.pop(task_id, None)) is None:
                others.append((task_id, result))
            else:
                self._tallies[index].add(result.reward is not None, result.decision is Decision.PASS)
        return others

    def drain(self) -> None:
        """Wait for the scores that are out, where nobody else uses the scoring."""
        while self._out:
            self.take_scores(self._scoring.poll(_DRAIN_WAIT_S))

    def scores(self) -> list[ProblemScore]:
        """One score per problem, in their order. Raises EvaluationError while a generation or a score is missing."""
        if self._owners:
            num_missing, first = len(self._owners), next(iter(self._owners))
            raise EvaluationError(f"{num_missing} of {len(self.requests)} generations are missing, first {first!r}")
        if self._out:
            num_missing, first = len(self._out), next(iter(self._out))
            raise EvaluationError(f"{num_missing} of {len(self.requests)} scores are missing, first {first!r}")
        return [tally.score_of(problem) for tally, problem in zip(self._tallies, self._problems, strict=True)]

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """The scores by domain as plain JSON values, all domains in the headline. Raises as `scores` does."""
        return as_dicts(summarize(self.scores(), self._seed))

    def counts(self) -> dict[str, list[int]]:
        """Passed and scored samples by problem id: what pairs two evaluations. Raises as `scores` does."""
        return {score.problem_id: [score.num_passed, score.num_scored] for score in self.scores()}


def evaluate(
    run: EvaluationRun[P], generate: Callable[[Sequence[GenerationRequest]], Iterable[Generation]]
) -> list[ProblemScore]:
    """Sample and score a whole evaluation on an engine that does nothing else. Raises EvaluationError as `run` does."""
    for generation in generate(run.requests):
        run.take(generation)
    run.drain()
    return run.scores()


@dataclass(slots=True)
class _Tally:
    """The running counts of one problem."""

    num_scored: int = 0
    num_passed: int = 0
    num_unscored: int = 0
    num_tokens: int = 0

    def add(self, scored: bool, passed: bool) -> None:
        self.num_scored += scored
        self.num_unscored += not scored
        self.num_passed += scored and passed

    def score_of(self, problem: EvaluatedProblem) -> ProblemScore:
        return ProblemScore(
            problem_id=problem.problem_id,
            domain=problem.domain,
            num_scored=self.num_scored,
            num_passed=self.num_passed,
            num_unscored=self.num_unscored,
            num_tokens=self.num_tokens,
        )


def _refuse_second_version(generation: Generation, versions: set[PolicyVersion]) -> None:
    versions.update(generation.versions)
    if len(versions) > 1 or generation.mixed_context_from is not None:
        seen = ", ".join(str(version) for version in sorted(versions))
        raise EvaluationError(f"an evaluation is of one policy version; up to {generation.request_id!r} it saw {seen}")


def _domain_score(scores: Sequence[ProblemScore], seed: int) -> DomainScore:
    rates = np.array(
        [s.pass_rate for s in sorted(scores, key=lambda s: s.problem_id) if s.num_scored], dtype=np.float64
    )
    num_unscored = sum(s.num_unscored for s in scores)
    if not rates.size:
        return DomainScore(pass_at_1=math.nan, low=math.nan, high=math.nan, num_problems=0, num_unscored=num_unscored)
    low, high = bootstrap_interval(rates, seed)
    return DomainScore(
        pass_at_1=float(rates.mean()), low=low, high=high, num_problems=rates.size, num_unscored=num_unscored
    )


def bootstrap_interval(values: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % percentile interval of the mean of values [P], drawn with replacement."""
    # How often each value is drawn is all that the mean of a resample depends on: multinomial counts.
    draws = np.random.default_rng(seed).multinomial(values.size, np.full(values.size, 1 / values.size), NUM_RESAMPLES)
    low, high = np.percentile(draws @ values / values.size, INTERVAL_PERCENTILES)
    return float(low), float(high)


def _rates_by_id(scores: Sequence[ProblemScore]) -> dict[str, float]:
    rates = {score.problem_id: score.pass_rate for score in scores}
    if len(rates) != len(scores):
        raise ValueError("a problem id occurs twice among the scores")
    return rates


def derived_seed(seed: int, *parts: object) -> int:
    """A seed of 63 bits, the same on every machine; a repr keeps ("a", 1) and ("a1",) apart."""
    digest = hashlib.sha256(repr((seed, *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
