"""Who waits for whom, from shares of time, in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_S = 60.0
"""What is looked back on."""
LITTLE = 0.1
"""A side that waits for a smaller share of the time is not held up."""
MUCH = 0.25
"""Where both sides wait for as much, they wait for each other."""
SPARSE = 0.5
"""Share of a sampler's slots below which it has too little to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What both sides did, in shares of a span of time; of several samplers their mean."""

    learner_waited: float = 0.0
    """For a batch."""
    learner_published: float = 0.0
    """Publishing and making checkpoints."""
    sampler_idle: Mapping[str, float]
    """With nothing to sample, by what was waited for: policy, buffer, curator, rewards, environment."""
    sampler_stalled: float = 0.0
    """Taking up weights."""
    slots_taken: float = 1.0
    """Running requests over what the engine runs at once."""


_WAITED_FOR = {
    "policy": "weights",
    "buffer": "the permission to begin groups",
    "curator": "problems",
    "rewards": "scores",
    "environment": "environments",
}
_OUTSIDE = {"curator": "the curator is", "rewards": "scoring is", "environment": "acting in environments is"}
"""Neither sampler nor learner, as the bottleneck."""


def bottleneck(shares: Shares, span_s: float = WINDOW_S) -> str:
    """Who waits for whom, in a sentence."""
    span = "the last minute" if span_s >= WINDOW_S else f"the last {span_s:.0f} s"
    idle = sum(shares.sampler_idle.values())
    waited = shares.learner_waited
    cause = max(shares.sampler_idle, key=lambda name: shares.sampler_idle[name], default="buffer")
    idle_words = f"the samplers waited {idle:.0%} of {span} for {_WAITED_FOR[cause]}"
    if waited < LITTLE and idle < LITTLE:
        return f"nothing is held up: in {span} the learner waited {waited:.0%} and the samplers {idle:.0%}"
    if idle >= LITTLE and cause in _OUTSIDE:
        return f"{_OUTSIDE[cause]} the bottleneck: {idle_words}, the learner {waited:.0%} for a batch"
    if cause == "buffer" and min(waited, idle) >= MUCH:
        return (
            f"the two sides wait for each other: the learner {waited:.0%} of {span} for a batch, the samplers "
            f"{idle:.0%} for {_WAITED_FOR[cause]}; a larger stream.max_policy_age lets them work at once"
        )
    if waited >= idle:
        if shares.sampler_stalled > max(LITTLE, waited / 2):
            return (
                f"taking up weights is the bottleneck: the samplers did that {shares.sampler_stalled:.0%} of {span}, "
                f"and the learner waited {waited:.0%}; a larger stream.publish_interval costs less"
            )
        sentence = f"sampling is the bottleneck: the learner waited {waited:.0%} of {span}"
        if shares.slots_taken < SPARSE:
            sentence += (
                f", with {shares.slots_taken:.0%} of the samplers' slots taken: a larger stream.max_policy_age "
                f"lets them do more at once"
            )
        return sentence
    learned = 1 - waited - shares.learner_published
    if shares.learner_published > max(LITTLE, learned):
        return f"publishing is the bottleneck: it took {shares.learner_published:.0%} of {span}, and {idle_words}"
    return f"the learner is the bottleneck: {idle_words}"
