"""What a configuration names for its rewards is looked for before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from stream_grpo.cli import app
from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.named import check_named

JUDGE = {"kind": "score", "url": "http://h:1/score", "model": "m"}
MODULE = """
import sys
print("a module may print")
def reward(completions): return [0.0]
def neither(text): return 0.0
"""


def rewards(**sections: Any) -> Rewards:
    return Rewards.model_validate(sections)


def composed(**parts: str) -> dict[str, Any]:
    return {"c": {"components": {key: {"verifier": verifier} for key, verifier in parts.items()}}}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"compose": composed(a="math", b="regx")}, r"c\.components\.b\.verifier = 'regx': .* did you mean 'regex'\?"),
        ({"compose": composed(a="http:jugde"), "http": {"judge": JUDGE}}, "did you mean 'http:judge'"),
        ({"compose": composed(a="zzz")}, "no verifier is called so; known: choice, code, environment, exact"),
        ({"compose": composed(a="python:m.f")}, r"rewards\.functions does not list it"),
        ({"hidden": {"verifier": "maths"}}, r"rewards\.hidden\.verifier = 'maths': .* did you mean 'math'\?"),
        (
            {"compose": {"c": {"components": {"a": {"verifier": "math", "tail_above": 1, "tail_verifier": "exakt"}}}}},
            r"a\.tail_verifier = 'exakt': .* did you mean 'exact'\?",
        ),
    ],
)
def test_a_verifier_that_there_is_not_is_refused_with_the_nearest_name(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_named(rewards(**settings))


def test_what_is_there_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine_named.py").write_text(MODULE)
    function = "python:mine_named.reward"
    settings = {"compose": composed(a="http:judge", b=function), "http": {"judge": JUDGE}, "functions": [function]}
    check_named(rewards(**settings, hidden={"verifier": "math"}, function_dir=tmp_path))


def test_functions_that_cannot_be_imported_are_refused_each_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "mine_named.py").write_text(MODULE)
    (tmp_path / "mine_broken.py").write_text("import no_such_library")
    (tmp_path / "mine_leaving.py").write_text("import sys\nsys.exit(3)")
    names = ["named.reward", "named.none", "named.neither", "absent.f", "broken.f", "leaving.f"]
    functions = [f"python:mine_{name}" for name in names]
    with pytest.raises(ConfigError) as refused:
        check_named(rewards(functions=functions, function_dir=tmp_path))
    reasons = str(refused.value).splitlines()
    for expected, reason in zip(
        ("has no function 'none'", "neither shape", "no module 'mine_absent'", "no_such_library", "SystemExit: 3"),
        reasons,
        strict=True,
    ):
        assert reason.startswith("rewards.functions: 'python:mine_")
        assert expected in reason


def test_a_module_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine_ending.py").write_text("import os\nos._exit(7)")
    with pytest.raises(ConfigError, match=r"'python:mine_ending.f': importing ended the process with status 7"):
        check_named(rewards(functions=["python:mine_ending.f"], function_dir=tmp_path))


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://h:0/x", "expected a port from 1 to 65535"),
        ("http://h:65536/x", "expected a port from 1 to 65535"),
        ("https://h:80a/x", "expected a port from 1 to 65535"),
        ("ftp://h/x", "expected a whole address"),
        ("http:/h/x", "expected a whole address"),
    ],
)
def test_an_address_with_a_bad_port_or_scheme_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        rewards(http={"j": JUDGE | {"url": url}})


def test_a_dry_run_refuses_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[rewards.hidden]\nverifier = "maths"\n')
    result = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert result.exit_code == 2
    assert "rewards.hidden.verifier = 'maths'" in result.output
