"""What a person must hear of the responses of a run, each once: none ends, the verifier does not, or it is fooled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stream_grpo.types import NEVER_VALID, EndReason

NUM_FIRST = 64
"""Responses before anything is said."""
EXHAUSTED_SHARE = 0.05
"""Of the pool's answers; above it a policy may be learning to hang its verifier, or a limit is too low."""


class HasShare(Protocol):
    """What the alarm reads of the scoring."""

    @property
    def exhausted_share(self) -> float:
        """Of the pool's answers, those on which the verifier ran out of time or memory."""


class HasHidden(Protocol):
    """What the alarm reads of a scoring with a hidden verifier."""

    @property
    def hidden_alarm(self) -> str | None:
        """What is wrong between it and the reward, in a sentence; None while nothing is."""


class Alarms:
    """Counts, and warns at most once of each thing."""

    def __init__(self, warn: Callable[[str], None], *, max_new_tokens: int, time_limit_s: float) -> None:
        self._warn, self._max_new_tokens, self._time_limit_s = warn, max_new_tokens, time_limit_s
        self._num_ended, self._num_cut = 0, 0
        self._num_scored, self._next_look = 0, NUM_FIRST
        self._has_warned = self._has_warned_of_gap = False

    def ended(self, end_reason: EndReason) -> None:
        """Count a response of a group; one that engine or deadline ended says nothing of its length."""
        if self._num_ended >= NUM_FIRST or end_reason in NEVER_VALID:
            return
        self._num_ended += 1
        self._num_cut += end_reason is EndReason.LENGTH
        if self._num_cut == NUM_FIRST:
            self._warn(
                f"all of the first {NUM_FIRST} responses (100%) were cut off at sampler.max_new_tokens = "
                f"{self._max_new_tokens}: an answer that comes later is never seen; raise it, or check that the model "
                f"ends its responses"
            )

    def scored(self, scoring: HasShare, num: int) -> None:
        """Count results, and look at the share of exhausted ones now and then."""
        self._num_scored += num
        if self._has_warned or self._num_scored < self._next_look:
            return
        self._next_look = self._num_scored + NUM_FIRST
        if (share := scoring.exhausted_share) > EXHAUSTED_SHARE:
            self._has_warned = True
            self._warn(
                f"on {share:.0%} of the responses the verifier ran out of time or memory: either the policy learns to "
                f"hang it, or rewards.time_limit_s = {self._time_limit_s:g} is too low for it"
            )

    def compared(self, scoring: HasHidden) -> None:
        """Look at the gap between the reward and the hidden verifier."""
        if not self._has_warned_of_gap and (alarm := scoring.hidden_alarm) is not None:
            self._has_warned_of_gap = True
            self._warn(alarm)
