"""Length terms against slow loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.length import length_deviation

ROWS = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 2), st.booleans()), min_size=1, max_size=16)


@given(ROWS, st.floats(0, 2))
def test_the_deviation_equals_its_slow_loop(rows: list[tuple[int, bool, int, bool]], weight: float) -> None:
    got = length_deviation(
        torch.tensor([length for length, *_ in rows], dtype=torch.float64),
        torch.tensor([valid for _, valid, _, _ in rows]),
        torch.tensor([group for *_, group, _ in rows]),
        weight=weight,
        acts_B=torch.tensor([acts for *_, acts in rows]),
    )
    expected = []
    for length, valid, group, acts in rows:
        mine = [other for other, v, g, _ in rows if v and g == group]
        mean = sum(mine) / len(mine) if mine else 0.0
        expected.append(weight * (length - mean) / mean if valid and acts and mean > 0 else 0.0)
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_deviation_is_relative_to_the_valid_rollouts_of_the_group() -> None:
    # Mean of 10 and 30 is 20: -1/2 and 1/2, times 0.2. The invalid 1000 is in no mean. Group 1 does not act.
    got = length_deviation(
        torch.tensor([10, 30, 1000, 1, 9]),
        torch.tensor([True, True, False, True, True]),
        torch.tensor([0, 0, 0, 1, 1]),
        weight=0.2,
        acts_B=torch.tensor([True, True, True, False, False]),
    )
    assert got.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0, 0.0])


def test_bad_numbers_are_refused() -> None:
    one, yes = torch.ones(1), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"weight -1\.0: expected 0 or more"):
        length_deviation(one, yes, one.long(), weight=-1.0, acts_B=yes)
