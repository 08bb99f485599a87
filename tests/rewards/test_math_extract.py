r"""Tests of where the final answer of a response is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.rewards.math_extract import closing_braces, extract, find_boxes


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        (r"It is \boxed{5}. No wait, \boxed{6}.", ("6",)),
        (r"\boxed{1}, \boxed{2}", ("1", "2")),
        ("x=\\boxed{1}\ny=\\boxed{2}", ("1", "2")),  # one line after the other is one sentence
        ("$$\\boxed{1}$$\n\nand\n\n$$\\boxed{2}$$", ("1", "2")),
        ("Step 1: \\boxed{1}\n\nStep 2: \\boxed{2}", ("2",)),  # a paragraph ends a sentence
        (r"about \boxed{0.5}, i.e. \boxed{1/2}", ("0.5", "1/2")),
        (r"\boxed{1.5} or \boxed{2.5}", ("1.5", "2.5")),  # a decimal point ends none
        (r"\boxed{5}. Hmm \boxed{}", ("5",)),
        (r"\boxed{5} then \boxed{6", ()),
        (r"\boxed{}", ()),
        (r"\boxed 7", ("7",)),
        (r"\boxed{\boxed{7}}", ("7",)),
        (r"\boxed{\{1,2\}}", (r"\{1,2\}",)),
    ],
)
def test_boxes_of_the_last_sentence_count(response: str, parts: tuple[str, ...]) -> None:
    assert extract(response).parts == parts


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        (r"Put it in \boxed{}. The answer is 5.", ("5",)),
        (r"The answer is 5. So \boxed{6}", ("6",)),
        (r"The answer is $\frac{1}{2}$. I hope it is correct.", (r"\frac{1}{2}",)),
        ("The answer is 3.5.", ("3.5",)),
        ("**Final Answer:** **73**", ("73",)),
        ("**Final Answer**\n\n73", ("73",)),
        ("### Final Answer\n$73$\n", ("73",)),
        ("a\n#### 1,234\n", ("1,234",)),
        ("The final answer is: $x = 5$", ("x = 5",)),
        ("Answer: $5$ and $7$", ("5", "7")),
        ("The answer is $5$ apples.", (r"5 \text{ apples}",)),
        ("The answer is 42 because 6*7=42", ("42",)),
        ("the answer is 5. The answer is 6", ("6",)),
        ("The answer is therefore\n$$\\frac{1}{2}$$", (r"\frac{1}{2}",)),
        ("The answer to the question is 12.", ("12",)),
        ("The answer is either 8 or 9.", ("8 or 9",)),
        ("The answer is:", ()),
        ("I got 42 in the end, after long work.\nSo yes", ()),
        ("42", ("42",)),
    ],
)
def test_without_a_box_the_last_marked_answer_counts(response: str, parts: tuple[str, ...]) -> None:
    assert extract(response).parts == parts


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        ("<answer>42</answer>", ("42",)),
        ("<answer> \\boxed{4} </answer>", ("4",)),
        ("<answer>5</answer> and <answer>6</answer>", ("6",)),
        (r"<answer>5</answer> \boxed{6}", ("5",)),
        ("<answer>42", ()),
        ("<answer>5</answer> <answer>6", ()),
        ("<think>\\boxed{5}</think> The answer is 7.", ("7",)),
        ("\\boxed{5}</think>\\boxed{6}", ("6",)),
        ("<think>\\boxed{5}", ()),
    ],
)
def test_answer_tags_come_before_boxes_and_thinking_does_not_count(response: str, parts: tuple[str, ...]) -> None:
    assert extract(response).parts == parts


def test_a_marked_answer_at_the_cut_is_none_but_a_closed_box_is_one() -> None:
    assert extract("The answer is 4", is_cut=True).parts == ()
    assert extract("The answer is 4\nand", is_cut=True).parts == ("4",)
    assert extract(r"\boxed{4} and", is_cut=True).parts == ("4",)


def test_braces_are_matched_and_escaped_ones_are_characters() -> None:
    assert closing_braces(r"{a{b}\}c}d") == {0: 8, 2: 4}
    assert closing_braces("}{a{b}") == {3: 5}
    assert [box.content for box in find_boxes(r"\boxed{a} \boxedtext{b} \fbox {c}")] == ["a", "c"]


@given(st.text())
def test_any_text_has_an_answer_or_a_reason(text: str) -> None:
    extraction = extract(text)
    assert extraction.source
    assert all(part.strip() for part in extraction.parts)
