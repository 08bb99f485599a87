"""What a policy may write to hang the search for its answer: the work grows as the text does, and no faster."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.rewards import choice, math_extract
from tests.rewards.problem import FakeProblem

PIECES = (
    *("\\boxed{", "\\boxed", "\\fbox{", "{", "}", "\\", "A", "B, ", "(C)", " ", "\n", "\n\n", "~", "$", "$$", "\\("),
    *("\\[", "\\)", "<answer>", "</answer>", "</think>", "the answer is ", "answer: ", "answer to ", "final "),
    *("#### ", "**", ". ", "e.g. ", "!", ", ", "and ", " because", "\\text{", "option "),
)
SURROUNDED = [
    ("\\boxed{A}", "!", "\\boxed{B}"),
    ("\\boxed{A}", " e.g. ", "\\boxed{B}"),
    ("\\boxed{A}", "\n", "x\\boxed{B}"),
    ("\\boxed{A}\n\n", "$ ", "x\\boxed{B}"),
    ("\\boxed{", "\\boxed{", "A" + "}" * 4096),
    ("\\boxed{A", " ", "x}"),
    ("", "<answer>", "</answer>"),
    ("answer is A", " ", "x"),
    ("answer is $A$", " ", "x $B$"),
    ("answer is ", "etc. ", ""),
    ("answer is ", "\\[", ""),
]


class Counted:
    """A pattern that counts the characters it is given to look at; how often it goes back over them is not seen."""

    def __init__(self, pattern: re.Pattern[str], work: list[int]) -> None:
        self._pattern, self._work = pattern, work

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pattern, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            text = arguments[1] if name == "sub" else arguments[0]
            if name != "sub" and len(arguments) > 1:
                text = text[arguments[1] : arguments[2] if len(arguments) > 2 else None]
            found = method(*arguments, **options)
            # What comes back from a search says how far it went.
            self._work[0] += found.end() - found.pos if isinstance(found, re.Match) else len(text)
            return found

        return counted if callable(method) else method


@contextmanager
def counting(*modules: ModuleType) -> Iterator[list[int]]:
    """Counts the characters given to the patterns of these modules, and the lines that they run."""
    work, kept = [0], [(module, dict(vars(module))) for module in modules]
    files = {module.__file__ for module in modules}

    def line(frame: FrameType, event: str, _: Any) -> Any:
        work[0] += event == "line"
        return line

    for module, names in kept:
        for name, value in names.items():
            if isinstance(value, re.Pattern):
                setattr(module, name, Counted(value, work))
            elif name == "_MATH_CLOSING":
                setattr(module, name, {key: Counted(pattern, work) for key, pattern in value.items()})
    before = sys.gettrace()
    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in files else None)
    try:
        yield work
    finally:
        sys.settrace(before)
        for module, names in kept:
            vars(module).update(names)


def work_of(text: str) -> int:
    with counting(math_extract, choice) as work:
        choice.choice(text, FakeProblem(answer="A", verifier="choice"))
    return work[0]


def assert_linear(make: Callable[[int], str], num: int) -> None:
    once, twice = work_of(make(num)), work_of(make(2 * num))
    # Twice the text, and what does not depend on it.
    assert twice <= 2.1 * once + 200, f"{make(1)!r}: {once} for {num}, {twice} for {2 * num}"


@pytest.mark.parametrize("piece", PIECES)
def test_a_repeated_piece_takes_twice_the_work_for_twice_the_text(piece: str) -> None:
    assert_linear(lambda num: piece * num, 200)


@pytest.mark.parametrize(("before", "piece", "after"), SURROUNDED)
def test_a_run_between_two_ends_does_too(before: str, piece: str, after: str) -> None:
    assert_linear(lambda num: before + piece * num + after, 200)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=2, max_size=5))
def test_so_does_every_mixture(pieces: list[str]) -> None:
    assert_linear(lambda num: "".join(pieces) * num, 40)


def test_boxes_as_deep_as_the_text_is_long_are_read() -> None:
    # The recursion limit of Python is 1000.
    text = "\\boxed{ " * 5000 + "A" + " }" * 5000
    assert math_extract.extract(text).parts == ("A",)
    assert math_extract.extract(text[:-1]).source == "an unterminated box"
