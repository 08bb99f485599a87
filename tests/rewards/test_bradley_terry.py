"""One scale from comparisons in pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stream_grpo.rewards.bradley_terry import Triads, bradley_terry, triads


def slow_strengths(wins: np.ndarray, prior: float) -> list[float]:
    """The same by the minorisation-maximisation of Hunter (2004, Annals of Statistics 32), one response at a time."""
    num = len(wins)
    strength = [1.0] * num
    for _ in range(20_000):
        for i in range(num):
            won = prior + sum(wins[i][j] for j in range(num))
            games = 2 * prior / (strength[i] + 1)
            games += sum((wins[i][j] + wins[j][i]) / (strength[i] + strength[j]) for j in range(num) if j != i)
            strength[i] = won / games
    return [value / (1 + value) for value in strength]


def test_two_responses_have_the_strengths_of_a_logistic_fit() -> None:
    # One win of the first, prior a = 1. By symmetry t = (x, -x), and the slope is sigmoid(-2x) + 1 - 2 sigmoid(x) = 0.
    # With s = sigmoid(x): sigmoid(-2x) = (1-s)^2 / (s^2 + (1-s)^2). s = 0.5 leaves 0.5 > 0; solved by bisection below.
    low, high = 0.5, 1.0
    for _ in range(100):
        s = (low + high) / 2
        slope = (1 - s) ** 2 / (s**2 + (1 - s) ** 2) + 1 - 2 * s
        low, high = (s, high) if slope > 0 else (low, s)
    found = bradley_terry(np.array([[0.0, 1.0], [0.0, 0.0]]), prior=1.0)
    assert found == pytest.approx([s, 1 - s], abs=1e-10)


def test_it_is_the_fit_of_a_slow_loop() -> None:
    wins = np.array([[0, 2, 1.5, 0], [0, 0, 1, 2], [0.5, 1, 0, 2], [0, 0, 0, 0]], dtype=np.float64)
    assert bradley_terry(wins, prior=0.1) == pytest.approx(slow_strengths(wins, 0.1), abs=1e-9)


@given(
    wins=arrays(np.float64, (5, 5), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0, 1000.0])),
    prior=st.sampled_from([1e-3, 0.1, 1.0]),
)
def test_the_slope_is_nothing_at_the_fit(wins: np.ndarray, prior: float) -> None:
    np.fill_diagonal(wins, 0.0)
    strength = bradley_terry(wins, prior=prior)
    assert ((strength > 0) & (strength < 1)).all()
    t = np.log(strength) - np.log1p(-strength)
    for i in range(5):
        expected = sum((wins[i, j] + wins[j, i]) / (1 + np.exp(t[j] - t[i])) for j in range(5))
        slope = wins[i].sum() - expected + prior * (1 - 2 * strength[i])
        assert abs(slope) < 1e-6 * (1 + wins.sum())


def test_a_response_that_was_never_compared_is_in_the_middle() -> None:
    wins = np.zeros((3, 3))
    wins[0, 1] = 2
    first, second, third = bradley_terry(wins, prior=0.1)
    assert third == pytest.approx(0.5)
    assert first > 0.5 > second
    assert first == pytest.approx(1 - second)


def test_a_circle_has_no_better_and_no_worse() -> None:
    wins = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=np.float64)
    assert bradley_terry(wins, prior=0.1) == pytest.approx([0.5] * 3, abs=1e-12)
    assert triads(wins) == Triads(1, 1)


def test_triads_with_a_tie_are_none() -> None:
    # 0 over 1 over 2 over 3, 0 over 3, but 2 and 0 tie and 3 over 1: of the four triads only 0-1-3 and 1-2-3 are
    # decided. 0 > 1, 3 > 1, 0 > 3 is an order; 1 > 2, 2 > 3, 3 > 1 is a circle.
    wins = np.zeros((4, 4))
    wins[0, 1] = wins[1, 2] = wins[2, 3] = wins[0, 3] = wins[3, 1] = 2
    wins[0, 2] = wins[2, 0] = 1
    assert triads(wins) == Triads(2, 1)


@pytest.mark.parametrize("wins", [np.zeros((2, 3)), -np.ones((2, 2)), np.eye(2), np.zeros(2)])
def test_what_is_no_table_of_wins_is_refused(wins: np.ndarray) -> None:
    with pytest.raises(ValueError, match="wins of shape"):
        bradley_terry(wins, prior=0.1)
    with pytest.raises(ValueError, match="prior = 0"):
        bradley_terry(np.zeros((2, 2)), prior=0.0)
