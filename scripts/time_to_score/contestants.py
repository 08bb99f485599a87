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
TRL, TRL_VLLM = "trl", "trl_vllm"
PEERS = (TRL, TRL_VLLM)
SAID: Mapping[str, str] = {name: contestant.said for name, contestant in OURS.items()} | {
    TRL: "TRL's GRPOTrainer, its own generation",
    TRL_VLLM: "TRL's GRPOTrainer, vLLM in its process",
}
STEP_S: Mapping[str, float] = {"synchronous": 1.6, "sync_uniform": 1.9, "uniform": 1.5} | dict.fromkeys(PEERS, 0.9)
"""Seconds a step that are reckoned with until one training of a contestant is there; 1.2 for those not named."""
START_S, SCORE_S = 45.0, 6.0
"""Likewise of a start, and of one score."""


def key(name: str, seed: int) -> str:
    """Under which the result of a training is kept, and the name of its folder."""
    return f"{name}-{seed}"


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
