"""Every preset is there, says what it trades, and holds its paper's choices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.algo.recipe import Recipe

NAMES = (
    "grpo", "dr_grpo", "rloo", "reinforce", "dapo", "gspo", "gspo_token", "gmpo", "cispo", "scalerl", "decoupled",
    "a3po", "tis", "seq_tis", "mis", "icepop", "geo_mask", "m2po", "dppo_tv", "dppo_kl", "sapo", "topr", "vespo",
    "vcpo", "max_rl", "lite_ppo", "ppo",
)  # fmt: skip


def test_all_presets_are_there() -> None:
    assert set(PRESETS) == set(NAMES)
    assert DEFAULT in PRESETS


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_valid_frozen_and_says_where_it_comes_from(name: str) -> None:
    preset = PRESETS[name]
    assert Recipe.model_validate(preset.recipe.model_dump()) == preset.recipe
    assert re.search(r"\d{4}\.\d{5}|notion|SkyRL|Williams", preset.source)
    assert preset.trades.endswith(".")
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.source = ""  # type: ignore[misc]
    with pytest.raises(TypeError):
        PRESETS[name] = preset  # type: ignore[index]


def test_no_two_presets_are_one_but_those_that_say_so() -> None:
    # The two papers' names differ only where advantages differ within an answer.
    assert PRESETS["gspo_token"].recipe == PRESETS["gspo"].recipe
    assert len({preset.recipe for preset in PRESETS.values()}) == len(PRESETS) - 1


@pytest.mark.parametrize("name", NAMES)
def test_only_a_baseline_that_is_not_the_groups_admits_groups_without_spread(name: str) -> None:
    assert PRESETS[name].recipe.needs_spread == (name not in ("reinforce", "ppo"))


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("grpo", {"scale": "group_std", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequences"}),
        ("dr_grpo", {"baseline": "group_mean", "scale": "none", "aggregation": "constant"}),
        ("rloo", {"baseline": "leave_one_out", "scale": "none"}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "tokens"}),
        ("gspo", {"ratio_level": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequences"}),
        ("gmpo", {"weight": "geometric", "clip_low": 0.4, "clip_high": 0.4}),
        ("cispo", {"weight": "cispo", "aggregation": "tokens"}),
        ("scalerl", {"weight": "cispo", "scale": "batch_std", "aggregation": "problems"}),
        ("decoupled", {"proximal": "recomputed", "correction": "truncated", "correction_high": 2.0}),
        ("a3po", {"proximal": "interpolated", "correction": "truncated"}),
        ("tis", {"correction": "truncated", "correction_level": "token"}),
        ("seq_tis", {"correction": "truncated", "correction_level": "sequence_sum"}),
        ("mis", {"correction": "masked", "correction_level": "sequence_sum", "correction_high": 2.0}),
        ("icepop", {"correction": "masked", "correction_low": 0.5, "correction_high": 5.0}),
        ("m2po", {"mask_second_moment": 0.04, "ratio_to": "behavior"}),
        ("dppo_tv", {"mask_tv": 0.2, "cap": 20.0}),
        ("dppo_kl", {"mask_binary_kl": 0.05, "cap": 20.0}),
        ("sapo", {"weight": "soft", "soft_positive": 1.0, "soft_negative": 1.05}),
        ("topr", {"weight": "topr", "ratio_level": "sequence_sum"}),
        ("vespo", {"gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0), "ratio_level": "sequence_sum"}),
        ("vcpo", {"weight": "reinforce", "correction_level": "sequence_sum", "correction_high": 8.0, "ess_base": 1.0}),
        ("max_rl", {"scale": "group_mean"}),
        ("ppo", {"advantage": "gae", "gae_gamma": 1.0, "gae_lambda": 1.0, "clip_high": 0.2, "baseline": "none"}),
    ],
)  # fmt: skip
def test_a_preset_holds_the_settings_of_its_paper(name: str, choices: dict[str, Any]) -> None:
    assert {choice: getattr(PRESETS[name].recipe, choice) for choice in choices} == choices
