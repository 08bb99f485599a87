"""What the model knows of a run: how long things take and are, and the settings that may be changed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Groups to draw from: one is a row, so that lengths and rewards of one problem stay together.

    Shape letters: R rows, G rollouts of a group.
    """

    length_RG: NDArray[np.int64]
    """Sampled tokens, each at least 1."""
    reward_RG: NDArray[np.float64] | None = None
    """Rewards of the same rollouts; a group has signal if those drawn differ. None: `signal_share` decides."""
    signal_share: float = 1.0
    """Share of groups with signal, whatever their size; read without rewards alone."""

    def __post_init__(self) -> None:
        if self.length_RG.ndim != 2 or not self.length_RG.size or self.length_RG.min() < 1:
            raise ValueError("length_RG: expected rows of lengths of at least 1 token")
        if self.reward_RG is not None and self.reward_RG.shape != self.length_RG.shape:
            raise ValueError(f"reward_RG: shape {self.reward_RG.shape}, that of length_RG is {self.length_RG.shape}")
        if not 0 <= self.signal_share <= 1:
            raise ValueError(f"signal_share = {self.signal_share}: expected 0 to 1")

    def rounded(self, unit: int) -> Rollouts:
        """The same with lengths that are multiples of `unit`, at least one."""
        rounded = np.maximum(1, np.rint(self.length_RG / unit).astype(np.int64)) * unit
        return replace(self, length_RG=rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerTimes:
    """Of one sampler. An engine step samples a token of every running sequence."""

    base_s: float
    """Of an engine step, whatever runs in it."""
    per_sequence_s: float
    """And for each running sequence."""
    between_per_sequence_s: float = 0.0
    """The sampler's own work between two engine steps, for each running sequence: tickets, texts, rewards scored in its
    process. It comes with groups, and so with tokens, not with steps."""
    update_s: float = 0.0
    """That new weights keep the engine from sampling: applied and proved."""
    score_s: float = 0.0
    """From the last token of a group to its last reward, where others score it."""
    insert_s: float = 0.0
    """From there until the buffer has it."""

    def step_s(self, num_running: float) -> float:
        """Seconds of an engine step."""
        return self.base_s + self.per_sequence_s * num_running

    @overload
    def cycle_s(self, num_running: float) -> float: ...
    @overload
    def cycle_s(self, num_running: NDArray[np.int64]) -> NDArray[np.float64]: ...
    def cycle_s(self, num_running: Any) -> Any:
        """Seconds from the begin of an engine step to that of the next."""
        return self.base_s + (self.per_sequence_s + self.between_per_sequence_s) * num_running


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnerTimes:
    """Of the learner, all ranks together."""

    base_s: float
    """Of a step, however long its sequences."""
    per_token_s: float
    """And for each sampled token of its groups, in each pass over them."""
    publish_s: float = 0.0
    """From the end of a step until its weights can be taken up, and the learner goes on."""
    checkpoint_s: float = 0.0
    spread: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))
    """Factors of mean 1 that a step's time is multiplied with, drawn uniformly."""

    def step_s(self, num_tokens: float) -> float:
        """Mean seconds of a step that passes over so many sampled tokens; one it passes over twice counts twice."""
        return self.base_s + self.per_token_s * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """What stays as it is when settings change."""

    rollouts: Rollouts
    sampler: SamplerTimes
    learner: LearnerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What may be changed; the names are those of the configuration."""

    num_samplers: int = 1
    group_size: int = 8
    max_num_seqs: int = 256
    groups_per_step: int = 32
    max_policy_age: int = 4
    publish_interval: int = 1
    too_old: Literal["wait", "drop"] = "wait"
    """`drop` stands for every setting that never waits for a group in flight."""
    sample_deadline_s: float = math.inf
    checkpoint_interval: int = 50
    num_epochs: int = 1
    """Passes of the learner over a batch."""
    cores: int = 0
    """Processor cores that samplers and learner share; 0: each has its own."""

    def __post_init__(self) -> None:
        for name in (
            "num_samplers",
            "group_size",
            "groups_per_step",
            "publish_interval",
            "checkpoint_interval",
            "num_epochs",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")
        for name in ("max_policy_age", "cores"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 0")
        if self.sample_deadline_s <= 0:
            raise ValueError(f"sample_deadline_s = {self.sample_deadline_s:g}: expected above 0")
        if self.publish_interval > self.max_policy_age + 1:
            raise ValueError(
                f"publish_interval = {self.publish_interval}: no ticket could ever be issued; at most "
                f"max_policy_age + 1 = {self.max_policy_age + 1}"
            )
        if self.group_size > self.max_num_seqs:
            raise ValueError(
                f"group_size = {self.group_size}: a group must fit max_num_seqs = {self.max_num_seqs}; raise it"
            )
        if self.max_policy_age == 0 and self.too_old != "wait":
            raise ValueError("too_old = drop with max_policy_age = 0: the synchronous loop waits for its whole block")
