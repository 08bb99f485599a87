"""Group statistics over a flat batch against a dictionary of lists."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.grouped import group_mean, group_quantile, group_spread, group_sum, groups_of

NAN = float("nan")
ROWS = st.lists(st.tuples(st.floats(-10, 10), st.booleans(), st.integers(-3, 3)), min_size=1, max_size=16)


def slow_quantile(values: list[float], share: float) -> float:
    """Linear between neighbours, from its definition: position share (n - 1) in the sorted list."""
    ordered, position = sorted(values), share * (len(values) - 1)
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@given(ROWS, st.floats(0, 1))
def test_every_statistic_equals_its_slow_loop(rows: list[tuple[float, bool, int]], share: float) -> None:
    values = torch.tensor([v if ok else NAN for v, ok, _ in rows], dtype=torch.float64)
    groups = groups_of(torch.tensor([g for *_, g in rows]), torch.tensor([ok for _, ok, _ in rows]))
    labels = sorted({g for *_, g in rows})
    members = [[v for v, ok, g in rows if ok and g == label] for label in labels]
    assert groups.num_valid_P.tolist() == [len(m) for m in members]
    assert group_sum(values, groups).tolist() == pytest.approx([math.fsum(m) for m in members], rel=1e-9, abs=1e-9)
    means = [math.fsum(m) / len(m) if m else 0.0 for m in members]
    assert group_mean(values, groups).tolist() == pytest.approx(means, rel=1e-9, abs=1e-9)
    assert group_spread(values, groups).tolist() == [max(m) - min(m) if m else -math.inf for m in members]
    quantiles = [slow_quantile(m, share) if m else 0.0 for m in members]
    assert group_quantile(values, groups, share=share).tolist() == pytest.approx(quantiles, rel=1e-9, abs=1e-9)
    medians = [statistics.median(m) if m else 0.0 for m in members]
    assert group_quantile(values, groups, share=0.5).tolist() == pytest.approx(medians, rel=1e-9, abs=1e-9)


def test_flags_that_are_not_bool_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        groups_of(torch.tensor([0, 1]), torch.tensor([1, 0]))
