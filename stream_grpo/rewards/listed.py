"""A row that names several verifiers, in a list: the composition that this stands for. Pure.

    reward = -W                                          where a gate is failed, W = sum of the weights
           = sum weight r, held within [0, W] if there is a gate                                 elsewhere

Weights are 1/n for all n that are no gates, or given for each. A failed gate lies as far below the worst response as
the best lies above it: nothing buys it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from curator.schema import verifier_items
from stream_grpo.config_composition import Composition
from stream_grpo.errors import ConfigError

_MAX_NAME = 60


@lru_cache(maxsize=4096)
def listed(verifier: str) -> Composition | None:
    """The composition of a list of verifiers; None for one name. Raises ConfigError for a list that is none."""
    try:
        items = verifier_items(verifier)
    except ValueError as error:
        raise ConfigError(f"verifier {verifier!r}: {error}") from None
    if items is None:
        return None
    scores = [item for item in items if not item.gate]
    weights = {item.verifier: 1.0 / len(scores) if item.weight is None else item.weight for item in scores}
    components = {
        name: {"verifier": item.verifier, "role": "gate"}
        if item.gate
        else {"verifier": item.verifier, "weight": weights[item.verifier]}
        for name, item in zip(_names(item.verifier for item in items), items, strict=True)
    }
    tree: dict[str, Any] = {"components": components}
    if len(scores) < len(items):
        total = sum(weights.values())
        tree |= {"bounds": (0.0, total), "gate_reward": -total}
    return Composition.model_validate(tree)


def label_of(composition: Composition) -> str:
    """The names of its components, joined: the verifier of what a list says. No composition of a run is called so."""
    return "+".join(composition.components)


def _names(verifiers: Iterable[str]) -> list[str]:
    """Names of components, each near that of its verifier and none twice."""
    found: list[str] = []
    for verifier in verifiers:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", verifier)[:_MAX_NAME]
        name = plain if plain[0].isalpha() else f"v{plain}"
        found.append(name if name not in found else f"{name}-{len(found)}")
    return found
