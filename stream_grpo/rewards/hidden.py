"""The gap between the reward and a verifier that is no part of it: how reward hacking shows. Pure.

A policy that learns the task pleases both; one that learns the weak spots of its verifier pleases that one alone.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import NamedTuple

from stream_grpo.config_rewards import Hidden
from stream_grpo.types import Decision, RewardResult


def is_sampled(hidden: Hidden, task_id: str) -> bool:
    """Whether the hidden verifier sees this response: a share of all ids, the same ones for the same seed."""
    digest = hashlib.sha256(f"{hidden.seed}/{task_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < hidden.share * 2**64


class Gap(NamedTuple):
    """What two verifiers made of the same responses."""

    num_pairs: int
    """Responses with a reward from both."""
    disagreement: float
    """Share of different decisions."""
    overrated: float
    """Share that passes and that the hidden verifier fails: what a policy gains by hacking."""
    mean_difference: float
    """Mean of reward minus hidden reward."""


class HiddenGap:
    """The gap over the newest pairs. Not for several threads, but for `now`."""

    def __init__(self, hidden: Hidden) -> None:
        self._hidden = hidden
        self._pairs: deque[tuple[bool, bool, float, float]] = deque(maxlen=hidden.window)
        self.num_pairs = 0
        """All so far."""
        self.num_unscored = 0
        """Sampled responses that one of the two gave no reward."""

    def add(self, result: RewardResult, hidden: RewardResult) -> None:
        """Count one response. One without a reward on either side says nothing of the gap."""
        if result.reward is None or hidden.reward is None:
            self.num_unscored += 1
            return
        self.num_pairs += 1
        passes = result.decision is Decision.PASS, hidden.decision is Decision.PASS
        self._pairs.append((*passes, result.reward, hidden.reward))

    def now(self) -> Gap | None:
        """Over the newest pairs, at most a window of them; None before the first."""
        if not (pairs := list(self._pairs)):
            return None
        return Gap(
            num_pairs=len(pairs),
            disagreement=sum(passed != hidden for passed, hidden, *_ in pairs) / len(pairs),
            overrated=sum(passed and not hidden for passed, hidden, *_ in pairs) / len(pairs),
            mean_difference=sum(reward - hidden for *_, reward, hidden in pairs) / len(pairs),
        )

    @property
    def alarm(self) -> str | None:
        """What is wrong, in a sentence, with its figures; None before a full window and while nothing is."""
        hidden, gap = self._hidden, self.now()
        if gap is None or gap.num_pairs < hidden.window:
            return None
        found = []
        if gap.disagreement > hidden.max_disagreement:
            found.append(
                f"{gap.disagreement:.0%} are decided otherwise, more than rewards.hidden.max_disagreement = "
                f"{hidden.max_disagreement:.0%} ({gap.overrated:.0%} pass and should not)"
            )
        if hidden.max_difference is not None and abs(gap.mean_difference) > hidden.max_difference:
            found.append(
                f"the reward differs by {gap.mean_difference:+.3g} in the mean, more than "
                f"rewards.hidden.max_difference = {hidden.max_difference:g}"
            )
        if not found:
            return None
        return (
            f"of the newest {gap.num_pairs} responses that {hidden.verifier!r} scored besides their verifier, "
            f"{' and '.join(found)}: the policy may be learning the weak spots of its verifier; read some that pass"
        )

    def status(self) -> dict[str, float | int | None]:
        """Plain values."""
        gap, pairs = self.now(), list(self._pairs)
        figures = dict.fromkeys(Gap._fields[1:]) if gap is None else gap._asdict()
        hidden_mean = sum(hidden for *_, hidden in pairs) / len(pairs) if pairs else None
        counts = {"num_pairs": self.num_pairs, "num_unscored": self.num_unscored}
        return {**figures, "hidden_reward_mean": hidden_mean, **counts}
