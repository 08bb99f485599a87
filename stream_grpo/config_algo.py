"""The settings of the off-policy maths: a recipe by its preset. Loads no torch. Part of the tree of `config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.algo.recipe import Recipe, readers


class Algo(Recipe):
    """The off-policy maths: a preset, and the single choices that differ from it."""

    preset: str = DEFAULT
    """The row that the choices below start from; `stream-grpo presets` lists all."""
    shuffle_rewards: bool = False
    """A control: the rewards of each group are shuffled among its rollouts, so that nothing can be learnt."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, given: Any) -> Any:
        """Fill in what is not given; numbers of the preset that the given choices no longer read fall away."""
        if not isinstance(given, Mapping):
            return given
        name = given.get("preset", DEFAULT)
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(PRESETS))}"
            raise ValueError(f"preset = {name!r}: no such preset; {hint}")
        choices = {**PRESETS[name].recipe.model_dump(), **given}
        return {
            key: None if key not in given and key in Recipe.model_fields and readers(key, choices) else value
            for key, value in choices.items()
        }
