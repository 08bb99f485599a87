"""How many rollouts a group has: worth per token against numbers derived by hand, and what goes with a pick."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curator.curation import Curation
from curator.difficulty import expected_signal
from curator.estimators.belief import Beta
from curator.estimators.value import mixed_K
from curator.group_size import best_size, token_worth
from curator.schema import PICK_SCHEMA, batch_from_bytes, batch_to_bytes, picks_from_batch, picks_to_batch
from tests.curator.fakes import make_outcome, make_pool

SIZES = (4, 8, 16)


def mixed_at(*rates: float) -> np.ndarray:
    return np.stack([expected_signal(np.array(rates), size) for size in SIZES])


def test_worth_per_token_is_the_chance_of_signal_by_what_a_mean_of_few_leaves() -> None:
    # p = 1/2: (1 - 2/16) 3/16, (1 - 2/256) 7/64, (1 - 2/65536) 15/256.
    at_half = token_worth(mixed_at(0.5), SIZES)[:, 0]
    np.testing.assert_allclose(at_half, [0.875 * 3 / 16, 0.9921875 * 7 / 64, 65534 / 65536 * 15 / 256], rtol=1e-14)
    # p = 0.02, where p^G is next to nothing: 1 - 0.98^G = 0.0776, 0.1492, 0.2762.
    at_few = token_worth(mixed_at(0.02), SIZES)[:, 0]
    np.testing.assert_allclose(at_few, [0.07763 * 3 / 16, 0.14924 * 7 / 64, 0.27621 * 15 / 256], rtol=1e-4)


def test_the_best_size_grows_as_passes_get_rare_and_is_the_same_for_rare_failures() -> None:
    rates = (0.5, 0.1, 0.02, 0.01, 0.99, 0.98, 0.9)
    assert [SIZES[place] for place in best_size(mixed_at(*rates), SIZES)] == [4, 4, 8, 16, 16, 8, 4]
    # Without any chance of signal all sizes are alike, and the smallest costs least.
    assert best_size(mixed_at(0.0, 1.0), SIZES).tolist() == [0, 0]


@given(st.floats(1e-6, 0.5), st.floats(1e-6, 0.5))
def test_the_rarer_passes_are_the_larger_is_the_group(one: float, other: float) -> None:
    rarer, commoner = best_size(mixed_at(min(one, other), max(one, other)), SIZES).tolist()
    assert rarer >= commoner


def test_doubt_counts_by_what_it_expects() -> None:
    # p ~ Beta(0.1, 4.9) has the mean 0.02 of a problem whose groups should have 8. But it is most often next to 0,
    # where nothing helps, and else so large that 4 do: E[mixed] = 1 - prod (4.9 + i) / (5 + i) - prod (.1 + i)
    # / (5 + i).
    belief = Beta(np.array([0.1]), np.array([4.9]))
    mixed_SP = np.stack([belief.group_value_P(mixed_K(size)) for size in SIZES])
    fails = 4.9 / 5 * 5.9 / 6 * 6.9 / 7 * 7.9 / 8
    passes = 0.1 / 5 * 1.1 / 6 * 2.1 / 7 * 3.1 / 8
    assert mixed_SP[0, 0] == pytest.approx(1 - fails - passes, rel=1e-12)
    # 0.0615 x 3/16 = 0.01154, 0.0976 x 7/64 = 0.01067.
    np.testing.assert_allclose(token_worth(mixed_SP, SIZES)[:2, 0], [0.01154, 0.01067], rtol=1e-3)
    assert best_size(mixed_SP, SIZES).tolist() == [0]


def curation_of(path: Path, num: int, **rules: object) -> Curation:
    """The sliding rate, which is certain, and moves all the way with each group."""
    settings = {"estimator": "sliding_rate", "rate_step": 1.0, "exploration": 0.0, "group_sizes": SIZES, **rules}
    return Curation(make_pool(path, num), group_size=8, **settings)


def test_a_pick_has_the_size_that_pays_best_for_its_problem_and_keeps_it(tmp_path: Path) -> None:
    curation = curation_of(tmp_path / "pool", 3, exploration=0.5)
    rates = {"p0000": 0.5, "p0001": 0.02, "p0002": 0.01}
    curation.report([make_outcome(i, name, mean=rate) for i, (name, rate) in enumerate(rates.items())])
    picks = curation.next(["a", "b", "c"])
    found = {pick.problem.problem_id: (pick.group_size, round(pick.expected_signal, 4)) for pick in picks}
    # 1 - 2/16; 1 - 0.98^8; 1 - 0.99^16.
    assert found == {"p0000": (4, 0.875), "p0001": (8, 0.1492), "p0002": (16, 0.1485)}
    assert curation.stats()["picks_by_size"] == {"4": 1, "8": 1, "16": 1}
    # What it learns while the group is under way does not change that.
    for_hard = next(pick for pick in picks if pick.group_size == 16)
    curation.report([make_outcome(3, "p0002", mean=0.5, group_id="other")])
    assert curation.next([for_hard.group_id]) == [for_hard]
    assert picks_from_batch(batch_from_bytes(batch_to_bytes(picks_to_batch(picks)), PICK_SCHEMA)) == picks


def test_a_requeued_problem_has_the_size_that_pays_best_now(tmp_path: Path) -> None:
    curation = curation_of(tmp_path / "pool", 3)
    curation.report(
        [make_outcome(0, "p0001", mean=0.01), make_outcome(1, "p0001", passed=0, failed=0, fate="requeued")]
    )
    (pick,) = curation.next(["a"])
    assert (pick.problem.problem_id, pick.group_size, pick.probability) == ("p0001", 16, 1.0)


def test_without_sizes_every_group_has_the_one_that_was_given(tmp_path: Path) -> None:
    curation = curation_of(tmp_path / "pool", 2, group_sizes=())
    curation.report([make_outcome(0, "p0001", mean=0.01)])
    assert [pick.group_size for pick in curation.next(["a", "b"])] == [8, 8]


def test_a_larger_group_costs_its_problem_as_many_more_tokens(tmp_path: Path) -> None:
    curation = curation_of(
        tmp_path / "pool", 2, choice="worth", sharpness=1.0, unseen_share=0.0, domain_share=0.0, group_sizes=(4, 8)
    )
    # 10 tokens and 2 rollouts each: 5 a rollout.
    curation.report([make_outcome(0, "p0000", mean=0.5), make_outcome(1, "p0001", mean=0.02)])
    picks = {pick.problem.problem_id: pick for pick in (curation.next([f"g{i}"])[0] for i in range(2))}
    # Worth of the one 0.875 / (4 x 5), of the other 0.14924 / (8 x 5); who is second is the only one left.
    worths = {"p0000": 0.875 / 20, "p0001": 0.149237 / 40}
    first = next(name for name, pick in picks.items() if pick.group_id == "g0")
    assert picks[first].probability == pytest.approx(worths[first] / sum(worths.values()), rel=1e-5)
    assert {name: pick.group_size for name, pick in picks.items()} == {"p0000": 4, "p0001": 8}


@pytest.mark.parametrize("sizes", [(8, 4), (4, 4), (1, 4)])
def test_sizes_that_do_not_ascend_from_two_are_refused(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected whole numbers from 2 that ascend"):
        curation_of(tmp_path / "pool", 2, group_sizes=sizes)
