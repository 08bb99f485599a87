"""Worlds small enough to work out by hand."""

import numpy as np

from stream_grpo.planner.world import LearnerTimes, Rollouts, SamplerTimes, World


def constant_world(
    *, tokens: int = 10, group_size: int = 2, step_s: float = 1.0, learner_s: float = 0.0, publish_s: float = 0.0
) -> World:
    """All rollouts of one length, all groups with signal, an engine step of one time whatever runs."""
    return World(
        rollouts=Rollouts(length_RG=np.full((1, group_size), tokens, np.int64)),
        sampler=SamplerTimes(base_s=step_s, per_sequence_s=0.0),
        learner=LearnerTimes(base_s=learner_s, per_token_s=0.0, publish_s=publish_s),
    )


def mixed_world(*, mean: float = 40.0, group_size: int = 4, signal_share: float = 0.7, learner_s: float = 2.0) -> World:
    """Lengths of all kinds, groups without signal, and times that depend on what runs."""
    rng = np.random.default_rng(7)
    lengths = np.clip(np.rint(rng.gamma(4.0, mean / 4.0, (200, group_size))), 1, 4 * mean).astype(np.int64)
    return World(
        rollouts=Rollouts(length_RG=lengths, signal_share=signal_share),
        sampler=SamplerTimes(
            base_s=0.02, per_sequence_s=0.002, between_per_sequence_s=0.0001, update_s=0.1, insert_s=0.02
        ),
        learner=LearnerTimes(
            base_s=learner_s / 2, per_token_s=learner_s / 2 / 1280, publish_s=0.1, spread=np.array([0.8, 1.0, 1.2])
        ),
    )
