"""Tests of held-out pass@k, its intervals and the paired rise."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import EvaluationError
from stream_grpo.evaluation import (
    EvaluationRun,
    ProblemScore,
    as_dicts,
    evaluate,
    paired_rise,
    pass_at_k,
    summarize,
)
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.types import EndReason, Generation, GenerationRequest, PolicyVersion

VERSION = PolicyVersion(0, 3)


@dataclass(frozen=True)
class FakeProblem:
    problem_id: str
    answer: str = "7"
    domain: str = "add-1"
    verifier: str = "exact"
    extra: Mapping[str, Any] = field(default_factory=lambda: {"answer_prefix": "#"})


Respond = Callable[[GenerationRequest], Generation]


class FakeEngine:
    """Answers every request by a function, in reverse order, and keeps the requests."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.requests: list[GenerationRequest] = []

    def __call__(self, requests: Sequence[GenerationRequest]) -> Iterable[Generation]:
        self.requests = list(requests)
        return [self.respond(request) for request in reversed(requests)]


def saying(text: str, request: GenerationRequest) -> Generation:
    """A generation whose tokens are the characters of the text."""
    return Generation(
        request_id=request.request_id,
        token_ids=np.array([ord(c) for c in text], dtype=np.int32),
        logprobs=np.zeros(len(text), dtype=np.float32),
        versions=(VERSION,) * len(text),
        end_reason=EndReason.EOS,
    )


def run(problems: Sequence[FakeProblem], engine: FakeEngine, num_samples: int = 4, seed: int = 0) -> list[ProblemScore]:
    return evaluate(begin(problems, num_samples=num_samples, seed=seed), engine)


def begin(problems: Sequence[FakeProblem], **settings: Any) -> EvaluationRun[FakeProblem]:
    return EvaluationRun(
        problems,
        prompt_ids_of=lambda problem: [ord(c) for c in problem.problem_id],
        decode=lambda ids: "".join(map(chr, ids)),
        scoring=Scoring(Rewards()),
        **{"num_samples": 4, "seed": 0, "max_new_tokens": 64, **settings},
    )


def scores(rates: Mapping[str, int], domain: str = "d", num_scored: int = 4) -> list[ProblemScore]:
    return [ProblemScore(problem_id=i, domain=domain, num_scored=num_scored, num_passed=c) for i, c in rates.items()]


def test_pass_at_k_by_hand() -> None:
    # 2 of 4 pass. k = 1: 2/4. k = 2: 1 - C(2,2)/C(4,2) = 1 - 1/6. k = 3: no 3 failing samples exist, 1.
    assert pass_at_k(4, 2, 1) == pytest.approx(0.5)
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 2, 3) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(nck: tuple[int, int, int]) -> None:
    n, c, k = nck
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= c <= n"):
        pass_at_k(n, c, k)


def test_a_summary_weighs_every_problem_the_same() -> None:
    # add-1: rates 1 and 0.5, mean 0.75. add-2: rate 0 from 100 samples. All: (1 + 0.5 + 0) / 3 = 0.5.
    counts = scores({"a": 4, "b": 2}, "add-1") + scores({"c": 0}, "add-2", num_scored=100)
    summary = summarize(counts, seed=0, headline_domains=["add-1"])
    assert {name: s.pass_at_1 for name, s in summary.items()} == {
        "add-1": 0.75,
        "add-2": 0.0,
        "all": 0.5,
        "headline": 0.75,
    }
    assert {name: s.num_problems for name, s in summary.items()} == {"add-1": 2, "add-2": 1, "all": 3, "headline": 2}


def test_without_headline_domains_the_headline_is_over_all() -> None:
    summary = summarize(scores({"a": 4, "b": 2}, "x") + scores({"c": 0}, "y"), seed=0)
    assert summary["headline"].pass_at_1 == summary["all"].pass_at_1


def test_the_interval_is_that_of_a_mean_over_problems() -> None:
    # 400 problems, half at rate 1 and half at 0: standard error 0.5 / sqrt(400) = 0.025, 1.96 of it = 0.049.
    # However many samples a problem has, the interval is of problems, so it stays this wide.
    counts = scores({f"p{i}": 1000 * (i % 2) for i in range(400)}, num_scored=1000)
    score = summarize(counts, seed=0)["d"]
    assert score.pass_at_1 == 0.5
    assert score.low == pytest.approx(0.451, abs=0.006)
    assert score.high == pytest.approx(0.549, abs=0.006)


