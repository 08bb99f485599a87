"""Step rewards against slow loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.process_rewards import StepAggregation, aggregate_steps, position_advantages

NAN = float("nan")
NUM_TOKENS = 9
PLAIN: dict[str, Any] = {"num_tokens": NUM_TOKENS, "signal_tolerance": 1e-6}


@st.composite
def rollouts(draw: st.DrawFn) -> list[tuple[list[float], list[int], bool, int]]:
    """(step rewards, step ends, valid, group) of every rollout."""
    result = []
    for _ in range(draw(st.integers(1, 6))):
        ends = sorted(draw(st.sets(st.integers(1, NUM_TOKENS), max_size=4)))
        rewards = [draw(st.floats(-3, 3) | st.sampled_from([0.0, 1.0])) for _ in ends]
        result.append((rewards, ends, draw(st.booleans()), draw(st.integers(0, 1))))
    return result


def slow_position_advantages(rows: list[tuple[list[float], list[int], bool, int]], scale: str) -> list[list[float]]:
    result = []
    for rewards, ends, valid, group in rows:
        fellows = [row[0] for row in rows if row[2] and row[3] == group]
        steps = [r for rewards_of_one in fellows for r in rewards_of_one]
        if not valid or len(fellows) < 2 or len(steps) < 2 or max(steps) - min(steps) <= 1e-6:
            result.append([0.0] * NUM_TOKENS)
            continue
        mean = math.fsum(steps) / len(steps)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in steps) / len(steps))
        divisor = max(std, 0.01) if scale == "group_std" else 1.0
        normalised = [(r - mean) / divisor for r in rewards]
        # Token t is number t + 1 of the output: a step ends at or after it if its exclusive end is above t.
        pairs = list(zip(normalised, ends, strict=True))
        result.append([math.fsum(r for r, end in pairs if end > t) for t in range(NUM_TOKENS)])
    return result


def tensors(
    rows: list[tuple[list[float], list[int], bool, int]],
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    return (
        [torch.tensor(r if valid else [NAN] * len(r), dtype=torch.float64) for r, _, valid, _ in rows],
        [torch.tensor(ends, dtype=torch.int64) for _, ends, _, _ in rows],
        torch.tensor([valid for *_, valid, _ in rows]),
        torch.tensor([group for *_, group in rows]),
    )


@given(rollouts(), st.sampled_from(["group_std", "none"]))
def test_position_advantages_equal_their_slow_loop(
    rows: list[tuple[list[float], list[int], bool, int]], scale: Any
) -> None:
    got = position_advantages(*tensors(rows), **PLAIN, scale=scale)
    for row, expected in zip(got.advantage_BT.tolist(), slow_position_advantages(rows, scale), strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert got.advantage_BT.dtype == torch.float64


def test_a_token_is_worth_the_steps_still_to_end() -> None:
    # Steps 1, 0 | 0, 1: mean 1/2, std 1/2, normalised 1, -1 | -1, 1. First rollout: steps end after tokens 2 and 4.
    # Tokens 0, 1: 1 - 1 = 0. Tokens 2, 3: -1. Second: ends after 1 and 3: token 0: 0; tokens 1, 2: 1.
    rows = [([1.0, 0.0], [2, 4], True, 5), ([0.0, 1.0], [1, 3], True, 5)]
    got = position_advantages(*tensors(rows), num_tokens=5, signal_tolerance=1e-6)
    assert got.advantage_BT.tolist() == [[0.0, 0.0, -1.0, -1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 0.0]]
    assert got.has_signal_B.tolist() == [True, True]


def test_no_spread_and_a_lone_rollout_are_exactly_zero() -> None:
    # Group 0: all steps 0.1, whose mean over seven is not exactly 0.1. Group 1: one valid rollout.
    rows = [([0.1] * 4, [1, 2, 3, 4], True, 0), ([0.1] * 3, [1, 2, 3], True, 0)]
    rows += [([0.0, 1.0], [1, 2], True, 1), ([5.0], [1], False, 1)]
    got = position_advantages(*tensors(rows), **PLAIN)
    assert got.advantage_BT.tolist() == [[0.0] * NUM_TOKENS] * 4
    assert got.has_signal_B.tolist() == [False] * 4


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 3)), min_size=1, max_size=8))
def test_aggregates_equal_their_slow_loops(steps: list[tuple[float, float]]) -> None:
    rewards, weights = (torch.tensor(column, dtype=torch.float64) for column in zip(*steps, strict=True))
    expected: dict[StepAggregation, float] = {
        "min": min(r for r, _ in steps),
        "product": math.prod(r for r, _ in steps),
        "last": steps[-1][0],
        "mean": math.fsum(r for r, _ in steps) / len(steps),
        "weighted": math.fsum(r * w for r, w in steps) / math.fsum(w for _, w in steps),
    }
    for method, value in expected.items():
        got = aggregate_steps(rewards, method=method, weights=weights if method == "weighted" else None)
        assert float(got) == pytest.approx(value, rel=1e-9, abs=1e-9)
        assert got.shape == ()


def test_bad_steps_are_refused() -> None:
    two = torch.tensor([0.5, 1.0])
    for arguments, message in [
        ({"step_rewards": two[:0], "method": "min"}, "step_rewards is empty"),
        ({"step_rewards": two, "method": "best"}, "method 'best': expected min"),
        ({"step_rewards": two, "method": "weighted"}, "weights missing with method 'weighted'"),
        ({"step_rewards": two, "method": "min", "weights": two}, "weights given with method 'min'"),
        ({"step_rewards": two, "method": "weighted", "weights": -two}, "expected 0 or more, with a sum above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            aggregate_steps(**arguments)  # type: ignore[arg-type]
    for rewards, ends, message in [
        ([0.5], [1, 2], "rollout 0 has 1 step rewards and 2 step ends"),
        ([0.5, 0.5], [2, 2], "expected rising, from 1 to 9"),
        ([0.5], [0], "expected rising, from 1 to 9"),
        ([0.5], [10], "expected rising, from 1 to 9"),
    ]:
        with pytest.raises(ValueError, match=message):
            position_advantages(*tensors([(rewards, ends, True, 0)]), **PLAIN)
    step_rewards, step_ends, valid, group = tensors([([0.5], [1], True, 0)])
    with pytest.raises(ValueError, match="1 step_rewards, 0 step_ends and 1 valid flags"):
        position_advantages(step_rewards, step_ends[:0], valid, group, **PLAIN)
