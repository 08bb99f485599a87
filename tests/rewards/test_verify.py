"""Tests of `stream-grpo verify`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stream_grpo.cli import app
from tests.rewards.http_server import JudgeServer, Reply

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


def test_judges_of_a_configuration_are_asked_beside_verifiers(tmp_path: Path) -> None:
    with JudgeServer(lambda body: Reply({"score": float(body["response"] == body["gold"])})) as server:
        (tmp_path / "run.toml").write_text(
            f'[model]\npath = "m"\n[rewards.http.rm]\nkind = "score"\nurl = "{server.url}"\nmodel = "rm-1"\n'
        )
        file = rows(
            tmp_path / "rows.jsonl",
            {"gold": "7", "response": "7", "verifier": "http:rm"},
            {"gold": "7", "response": "#### 7", "verifier": "exact"},
            {"gold": "7", "response": "8", "verifier": "http:rm"},
        )
        result = run(file, "--config", str(tmp_path / "run.toml"), "--json")
        assert result.exit_code == 0, result.output
        found = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(row["verifier"], row["reward"]) for row in found] == [
            ("http:rm", 1.0),
            ("exact", 1.0),
            ("http:rm", 0.0),
        ]
        assert found[2]["evidence"] == "score 0, pass from 0.5"


def test_a_judge_without_its_configuration_is_refused_with_what_is_known() -> None:
    result = run("--gold", "1", "--response", "1", "--verifier", "http:rm")
    assert result.exit_code == 2
    assert "no verifier is called 'http:rm'" in result.output


CAREFUL = """
[model]
path = "m"
[rewards.compose.careful]
bounds = [0.0, 1.0]
gate_reward = -1.0
components.form = { verifier = "regex", role = "gate", columns = { pattern = "####" } }
components.answer = { verifier = "exact", weight = 0.5 }
components.label = { verifier = "exact", weight = 0.5, gold = "label" }
"""


def test_a_composition_of_a_configuration_shows_what_every_part_says(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CAREFUL)
    file = rows(
        tmp_path / "rows.jsonl",
        {"gold": "7", "response": "#### 7", "verifier": "compose:careful", "label": "8"},
        {"gold": "7", "response": "7", "verifier": "compose:careful", "label": "8"},
        {"gold": "7", "response": "#### 7", "verifier": "compose:careful"},  # no such column
        {"gold": "7", "response": "#### 7", "verifier": "exact"},
    )
    arguments = [file, "--config", str(tmp_path / "run.toml")]
    shown = run(*arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    # Of four rows three have three parts each.
    assert len(lines) == 4 + 3 * 3
    assert lines[0].startswith("    1  fail       compose:careful ")
    assert lines[0].endswith("reward 0.5")
    assert lines[2].strip() == "pass       answer: exact 1  reward 1  answer '7', expected '7'"
    assert lines[3].strip() == "fail       label: exact 1  reward 0  answer '7', expected '8'"
    found = [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]
    assert [row["reward"] for row in found] == [0.5, -1.0, None, 1.0]
    assert [list(row.get("parts", ())) for row in found] == [["form", "answer", "label"]] * 3 + [[]]
    assert found[2]["parts"]["label"]["evidence"].endswith("has no column 'label', the gold of label")


def test_a_list_of_verifiers_is_asked_part_by_part(tmp_path: Path) -> None:
    function = FAKE + "obedient"
    listed = [{"verifier": "exact", "weight": 0.75}, {"verifier": function, "weight": 0.25}]
    file = rows(tmp_path / "rows.jsonl", {"gold": "#### 7", "response": "#### 7", "verifier": listed})
    (line,) = run(file, "--json").stdout.splitlines()
    found = json.loads(line)
    # `exact` reads 7, which is not the gold; the function compares the whole text.
    assert found["reward"] == 0.25
    assert [part["decision"] for part in found["parts"].values()] == ["fail", "pass"]
    pair = run("--gold", "7", "--response", "#### 7", "--verifier", '["exact", "math"]')
    assert "exact+math" in pair.stdout
    assert [line.split()[1] for line in pair.stdout.splitlines()[1:]] == ["exact:", "math:"]


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ('["exact", "maths"]', "no verifier is called 'maths'"),
        ('["exact", {"verifier": "math", "wieght": 1}]', "[1].wieght: unknown; known: verifier, weight, gate"),
        ("compose:none", "no verifier is called 'compose:none'"),
    ],
)
def test_a_list_or_composition_that_cannot_be_asked_is_refused(verifier: str, message: str) -> None:
    result = run("--gold", "1", "--response", "1", "--verifier", verifier)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", "")
