"""The tests of a code problem, from the columns in which data sets have them; and the program, from a response."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stream_grpo.rewards.result import VerifiableProblem

_FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,}|~{3,})[ \t]*(?P<tag>[^\n`]*)$")
_PYTHON_TAGS = ("python", "py", "python3")


@dataclass(frozen=True, slots=True)
class ScriptTest:
    """The program reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Python code that raises unless the program's functions do what they should."""

    source: str


CodeTest = ScriptTest | AssertTest


class NoProgramError(ValueError):
    """A response without a program; the message says why."""


def read_program(response_text: str, *, is_cut: bool, takes_whole_text: bool) -> str:
    """The content of the last fenced block marked as Python, or else of the last one without a mark.

    A block that never ends is no program. Without any block, the whole response is the program if `takes_whole_text`
    says so and the response was not cut. Raises NoProgramError otherwise.
    """
    blocks, is_open = _blocks(response_text)
    if is_open:
        raise NoProgramError("the last code block was cut off" if is_cut else "the last code block does not end")
    for tags in (_PYTHON_TAGS, ("",)):
        for tag, content in reversed(blocks):
            if tag in tags:
                return content
    if takes_whole_text and not blocks and not is_cut and response_text.strip():
        return response_text
    raise NoProgramError("no code block")


def _blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """(tag, content) of every closed fenced block, and whether one is still open at the end."""
    blocks: list[tuple[str, str]] = []
    marks: str | None = None
    tag, lines = "", list[str]()
    for line in text.split("\n"):
        fence = _FENCE.match(line.rstrip())
        if marks is None:
            if fence:
                marks, tag, lines = fence["marks"], fence["tag"].strip().lower(), []
        elif fence and fence["marks"].startswith(marks) and not fence["tag"].strip():
            blocks.append((tag.split()[0] if tag else "", "\n".join(lines) + "\n"))
            marks = None
        else:
            lines.append(line)
    return blocks, marks is not None


def read_tests(problem: VerifiableProblem) -> tuple[CodeTest, ...]:
    """All tests of the problem's row.

    `tests` or `input_output`: a list of {"in", "out"} or {"input", "output"}, or {"inputs": [...], "outputs": [...]},
    or either as JSON text. `test`: Python code; where it defines `check`, `check(entry_point)` follows. `test_list`:
    Python statements, each a test of its own, after `test_setup_code` and `test_imports`.

    Raises ValueError for a row without tests, or with tests that cannot be read.
    """
    extra = problem.extra
    found: list[CodeTest] = []
    for column in ("tests", "input_output"):
        if extra.get(column):
            found += _script_tests(_parsed(extra[column], column), column)
    if extra.get("test"):
        found.append(AssertTest(_with_check_called(str(extra["test"]), extra.get("entry_point"))))
    if extra.get("test_list"):
        setup = [*_parsed(extra.get("test_imports") or [], "test_imports"), extra.get("test_setup_code") or ""]
        before = "".join(f"{line}\n" for line in setup if line)
        found += [AssertTest(before + str(test)) for test in _parsed(extra["test_list"], "test_list")]
    if not found:
        raise ValueError(
            f"problem {problem.problem_id} has no tests: one of tests, input_output, test, test_list must be given"
        )
    return tuple(found)


def read_weights(problem: VerifiableProblem, num_tests: int) -> tuple[float, ...]:
    """`weights` of the row, one per test and not all zero; without the column every test counts the same."""
    if problem.extra.get("weights") is None:
        return (1.0,) * num_tests
    weights = tuple(float(weight) for weight in _parsed(problem.extra["weights"], "weights"))
    if len(weights) != num_tests:
        raise ValueError(f"problem {problem.problem_id} has {num_tests} tests and {len(weights)} weights")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"problem {problem.problem_id} has weights {weights}: none may be below 0, one must be above")
    return weights


def _parsed(column: Any, name: str) -> Any:
    if not isinstance(column, str):
        return column
    try:
        return json.loads(column)
    except ValueError as error:
        raise ValueError(f"column {name} is neither a list nor JSON text: {error}") from error


def _script_tests(tests: Any, column: str) -> list[ScriptTest]:
    if isinstance(tests, Mapping):
        if tests.get("fn_name"):
            raise ValueError(f"column {column} calls the function {tests['fn_name']}; give such tests as test_list")
        inputs, outputs = tests["inputs"], tests["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"column {column} has {len(inputs)} inputs and {len(outputs)} outputs")
        return [ScriptTest(_text(before), _text(after)) for before, after in zip(inputs, outputs, strict=True)]
    return [_script_test(test, column) for test in tests]


def _script_test(test: Any, column: str) -> ScriptTest:
    if test.get("testtype", "stdin") != "stdin":
        raise ValueError(f"column {column} has a test of type {test['testtype']!r}; only 'stdin' can be run")
    for names in (("in", "out"), ("input", "output")):
        if all(name in test for name in names):
            return ScriptTest(_text(test[names[0]]), _text(test[names[1]]))
    raise ValueError(f"column {column} has a test with the fields {sorted(test)}; it needs in and out")


def _text(value: Any) -> str:
    """A text as it is; lines where a data set keeps a list of them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(map(str, value))
    return str(value)


def _with_check_called(source: str, entry_point: Any) -> str:
    if not re.search(r"^def check\(", source, re.MULTILINE) or re.search(r"^check\(", source, re.MULTILINE):
        return source
    if not entry_point:
        raise ValueError("column test defines check(candidate), and there is no entry_point to call it with")
    return f"{source}\ncheck({entry_point})\n"


def same_output(printed: str, expected: str, *, float_tolerance: float | None = None) -> bool:
    """Whether two outputs have the same words on the same lines; white space and blank lines at the end do not count.

    With a tolerance, two words that are numbers agree if |a - b| <= tolerance * max(1, |b|), b being the expected one.
    """
    left, right = _words(printed), _words(expected)
    return len(left) == len(right) and all(
        len(a) == len(b) and all(_same_word(*pair, float_tolerance) for pair in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(printed: str, expected: str, tolerance: float | None) -> bool:
    if printed == expected:
        return True
    if tolerance is None:
        return False
    try:
        a, b = float(printed), float(expected)
    except ValueError:
        return False
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))
