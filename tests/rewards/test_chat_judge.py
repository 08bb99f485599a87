"""The score in a judge's answer, and several votes as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stream_grpo.config_http import ChatJudge
from stream_grpo.rewards.chat_judge import ChatGrades, read_score
from stream_grpo.rewards.judging import Answer, EndpointError, filled
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.types import Decision, RewardResult

ROW = ProblemRow(
    problem_id="p1", answer="42", verifier="http:j", prompt="6*7=", extra={"rubric": "be {strict}", "level": 3}
)


def judge(**more: Any) -> ChatJudge:
    return ChatJudge.model_validate({"kind": "chat", "url": "http://h/v1/chat/completions", "model": "m", **more})


def graded(*votes: str | Exception | None, **more: Any) -> RewardResult:
    """The result of a judge that says these votes."""
    left = list(votes)

    async def post(body: Any) -> dict[str, Any]:
        vote = left.pop(0)
        if isinstance(vote, Exception):
            raise vote
        return {"choices": [{"message": {"content": vote}}]}

    grades = ChatGrades("http:j", judge(num_votes=len(votes), **more))
    (result,) = asyncio.run(grades(ROW, [Answer("a", "it is 42")], post))
    return result


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7", 7.0),
        ("Step 1 is fine, step 2 is not.\n\n**6.5**", 6.5),
        ("Score: 8/10", 8.0),
        ("I give it 9 out of 10.", 9.0),
        ("8/10 for form, and in all 3", 3.0),
        ("<think>10, surely 10</think> 2", 2.0),
        ("Grade: 10.", 10.0),
        # No score: none of the scale, of another scale, or no number.
        ("11", None),
        ("-1", None),
        ("8/100", None),
        ("4 out of 5", None),
        ("very good", None),
        ("", None),
        ("<think>10", 10.0),
        ("gpt4", None),
        ("version 1.2.3", None),
    ],
)
def test_the_last_number_is_the_score(text: str, score: float | None) -> None:
    assert read_score(text, judge()) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("grade=3 and grade=4", 4.0),
        ("grade=good", 10.0),
        ("grade=unheard", None),
        ("3", None),
        ("grade=99", None),
    ],
)
def test_a_pattern_finds_a_number_or_a_label(text: str, score: float | None) -> None:
    assert read_score(text, judge(read="pattern", pattern=r"grade=(\w+)", labels={"good": 10})) == score


def test_a_pattern_that_goes_astray_is_no_score() -> None:
    hostile = "a" * 64 + "!"
    assert read_score(hostile, judge(read="pattern", pattern=r"((?:a|aa)+)$")) is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 5}', 5.0),
        ('```json\n{"why": {"score": 1, "x": {}}, "score": 7}\n```', 7.0),
        ('{"score": 2} then {"score": 3} then {"other": 1}', 3.0),
        ('{"score": "good"}', 10.0),
        ('{"score": "4"}', 4.0),
        ('{"score": true}', None),
        ('{"score": null}', None),
        ('{"score": NaN}', None),
        ('{"score": 5', None),
        ("{" * 100_000, None),
        ('{"a":' * 50_000, None),
    ],
)
def test_a_field_of_the_last_json_object_that_has_it_is_the_score(text: str, score: float | None) -> None:
    assert read_score(text, judge(read="json", field="score", labels={"good": 10})) == score


def test_one_vote_is_scaled_and_shown() -> None:
    result = graded("I think it deserves 8")
    # 8 of 0 to 10, and a pass from 5 on.
    assert (result.decision, result.reward, result.verifier) == (Decision.PASS, 0.8, "http:j")
    assert result.components == {"vote_0": 8.0}
    assert result.evidence == "votes 8 of 1: 'I think it deserves 8'"
    assert result.verifier_version == judge(num_votes=1).version


def test_a_score_below_the_threshold_fails_with_its_reward() -> None:
    result = graded("6", pass_score=7)
    assert (result.decision, result.reward) == (Decision.FAIL, 0.6)


@pytest.mark.parametrize(
    ("combine", "reward", "decision"),
    [
        ("mean", 0.5, Decision.PASS),  # (1 + 6 + 8) / 3 = 5
        ("median", 0.6, Decision.PASS),
        ("majority", 1.0, Decision.PASS),  # 6 and 8 pass
    ],
)
def test_votes_are_combined(combine: str, reward: float, decision: Decision) -> None:
    result = graded("1", "6", "8", combine=combine)
    assert (result.decision, result.reward) == (decision, reward)
    assert result.components == {"vote_0": 1.0, "vote_1": 6.0, "vote_2": 8.0}


def test_as_many_for_as_against_is_unknown() -> None:
    assert graded("1", "9", combine="majority").decision is Decision.UNKNOWN


@pytest.mark.parametrize("vote", ["no idea", "", None, "12"])
def test_what_cannot_be_read_is_unknown_and_never_0(vote: str | None) -> None:
    result = graded(vote)
    assert (result.decision, result.reward) == (Decision.UNKNOWN, None)
    assert result.evidence.startswith("no score in 1 of 1 votes")


def test_more_than_half_of_the_votes_must_be_read() -> None:
    assert graded("4", "8", "?").reward == pytest.approx(0.6)  # (4 + 8) / 2
    assert graded("4", "?", "?").decision is Decision.UNKNOWN
    assert graded("4", "?").decision is Decision.UNKNOWN  # exactly half
    assert graded("4", "8", EndpointError("gone")).reward == pytest.approx(0.6)


def test_votes_that_do_not_come_are_no_opinion_of_the_judge() -> None:
    with pytest.raises(EndpointError, match="gone"):
        graded("4", EndpointError("gone"), EndpointError("gone"))


def test_a_reply_of_another_form_is_an_error_that_says_what_it_has() -> None:
    async def post(body: Any) -> dict[str, Any]:
        return {"error": "x", "object": "y"}

    grades = ChatGrades("http:j", judge())
    with pytest.raises(EndpointError, match=r"no choices\[0\].message.content; it has 'error', 'object'"):
        asyncio.run(grades(ROW, [Answer("a", "42")], post))


def test_the_evidence_stays_short_and_shows_how_the_judge_ends() -> None:
    result = graded(*["x" * 100_000 + " 7"] * 8)
    assert len(result.evidence) < 1000
    assert result.evidence.count(" 7'") == 8


def test_the_request_is_that_of_a_chat_completion() -> None:
    sent: list[Any] = []

    async def post(body: Any) -> dict[str, Any]:
        sent.append(body)
        return {"choices": [{"message": {"content": "1"}}]}

    chosen = judge(prompt="{row.rubric}: {response}", system="You grade.", body={"top_p": 0.9, "max_tokens": 5})
    asyncio.run(ChatGrades("http:j", chosen)(ROW, [Answer("a", "{gold} 42")], post))
    assert sent == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "You grade."},
                {"role": "user", "content": "be {strict}: {gold} 42"},
            ],
            "temperature": 0.0,
            "max_tokens": 5,  # the user's own field wins
            "top_p": 0.9,
        }
    ]


def test_what_a_text_brings_along_is_not_filled_in() -> None:
    # A response that names a placeholder gets nothing: the gold would be for it to quote.
    assert filled('{"a": 1} {prompt} {response}', ROW, response="{gold} {prompt}") == '{"a": 1} 6*7= {gold} {prompt}'


def test_chat_messages_stand_with_their_roles() -> None:
    row = ProblemRow(problem_id="p", answer="", verifier="v", prompt=[{"role": "user", "content": "6*7="}])
    assert filled("{prompt}", row) == "user: 6*7="


def test_a_column_that_the_row_lacks_is_named() -> None:
    with pytest.raises(
        ValueError, match="problem p1 has no column 'rubrik' for the judge's prompt; it has level, rubric"
    ):
        filled("{row.rubrik}", ROW)
