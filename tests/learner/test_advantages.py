"""Rewards in, advantages out, by the recipe; and the baseline that goes from batch to batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Scored

ON_BEHAVIOR: dict[str, Any] = {"ratio_to": "behavior", "weight": "plain"}


def scored(maker: AdvantageMaker, rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> Scored:
    """NaN is a rollout that was not scored."""
    rewards_B = np.array(rewards, dtype=np.float64)
    lengths_B = np.array(lengths if lengths is not None else [1] * len(rewards), dtype=np.int64)
    return maker(rewards_B, np.isfinite(rewards_B), np.array(groups, dtype=np.int64), lengths_B)


def test_a_missing_reward_is_left_out_of_the_baseline() -> None:
    # Report C05: [1, missing, 0, 0]. Leave-one-out: 1 - 0 = 1 and 0 - 1/2 = -1/2; the missing one gets 0.
    got = scored(AdvantageMaker(PRESETS["rloo"].recipe), [1.0, np.nan, 0.0, 0.0], [0] * 4)
    assert got.advantages_B.tolist() == [1.0, 0.0, -0.5, -0.5]
    # Group mean over population std: mean 1/3, std sqrt(2)/3: sqrt(2) and -1/sqrt(2).
    got = scored(AdvantageMaker(PRESETS["grpo"].recipe), [1.0, np.nan, 0.0, 0.0], [0] * 4)
    assert got.advantages_B.tolist() == pytest.approx([2**0.5, 0.0, -(2**-0.5), -(2**-0.5)])


def test_each_group_has_its_own_baseline_whatever_their_sizes() -> None:
    # Report C08: A lost a rollout: [1, 0, 0] with mean 1/3; B [1, 1, 0, 0] with mean 1/2.
    got = scored(AdvantageMaker(PRESETS["dr_grpo"].recipe), [1, 0, 0, 1, 1, 0, 0], [7, 7, 7, 2, 2, 2, 2])
    assert got.advantages_B.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, 0.5, -0.5, -0.5])
    assert got.has_signal_B.all()


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.recipe.needs_spread])
def test_a_group_without_spread_has_advantages_of_exactly_0(name: str) -> None:
    got = scored(AdvantageMaker(PRESETS[name].recipe), [0.7, 0.7, 0.7, 1.0, 0.0], [0, 0, 0, 1, 1])
    assert got.advantages_B[:3].tolist() == [0.0, 0.0, 0.0]
    assert got.has_signal_B.tolist() == [False, False, False, True, True]
    assert (got.advantages_B[3:] != 0).all()


def test_a_running_mean_is_that_of_the_batches_before() -> None:
    maker = AdvantageMaker(Recipe(baseline="running_mean", baseline_decay=0.5, **ON_BEHAVIOR))
    # The first batch is measured against its own mean of 1/2; then 0.5 x 0.5 + 0.5 x 0.5.
    assert scored(maker, [1.0, 0.0], [0, 0]).advantages_B.tolist() == [0.5, -0.5]
    assert maker.baseline == 0.5
    # A group without spread still teaches; then 0.5 x 0.5 + 0.5 x 1.
    assert scored(maker, [1.0, 1.0], [0, 0]).advantages_B.tolist() == [0.5, 0.5]
    assert maker.baseline == 0.75
    maker.baseline = 0.25
    assert scored(maker, [1.0, np.nan], [0, 0]).advantages_B.tolist() == [0.75, 0.0]


def test_a_running_quantile_moves_by_its_step() -> None:
    maker = AdvantageMaker(
        Recipe(baseline="running_quantile", baseline_quantile=0.75, baseline_step=0.1, **ON_BEHAVIOR)
    )
    # From the mean of 0.5: one of two rewards is at or below it: 0.5 + 0.1 (0.75 - 0.5).
    scored(maker, [1.0, 0.0], [0, 0])
    assert maker.baseline == pytest.approx(0.525)


def test_a_group_baseline_keeps_nothing() -> None:
    maker = AdvantageMaker(PRESETS["grpo"].recipe)
    scored(maker, [1.0, 0.0], [0, 0])
    assert maker.baseline is None


def test_rewards_are_made_robust_first() -> None:
    # Clipped to [0, 1]: 5 -> 1, -3 -> 0.
    clipped = Recipe(baseline="group_mean", robust="clip", robust_low=0.0, robust_high=1.0, **ON_BEHAVIOR)
    assert scored(AdvantageMaker(clipped), [5.0, -3.0], [0, 0]).advantages_B.tolist() == [0.5, -0.5]
    # Winsorized by a quarter: of 0, 1, 2, 3, 100 the quartiles are 1 and 3; mean of 1, 1, 2, 3, 3 is 2.
    pulled = Recipe(baseline="group_mean", robust="winsorize", robust_share=0.25, **ON_BEHAVIOR)
    got = scored(AdvantageMaker(pulled), [0.0, 1.0, 2.0, 3.0, 100.0], [0] * 5)
    assert got.advantages_B.tolist() == pytest.approx([-1, -1, 0, 1, 1])


@pytest.mark.parametrize("without_signal", [False, True])
def test_length_is_taken_from_the_scaled_advantage(without_signal: bool) -> None:
    recipe = Recipe(baseline="group_mean", length_deviation=0.1, length_without_signal=without_signal, **ON_BEHAVIOR)
    # Lengths 1 and 3 of mean 2: deviations -1/2 and 1/2, so 0.05 is added to the short and taken from the long one.
    got = scored(AdvantageMaker(recipe), [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [1, 3, 1, 3])
    rest = [0.05, -0.05] if without_signal else [0.0, 0.0]
    assert got.advantages_B.tolist() == pytest.approx([0.55, -0.55, *rest])
