"""A tool call in the text of an action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.environments.calls import Call, CallFormat, Malformed, find_call

JSON = CallFormat(tools={"sql": "query", "python": "code"})
PLAIN = CallFormat(open="[", close="]", body="plain", tools={"python": "code"})


def test_an_action_without_a_mark_has_no_call() -> None:
    assert find_call("the answer is #51", JSON) is None


def test_a_call_is_read_whatever_stands_around_it() -> None:
    text = 'I ask: <tool_call>{"name": "sql", "arguments": {"query": "select 1"}}</tool_call> and wait'
    assert find_call(text, JSON) == Call("sql", {"query": "select 1"})


def test_a_plain_call_is_the_one_argument_of_the_one_tool() -> None:
    assert find_call("[12+39]", PLAIN) == Call("python", {"code": "12+39"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{}", "not closed"),
        ("<tool_call>{</tool_call>", "no JSON"),
        ("<tool_call>[1]</tool_call>", "no object with a name"),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "no tool is called 'rm'"),
        ('<tool_call>{"name": "sql", "arguments": 3}</tool_call>', "the arguments are no object"),
        ('<tool_call>{"name": "sql", "arguments": {"code": "1"}}</tool_call>', "needs the argument 'query'"),
        ('<tool_call>{"name": "sql"}</tool_call><tool_call>', "more than one call"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(text: str, reason: str) -> None:
    found = find_call(text, JSON)
    assert isinstance(found, Malformed)
    assert reason in found.reason


@given(st.text())
def test_no_text_breaks_the_reading(text: str) -> None:
    find_call(text, JSON)
    find_call(f"<tool_call>{text}</tool_call>", JSON)
    find_call(f"[{text}]", PLAIN)


def test_marks_that_are_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="neither can be empty"):
        CallFormat(open="")
