"""Who is compared, and what each leaves behind of a training. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

UNIFORM = {"curator.exploration": "1.0"}
SYNCHRONOUS = {"stream.max_policy_age": "0"}
# A weight too small to act, by which groups without signal are trained on instead of being left out.
UNFILTERED = {"algo.entropy_weight": "1e-12", "algo.regularize_without_signal": "true"}


class Contestant(NamedTuple):
    """A way to train."""

    said: str
    settings: Mapping[str, str]
    """Of this trainer, besides what all have."""


OURS: Mapping[str, Contestant] = {
    "default": Contestant("this trainer", {}),
    "synchronous": Contestant("with `max_policy_age` 0", SYNCHRONOUS),
    "filter": Contestant("uniform choice, groups without signal replaced", UNIFORM),
    "uniform": Contestant("uniform choice, all groups trained on", UNIFORM | UNFILTERED),
    "sync_uniform": Contestant(
        "uniform choice, all groups trained on, `max_policy_age` 0", UNIFORM | UNFILTERED | SYNCHRONOUS
    ),
}
TRL = "trl"
SAID: Mapping[str, str] = {name: contestant.said for name, contestant in OURS.items()} | {
    TRL: "TRL's GRPOTrainer, its own generation"
}


class Point(NamedTuple):
    """Weights that a training has come to, and what they had cost."""

    step: int
    """Optimizer steps."""
    seconds: float
    """Since sampling began; what copying weights took is left out."""
    tokens: int
    """Generated."""
    score: float
    """Held-out pass@1."""
