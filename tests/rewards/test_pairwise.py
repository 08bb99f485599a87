"""Responses of a group, compared in pairs by a judge that may be biased, inconsistent, silent or gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.config_http import PairJudge
from stream_grpo.rewards.gathering import Gathering, Place
from stream_grpo.rewards.judging import Answer, EndpointError
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.pairwise import PairPreferences, chosen_pairs, verdict_of
from stream_grpo.types import Decision, RewardResult

ROW = ProblemRow(problem_id="p1", answer="42", verifier="http:pair", prompt="6*7=")


def compared(texts: str, prefers: Callable[[str, str], str | Exception], **more: Any) -> list[RewardResult]:
    """The results of one-letter answers, where the judge says `prefers(first, second)`."""
    url = "http://h/v1/chat/completions"
    settings = {"kind": "pairwise", "url": url, "model": "m", "prompt": "{first} or {second}", **more}

    async def post(body: Any) -> dict[str, Any]:
        first, _, second = body["messages"][0]["content"].split(" ")
        if isinstance(said := prefers(first, second), Exception):
            raise said
        return {"choices": [{"message": {"content": said}}]}

    judge = PairPreferences("http:pair", PairJudge.model_validate(settings))
    return asyncio.run(judge(ROW, [Answer(f"g/{text}", text) for text in texts], post))


def rewards(results: list[RewardResult]) -> list[float]:
    assert all(result.reward is not None for result in results)
    return [float(result.reward or 0.0) for result in results]


def earlier_letter(first: str, second: str) -> str:
    return "[[A]]" if first < second else "[[B]]"


def test_the_better_response_has_the_higher_reward() -> None:
    results = compared("cab", earlier_letter)
    c, a, b = rewards(results)
    assert 1 > a > b > c > 0
    assert b == pytest.approx(0.5)  # it won and lost two each
    assert [result.decision for result in results] == [Decision.FAIL, Decision.PASS, Decision.PASS]
    # a is in two pairs, each in two orders.
    assert results[1].components == {"won": 4.0, "lost": 0.0, "contradicted_pairs": 0.0, "circular_triads": 0.0}
    assert results[1].evidence.startswith("4 to 0 in 3 pairs of 3 responses, 0 against their other order")


def test_a_judge_that_prefers_a_place_prefers_nobody() -> None:
    results = compared("abcd", lambda first, second: "[[A]]")
    assert rewards(results) == pytest.approx([0.5] * 4)
    assert results[0].components["contradicted_pairs"] == 1.0
    assert results[0].components["circular_triads"] == 0.0


def test_preferences_in_a_circle_are_counted() -> None:
    beats = {("a", "b"), ("b", "c"), ("c", "a")}
    results = compared("abc", lambda first, second: "[[A]]" if (first, second) in beats else "[[B]]")
    assert rewards(results) == pytest.approx([0.5] * 3)
    assert results[0].components["circular_triads"] == 1.0
    assert "1 of 1 triads circular" in results[0].evidence


def test_ties_are_half_a_win_each() -> None:
    results = compared("ab", lambda first, second: "both fine: [[C]]")
    assert rewards(results) == [0.5, 0.5]
    assert (results[0].components["won"], results[0].components["lost"]) == (1.0, 1.0)
    assert results[0].components["contradicted_pairs"] == 0.0


def test_a_response_of_which_no_comparison_can_be_read_is_unknown() -> None:
    results = compared("abc", lambda first, second: "?" if "c" in first + second else earlier_letter(first, second))
    assert [result.decision for result in results] == [Decision.PASS, Decision.FAIL, Decision.UNKNOWN]
    assert "4 unreadable" in results[0].evidence


def test_comparisons_that_do_not_come_are_counted_until_they_are_half() -> None:
    def gone_for_c(first: str, second: str) -> str | Exception:
        return EndpointError("gone") if first == "c" else earlier_letter(first, second)

    # 2 of 6 comparisons begin with c.
    assert "2 without a reply" in compared("abc", gone_for_c)[0].evidence
    with pytest.raises(EndpointError, match="gone"):
        compared("ab", lambda first, second: EndpointError("gone") if first == "a" else "[[A]]")


def test_a_response_alone_cannot_be_compared() -> None:
    assert [result.decision for result in compared("a", earlier_letter)] == [Decision.UNKNOWN]
    assert compared("", earlier_letter) == []


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("[[A]]", 0), ("not [[A]], rather [[B]]", 1), ("[[C]]", 2), ("A", None), ("<think>[[A]]</think> [[B]]", 1)],
)
def test_the_last_verdict_counts(text: str, verdict: int | None) -> None:
    assert verdict_of(text, ("[[A]]", "[[B]]", "[[C]]")) == verdict


@given(num=st.integers(2, 12), seed=st.integers(0, 1000), data=st.data())
def test_pairs_are_different_even_and_connected(num: int, seed: int, data: st.DataObject) -> None:
    everything = chosen_pairs(num, None, seed=seed)
    assert len({frozenset(pair) for pair in everything}) == len(everything) == num * (num - 1) // 2
    num_pairs = data.draw(st.integers(1, len(everything)))
    pairs = chosen_pairs(num, num_pairs, seed=seed)
    assert pairs == everything[:num_pairs]
    played = Counter(place for pair in pairs for place in pair)
    assert max(played.values()) - min(played[place] for place in range(num)) <= 2
    if num_pairs >= num - 1:
        reached, todo = {0}, [0]
        while todo:
            here = todo.pop()
            near = {other for pair in pairs if here in pair for other in pair} - reached
            reached |= near
            todo += near
        assert reached == set(range(num))


def test_a_group_waits_for_its_last_response() -> None:
    gathering, place = Gathering(), Place("g0@1", 3)
    assert gathering.add(Answer("g0/2", "c"), place) == []
    assert gathering.add(None, place) == []  # one that the engine aborted
    assert gathering.add(Answer("g1/0", "x"), Place("g1@1", 2)) == []
    assert gathering.add(Answer("g0/0", "a"), place) == [Answer("g0/0", "a"), Answer("g0/2", "c")]
    # Its name is free again.
    assert gathering.add(Answer("g0/0", "a"), place) == []
    assert gathering.forget("g0@1") == 1
    assert gathering.forget("g0@1") == 0
    assert gathering.add(Answer("eval/0/0", "a"), None) == [Answer("eval/0/0", "a")]
