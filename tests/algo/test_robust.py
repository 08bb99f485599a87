"""Robust rewards against slow loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.robust import clip_rewards, winsorize
from tests.algo.test_grouped import slow_quantile

NAN = float("nan")
ROWS = st.lists(st.tuples(st.floats(-10, 10), st.booleans(), st.integers(0, 2)), min_size=1, max_size=16)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(-5, 0), st.floats(0.1, 5))
def test_clipping_equals_its_slow_loop(rewards: list[float], low: float, high: float) -> None:
    got = clip_rewards(torch.tensor(rewards, dtype=torch.float64), low=low, high=high)
    assert got.tolist() == [min(max(r, low), high) for r in rewards]


@given(ROWS, st.floats(0, 0.49))
def test_winsorizing_equals_its_slow_loop(rows: list[tuple[float, bool, int]], share: float) -> None:
    got = winsorize(
        torch.tensor([r if v else NAN for r, v, _ in rows], dtype=torch.float64),
        torch.tensor([v for _, v, _ in rows]),
        torch.tensor([g for *_, g in rows]),
        share=share,
    )
    for value, (r, valid, group) in zip(got.tolist(), rows, strict=True):
        if not valid:
            assert math.isnan(value)
            continue
        mine = [q for q, v, g in rows if v and g == group]
        expected = min(max(r, slow_quantile(mine, share)), slow_quantile(mine, 1 - share))
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_an_outlier_is_pulled_to_its_own_groups_quantile() -> None:
    # Group 0 sorted: 0, 1, 2, 3, 100. The 0.25 quantile is at position 1 (1), the 0.75 quantile at position 3 (3).
    rewards = torch.tensor([100.0, 0.0, 1.0, 2.0, 3.0, 50.0, 60.0])
    group = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    got = winsorize(rewards, torch.ones(7, dtype=torch.bool), group, share=0.25)
    assert got.tolist() == [3.0, 1.0, 1.0, 2.0, 3.0, 52.5, 57.5]


def test_bad_bounds_are_refused() -> None:
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"low 1\.0: expected below high 1\.0"):
        clip_rewards(ones, low=1.0, high=1.0)
    with pytest.raises(ValueError, match=r"share 0\.5: expected 0 or more and below 0\.5"):
        winsorize(ones, ones.bool(), ones.long(), share=0.5)
