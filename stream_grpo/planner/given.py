"""A world that is given in a few figures, where no run has measured it yet. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stream_grpo.planner.world import LearnerTimes, Rollouts, SamplerTimes, World

NUM_ROWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The figures; all but the first three have a default."""

    mean_tokens: float
    """Sampled tokens of a rollout, in the mean."""
    engine_step_s: float
    """Of an engine step with all slots taken."""
    learner_tokens_per_s: float
    """Sampled tokens that the learner, all ranks together, makes a step of in a second."""
    tokens_cv: float = 0.6
    """Standard deviation of the tokens of a rollout over their mean: they are drawn log-normal, cut at the limit."""
    group_correlation: float = 0.3
    """Of the logarithms of two lengths of one group."""
    signal_share: float = 0.7
    """Share of groups with signal."""
    base_share: float = 0.3
    """Part of an engine step with all slots taken that does not depend on how many run."""
    update_s: float = 1.0
    """That new weights keep an engine from sampling."""
    score_s: float = 0.0
    """From the last token of a group to its last reward."""
    publish_s: float = 2.0
    """That a publish keeps the learner from its next step."""
    checkpoint_s: float = 10.0
    """That a checkpoint does."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not math.isfinite(getattr(self, field.name)):
                raise ValueError(f"{field.name} = {getattr(self, field.name):g}: expected a finite number")
        for name in ("mean_tokens", "engine_step_s", "learner_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name):g}: expected above 0")
        for name in ("group_correlation", "signal_share", "base_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: expected 0 to 1")
        for name in ("tokens_cv", "update_s", "score_s", "publish_s", "checkpoint_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name):g}: expected at least 0")


def given_world(given: Given, *, group_size: int, max_num_seqs: int, max_tokens: int, seed: int = 0) -> World:
    """The world of these figures; `max_tokens` is the limit of a rollout."""
    per_slot_s = given.engine_step_s / max_num_seqs
    return World(
        rollouts=Rollouts(
            length_RG=lengths(given, group_size=group_size, max_tokens=max_tokens, seed=seed),
            signal_share=given.signal_share,
        ),
        sampler=SamplerTimes(
            base_s=given.base_share * given.engine_step_s,
            per_sequence_s=(1 - given.base_share) * per_slot_s,
            update_s=given.update_s,
            score_s=given.score_s,
        ),
        learner=LearnerTimes(
            base_s=0.0,
            per_token_s=1 / given.learner_tokens_per_s,
            publish_s=given.publish_s,
            checkpoint_s=given.checkpoint_s,
        ),
    )


def lengths(given: Given, *, group_size: int, max_tokens: int, seed: int) -> NDArray[np.int64]:
    """Log-normal lengths [R, G]: log L = mu + sigma (sqrt(c) of the group + sqrt(1 - c) of the rollout)."""
    rng = np.random.default_rng(seed)
    variance = math.log1p(given.tokens_cv**2)
    mu = math.log(given.mean_tokens) - variance / 2
    ours, own = rng.standard_normal((NUM_ROWS, 1)), rng.standard_normal((NUM_ROWS, group_size))
    share = given.group_correlation
    normal = math.sqrt(share) * ours + math.sqrt(1 - share) * own
    drawn = np.exp(mu + math.sqrt(variance) * normal)
    found: NDArray[np.int64] = np.clip(np.rint(drawn), 1, max_tokens).astype(np.int64)
    return found
