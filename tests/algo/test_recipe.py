"""What a recipe refuses, in words, and what follows from its choices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import _MAY_BE_ABSENT, _READ_BY, Recipe, given, readers
from stream_grpo.config import Config
from stream_grpo.config_file import load, parse, to_toml
from stream_grpo.errors import ConfigError

PLAIN: dict[str, Any] = {"ratio_to": "behavior", "weight": "plain"}
UPDATE: dict[str, Any] = {"ratio_to": "proximal", "proximal": "recomputed", "weight": "plain"}
TRUNCATED: dict[str, Any] = {"correction": "truncated", "correction_level": "token", "correction_high": 2.0}
ESS: dict[str, Any] = UPDATE | TRUNCATED | {"learning_rate_scale": "ess", "ess_base": 1.0}
KL: dict[str, Any] = {"kl_weight": 0.1, "kl_reference": "fixed", "regularize_without_signal": True}

VALUES: dict[str, Any] = {
    "std": "population", "correction_level": "token", "kl_place": "loss", "kl_reference": "fixed",
    "kl_refresh_interval": 5, "gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0), "robust_low": -1.0,
    "robust_share": 0.2, "correction_high": 2.0, "dual_clip": 3.0, "length_without_signal": True,
    "regularize_without_signal": False, "gae_whiten": True,
}  # fmt: skip
"""A value for every number that some choice reads; 0.5 for the rest."""

GAE: dict[str, Any] = {"advantage": "gae", "baseline": "none"}
READERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gae_gamma", "gae_lambda", "gae_whiten", "value_clip", "critic_rate"), GAE),
    "baseline_decay": {"baseline": "running_mean"},
    "baseline_quantile": {"baseline": "running_quantile"},
    "baseline_step": {"baseline": "running_quantile"},
    "std": {"scale": "group_std"},
    "scale_floor": {"scale": "group_mean"},
    "robust_low": {"robust": "clip"},
    "robust_high": {"robust": "clip"},
    "robust_share": {"robust": "winsorize"},
    "step_weight": {"step_rewards": "mean"},
    "outcome_weight": {"step_rewards": "position"},
    "length_without_signal": {"length_deviation": 0.1},
    "clip_low": {"weight": "ppo"},
    "clip_high": {"weight": "geometric"},
    "dual_clip": {"weight": "ppo"},
    "cap": {"weight": "cispo"},
    "soft_positive": {"weight": "soft"},
    "soft_negative": {"weight": "soft"},
    "gamma_positive": {"weight": "gamma", "ratio_level": "sequence_sum"},
    "gamma_negative": {"weight": "gamma", "ratio_level": "sequence_sum"},
    "correction_level": {"correction": "truncated"} | UPDATE,
    "correction_low": {"correction": "both"} | UPDATE,
    "correction_high": {"correction": "masked"} | UPDATE,
    "kl_place": {"kl": "k2"},
    "kl_weight": {"kl": "k3"},
    "kl_reference": {"kl": "k3_off_policy"},
    "kl_refresh_interval": {"kl": "k2", "kl_reference": "refreshed"},
    "kl_ema_decay": {"kl": "k2", "kl_reference": "ema"},
    "kl_target": {"kl": "k2"},
    "kl_horizon": {"kl": "k2", "kl_target": 0.1},
    "regularize_without_signal": {"entropy_weight": 0.1},
    "ess_base": {"learning_rate_scale": "ess"},
}
"""For every number that only some choices read: choices that do."""


def value_of(name: str) -> Any:
    return VALUES.get(name, 0.5)


def filled(choices: dict[str, Any]) -> dict[str, Any]:
    """The choices with every number that they need."""
    base = PLAIN | choices
    whole = {name: field.default for name, field in Recipe.model_fields.items()} | base
    needed = [name for name, (_, reads) in _READ_BY.items() if reads(whole) and name not in _MAY_BE_ABSENT]
    return {name: value_of(name) for name in needed} | base


@pytest.mark.parametrize("name", _READ_BY)
def test_a_number_that_nothing_reads_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} = .* would do nothing: it is read with"):
        Recipe(**PLAIN, **{name: value_of(name)})


@pytest.mark.parametrize("name", _READ_BY)
def test_a_number_that_is_read_must_be_there(name: str) -> None:
    assert READERS.keys() == _READ_BY.keys()
    without = {key: value for key, value in filled(READERS[name]).items() if key != name}
    if name in _MAY_BE_ABSENT:
        assert getattr(Recipe(**without), name) is None
    else:
        with pytest.raises(ValidationError, match=f"{name} is missing: "):
            Recipe(**without)
    rest = {"kl_horizon": 9.0} if name == "kl_target" else {}
    assert getattr(Recipe(**without, **rest, **{name: value_of(name)}), name) == value_of(name)


WITH_CRITIC = {key: value for key, value in PRESETS["ppo"].recipe.model_dump().items() if value is not None}


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        (UPDATE | {"mask_ratio": (1.1, 2.0)}, r"mask_ratio = \[1.1, 2.0\]: the band must hold 1"),
        (UPDATE | {"mask_sequence": (0.5, 0.9)}, "mask_sequence = .* the band must hold 1"),
        (UPDATE | {"mask_veto": (2.0, 3.0)}, "mask_veto = .* the band must hold 1"),
        (UPDATE | TRUNCATED | {"correction_high": 0.5}, "1 must lie between them"),
        (UPDATE | TRUNCATED | {"correction": "both", "correction_low": 1.5}, "1 must lie between them"),
        (PLAIN | {"robust": "clip", "robust_low": 2.0, "robust_high": 1.0}, "robust_low = 2.0: not below robust_high"),
        (PLAIN | TRUNCATED | {"proximal": "recomputed"}, "the ratio would count twice"),
        ({"weight": "reinforce"} | TRUNCATED, "the correction could not act; use proximal = recomputed"),
        ({"weight": "plain", "ratio_to": "proximal"}, "say ratio_to = behavior"),
        (PLAIN | {"mask_ratio": (0.5, 2.0)}, "mask_ratio is on proximal / behavior, which proximal = behavior makes 1"),
        (PLAIN | {"mask_sequence": (0.5, 2.0)}, "mask_sequence is on proximal / behavior"),
        (PLAIN | {"mask_sequence_k3": 0.1}, "mask_sequence_k3 is on proximal / behavior"),
        (PLAIN | {"mask_veto": (0.5, 2.0)}, "mask_veto is on proximal / behavior"),
        (ESS | {"correction_level": "token"}, "learning_rate_scale = ess counts sequences"),
        (ESS | {"correction": "masked", "correction_low": 0.5}, "learning_rate_scale = ess with correction = masked"),
        (PLAIN | {"proximal": "recomputed"}, "proximal = recomputed would do nothing"),
        (
            PLAIN | {"weight": "geometric", "clip_low": 0.4, "clip_high": 0.4, "ratio_level": "sequence_mean"},
            "weight = geometric is defined on the token",
        ),
        (PLAIN | {"weight": "topr"}, "weight = topr is defined on the sequence_sum"),
        (
            PLAIN | {"weight": "gamma", "gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0)},
            "weight = gamma is defined on the sequence_sum",
        ),
        (PLAIN | KL | {"kl": "k1", "kl_place": "loss"}, "expected gradient of k1 on-policy is 0"),
        (PLAIN | KL | {"kl": "k2", "kl_place": "advantage"}, "only k1 gives KL's gradient there"),
        (PLAIN | KL | {"kl": "k3", "kl_place": "advantage"}, "only k1 gives KL's gradient there"),
        (PLAIN | KL | {"kl": "k2", "kl_place": "reward"}, "kl_place = reward: only k1 gives KL's gradient there"),
        (
            PLAIN | KL | {"kl": "k1", "kl_place": "reward", "kl_reference": "behavior"},
            "kl_reference = behavior with kl_place = reward: use kl = k2",
        ),
        (
            PLAIN
            | {"step_rewards": "position", "step_weight": 1.0, "outcome_weight": 0.0}
            | {"scale": "group_mean", "scale_floor": 0.1, "baseline": "group_mean"},
            "step_rewards = position with scale = group_mean",
        ),
        (
            PLAIN | KL | {"kl": "k1", "kl_place": "advantage", "kl_reference": "behavior"},
            "kl_reference = behavior with kl_place = advantage: use kl = k2",
        ),
        (
            WITH_CRITIC | {"baseline": "leave_one_out"},
            "baseline = leave_one_out with advantage = gae: the critic is the",
        ),
        (WITH_CRITIC | {"scale": "batch_std", "std": "sample", "scale_floor": 0.1}, "gae_whiten = true for advantages"),
        (
            WITH_CRITIC | {"step_rewards": "position", "step_weight": 1.0, "outcome_weight": 0.0},
            "step_rewards = position with advantage = gae",
        ),
        (
            WITH_CRITIC | {"length_deviation": 0.1, "length_without_signal": True},
            "length_deviation = 0.1 with advantage = gae",
        ),
    ],
)
def test_choices_that_cannot_work_together_are_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Recipe(**choices)


@pytest.mark.parametrize(
    "choices",
    [{"clip": 0.2}, {"weight": "bnpo"}, {"weight": "cispo", "cap": -1.0}, {"weight": "cispo", "cap": float("inf")}],
)
def test_unknown_names_and_impossible_numbers_are_refused(choices: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Recipe(**(PLAIN | choices))


def test_a_recipe_is_frozen() -> None:
    recipe = Recipe(**PLAIN)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.weight = "ppo"  # type: ignore[misc]
    assert hash(recipe) == hash(Recipe(**PLAIN))


def test_what_needs_spread() -> None:
    entropy = {"entropy_weight": 0.1, "regularize_without_signal": False}
    length = {"length_deviation": 0.1, "length_without_signal": False}
    assert Recipe(**PLAIN, baseline="group_mean", **entropy, **length).needs_spread
    assert Recipe(**PLAIN, baseline="leave_one_out").needs_spread
    assert Recipe(**PLAIN, baseline="group_median").needs_spread
    assert not Recipe(**PLAIN, baseline="batch_mean").needs_spread
    assert not Recipe(**PLAIN, baseline="none").needs_spread
    assert not Recipe(**PLAIN, baseline="running_mean", baseline_decay=0.9).needs_spread
    # What acts without signal must see such groups.
    assert not Recipe(**PLAIN, **(entropy | {"regularize_without_signal": True})).needs_spread
    assert not Recipe(**PLAIN, **(length | {"length_without_signal": True})).needs_spread


def test_what_follows_from_the_choices() -> None:
    k2 = Recipe(**PLAIN, **KL, kl="k2", kl_place="loss")
    assert (k2.needs_first_pass, k2.needs_reference, k2.has_regularizer, k2.has_mask) == (False, True, True, False)
    k1 = Recipe(**PLAIN, **KL, kl="k1", kl_place="advantage")
    assert (k1.needs_first_pass, k1.needs_reference, k1.has_regularizer) == (True, True, True)
    sampler = Recipe(**PLAIN, **(KL | {"kl_reference": "behavior"}), kl="k2", kl_place="loss")
    assert (sampler.needs_first_pass, sampler.needs_reference) == (False, False)
    m2po, vcpo, plain = Recipe(**PLAIN, mask_second_moment=0.04), PRESETS["vcpo"].recipe, Recipe(**PLAIN)
    assert (m2po.needs_first_pass, vcpo.needs_first_pass, plain.needs_first_pass) == (True, True, False)
    assert (m2po.has_mask, plain.has_mask, plain.has_regularizer) == (True, False, False)


def test_with_a_critic_a_group_without_spread_is_kept() -> None:
    assert (PRESETS["ppo"].recipe.has_critic, PRESETS["ppo"].recipe.needs_spread) == (True, False)
    assert not PRESETS["grpo"].recipe.has_critic


BANDS = ("mask_ratio", "mask_sequence", "mask_veto")


@pytest.mark.parametrize("name", [name for name in Recipe.model_fields if name.startswith("mask_")])
def test_every_mask_is_one(name: str) -> None:
    assert Recipe(**UPDATE, **{name: (0.5, 2.0) if name in BANDS else 0.1}).has_mask


def test_readers_are_told_in_words() -> None:
    assert readers("cap", {"weight": "ppo"}) == "weight = cispo"
    assert readers("cap", {"weight": "cispo"}) is None
    assert readers("baseline", {}) is None
    assert given(0.0) == 0.0
    with pytest.raises(AssertionError, match="every number"):
        given(None)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_is_a_preset_and_what_differs(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[model]\npath = "m"\n[algo]\npreset = "{preset}"\naggregation = "constant"\n')
    config = load(path)
    expected = PRESETS[preset].recipe.model_dump() | {"aggregation": "constant"}
    assert Recipe(**{name: getattr(config.algo, name) for name in Recipe.model_fields}) == Recipe(**expected)
    path.write_text(to_toml(config))
    assert load(path) == config


def test_numbers_of_a_preset_that_no_longer_act_fall_away() -> None:
    config = parse({"model": {"path": "m"}, "algo": {"preset": "grpo", "scale": "none", "weight": "plain"}}, "here")
    assert (config.algo.std, config.algo.scale_floor, config.algo.clip_low, config.algo.clip_high) == (None,) * 4
    assert config.algo.baseline == "group_mean"


@pytest.mark.parametrize(
    ("algo", "complaint"),
    [
        ({"preset": "dappo"}, "no such preset; did you mean 'dapo'"),
        ({"preset": "grpo", "cap": 5.0}, "cap = 5.0 would do nothing: it is read with weight = cispo"),
        ({"preset": "grpo", "clip_hihg": 0.3}, r"unknown key algo.clip_hihg: did you mean algo.clip_high\?"),
        ({"preset": "decoupled", "proximal": "behavior"}, "the correction could not act"),
    ],
)
def test_a_configuration_names_what_is_wrong(algo: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse({"model": {"path": "m"}, "algo": algo}, "here")


def test_the_default_is_a_preset() -> None:
    assert Config.model_validate({"model": {"path": "m"}}).algo.preset in PRESETS


def test_recipes_load_no_torch() -> None:
    code = "import sys, stream_grpo.algo.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
