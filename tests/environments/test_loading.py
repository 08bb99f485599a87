"""What an environment says of its calls, by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.environments.loading import check_named, grammar_of
from stream_grpo.errors import ConfigError

WORLDS = "python:tests.environments.worlds"


@pytest.mark.parametrize(("name", "argument"), [("calculator", "code"), ("records", "query")])
def test_what_is_built_in_says_how_a_call_is_written(name: str, argument: str) -> None:
    tag = json.loads(grammar_of(name, {"open": "<a>", "close": "</a>"}))
    assert tag["format"]["triggers"] == ["<a>"]
    assert tag["format"]["stop_after_first"] is True
    (one,) = tag["format"]["tags"]
    assert one["end"] == "</a>"
    arguments = one["content"]["json_schema"]["properties"]["arguments"]
    assert arguments["required"] == [argument]


def test_options_that_have_nothing_to_do_with_calls_are_left_alone() -> None:
    assert grammar_of("calculator", {"time_limit_s": 1.0}) == grammar_of("calculator", {})
    assert json.loads(grammar_of("calculator", {"body": "plain"}))["format"]["tags"][0]["content"] == {
        "type": "any_text"
    }


def test_a_users_environment_gives_a_structural_tag_of_its_own() -> None:
    assert json.loads(grammar_of(f"{WORLDS}.Summing", {}))["format"]["at_least_one"] is True


def test_a_users_module_is_found_where_reward_functions_are(tmp_path: Path) -> None:
    (tmp_path / "my_calls.py").write_text(
        "from stream_grpo.environments.calls import CallFormat\n"
        "class Mine:\n"
        "    @staticmethod\n"
        "    def call_format():\n"
        "        return CallFormat(open='(', close=')', tools={'ask': 'what'})\n"
    )
    assert json.loads(grammar_of("python:my_calls.Mine", {}, [str(tmp_path)]))["format"]["triggers"] == ["("]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{WORLDS}.Counter", "does not say how a call is written"),
        ("verifiers:some", "does not say how a call is written"),
        (f"{WORLDS}.Unwritten", "call_format of environment .*Unwritten': ValueError: there is no such mark"),
        (f"{WORLDS}.Lost", "call_format of environment .*Lost': KeyError: 'marks'"),
        (f"{WORLDS}.Missing", "has no 'Missing'"),
    ],
)
def test_an_environment_without_a_format_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        grammar_of(name, {})


def test_marks_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"environment\.grammar = true: call_format of environment 'records': ValueError: open"
    ):
        grammar_of("records", {"open": ""})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module_of_anybody", "ModuleNotFoundError: No module named 'no_such_module_of_anybody'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def half(:", "SyntaxError"),
    ],
)
def test_a_users_module_that_cannot_be_imported_is_named(tmp_path: Path, text: str, reason: str) -> None:
    name = f"broken_{reason[:4].lower()}"
    (tmp_path / f"{name}.py").write_text(f"{text}\n")
    with pytest.raises(
        ConfigError, match=rf"environment 'python:{name}.Mine': its module cannot be imported: {reason}"
    ):
        grammar_of(f"python:{name}.Mine", {}, [str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("recrods", {}, "no environment is called 'recrods'; known: calculator, records,"),
        ("records", {"opn": "{"}, "environment.options: records has no 'opn'; it takes open, close, body"),
        ("records", {"open": 3}, "environment.options: open = 3: expected a text"),
        ("calculator", {"close": ""}, "environment.options: open and close are the marks of a call"),
        ("calculator", {"body": "xml"}, "environment.options: body = 'xml': expected 'json' or 'plain'"),
        ("python:no.such", {}, "there is no module 'no'"),
    ],
)
def test_a_name_or_an_option_that_cannot_be_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_named(name, options)


def test_what_can_be_passes_and_no_users_code_is_run(tmp_path: Path) -> None:
    check_named(None, {"open": 3})
    check_named("calculator", {"time_limit_s": 1.0, "allow_weaker_sandbox": True})
    (tmp_path / "raises.py").write_text("raise SystemExit")
    check_named("python:raises.Anything", {"open": 3}, [str(tmp_path)])
