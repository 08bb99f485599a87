"""Tests of the verifier `choice`."""

import pytest

from stream_grpo.rewards.choice import choice
from stream_grpo.types import Decision
from tests.rewards.problem import FakeProblem


def decide(response: str, gold: str = "B", *, is_cut: bool = False) -> Decision:
    return choice(response, FakeProblem(answer=gold, verifier="choice"), is_cut).decision


@pytest.mark.parametrize(
    "response",
    [
        r"So \boxed{B}.",
        r"So \boxed{\text{(B)}}.",
        r"So \boxed{\textbf{(B)}\ 42}.",
        r"First \boxed{A}. No, it is \boxed{B}.",  # a box in a later sentence replaces
        "<answer>B</answer>",
        "<answer> (b) </answer>",
        "The answer is (B).",
        "The answer is B because A is wrong.",
        "**Answer:** **B**",
        "Answer: B) the second",
        "The correct answer is option B.",
        "#### B",
        "A is too small. Hence (B) fits.",
        "I choose option B",
        "So it is\nB.",
        "<think>\\boxed{A}</think> The answer is B",
        "B",
    ],
)
def test_the_letter_that_the_response_settles_on_counts(response: str) -> None:
    assert decide(response) is Decision.PASS


@pytest.mark.parametrize(
    "response",
    [
        r"So \boxed{A}.",
        r"It is \boxed{A} or \boxed{B}.",  # hedging
        "The answer is A or B.",
        "The answer is (A), (B)",
        "Either (A) or (B) fits.",
        "The answer is B. The answer is C.",  # the last one counts
        r"So \boxed{B",
        "Bananas are yellow.",
        r"\boxed{Banana}",
        "The answer is between the two.",
        "",
    ],
)
def test_other_letters_hedging_and_none_fail(response: str) -> None:
    assert decide(response) is Decision.FAIL


def test_an_article_is_not_a_choice() -> None:
    assert decide("The answer is a prime number.", "A") is Decision.FAIL
    assert decide("The answer is I think C", "I") is Decision.FAIL
    assert decide("The answer is A.", "A") is Decision.PASS


@pytest.mark.parametrize("gold", ["B", "(B)", "B.", r"\text{B}", "b"])
def test_the_gold_may_wear_brackets(gold: str) -> None:
    assert decide(r"\boxed{B}", gold) is Decision.PASS


def test_a_gold_of_several_letters_needs_all_of_them() -> None:
    for gold in ("A, C", "AC", "A and C"):
        assert decide(r"\boxed{A, C}", gold) is Decision.PASS
        assert decide(r"\boxed{CA}", gold) is Decision.PASS
        assert decide(r"\boxed{A}", gold) is Decision.FAIL
        assert decide(r"\boxed{A, B, C}", gold) is Decision.FAIL


def test_a_marked_answer_that_was_cut_fails_since_more_might_have_come() -> None:
    assert decide("The answer is B", is_cut=True) is Decision.FAIL
    assert decide("The answer is B\nand so", is_cut=True) is Decision.PASS


@pytest.mark.parametrize(("gold", "message"), [("", "empty answer"), ("42", "a letter"), ("maybe", "a letter")])
def test_a_gold_that_is_no_letter_is_refused(gold: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide("B", gold)


def test_the_evidence_shows_both_sides() -> None:
    result = choice(r"\boxed{C}", FakeProblem(answer="B"))
    assert result.evidence == "answer 'C', expected 'B'"