def test_a_summary_does_not_depend_on_order_and_depends_on_the_seed() -> None:
    counts = scores({f"p{i}": i % 5 for i in range(50)})
    assert summarize(counts, seed=1) == summarize(counts[::-1], seed=1)
    assert summarize(counts, seed=1)["d"].low != summarize(counts, seed=2)["d"].low


def test_unscored_samples_are_in_no_rate_and_a_domain_without_scores_has_none() -> None:
    counts = [
        ProblemScore(problem_id="a", domain="x", num_scored=2, num_passed=2, num_unscored=2),
        ProblemScore(problem_id="b", domain="y", num_scored=0, num_passed=0, num_unscored=4),
    ]
    summary = summarize(counts, seed=0)
    assert (summary["x"].pass_at_1, summary["x"].num_unscored) == (1.0, 2)
    assert math.isnan(summary["y"].pass_at_1)
    assert (summary["all"].pass_at_1, summary["all"].num_problems, summary["all"].num_unscored) == (1.0, 1, 6)
    plain = json.loads(json.dumps(as_dicts(summary), allow_nan=False))
    assert plain["y"] == {"pass_at_1": None, "low": None, "high": None, "num_problems": 0}
    assert plain["x"] == {"pass_at_1": 1.0, "low": 1.0, "high": 1.0, "num_problems": 1}


def test_names_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"without a problem: \['add-9'\]"):
        summarize(scores({"a": 1}), seed=0, headline_domains=["add-9"])
    with pytest.raises(ValueError, match="a row of the summary"):
        summarize(scores({"a": 1}, domain="all"), seed=0)


def test_a_rise_is_paired_by_problem() -> None:
    # Every problem rises by exactly 1 of 4 passes, so the mean is 0.25 and the interval a point.
    before, after = scores({"a": 0, "b": 2, "c": 3}), scores({"c": 4, "b": 3, "a": 1})
    rise = paired_rise(before, after, seed=0)
    assert (rise.mean, rise.low, rise.high, rise.num_problems) == (0.25, 0.25, 0.25, 3)


def test_the_rise_of_nothing_is_zero() -> None:
    same = scores({f"p{i}": i % 5 for i in range(20)})
    rise = paired_rise(same, same, seed=0)
    assert (rise.mean, rise.low, rise.high) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 99))
def test_the_interval_holds_the_mean_and_turns_with_the_sign(pairs: list[tuple[int, int]], seed: int) -> None:
    before = scores({f"p{i}": b for i, (b, _) in enumerate(pairs)})
    after = scores({f"p{i}": a for i, (_, a) in enumerate(pairs)})
    rise, fall = paired_rise(before, after, seed), paired_rise(after, before, seed)
    assert rise.low - 1e-12 <= rise.high
    assert rise.mean == pytest.approx(-fall.mean)
    assert rise.low == pytest.approx(-fall.high)


def test_problems_without_a_score_on_one_side_are_left_out_of_a_rise() -> None:
    before = [*scores({"a": 2}), ProblemScore(problem_id="b", domain="d", num_scored=0, num_passed=0)]
    rise = paired_rise(before, scores({"a": 3, "b": 4}), seed=0)
    assert (rise.mean, rise.num_problems) == (0.25, 1)
    with pytest.raises(ValueError, match="no problem was scored"):
        paired_rise(before[1:], scores({"b": 4}), seed=0)


def test_different_or_repeated_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="1 are on one side only, first 'b'"):
        paired_rise(scores({"a": 1}), scores({"a": 1, "b": 1}), seed=0)
    with pytest.raises(ValueError, match="twice"):
        paired_rise(scores({"a": 1}) * 2, scores({"a": 1}) * 2, seed=0)


def test_an_evaluation_counts_passes_per_problem() -> None:
    # The last sample of every problem answers 8; the gold is 7.
    engine = FakeEngine(lambda request: saying("#8" if request.request_id.endswith("/3") else "1+6=07,#7", request))
    (first, second) = run([FakeProblem("a"), FakeProblem("b", domain="add-2")], engine)
    assert (first.problem_id, first.domain, first.num_scored, first.num_passed) == ("a", "add-1", 4, 3)
    assert (second.problem_id, second.domain, second.num_unscored) == ("b", "add-2", 0)
    assert first.num_tokens == 3 * len("1+6=07,#7") + len("#8")
    assert [request.prompt_ids for request in engine.requests[:5]] == [(ord("a"),)] * 4 + [(ord("b"),)]
    assert {request.max_new_tokens for request in engine.requests} == {64}


