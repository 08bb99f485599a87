"""Held-out pass@k by domain, and pass@1 by the length of answers, by hand."""

import pytest

from stream_grpo.evaluation import ProblemScore
from stream_grpo.heldout_tables import by_length, length_buckets, pass_at_powers, report_lines


def score(problem_id: str, num_passed: int, domain: str = "d", **more: int) -> ProblemScore:
    return ProblemScore(problem_id=problem_id, domain=domain, num_passed=num_passed, **{"num_scored": 4, **more})


def test_pass_at_k_is_the_mean_over_problems_by_domain() -> None:
    # 2 of 4: pass@1 1/2, pass@2 1 - C(2,2)/C(4,2) = 5/6, pass@4 1. 0 of 4: 0 always.
    found = pass_at_powers([score("a", 2), score("b", 0), score("c", 4, "e")], seed=0, headline_domains=["d"])
    assert {k: row["value"] for k, row in found["d"].items()} == pytest.approx({"1": 1 / 4, "2": 5 / 12, "4": 1 / 2})
    assert found["headline"]["2"]["value"] == found["d"]["2"]["value"]
    assert found["all"]["1"]["value"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found["d"]["1"]["low"] == 0.0
    assert found["d"]["1"]["high"] == 0.5


def test_a_problem_with_fewer_scored_samples_than_k_is_left_out_of_pass_at_k() -> None:
    found = pass_at_powers([score("a", 2), score("b", 1, num_scored=1, num_unscored=3)], seed=0)["all"]
    assert {k: row["num_problems"] for k, row in found.items()} == {"1": 2, "2": 1, "4": 1}
    assert found["2"]["value"] == pytest.approx(5 / 6)
    unscored = pass_at_powers([score("a", 4), score("b", 0, "e", num_scored=0, num_unscored=4)], seed=0)
    assert unscored["e"]["1"] == {"value": None, "low": None, "high": None, "num_problems": 0}


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, "0-1"), (4, "0-1"), (5, "2"), (9, "3-4"), (128, "17-32"), (129, "33-64")]
)
def test_the_bucket_is_that_of_the_mean_length_of_all_samples(tokens: int, bucket: str) -> None:
    # Of 4 samples: 5 tokens are 1.25 each, above 1; 129 are 32.25 each, above 32.
    assert length_buckets([score("a", 2, num_scored=3, num_unscored=1, num_tokens=tokens)]) == {"a": bucket}


def test_lengths_of_one_evaluation_sort_the_problems_of_another() -> None:
    before = [score("a", 0, num_tokens=40), score("b", 4, num_tokens=160), score("c", 2, num_tokens=160)]
    after = [score("a", 4, num_tokens=400), score("b", 4, num_tokens=4), score("c", 4), score("new", 0)]
    buckets = length_buckets(before)
    rows = {when: by_length(scores, buckets, seed=0) for when, scores in (("before", before), ("after", after))}
    # 10 tokens a sample: 9 to 16; 40: 33 to 64.
    assert list(rows["before"]) == list(rows["after"]) == ["9-16", "33-64"]
    assert [row["pass_at_1"] for row in rows["before"].values()] == [0.0, 0.75]
    assert [row["pass_at_1"] for row in rows["after"].values()] == [1.0, 1.0]
    assert [row["num_problems"] for row in rows["after"].values()] == [1, 2]


def test_the_end_of_a_run_says_both_before_and_after() -> None:
    before, after = [score("a", 2, num_tokens=40)], [score("a", 4, num_tokens=40)]
    buckets = length_buckets(before)
    summary = {
        "heldout_pass_at_k": {"before": pass_at_powers(before, 0), "after": pass_at_powers(after, 0)},
        "heldout_by_length": {"before": by_length(before, buckets, 0), "after": by_length(after, buckets, 0)},
    }
    # pass@2 of 2 of 4 is 5/6.
    assert report_lines(summary) == [
        "pass     @1 50.0% to 100.0%, @2 83.3% to 100.0%, @4 100.0% to 100.0%",
        "lengths  in tokens before: 9-16 50.0% to 100.0%",
    ]
    assert report_lines({"heldout_pass_at_k": None, "heldout_by_length": None}) == []
