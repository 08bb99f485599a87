"""The settings of alarms: from which figures on a run says that something is wrong. Loads no torch.

Part of the tree of `config`.
"""

from __future__ import annotations

from pydantic import Field

from stream_grpo.config_section import Section


class Alarms(Section):
    """From which figures on a run says that something is wrong. An alarm never stops a run."""

    window: int = Field(20, ge=4, le=100_000)
    """Learner steps that a trend is seen over: the newest half against the half before. An alarm that was not true for
    so many steps may be raised again."""
    groups_without_signal: int = Field(256, ge=1)
    """Groups in a row without signal."""
    truncated_share: float = Field(0.95, gt=0, le=1)
    """Share of responses that were cut off at the length limit."""
    entropy_fall: float = Field(0.6, gt=0, lt=1)
    """Share of the entropy that is lost from one half of the window to the other."""
    mismatch: float | None = Field(None, gt=0)
    """Mean abs(log(policy / behavior)) on rollouts of the learner's own version. None: 1e-3 in float32, 0.05 else."""
    idle_ess: float = Field(0.9, gt=0, le=1)
    """Effective sample size below which a correction must have acted."""
    hidden_rise: float = Field(0.1, gt=0, lt=1)
    """Rise of the share of responses that pass and that the hidden verifier fails, above its lowest."""
    length_rise: float = Field(0.25, gt=0)
    """Growth of responses from one half of the window to the other, as a share, while rewards rise."""
    length_correlation: float = Field(0.3, gt=0, lt=1)
    """Correlation of reward and length within groups from which such growth is suspect."""
    domain_share: float = Field(0.05, gt=0, lt=1)
    """Of an even share of the trained groups: what a domain that is neither solved nor too hard should have."""
