"""Statistics of a loss against plain numbers, and that parts add up to the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.statistics import NUM_BINS, Ratio, Statistics, gather, measure
from tests.algo.test_loss import RECIPES, arguments, draw

WIDTH = 8.0 / NUM_BINS
"""Of a bin of log R: half of it is what a quantile may be off."""


def ratio(log_BT: Tensor) -> Ratio:
    return Ratio(log_BT, log_BT.exp())


def statistics(log_R: list[list[float]], mask: list[list[bool]] | None = None, **given: Any) -> Statistics:
    """Of these log ratios R, which the weight takes too."""
    log_R_BT = torch.tensor(log_R, dtype=torch.float64)
    mask_BT = torch.tensor(mask) if mask is not None else torch.ones_like(log_R_BT, dtype=torch.bool)
    settings = {
        "age_B": torch.zeros(len(log_R), dtype=torch.int64),
        "shares": {},
        "divergences": {},
        "num_clamped": torch.tensor(0),
    }
    total = ratio(log_R_BT)
    return gather([measure(mask_BT, update=total, total=total, **(settings | given))])


def test_metrics_are_those_of_the_slow_loop() -> None:
    logs = [[0.1, -0.2, 0.0], [0.3, 0.0, 0.0]]
    mask = [[True, True, False], [True, False, False]]
    kept = [0.1, -0.2, 0.3]
    ratios = [math.exp(x) for x in kept]
    got = statistics(logs, mask, num_clamped=torch.tensor(2)).metrics()
    expected = {
        "ratio_mean": sum(ratios) / 3,
        "ratio_max": math.exp(0.3),
        "abs_log_ratio": 0.6 / 3,
        "k1": -0.2 / 3,
        "k3": sum(r - 1 - x for r, x in zip(ratios, kept, strict=True)) / 3,
        "chi_square": sum(r * r for r in ratios) / 3 - 1,
        "ess": sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)),
        "num_clamped": 2,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_divergences_to_other_policies() -> None:
    # x = log policy / other under the policy's own tokens: k1 = x, k3 = exp(-x) - 1 + x.
    x = torch.tensor([[0.2, -0.1]], dtype=torch.float64)
    got = statistics([[0.0, 0.0]], divergences={"reference": ratio(x)}).metrics()
    assert got["k1_reference"] == pytest.approx(0.05)
    k3 = (math.exp(-0.2) - 1 + 0.2 + math.exp(0.1) - 1 - 0.1) / 2
    assert got["k3_reference"] == pytest.approx(k3, rel=1e-9)


def test_entropy_by_place_age_and_length_counts_trained_tokens_alone() -> None:
    # One response of 20 tokens after 2 of prompt, one of 3: places count from the first trained token.
    mask = [[False, False, *[True] * 20], [False, True, True, False, True, *[False] * 17]]
    entropy_BT = torch.arange(44, dtype=torch.float64).view(2, 22)
    got = statistics([[0.0] * 22] * 2, mask, entropy_BT=entropy_BT, age_B=torch.tensor([0, 1]))
    # Row 0: entropies 2 to 21, of which 2 to 17 stand at places 1 to 16. Row 1: 23, 24, 26.
    assert got.entropy_by_position() == {
        "1-16": pytest.approx((sum(range(2, 18)) + 23 + 24 + 26) / 19),
        "17-64": pytest.approx((18 + 19 + 20 + 21) / 4),
    }
    assert got.metrics()["entropy"] == pytest.approx((sum(range(2, 22)) + 73) / 23)
    assert got.by_age()["1"]["entropy"] == pytest.approx(73 / 3)
    assert got.by_length()["17-64"]["entropy"] == pytest.approx(sum(range(2, 22)) / 20)
    assert statistics([[0.0]]).entropy_by_position() == {}
    assert "entropy" not in statistics([[0.0]]).metrics()


@given(st.data())
def test_entropy_by_place_is_that_of_a_loop(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 90))
    mask = data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3))
    entropy_BT = torch.rand(len(mask), length, dtype=torch.float64)
    sums: dict[str, list[float]] = {}
    for row, kept in enumerate(mask):
        for place, at in enumerate((at for at in range(length) if kept[at]), 1):
            label = "1-16" if place <= 16 else "17-64" if place <= 64 else "65-256"
            sums.setdefault(label, []).append(float(entropy_BT[row, at]))
    got = statistics([[0.0] * length] * len(mask), mask, entropy_BT=entropy_BT)
    expected = {label: sum(values) / len(values) for label, values in sums.items()}
    assert got.entropy_by_position() == pytest.approx(expected)


def test_shares_are_per_trained_token_and_only_what_there_is_is_reported() -> None:
    shares = {"clipped_high": torch.tensor([[True, False, False]]), "rejected_tv": torch.tensor([[True, True, False]])}
    got = statistics([[0.0] * 3], [[True, True, False]], shares=shares).metrics()
    assert (got["clip_share_high"], got["mask_share_tv"]) == (0.5, 1.0)
    assert "clip_share_low" not in got
    assert "correction_mean" not in got


def test_what_the_guard_looks_at() -> None:
    # Three watched tokens, one of them under the mask.
    watched_BT = torch.tensor([[True, True, False, True]])
    got = statistics([[0.2, -0.3, 0.4, 0.0]], [[True, True, True, False]], watched_BT=watched_BT)
    assert got.total("watched") == 2
    assert got.total("watched_abs_log") == pytest.approx(0.5)


def test_sequences_are_told_apart_by_age_and_length() -> None:
    # Lengths 1, 17 and 17 at ages 0, 3 and 40.
    mask_BT = torch.arange(17) < torch.tensor([[1], [17], [17]])
    logs_BT = torch.where(mask_BT, 0.1, 0.0).double()
    logs_BT[2] = 0.2 * mask_BT[2]
    got = statistics(logs_BT.tolist(), mask_BT.tolist(), age_B=torch.tensor([0, 3, 40]))
    assert {label: row["num_tokens"] for label, row in got.by_age().items()} == {"0": 1, "3-4": 17, ">32": 17}
    assert {label: row["num_tokens"] for label, row in got.by_length().items()} == {"1-16": 1, "17-64": 34}
    assert got.by_age()[">32"]["abs_log_ratio"] == pytest.approx(0.2)
    assert got.by_length()["17-64"]["abs_log_ratio"] == pytest.approx(0.15)


@given(st.lists(st.floats(-3.9, 3.9), min_size=1, max_size=200))
@settings(deadline=None)
def test_quantiles_are_right_to_the_width_of_a_bin(logs: list[float]) -> None:
    # The q quantile is the smallest value with at least q of all at or below it.
    got = statistics([logs]).metrics()
    for name, q in (("p01", 0.01), ("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = sorted(logs)[max(math.ceil(q * len(logs) - 1e-9) - 1, 0)]
        assert math.log(got[f"ratio_{name}"]) == pytest.approx(exact, abs=WIDTH)


def test_what_lies_beyond_the_histogram_is_in_its_outer_bins() -> None:
    got = statistics([[-20.0, 20.0, 0.0, 0.0]], [[True, True, True, False]])
    assert got.histogram.sum() == 3
    assert (got.histogram[0], got.histogram[NUM_BINS // 2], got.histogram[-1]) == (1, 1, 1)


def test_the_largest_ratio_is_that_of_a_trained_token() -> None:
    # A token under the mask has log ratio 0, ratio 1.
    assert statistics([[-0.5, 0.0]], [[True, False]]).metrics()["ratio_max"] == pytest.approx(math.exp(-0.5))
    assert statistics([[0.0, 0.0]], [[False, False]]).metrics()["ratio_max"] == 0


@pytest.mark.parametrize("name", ["grpo", "decoupled", "dppo_kl", "vcpo"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_parts_add_up_to_the_whole(name: str, seed: int) -> None:
    recipe, inputs = RECIPES[name], draw(seed)
    given_ = arguments(recipe, inputs)
    _, whole = policy_loss(recipe, inputs, **given_)
    parts = [policy_loss(recipe, inputs.rows(rows), **given_)[1] for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    total = sum(parts[1:], parts[0])
    assert total.metrics() == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12)
    for buckets, expected in ((total.by_age(), whole.by_age()), (total.by_length(), whole.by_length())):
        assert buckets.keys() == expected.keys()
        for label in buckets:
            assert buckets[label] == pytest.approx(expected[label], rel=1e-9, abs=1e-12)
    assert sum(row["num_tokens"] for row in whole.by_age().values()) == whole.total("tokens")


def test_nothing_trained_is_no_nan() -> None:
    inputs = draw(1)
    empty = inputs._replace(mask_BT=torch.zeros_like(inputs.mask_BT), tokens_B=torch.zeros(6, dtype=torch.int64))
    loss, got = policy_loss(PRESETS["decoupled"].recipe, LossInputs(*empty), denominator=0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(math.isfinite(value) for value in got.metrics().values())
    assert got.by_age() == {}
