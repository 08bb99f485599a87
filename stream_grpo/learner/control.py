"""The closed loop: staleness moved by what it costs. Pure; the learner asks after each step and does what it is told.

Measured are the effective share of the trained tokens, ess = (sum R)^2 / (n sum R^2) with R = policy / behavior (Kish
1965), and KL(behavior || policy) per token by k3, both averaged over `interval` steps. Where ess is below its floor or
the KL above its ceiling, one setting is tightened: the publish interval first, halved, as it costs no throughput; at 1
the target age, by a quarter; at 0 the learning rate. Where both have had a margin for `patience` averages in a row, the
last of these is taken back by one: the learning rate first, then the target age, then the publish interval.

It does not swing, because

* what is already in flight is trained before a change can show: after one nothing is averaged for as many steps as
  tokens may be old at the settings before it;
* between bound and margin nothing happens;
* each loosening that the next change takes back doubles the patience.

The target is never below publish_interval - 1, for the interval in effect and for the one that comes with the next
publish: weights that samplers have may lag by that much, and must still get tickets. `buffer.selectors` has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from stream_grpo.config_stream import Control, Stream

LEARNING_RATE_FACTOR = 0.7
MAX_PATIENCE = 64
Setting = Literal["target_policy_age", "publish_interval", "learning_rate_scale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is steered."""

    target_policy_age: int
    """Takes the place of max_policy_age where tickets are issued, and nowhere else."""
    publish_interval: int
    """Holds from the next publish on."""
    learning_rate_scale: float = 1.0


class Observed(NamedTuple):
    """Means over some learner steps."""

    ess: float
    behavior_kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that is another from now on, and why."""

    setting: Setting
    before: float
    after: float
    reason: str


def tighter(settings: Settings, control: Control, publish_interval: int) -> tuple[Setting, float] | None:
    """The next setting to tighten and its value; None where there is nothing left.

    `publish_interval` is the one in effect, which may still be larger than the one that comes next.
    """
    if settings.publish_interval > 1:
        return "publish_interval", settings.publish_interval // 2
    lowest = max(settings.publish_interval, publish_interval) - 1
    if (target := settings.target_policy_age) > lowest:
        return "target_policy_age", max(lowest, target - max(1, target // 4))
    if (scale := settings.learning_rate_scale) > control.min_learning_rate_scale:
        return "learning_rate_scale", max(control.min_learning_rate_scale, scale * LEARNING_RATE_FACTOR)
    return None


def looser(settings: Settings, stream: Stream) -> tuple[Setting, float] | None:
    """The next setting to loosen and its value; None where all are as configured."""
    if (scale := settings.learning_rate_scale) < 1.0:
        return "learning_rate_scale", min(1.0, scale / LEARNING_RATE_FACTOR)
    if (target := settings.target_policy_age) < stream.max_policy_age:
        return "target_policy_age", target + 1
    if (interval := settings.publish_interval) < stream.publish_interval:
        return "publish_interval", interval + 1
    return None


def complaint(observed: Observed, control: Control) -> str:
    """Which bound is broken, in words; empty where none is."""
    if observed.ess < control.min_ess:
        return f"effective share of the tokens {observed.ess:.3f} is below min_ess = {control.min_ess:g}"
    if observed.behavior_kl > control.max_behavior_kl:
        highest = control.max_behavior_kl
        return f"KL to the behavior policy {observed.behavior_kl:.2g} is above max_behavior_kl = {highest:g}"
    return ""


def has_margin(observed: Observed, control: Control) -> bool:
    """Whether both are so far from their bounds that something may be loosened."""
    least_ess = control.min_ess + control.margin * (1 - control.min_ess)
    return observed.ess >= least_ess and observed.behavior_kl <= (1 - control.margin) * control.max_behavior_kl


class Controller:
    """Follows the steps of a learner. Where `[control]` is not enabled it never changes anything."""

    def __init__(self, control: Control, stream: Stream) -> None:
        """Begin with what is configured."""
        self._control, self._stream = control, stream
        self.settings = Settings(target_policy_age=stream.max_policy_age, publish_interval=stream.publish_interval)
        """As they are to be."""
        self.publish_interval = stream.publish_interval
        """The one in effect."""
        self._seen: list[Observed] = []
        self._num_skipped = 0
        """Steps that are still to be left out of the averages."""
        self._num_calm, self._patience = 0, control.patience
        self._has_loosened = False
        """Whether the last change was a loosening."""

    @property
    def is_enabled(self) -> bool:
        """Whether anything is steered."""
        return self._control.enabled

    def published(self) -> None:
        """The weights went out: from here on the publish interval is the one that was decided."""
        self.publish_interval = self.settings.publish_interval

    def step(self, metrics: Mapping[str, Any]) -> Change | None:
        """Take the `ess` and `k3` of a learner step; the change that follows from it, if one does.

        A step without them, as one in which nothing was trained, or with one that is not finite says nothing.
        """
        observed = Observed(metrics.get("ess", math.nan), metrics.get("k3", math.nan))
        if not self._control.enabled or not all(map(math.isfinite, observed)):
            return None
        if self._num_skipped > 0:
            self._num_skipped -= 1
            return None
        self._seen.append(observed)
        if len(self._seen) < self._control.interval:
            return None
        mean = Observed(*(sum(values) / len(values) for values in zip(*self._seen, strict=True)))
        self._seen.clear()
        return self._decide(mean)

    def _decide(self, mean: Observed) -> Change | None:
        if reason := complaint(mean, self._control):
            self._num_calm = 0
            if (found := tighter(self.settings, self._control, self.publish_interval)) is None:
                return None
            if self._has_loosened:
                self._patience = min(MAX_PATIENCE, 2 * self._patience)
            return self._change(*found, reason, loosens=False)
        self._num_calm = self._num_calm + 1 if has_margin(mean, self._control) else 0
        if self._num_calm < self._patience or (found := looser(self.settings, self._stream)) is None:
            return None
        reason = (
            f"effective share {mean.ess:.3f} and KL {mean.behavior_kl:.2g} had a margin for "
            f"{self._num_calm * self._control.interval} steps"
        )
        return self._change(*found, reason, loosens=True)

    def _change(self, setting: Setting, value: float, reason: str, *, loosens: bool) -> Change:
        before = self.settings
        changed: dict[str, Any] = {setting: value}
        self.settings = replace(before, **changed)
        self._num_calm, self._has_loosened = 0, loosens
        # Tokens of before may still be as old as the target allowed, and weights as old as the interval makes them.
        self._num_skipped = before.target_policy_age + max(self.publish_interval, self.settings.publish_interval)
        return Change(setting=setting, before=getattr(before, setting), after=value, reason=reason)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold; plain values."""
        return {
            **asdict(self.settings),
            "num_skipped": self._num_skipped,
            "num_calm": self._num_calm,
            "patience": self._patience,
            "has_loosened": self._has_loosened,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, within today's bounds. The averages under way begin anew.

        Without a state, as of a run that was not steered before, and where nothing is steered, all is as configured.
        """
        if not state or not self._control.enabled:
            return
        interval = min(state["publish_interval"], self._stream.publish_interval)
        target = min(max(state["target_policy_age"], interval - 1), self._stream.max_policy_age)
        scale = max(state["learning_rate_scale"], self._control.min_learning_rate_scale)
        self.settings = Settings(target_policy_age=target, publish_interval=interval, learning_rate_scale=scale)
        self.publish_interval = interval  # a restore publishes at once
        self._num_skipped, self._num_calm = state["num_skipped"], state["num_calm"]
        self._patience, self._has_loosened = max(state["patience"], self._control.patience), state["has_loosened"]
