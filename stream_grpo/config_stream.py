"""The settings of what flows to the learner: how old, how much, how it is kept, how it is steered. Loads no torch.

Part of the tree of `config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from stream_grpo.config_section import Section

TooOld = Literal["wait", "drop", "requeue", "baseline_only"]
"""What is done about groups that get too old."""
Selector = Literal["fewest_steps_left", "freshest_first", "expected_signal"]
"""Which groups a step takes first."""


class Stream(Section):
    """How old data may be and how much of it flows."""

    groups_per_step: int = Field(32, ge=1)
    """Groups that one learner step consumes."""
    max_policy_age: int = Field(4, ge=0)
    """No token older than this is ever trained on. 0 is the synchronous loop."""
    too_old: TooOld = "wait"
    """`wait`: a step waits for groups that would be too old after it. The others never wait: `drop` ends what is too
    old as stale, `requeue` has its problem sampled again, `baseline_only` keeps its rewards in its group's baseline."""
    max_requeues: int = Field(3, ge=1)
    """`requeue`: how often in a row a problem is sampled again before it is reported as never fresh."""
    selector: Selector = "fewest_steps_left"
    """Which groups a step takes first: with fewest steps left, the youngest, or whose rewards vary most."""
    max_uses: int = Field(1, ge=1)
    """In how many steps a group may be trained on, each within max_policy_age."""
    reuse_share: float = Field(0.25, gt=0, lt=1)
    """`max_uses` above 1: share of a step's groups, rounded down, that is left to groups trained on before."""
    publish_interval: int = Field(1, ge=1)
    """Learner steps between two publishes; at most max_policy_age + 1."""
    uniform_group_version: bool = False
    """Whether all tokens of a group must be of one version; needs weights.on_update = finish or restart."""
    sample_deadline_s: float = Field(120.0, gt=0)
    """A group not inserted this long after its ticket ends as stale."""
    ticket_timeout_s: float = Field(30.0, gt=0)
    """A ticket whose sampler is not heard of for so long is issued again; longer than an update of weights takes."""
    partial_interval_s: float = Field(5.0, ge=0)
    """How often a sampler hands over what it has of an unfinished group, so that it outlives the sampler. 0: never."""
    on_reward_change: Literal["rescore", "invalid"] = "rescore"
    """After a change of rewards, groups scored by the old ones are scored again as a whole, or end as invalid."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """A wait longer than this ends the run with the name of who was waited for."""
    max_groups_without_signal: int = Field(2000, ge=1)
    """So many groups in a row without spread end the run with their counts, where the recipe needs spread."""

    @property
    def reused_per_step(self) -> int:
        """Groups of a step, at most, that were trained on before."""
        # A share of 0.29 of 100 is 29, not the 28 that rounding makes of it.
        return math.floor(self.reuse_share * self.groups_per_step + 1e-9) if self.max_uses > 1 else 0


class Buffer(Section):
    """The journal and its bounds."""

    group_commit_s: float = Field(0.02, ge=0, le=1)
    """Longest wait for further groups before an fsync."""
    segment_bytes: int = Field(64 << 20, ge=1 << 16)
    """A journal segment is closed above this size."""
    log_bytes: int = Field(16 << 20, ge=1 << 20)
    """After so many bytes of transitions another log begins, with a snapshot; a start reads the newest log."""
    retain_bytes: int = Field(8 << 30, ge=0)
    """Segments beyond this are deleted, oldest first, once nothing needs them; what is kept can be looked at."""
    retain_groups: int | None = Field(None, ge=0)
    """Likewise segments older than the newest so many groups; None: no such limit."""
    retain_age_s: float | None = Field(None, ge=0)
    """Likewise segments whose last group came in longer ago; None: no such limit."""
    max_bytes: int = Field(32 << 30, ge=1 << 20)
    """The journal is never larger. Near it the learner is asked for checkpoints, at it groups are held back."""
    max_message_bytes: int = Field(256 << 20, ge=1 << 16)
    """A larger message is refused on receipt. Room for one is kept below max_bytes."""
    min_free_bytes: int = Field(256 << 20, ge=0)
    """Inserts are refused while the disk has less room than this."""

    @property
    def reserve_bytes(self) -> int:
        """What is kept free below max_bytes: for a message that comes in, and for the ends of what is there."""
        return self.max_message_bytes + 2 * self.log_bytes

    @property
    def min_max_bytes(self) -> int:
        """With a lower max_bytes not even checkpoints could make room."""
        return self.retain_bytes + 4 * (self.segment_bytes + self.max_message_bytes + self.log_bytes)

    @property
    def checkpoint_above_bytes(self) -> int:
        """With a larger journal the learner is asked for checkpoints: half of what retention leaves of max_bytes."""
        return (self.retain_bytes + self.max_bytes - self.reserve_bytes) // 2


class Control(Section):
    """The closed loop: staleness steered by what it costs, see docs/control.md."""

    enabled: bool = False
    """Whether the learner moves its staleness by itself, within stream.max_policy_age and stream.publish_interval."""
    min_ess: float = Field(0.9, gt=0, lt=1)
    """Floor of the effective share of the trained tokens (`ess` in the metrics)."""
    max_behavior_kl: float = Field(0.05, gt=0)
    """Ceiling of KL(behavior || policy) per token, by k3."""
    interval: int = Field(4, ge=1)
    """Learner steps that both are averaged over before anything is decided; more after a change, until it shows."""
    margin: float = Field(0.5, gt=0, lt=1)
    """Share of the way from a bound to no staleness at all that must be left before anything is loosened."""
    patience: int = Field(3, ge=1)
    """So many averages in a row with that margin loosen by one; twice as many each time that had to be taken back."""
    min_learning_rate_scale: float = Field(0.1, gt=0, le=1)
    """The learning rate is never lowered below this share. 1: it stays."""


def staleness_complaints(stream: Stream) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    if stream.selector != "fewest_steps_left" and stream.too_old == "wait":
        yield (
            f"stream.selector = {stream.selector} with stream.too_old = wait: any other order than fewest steps left "
            f"may leave behind what is then too old, however long a step waits; use another too_old, as drop"
        )
    if stream.max_policy_age == 0 and stream.too_old != "wait":
        yield (
            f"stream.too_old = {stream.too_old} with stream.max_policy_age = 0: the synchronous loop waits for its "
            f"whole block, and nothing gets too old; use too_old = wait, or a larger max_policy_age"
        )
    if stream.max_uses > 1 and stream.max_policy_age == 0:
        yield (
            f"stream.max_uses = {stream.max_uses} with stream.max_policy_age = 0: after its first use every group is 1 "
            f"step old, and too old for another; use max_uses = 1, or a larger max_policy_age"
        )
    if stream.max_uses > 1 and not stream.reused_per_step:
        yield (
            f"stream.reuse_share = {stream.reuse_share:g} of stream.groups_per_step = {stream.groups_per_step} is less "
            f"than one group: nothing would be used again; raise one of the two, or use max_uses = 1"
        )


def buffer_complaints(buffer: Buffer) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    if buffer.max_bytes < buffer.min_max_bytes:
        yield (
            f"buffer.max_bytes = {buffer.max_bytes}: beside buffer.retain_bytes = {buffer.retain_bytes} there must be "
            f"room for four segments and logs, and in each segment a message of buffer.max_message_bytes = "
            f"{buffer.max_message_bytes}; use at least {buffer.min_max_bytes}, or lower one of these"
        )
