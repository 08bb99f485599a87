"""The guard: a correction that is asked for and cannot act stops the run or is called out.

It looks only at ratios whose denominator is the behavior policy, and only at tokens of other weights than the
learner's: those must have another probability. Weights are compared by checksum, so that a learning rate of 0 is no
fault.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from stream_grpo.algo.statistics import Statistics
from stream_grpo.errors import CorrectionError
from stream_grpo.learner.batching import TrainBatch
from stream_grpo.types import PolicyVersion

FLOOR_FACTOR = 1.5
"""A mean |log ratio| this many times the engine mismatch tells old weights from those of the learner."""
NUM_BATCHES = 5
"""So many batches below it in a row are an alarm."""
MIN_TOKENS = 64
"""Fewer tokens than this are no evidence."""


class Gaps(NamedTuple):
    """Mean |log(policy / behavior)| of two kinds of tokens, never mixed up; None where there are none."""

    engine_mismatch: float | None
    """Of rollouts that the learner's own version sampled: two engines, the same weights."""
    engine_mismatch_tokens: int
    staleness: float | None
    """Of tokens that other weights than the learner's sampled."""
    publish_movement: float | None
    """Mean |change| of the probe's logprobs by the newest publish."""


class Guard:
    """What the learner has published, and whether what comes back fits it."""

    def __init__(self) -> None:
        self._checksums: dict[PolicyVersion, str] = {}
        self._newest = ""
        self._movement: float | None = None
        self._floor_sum, self._floor_tokens = 0.0, 0.0
        self._means: deque[float] = deque(maxlen=NUM_BATCHES)
        self.gaps: Gaps | None = None
        """Of the present batch, before its first update; None until then, and of a batch without a trained token."""

    def published(self, version: PolicyVersion, checksum: str, movement: float | None) -> None:
        """Take note of a publish; `movement` is the mean |change| of the probe's logprobs since the one before."""
        self._checksums[version] = self._newest = checksum
        self._movement = movement

    def differs(self, version: PolicyVersion) -> bool:
        """Whether these weights are known to be others than the newest published ones."""
        return self._checksums.get(version, self._newest) != self._newest

    def check_logprobs(self, batch: TrainBatch) -> None:
        """Begin a step: raise CorrectionError where all behavior logprobs of its batch are one number.

        Then nothing was recorded.
        """
        self.gaps = None
        microbatches = [m for minibatch in batch.minibatches for m in minibatch.microbatches]
        values = np.concatenate([np.zeros(0), *(m.behavior_logprobs_BT[m.mask_BT] for m in microbatches)])
        if values.size >= MIN_TOKENS and values.min() == values.max():
            raise CorrectionError(
                f"all {values.size} behavior logprobs of a batch are {values[0]:g}: the sampler recorded none, and no "
                f"ratio to the behavior policy means anything"
            )

    def check_ratios(self, first: Statistics) -> None:
        """Look at a batch before its first update; raise CorrectionError where the correction cannot act.

        Log policy / behavior of exactly 0 on every token of other weights says that the behavior logprobs are not the
        sampler's but the learner's own.
        """
        self._add_floor(first)
        num_tokens = first.total("watched")
        self.gaps = _gaps(first, self._movement)
        if num_tokens < MIN_TOKENS:
            return
        if first.total("watched_abs_log") == 0:
            raise CorrectionError(
                f"log(policy / behavior) is exactly 0 on all {num_tokens:.0f} tokens that older weights sampled: the "
                f"behavior logprobs are the learner's own, recomputed, and every correction of staleness is off"
            )
        self._means.append(first.total("watched_abs_log") / num_tokens)

    @property
    def alarm(self) -> str | None:
        """What is wrong, in a sentence, with its figures; None while nothing is."""
        if self._movement is None or not self._floor_tokens or len(self._means) < NUM_BATCHES:
            return None
        bound = FLOOR_FACTOR * self._floor_sum / self._floor_tokens
        if max(self._means) >= bound or self._movement <= bound:
            return None
        return (
            f"mean |log(policy / behavior)| on tokens of older weights was at most {max(self._means):.2e} in "
            f"{NUM_BATCHES} batches, below {FLOOR_FACTOR} x the engine mismatch ({bound:.2e}), while a publish moves "
            f"the probe's logprobs by {self._movement:.2e}: the behavior logprobs may not be the sampler's"
        )

    def _add_floor(self, first: Statistics) -> None:
        """Engine mismatch: |log ratio| on rollouts that the learner's own version sampled."""
        abs_log, tokens = _youngest(first)
        self._floor_sum += abs_log
        self._floor_tokens += tokens


def _youngest(first: Statistics) -> tuple[float, float]:
    """(sum of |log ratio|, tokens) of the rollouts of age 0."""
    return float(first.sums["abs_log"][0].sum()), float(first.sums["tokens"][0].sum())


def _gaps(first: Statistics, movement: float | None) -> Gaps:
    abs_log, tokens = _youngest(first)
    watched = first.total("watched")
    return Gaps(
        engine_mismatch=abs_log / tokens if tokens else None,
        engine_mismatch_tokens=int(tokens),
        staleness=first.total("watched_abs_log") / watched if watched else None,
        publish_movement=movement,
    )
