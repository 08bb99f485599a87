"""Tests of the user's own reward functions."""

import sys
from typing import Any

import pytest

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.user import load_user_verifier, source_version
from stream_grpo.types import Decision, RewardResult

MODULE = "python:tests.rewards.fake_verifiers."


def check(function: str, response: str = "42", prompt: Any = "6*7=", **extra: Any) -> RewardResult:
    verifier = load_user_verifier(MODULE + function)
    problem = ProblemRow(
        problem_id="p1", answer="42", verifier=verifier.name, extra=extra, prompt=prompt, source="sums"
    )
    return verifier.check(response, problem, False)


@pytest.mark.parametrize("prompt", ["6*7=", [{"role": "user", "content": "6*7="}]])
def test_a_function_in_the_shape_of_trl_scores_text_and_chat_completions(prompt: Any) -> None:
    # `target` is no column: it is given the gold "42", two characters long.
    assert check("trl_length", "ab", prompt).reward == 1.0
    assert check("trl_length", "abc", prompt).reward == 0.0


def test_trl_columns_come_as_lists_and_only_where_the_function_takes_them() -> None:
    result = check("trl_columns", level=1, other="x")
    assert (result.decision, result.reward) == (Decision.PASS, 1.0)


def test_a_score_is_the_reward_and_passes_from_the_pass_score() -> None:
    assert check("trl_async").decision is Decision.PASS  # 0.75 of 0.5
    result = check("trl_async", pass_score=0.8)
    assert (result.decision, result.reward, result.evidence) == (Decision.FAIL, 0.75, "score 0.75, pass from 0.8")


def test_a_function_in_the_shape_of_verl_may_return_a_dict() -> None:
    result = check("verl_dict", extra_info={"level": 3})
    assert (result.decision, result.reward) == (Decision.FAIL, 0.4)
    assert result.components == {"acc": 1.0, "format": 0.1, "level": 3.0}
    assert result.evidence == "score 0.4, pass from 0.5, pred '41', source 'sums'"


def test_without_a_column_extra_info_verl_is_given_all_columns() -> None:
    assert check("verl_dict", level=4, data_source="gsm").components["level"] == 4.0


def test_async_functions_are_awaited() -> None:
    assert check("verl_async").reward == 1.0


@pytest.mark.parametrize(("function", "shown"), [("trl_none", "None"), ("trl_nan", "nan")])
def test_none_and_nan_are_unknown_and_never_zero(function: str, shown: str) -> None:
    result = check(function)
    assert (result.decision, result.reward) == (Decision.UNKNOWN, None)
    assert result.evidence == f"the function returned {shown}"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("trl_two", "returned 2 scores for 1 completion"),
        ("trl_scalar", "returned float where a list with one score was due"),
        ("trl_text", "the score is '1.0', which is no number"),
        ("trl_needs_more", "rubric"),
        ("verl_no_score", "without 'score': it has acc"),
    ],
)
def test_anything_else_is_raised_with_its_reason(function: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check(function)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:trl_two", "is written python:module.function"),
        ("python:tests.rewards.no_such_module.f", "no_such_module"),
        (MODULE + "no_such_function", "has no function 'no_such_function'"),
        (MODULE + "neither", r"neither\(text, gold\) has neither shape"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_user_verifier(name)


def test_the_version_is_that_of_the_source(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module, score in (("reward_a", 1), ("reward_b", 1), ("reward_c", 2)):
        (tmp_path / f"{module}.py").write_text(f"def f(completions, **columns): return [{score}]")
    names = [f"python:{module}.f" for module in ("reward_a", "reward_b", "reward_c")]
    a, b, c = map(source_version, names)
    assert a == b != c
    assert "reward_a" not in sys.modules
    assert [load_user_verifier(name).version for name in names] == [a, b, c]
