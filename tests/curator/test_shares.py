"""Draws by worth: floor, unseen, domains, candidates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curator.selection import Part, Shares, candidates, draw_parts, mixture, shared_parts, shared_probabilities

NONE, TWO_DOMAINS = np.zeros(4, np.bool_), np.array([0, 0, 0, 1])


def test_worth_floor_and_unseen_add_up_by_hand() -> None:
    shares = Shares(sharpness=1.0, floor=0.2, unseen=0.1, domain=0.0)
    unseen = np.array([False, False, True, True])
    q = shared_probabilities(np.array([0.0, 1.0, 1.0, 2.0]), NONE, unseen, TWO_DOMAINS, shares)
    # 0.7 x (0, 1/4, 1/4, 2/4) + 0.2 / 4 + 0.1 / 2 for the unseen.
    np.testing.assert_allclose(q, [0.05, 0.225, 0.275, 0.45], atol=1e-15)


def test_domains_share_equally_what_is_theirs() -> None:
    shares = Shares(sharpness=2.0, floor=0.0, unseen=0.5, domain=0.5)
    q = shared_probabilities(np.array([1.0, 1.0, 0.0, 2.0]), NONE, NONE, TWO_DOMAINS, shares)
    # Nobody is unseen. Squares 1, 1, 0, 4: half by them over all, (1/6, 1/6, 0, 4/6), half by domain,
    # (1/4, 1/4, 0, 1/2).
    np.testing.assert_allclose(q, [5 / 24, 5 / 24, 0.0, 14 / 24], atol=1e-15)


def test_what_is_in_flight_is_left_out_of_every_share() -> None:
    in_flight = np.array([False, True, False, True])
    q = shared_probabilities(np.array([1.0, 9.0, 3.0, 9.0]), in_flight, ~NONE, TWO_DOMAINS, Shares(sharpness=1.0))
    assert q[[1, 3]].tolist() == [0, 0]
    # 0.9 x (1/4, 3/4) + 0.05 / 2 + 0.05 / 2.
    np.testing.assert_allclose(q[[0, 2]], [0.275, 0.725], atol=1e-15)


def test_without_any_worth_the_draw_is_uniform_and_bad_worths_are_refused() -> None:
    assert shared_probabilities(np.zeros(4), NONE, NONE, TWO_DOMAINS).tolist() == [0.25] * 4
    for worth in (np.array([-1.0, 1, 1, 1]), np.array([np.inf, 1, 1, 1])):
        with pytest.raises(ValueError, match="finite"):
            shared_probabilities(worth, NONE, NONE, TWO_DOMAINS)
    with pytest.raises(ValueError, match="no problems"):
        shared_probabilities(np.zeros(0), NONE[:0], NONE[:0], TWO_DOMAINS[:0])
    for settings in ({"floor": 1.5}, {"floor": 0.6, "unseen": 0.6}, {"sharpness": -1.0}):
        with pytest.raises(ValueError, match="expected"):
            Shares(**settings)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30), st.integers(0, 2**32 - 1), st.floats(0, 20))
def test_probabilities_sum_to_one_and_everything_free_has_the_floor(
    worths: list[float], seed: int, sharpness: float
) -> None:
    rng = np.random.default_rng(seed)
    num = len(worths)
    in_flight, unseen = rng.random(num) < 0.3, rng.random(num) < 0.5
    shares = Shares(sharpness=sharpness, floor=0.1, unseen=0.1, domain=0.4)
    q = shared_probabilities(np.array(worths), in_flight, unseen, rng.integers(0, 4, num), shares)
    free = np.ones(num, np.bool_) if in_flight.all() else ~in_flight
    assert q.sum() == pytest.approx(1.0)
    assert np.all(q[~free] == 0)
    assert np.all(q[free] >= 0.1 / free.sum() - 1e-12)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
def test_candidates_are_spread_over_the_pool(num_problems: int, limit: int, seed: int) -> None:
    index = candidates(num_problems, limit, np.random.default_rng(seed))
    assert np.all(np.diff(index) > 0)
    assert 0 <= index[0] <= index[-1] < num_problems
    # A stretch may begin within the problem with which the one before it ends.
    assert len(index) == num_problems if num_problems <= limit else limit / 2 <= len(index) <= limit


def test_every_problem_is_a_candidate_alike() -> None:
    rng = np.random.default_rng(0)
    counts = np.bincount(np.concatenate([candidates(50, 20, rng) for _ in range(4000)]), minlength=50)
    # Drawn with 20/50 at most; what a stretch shares with its neighbour can fall together: a little less.
    np.testing.assert_allclose(counts / 4000, 0.4, atol=0.06)


def test_a_block_of_draws_keeps_the_shares_of_its_parts() -> None:
    # A hundred good problems of 1,000, a floor of 0.1: however sharp, 9 in 10 draws are theirs while they last.
    worth = np.full(1000, 1e-3)
    worth[:100] = 1.0
    shares = Shares(sharpness=8.0, floor=0.1, unseen=0.0, domain=0.0)
    none = np.zeros(1000, np.bool_)
    parts = shared_parts(worth, none, none, np.zeros(1000, np.int64), shares)
    rng = np.random.default_rng(0)
    blocks = [draw_parts(parts, 80, rng) for _ in range(200)]
    assert all(len(set(block.tolist())) == 80 for block in blocks)
    # 72 of 80 by worth, and of the 8 of the floor about 28 in 928: 72.2.
    assert np.mean([(block < 100).sum() for block in blocks]) == pytest.approx(72.2, abs=0.8)


def test_a_part_that_has_too_few_problems_leaves_the_rest_to_the_others() -> None:
    only = Part(0.9, np.array([0.0, 0.0, 1.0]))
    rest = Part(0.1, np.array([0.5, 0.5, 0.0]))
    for parts in ([only, rest], [rest, only]):
        assert sorted(draw_parts(parts, 7, np.random.default_rng(1)).tolist()) == [0, 1, 2]
    np.testing.assert_allclose(mixture([only, rest]), [0.05, 0.05, 0.9])
