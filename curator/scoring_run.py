"""The two stages of scoring a pool: a few samples of every problem, then many where they pay."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from curator.answers import final_answer
from curator.errors import CuratorError
from curator.schema import Problem
from curator.scorers import Generator, SampleRequest, Score, Scorer
from curator.scoring import Beta, fit_priors, more_samples
from curator.scoring_log import Scored, ScoringLog

BATCH_SAMPLES, BATCH_S = 512, 10.0
"""A batch is written when it has so many samples or is so old, whichever comes first."""
DRAIN_WAIT_S = 1.0
Advance = Callable[[int, str, int], None]
"""(further samples, what is done, samples of the stage in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How many samples a problem gets."""

    screen: int = 8
    """Of every problem, in the first stage."""
    most: int = 32
    """Of one problem, further ones in the second stage; 0: no second stage."""
    target_sd: float = 0.08
    """How well the rate of a problem shall be known: the standard deviation that is left."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that mean nothing."""
        if self.screen < 1 or self.most < 0:
            raise ValueError(f"--screen {self.screen} --most {self.most}: at least 1 to screen, and none or more after")
        if not 0 < self.target_sd < 0.5:
            raise ValueError(f"--target-sd {self.target_sd:g}: expected a number between 0 and 0.5, such as 0.08")


@dataclass(slots=True)
class Tally:
    """What the samples of one problem came to."""

    passed: int = 0
    scored: int = 0
    unscored: int = 0
    num_cut: int = 0
    num_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)
    whys: Counter[str] = field(default_factory=Counter)
    """Of unscored samples."""
    refusal: str | None = None
    """Why the problem was not sampled at all."""

    @property
    def attempts(self) -> int:
        """Samples in all."""
        return self.scored + self.unscored

    def add(self, scored: Scored) -> None:
        """Count a sample."""
        self.num_cut += scored.is_cut
        self.num_tokens += scored.num_tokens
        self.texts.add(scored.text_digest)
        self.answers.add(scored.answer_digest)
        if scored.passed is None:
            self.unscored += 1
            self.whys[scored.why] += 1
            return
        self.scored += 1
        self.passed += scored.passed
        if scored.reward is not None:
            self.rewards.append(scored.reward)


class PoolScoring:
    """Scores problems; what the log holds already is not sampled again."""

    def __init__(
        self,
        problems: Sequence[Problem],
        generator: Generator,
        scorer: Scorer,
        log: ScoringLog,
        stages: Stages,
        *,
        seed: int = 0,
        advance: Advance = lambda amount, what, total: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`advance` is told how far each stage is."""
        self._problems, self._generator, self._scorer = problems, generator, scorer
        self._log, self._stages, self._seed = log, stages, seed
        self._advance, self._clock = advance, clock
        self._refusals = {problem.problem_id: generator.refusal(problem) for problem in problems}
        self._scored: dict[tuple[str, int], Scored] = {}
        for scored in log.scored:
            self._scored[scored.problem_id, scored.number] = scored
        self._batch: list[Scored] = []
        self._batch_since_s = 0.0

    def run(self) -> dict[str, Tally]:
        """Both stages; what came of each problem, by id. Raises CuratorError as generator and scorer do."""
        self._sample("screening", {problem.problem_id: self._stages.screen for problem in self._problems})
        if self._stages.most:
            self._sample("scoring", self.plan())
        return self.tallies()

    def plan(self) -> dict[str, int]:
        """Samples of each problem in both stages, from those of the first stage alone: a resumed run plans the same."""
        screened = self.tallies(below=self._stages.screen)
        priors = priors_of(self._problems, screened)
        return {
            problem.problem_id: self._stages.screen + self._more(priors[problem.domain], screened[problem.problem_id])
            for problem in self._problems
        }

    def tallies(self, below: int | None = None) -> dict[str, Tally]:
        """What is known of each problem, by id; `below`: from the samples of smaller numbers alone."""
        tallies = {name: Tally(refusal=refusal) for name, refusal in self._refusals.items()}
        for (problem_id, number), scored in self._scored.items():
            if problem_id in tallies and (below is None or number < below):
                tallies[problem_id].add(scored)
        return tallies

    def _more(self, prior: Beta, tally: Tally) -> int:
        if not tally.scored:
            # Nothing could be decided of its first answers, and nothing will be of further ones.
            return 0
        known = prior.after(tally.passed, tally.scored)
        return more_samples(known, target_sd=self._stages.target_sd, most=self._stages.most)

    def _sample(self, what: str, wanted: Mapping[str, int]) -> None:
        missing = [
            (problem, number)
            for problem in self._problems
            if self._refusals[problem.problem_id] is None
            for number in range(wanted[problem.problem_id])
            if (problem.problem_id, number) not in self._scored
        ]
        total = len(missing)
        requests = (
            SampleRequest(problem, number, sample_seed(self._seed, problem.problem_id, number))
            for problem, number in missing
        )
        num_out = 0
        try:
            for sample in self._generator.generate(requests):
                self._scorer.submit(sample)
                num_out += 1
                num_out -= self._take(self._scorer.poll(0.0), what, total)
            while num_out:
                num_out -= self._take(self._scorer.poll(DRAIN_WAIT_S), what, total)
        finally:
            self._flush()
        left = [key for problem, number in missing if (key := (problem.problem_id, number)) not in self._scored]
        if left:
            raise CuratorError(f"the generator gave no sample for {len(left)} of {total} requests, first {left[0]}")

    def _take(self, scores: Sequence[Score], what: str, total: int) -> int:
        for score in scores:
            scored = as_scored(score)
            self._scored[scored.problem_id, scored.number] = scored
            if not self._batch:
                self._batch_since_s = self._clock()
            self._batch.append(scored)
        if len(self._batch) >= BATCH_SAMPLES or (self._batch and self._clock() - self._batch_since_s > BATCH_S):
            self._flush()
        if scores:
            self._advance(len(scores), what, total)
        return len(scores)

    def _flush(self) -> None:
        if self._batch:
            self._log.append(self._batch)
            self._batch = []


def priors_of(problems: Iterable[Problem], tallies: Mapping[str, Tally]) -> dict[str, Beta]:
    """What the counts say of each domain."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for problem in problems:
        tally = tallies[problem.problem_id]
        counts.setdefault(problem.domain, []).append((tally.passed, tally.scored))
    return fit_priors(counts)


def sample_seed(seed: int, problem_id: str, number: int) -> int:
    """A seed of 63 bits for one sample, whatever else is sampled."""
    digest = hashlib.sha256(repr((seed, problem_id, number)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def as_scored(score: Score) -> Scored:
    """A sample as the log keeps it."""
    sample = score.sample
    problem = sample.request.problem
    return Scored(
        problem_id=problem.problem_id,
        number=sample.request.number,
        passed=score.passed,
        reward=score.reward,
        num_tokens=sample.num_tokens,
        is_cut=sample.is_cut,
        text_digest=_short(sample.text),
        answer_digest=_short(final_answer(sample.text, problem)),
        why=score.why,
    )


def with_verifier(problems: Iterable[Problem], verifier: str | None) -> Iterator[Problem]:
    """The problems, with another verifier than their own where one is named."""
    return (problem if verifier is None else replace(problem, verifier=verifier) for problem in problems)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
