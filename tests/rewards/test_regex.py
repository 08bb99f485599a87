"""Tests of the verifier `regex`."""

import pytest

from stream_grpo.rewards.regex import regex
from stream_grpo.types import Decision
from tests.rewards.problem import FakeProblem


def decide(response: str, answer: str = "", **extra: object) -> Decision:
    return regex(response, FakeProblem(answer=answer, verifier="regex", extra=extra)).decision


def test_a_pattern_is_searched_anywhere_unless_it_must_match_all() -> None:
    assert decide("it is 42 now", pattern=r"\b42\b") is Decision.PASS
    assert decide("it is 421", pattern=r"\b42\b") is Decision.FAIL
    assert decide("it is 42", pattern="42", match="full") is Decision.FAIL
    assert (
        decide(" 42\n", pattern="42", match="full") is Decision.PASS
    )  # white space around the response does not count


def test_the_answer_is_the_pattern_where_the_row_has_no_other() -> None:
    assert decide("abc", "a.c") is Decision.PASS
    assert decide("abc", "x", pattern="a.c") is Decision.PASS


def test_flags_are_letters() -> None:
    assert decide("YES", pattern="yes") is Decision.FAIL
    assert decide("so\nYES", pattern="^yes$", flags="im") is Decision.PASS


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pattern": ""}, "no pattern"),
        ({"pattern": "("}, "unterminated subpattern"),
        ({"pattern": "a", "match": "partial"}, "'search' or 'full'"),
        ({"pattern": "a", "flags": "z"}, "letters i, m, s, x"),
    ],
)
def test_a_row_without_a_sound_pattern_is_refused(extra: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide("a", **extra)


def test_the_evidence_shows_the_pattern_and_what_it_matched() -> None:
    problem = FakeProblem(answer="", extra={"pattern": "4."})
    assert regex("it is 42", problem).evidence == "pattern '4.' (search) matches '42'"
    assert regex("it is 5", problem).evidence == "pattern '4.' (search) does not match 'it is 5'"
