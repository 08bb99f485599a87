"""Probabilities by hand, and draws that repeat."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curator.selection import draw, draw_rng, selection_probabilities

FREE = np.zeros(4, np.bool_)


def test_probabilities_mix_signal_and_uniform() -> None:
    q = selection_probabilities(np.array([0.0, 0.1, 0.3, 0.4]), FREE, 0.2)
    # 0.8 x (0, 1/8, 3/8, 4/8) + 0.2 x 1/4
    np.testing.assert_allclose(q, [0.05, 0.15, 0.35, 0.45], atol=1e-15)


def test_sharpness_prefers_the_best_more_strongly() -> None:
    q = selection_probabilities(np.array([0.0, 0.1, 0.3, 0.4]), FREE, 0.2, sharpness=2.0)
    # 0.8 x (0, 1/26, 9/26, 16/26) + 0.2 x 1/4
    np.testing.assert_allclose(q, [0.05, 0.8 / 26 + 0.05, 7.2 / 26 + 0.05, 12.8 / 26 + 0.05], atol=1e-15)


def test_problems_in_flight_are_left_out() -> None:
    q = selection_probabilities(np.array([0.0, 0.1, 0.3, 0.4]), np.array([False, False, False, True]), 0.3)
    # 0.7 x (0, 1/4, 3/4) + 0.3 x 1/3 over the three free ones
    np.testing.assert_allclose(q, [0.1, 0.275, 0.625, 0.0], atol=1e-15)


def test_without_any_signal_the_choice_is_uniform() -> None:
    q = selection_probabilities(np.array([0.0, 0.0, 0.0, 0.9]), np.array([False, True, False, True]), 0.0)
    assert q.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_a_pool_that_is_in_flight_throughout_does_not_stall() -> None:
    q = selection_probabilities(np.array([1.0, 3.0]), np.array([True, True]), 0.0)
    assert q.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("signal", "exploration", "message"),
    [([], 0.1, "no problems"), ([-0.1], 0.1, "not negative"), ([np.nan], 0.1, "finite"), ([0.5], 1.5, "exploration")],
)
def test_bad_arguments_are_refused(signal: list[float], exploration: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection_probabilities(np.array(signal, np.float64), np.zeros(len(signal), np.bool_), exploration)


@given(
    signal=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    bits=st.integers(0, 2**30 - 1),
    exploration=st.floats(0, 1),
    num=st.integers(0, 40),
)
def test_draws_come_from_what_is_free(signal: list[float], bits: int, exploration: float, num: int) -> None:
    in_flight = np.array([bits >> i & 1 for i in range(len(signal))], np.bool_)
    q = selection_probabilities(np.array(signal), in_flight, exploration)
    assert q.sum() == pytest.approx(1.0)
    assert q.min() >= 0
    drawn = draw(q, num, np.random.default_rng(0))
    assert len(drawn) == num
    assert set(drawn.tolist()) <= set(np.flatnonzero(q).tolist())
    assert in_flight.all() or not in_flight[drawn].any()
    # Without replacement as long as possible: nobody twice before everybody once.
    times = np.bincount(drawn, minlength=q.size)[q > 0]
    assert times.max() - times.min() <= 1


def test_the_same_group_gives_the_same_draw_in_any_order_of_calls() -> None:
    q = np.full(50, 0.02)
    first = draw(q, 5, draw_rng(3, "run/17"))
    draw(q, 5, draw_rng(3, "run/16"))
    assert draw(q, 5, draw_rng(3, "run/17")).tolist() == first.tolist()
    assert draw(q, 5, draw_rng(4, "run/17")).tolist() != first.tolist()
    assert draw(q, 5, draw_rng(3, "run/18")).tolist() != first.tolist()


def test_draws_follow_the_probabilities() -> None:
    q = np.array([0.1, 0.2, 0.7])
    rng = np.random.default_rng(1)
    pairs = np.array([draw(q, 2, rng) for _ in range(20_000)])
    # The first is drawn by q. The standard error of a share at 20,000 draws is at most 0.0036; five of them.
    np.testing.assert_allclose(np.bincount(pairs[:, 0]) / 20_000, q, atol=0.018)
    # Then by q among the rest: P(2 second) = 0.1 x 0.7/0.9 + 0.2 x 0.7/0.8 = 0.2528.
    assert np.mean(pairs[:, 1] == 2) == pytest.approx(0.2528, abs=0.018)


def test_nothing_can_be_drawn_from_nothing() -> None:
    with pytest.raises(ValueError, match="positive"):
        draw(np.zeros(3), 1, np.random.default_rng(0))


def test_a_draw_is_the_first_of_all_clocks_that_ring() -> None:
    q = np.array([0.5, 0.0, 0.3, 0.2, 1e-320, 1e-320])
    for seed in range(20):
        support = np.flatnonzero(q)
        with np.errstate(over="ignore"):
            rings = np.random.default_rng(seed).standard_exponential(5) / q[support]
        # Those of a rate near 0 ring at infinity, in their order.
        expected = support[np.argsort(rings, kind="stable")]
        for num in range(1, 6):
            assert draw(q, num, np.random.default_rng(seed)).tolist() == expected[:num].tolist()
