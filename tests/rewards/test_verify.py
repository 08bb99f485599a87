"""Tests of `stream-grpo verify`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stream_grpo.cli import app

pytestmark = pytest.mark.slow

FAKE = "python:tests.rewards.fake_verifiers."


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments])


def rows(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_pair_shows_decision_and_both_sides() -> None:
    result = run("--gold", "51", "--response", "so #### 50", "--verifier", "exact")
    assert result.exit_code == 0
    assert result.stdout.split(maxsplit=4)[:4] == ["1", "fail", "exact", "1"]
    assert "answer '50', expected '51'" in result.stdout


def test_json_gives_one_result_a_line_in_the_order_of_the_rows(tmp_path: Path) -> None:
    file = rows(
        tmp_path / "rows.jsonl",
        {"gold": "ok", "response": "sleep 0.3", "verifier": FAKE + "obedient"},  # ends last
        {"gold": "7", "response": "#### 7"},
        {"gold": 7, "response": "#### 8"},
        {"gold": "7", "response": "# 7", "answer_prefix": "#"},
        {"gold": "ok", "response": "raise this", "verifier": FAKE + "obedient"},
    )
    result = run(file, "--verifier", "exact", "--json", "--workers", "2")
    assert result.exit_code == 0
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["decision"] for row in found] == ["fail", "pass", "fail", "pass", "env_error"]
    assert [row["reward"] for row in found] == [0.0, 1.0, 0.0, 1.0, None]
    assert found[4]["evidence"] == "OSError: the disk of this is gone"


def test_a_response_that_hangs_its_verifier_fails_at_the_limit() -> None:
    result = run("--gold", "ok", "--response", "hang", "--verifier", FAKE + "obedient", "--limit-s", "0.3", "--json")
    assert json.loads(result.stdout)["decision"] == "fail"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"gold": "1"}', "line 1: no field 'response'; it has 'gold'"),
        ('{"gold": "1", "response": 1}', "line 1: field 'response' is int, not text"),
        ("[1]", "line 1: a JSON object"),
        ("{", "line 1: not JSON"),
        ('{"gold": "1", "response": "1", "verifier": "maths"}', "line 1: no verifier is called 'maths'"),
    ],
)
def test_a_row_that_is_none_is_refused_with_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    result = run(str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("arguments", [[], ["--gold", "1"], ["rows.jsonl", "--gold", "1", "--response", "1"]])
def test_a_file_or_a_pair_is_due(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "not both" in result.output


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2
    assert "cannot be read" in result.output
