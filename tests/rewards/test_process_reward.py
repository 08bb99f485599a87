"""A response in steps, and what their scores make of it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.process_rewards import aggregate_steps
from stream_grpo.config_http import ProcessModel
from stream_grpo.rewards.judging import Answer, EndpointError
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.process_reward import StepScores, aggregated, step_ends
from stream_grpo.types import Decision, RewardResult, StepScore

ROW = ProblemRow(problem_id="p1", answer="42", verifier="http:prm", prompt="6*7=", extra={"level": 3})


def model(**more: Any) -> ProcessModel:
    return ProcessModel.model_validate({"kind": "process", "url": "http://h/score", "split": "line", **more})


def scored(text: str, reply: Any, **more: Any) -> tuple[RewardResult, list[Any]]:
    """The result where the model replies so, and what it was posted."""
    sent: list[Any] = []

    async def post(body: Any) -> dict[str, Any]:
        sent.append(body)
        answer: dict[str, Any] = reply(body) if callable(reply) else reply
        return answer

    (result,) = asyncio.run(StepScores("http:prm", model(**more))(ROW, [Answer("a", text)], post))
    return result, sent


def split(text: str, **more: Any) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *step_ends(text, model(**more))])]


@pytest.mark.parametrize(
    ("settings", "text", "steps"),
    [
        ({"split": "line"}, "a\nb\n\nc", ["a\n", "b\n\n", "c"]),  # a line without text belongs to the one before
        ({"split": "line"}, "\n\na\n", ["\n\na\n"]),
        ({"split": "line"}, "a", ["a"]),
        ({"split": "blank_line"}, "a\nb\n \n\nc\n\n", ["a\nb\n \n\n", "c\n\n"]),
        ({"split": "sentence"}, "It is 3.5. So 7!  Done", ["It is 3.5. ", "So 7!  ", "Done"]),
        ({"split": "pattern", "split_pattern": r"Step \d+:"}, "Step 1: x Step 2: y", ["Step 1:", " x Step 2:", " y"]),
        ({"split": "line", "max_steps": 2}, "a\nb\nc\nd", ["a\n", "b\nc\nd"]),
        ({"split": "line", "max_steps": 1}, "a\nb", ["a\nb"]),
        ({"split": "line"}, " \n ", []),
        ({"split": "line"}, "", []),
    ],
)
def test_steps_end_where_the_splitter_says(settings: dict[str, Any], text: str, steps: list[str]) -> None:
    assert split(text, **settings) == steps


@given(
    text=st.text(alphabet="ab. \n!\t", max_size=60),
    by=st.sampled_from(["line", "blank_line", "sentence"]),
    most=st.integers(1, 5),
)
def test_steps_are_the_whole_text_and_each_has_something_in_it(text: str, by: str, most: int) -> None:
    steps = split(text, split=by, max_steps=most)
    assert "".join(steps) == (text if text.strip() else "")
    assert all(step.strip() for step in steps)
    assert len(steps) <= most


@pytest.mark.parametrize("method", ["min", "product", "last", "mean"])
def test_the_aggregators_are_those_of_the_maths(method: Any) -> None:
    rewards = [0.9, 0.25, 0.5]
    expected = float(aggregate_steps(torch.tensor(rewards, dtype=torch.float64), method=method))
    assert aggregated(rewards, method) == pytest.approx(expected, abs=1e-15)


def test_a_weighted_mean_is_that_of_the_maths() -> None:
    rewards, weights = [0.9, 0.25, 0.5], [1.0, 2.0, 3.0]
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (rewards, weights))
    first, second = tensors
    expected = float(aggregate_steps(first, method="weighted", weights=second))
    # (0.9 + 0.5 + 1.5) / 6
    assert aggregated(rewards, "weighted", weights) == pytest.approx(2.9 / 6, abs=1e-15)
    assert expected == pytest.approx(2.9 / 6, abs=1e-15)


def test_the_steps_are_sent_and_their_scores_make_the_reward() -> None:
    result, sent = scored("one\ntwo\n", {"scores": [4, 1]}, high=5.0, columns=["level"], pass_score=2.0)
    assert sent == [{"level": 3, "prompt": "6*7=", "response": "one\ntwo\n", "gold": "42", "steps": ["one\n", "two\n"]}]
    # min(4, 1) / 5, a pass from 2 / 5 on.
    assert (result.decision, result.reward) == (Decision.FAIL, 0.2)
    assert result.steps == (StepScore(4, 0.8), StepScore(8, 0.2))
    assert result.components == {"num_steps": 2.0, "min_step": 0.2, "mean_step": 0.5}
    assert result.evidence == "min of 2 steps by line: 4, 1"


@pytest.mark.parametrize(
    ("weight", "reward"),
    [
        ("position", 2 / 3),  # (1 * 0 + 2 * 1) / 3
        ("length", 0.75),  # (2 * 0 + 6 * 1) / 8 characters
    ],
)
def test_a_step_weighs_by_its_length_or_its_place(weight: str, reward: float) -> None:
    result, _ = scored("a\nbcdefg", {"scores": [0, 1]}, aggregate="weighted", step_weight=weight)
    assert result.reward == pytest.approx(reward, abs=1e-15)


def test_a_response_without_text_is_wrong_and_nobody_is_asked() -> None:
    result, sent = scored(" \n", {"scores": []})
    assert (result.decision, result.reward, result.steps, sent) == (Decision.FAIL, 0.0, (), [])


def test_a_response_that_hangs_its_splitter_is_wrong() -> None:
    result, sent = scored("a" * 64 + "!", {"scores": [1]}, split="pattern", split_pattern=r"(?:a|aa)+$")
    assert (result.decision, result.reward, sent) == (Decision.FAIL, 0.0, [])
    assert "took over 0.5 s" in result.evidence


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"scores": [1]}, "'scores' of the reply is 1 scores for 2 steps"),
        ({"scores": "high"}, "is 'str' for 2 steps"),
        ({"score": 1}, "is 'NoneType' for 2 steps; it has score"),
    ],
)
def test_other_than_a_score_for_every_step_is_an_error(reply: Any, reason: str) -> None:
    with pytest.raises(EndpointError, match=reason):
        scored("a\nb", reply)


@pytest.mark.parametrize("score", [None, "x", float("nan"), 2.0, True])
def test_a_step_without_a_score_makes_it_unknown(score: Any) -> None:
    result, _ = scored("a\nb", {"scores": [1, score]})
    assert (result.decision, result.reward, result.steps) == (Decision.UNKNOWN, None, ())
    assert result.evidence.startswith("step 1: ")
