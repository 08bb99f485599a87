"""Tests of what pool and worker tell each other, of the golds as responses, and of the times."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.rewards.gold import gold_response
from stream_grpo.rewards.messages import (
    NOTHING,
    ProblemRow,
    Progress,
    decode,
    decode_batch,
    encode_batch,
    encode_task,
    result_from_plain,
    result_to_plain,
)
from stream_grpo.rewards.timings import Timings
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.types import Decision, RewardResult

ROW = ProblemRow(problem_id="p", answer="7", verifier="exact")


@given(st.lists(st.tuples(st.text(), st.booleans()), max_size=4))
def test_a_batch_is_one_line_and_comes_back_as_it_was(tasks: list[tuple[str, bool]]) -> None:
    line = encode_batch(12, [encode_task(text, ROW, is_cut) for text, is_cut in tasks])
    assert line.count(b"\n") == 1
    assert [(task["response"], task["is_cut"]) for task in decode_batch(line, 12)] == tasks
    assert all(ProblemRow(**task["problem"]) == ROW for task in decode_batch(line, 12))


def test_a_line_for_another_and_the_rest_of_a_line_are_no_batch() -> None:
    line = encode_batch(12, [encode_task("text", ROW, False)])
    assert decode_batch(line, 13) == []
    assert decode_batch(line[7:], 12) == []
    assert decode(b"[1]") == {}


def test_a_result_comes_back_as_it_was() -> None:
    result = RewardResult(
        decision=Decision.UNKNOWN, reward=None, verifier="v", verifier_version="2", components={"a": 0.5}, evidence="e"
    )
    assert result_from_plain(result_to_plain(result)) == result


def test_progress_is_seen_through_the_same_page() -> None:
    pool = Progress()
    worker = Progress(pool.file)
    assert pool.read() == NOTHING
    worker.loads(3)
    assert pool.read() == (3, 0.0)
    worker.checks(4)
    assert pool.read().place == 4
    assert pool.read().started_at > 0
    worker.idle()
    assert pool.read() == NOTHING
    pool.close()


@pytest.mark.parametrize(
    ("verifier", "answer", "extra"),
    [("exact", "7", {}), ("exact", "7", {"answer_prefix": "#"}), ("math", "\\frac{1}{2}", {}), ("choice", "B", {})],
)
def test_the_gold_as_a_response_passes(verifier: str, answer: str, extra: dict[str, str]) -> None:
    row = ProblemRow(problem_id="p", answer=answer, verifier=verifier, extra=extra)
    assert VERIFIERS[verifier].check(gold_response(row), row, False).decision is Decision.PASS


@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ({"canonical_solution": "  return 1"}, "def f():\n  return 1"),
        ({"canonical_solution": "  return 1", "program_prefix": "def f():\n"}, "  return 1"),
        ({"solution": "print(1)"}, "print(1)"),
        ({}, "answer"),
    ],
)
def test_the_gold_of_code_is_its_reference_solution(extra: dict[str, str], program: str) -> None:
    row = ProblemRow(problem_id="p", answer="answer", verifier="code", extra=extra, prompt="def f():\n")
    assert gold_response(row) == f"```python\n{program}\n```"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200), st.floats(1, 99))
def test_a_percentile_is_the_nearest_rank(times: list[float], percent: float) -> None:
    timings = Timings()
    for seconds in times:
        timings.add(seconds)
    found = timings.percentile_s(percent)
    assert found in times
    # At least `percent` of the times are no longer, and fewer than that are shorter.
    assert sum(t <= found for t in times) >= math.floor(percent * len(times) / 100)
    assert sum(t < found for t in times) < percent * len(times) / 100


def test_the_mean_is_plain_for_few_times_and_fades_for_many() -> None:
    timings = Timings()
    for seconds in (1.0, 2.0, 6.0):
        timings.add(seconds)
    assert timings.mean_s == pytest.approx(3.0)
    for _ in range(200):
        timings.add(1.0)
    # 3 -> 1 by at most a factor 0.95 for each of the last 183 times: 2 * 0.95 ** 183 < 2e-4.
    assert timings.mean_s == pytest.approx(1.0, abs=2e-4)