def test_seeds_depend_on_seed_problem_and_sample_alone() -> None:
    engine = FakeEngine(lambda request: saying("#7", request))

    def seeds(ids: str, seed: int = 0) -> dict[str, list[int]]:
        run([FakeProblem(i) for i in ids], engine, num_samples=2, seed=seed)
        found: dict[str, list[int]] = {}
        for request in engine.requests:
            found.setdefault(chr(request.prompt_ids[0]), []).append(request.seed)
        return found

    assert seeds("ab") == seeds("ba")
    assert seeds("abc")["a"] == seeds("a")["a"]
    assert seeds("a", seed=1) != seeds("a", seed=0)
    drawn = list(itertools.chain(*seeds("abcdef").values()))
    assert len(set(drawn)) == 12
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_unscored_samples_are_counted_apart() -> None:
    def respond(request: GenerationRequest) -> Generation:
        aborted = request.request_id.endswith("/0")
        return replace(saying("#7", request), end_reason=EndReason.ABORT if aborted else EndReason.EOS)

    (score,) = run([FakeProblem("a")], FakeEngine(respond))
    assert (score.num_scored, score.num_passed, score.num_unscored, score.pass_rate) == (3, 3, 1, 1.0)


def second_version_inside(request: GenerationRequest) -> Generation:
    return replace(saying("#7", request), versions=(VERSION, PolicyVersion(0, 4)))


def second_version_between(request: GenerationRequest) -> Generation:
    step = int(request.request_id.rpartition("/")[2])
    return replace(saying("#7", request), versions=(PolicyVersion(0, step),) * 2)


def kept_cache(request: GenerationRequest) -> Generation:
    return replace(saying("#7", request), mixed_context_from=1)


@pytest.mark.parametrize("respond", [second_version_inside, second_version_between, kept_cache])
def test_more_than_one_version_is_an_error(respond: Respond) -> None:
    with pytest.raises(EvaluationError, match="one policy version"):
        run([FakeProblem("a")], FakeEngine(respond))


def test_an_evaluation_of_given_weights_takes_no_others() -> None:
    evaluation = begin([FakeProblem("a")], version=PolicyVersion(0, 2))
    with pytest.raises(EvaluationError, match=r"one policy version; up to 'eval/0/0' it saw 0\.2, 0\.3"):
        evaluation.take(saying("#7", evaluation.requests[0]))


def test_an_evaluation_goes_on_one_generation_at_a_time() -> None:
    evaluation = begin([FakeProblem("a"), FakeProblem("b", domain="add-2")], num_samples=1)
    first, second = evaluation.requests
    evaluation.take(saying("#7", second))
    assert (list(evaluation.awaited), evaluation.num_tokens) == (["eval/0/0"], 2)
    with pytest.raises(EvaluationError, match="1 of 2 generations are missing, first 'eval/0/0'"):
        evaluation.summary()
    evaluation.take(saying("so #8", first))
    with pytest.raises(EvaluationError, match="2 of 2 scores are missing, first 'eval/1/0'"):
        evaluation.summary()
    evaluation.drain()
    assert (list(evaluation.awaited), evaluation.num_tokens) == ([], 7)
    # a is wrong and b is right: 0 and 1, over both 1/2.
    rates = {name: row["pass_at_1"] for name, row in evaluation.summary().items()}
    assert rates == {"add-1": 0.0, "add-2": 1.0, "all": 0.5, "headline": 0.5}


def test_missing_and_unasked_generations_are_errors() -> None:
    with pytest.raises(EvaluationError, match="was not asked for, or came twice"):
        run([FakeProblem("a")], FakeEngine(lambda request: replace(saying("#7", request), request_id="eval/0/0")))

    class Losing(FakeEngine):
        def __call__(self, requests: Sequence[GenerationRequest]) -> Iterable[Generation]:
            return list(super().__call__(requests))[1:]

    with pytest.raises(EvaluationError, match="1 of 4 generations are missing, first 'eval/0/3'"):
        run([FakeProblem("a")], Losing(lambda request: saying("#7", request)))


def test_a_problem_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        run([FakeProblem("a"), FakeProblem("a")], FakeEngine(lambda request: saying("#7", request)))
