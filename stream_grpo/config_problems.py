"""The settings of problems: those trained on, which comes next, and those held out. Loads no torch.

Part of the tree of `config`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from stream_grpo.config_section import Section

ProblemField = Literal["prompt", "answer", "verifier", "problem_id", "domain", "source"]
"""What is read of a row of problems."""


class Pool(Section):
    """The problems to train on and those held out."""

    files: tuple[Path, ...] = ()
    """JSONL, JSON or Parquet files that are imported into the run's pool when it is new."""
    verifier: str | None = None
    """Verifier for rows that name none."""
    mapping: dict[ProblemField, str] = Field(default_factory=dict)
    """Column that a field of a problem is read from, where the usual names do not fit; of held-out files too."""
    max_refused_share: float = Field(0.05, ge=0, le=1)
    """Above this share of refused rows the import fails."""


class Curator(Section):
    """Which problem is sampled next."""

    estimator: Literal["sliding_rate", "last_mean", "beta", "item_response"] = "item_response"
    """How pass rates are predicted: see docs/curation.md. The sliding rate is reported whatever this is."""
    choice: Literal["signal", "worth"] = "signal"
    """`signal`: by expected signal; `worth`: by it per expected token, with shares for domains and the unseen."""
    signal: Literal["mixed", "centered", "scaled"] = "mixed"
    """Value of a group: its rewards differ; their variance (advantages not scaled); their deviation (scaled ones)."""
    group_sizes: tuple[int, ...] = ()
    """Sizes out of which each group has the one that pays best per token; sampler.group_size, which is that of a group
    of which nobody knows, is one of them. Empty: sampler.group_size is that of all."""
    rate_step: float = Field(0.3, gt=0, le=1)
    """Step size a of the sliding success rate p <- (1 - a) p + a mean(rewards)."""
    domain_step: float = Field(0.05, gt=0, le=1)
    """Step size of the same rate kept for each domain: what is expected of a problem never sampled."""
    exploration: float = Field(0.05, ge=0, le=1)
    """Share of picks drawn uniformly over the pool, whatever the rate says."""
    sharpness: float = Field(4.0, ge=0)
    """The other picks are drawn by expected signal to this power; 1 draws by the signal itself."""
    doubt: float = Field(0.5, ge=0, le=1)
    """What uncertainty costs a problem: the share of its deviation that the value is averaged over; 0: none of it."""
    unseen_rate: float = Field(0.5, ge=0, le=1)
    """Success rate assumed of a domain never sampled."""
    keep: float = Field(0.98, gt=0, le=1)
    """With `beta`: what a rollout still counts after one learner step, as a share."""
    text_numbers: int = Field(32, ge=0, le=256)
    """With `item_response`: numbers by which problems of like texts tell of one another; 0: texts say nothing."""
    start_from: Path | None = None
    """Folder of another run, or a pool, whose outcomes are learned before this run's first; copied when it begins."""
    unseen_share: float = Field(0.05, ge=0, le=1)
    """With `worth`: share of picks drawn uniformly over the problems never sampled."""
    domain_share: float = Field(0.5, ge=0, le=1)
    """With `worth`: part of the picks by worth that is divided equally between domains."""
    flush_outcomes: int = Field(512, ge=1)
    """Outcomes kept in memory before they are written to the table; the buffer's journal holds them meanwhile."""


class Guard(Section):
    """A capability that training must not cost: problems that are never trained on, scored before and after it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """What it is called in the summary and in its alarm."""
    files: tuple[Path, ...] = Field(min_length=1)
    """Its problems, in the formats of the pool."""
    max_drop: float = Field(0.02, ge=0, lt=1)
    """A fall of pass@1 whose whole 95% interval lies beyond this is an alarm."""
    num_problems: int = Field(64, ge=1)
    """Problems that are scored; a seeded subset when there are more."""


class Evaluation(Section):
    """Held-out problems, scored before, during and after training."""

    files: tuple[Path, ...] = ()
    """Held-out problems, in the formats of the pool."""
    num_samples: int = Field(16, ge=1)
    """Rollouts per held-out problem."""
    num_problems: int = Field(256, ge=0)
    """Problems evaluated before and after training; a seeded subset when there are more. 0: neither is done."""
    num_engines: int = Field(1, ge=1, le=4096)
    """Engines that share these problems, each in a process of its own with the resources of a sampler."""
    domains: tuple[str, ...] = ()
    """Domains that make the headline figure; empty: all."""
    problems_seed: int | None = Field(None, ge=0, lt=1 << 63)
    """Of the choice of problems. None: run.seed. Runs of several seeds are compared on the same problems alone."""
    guards: tuple[Guard, ...] = ()
    """What a run must not lose, `[[evaluation.guards]]`; sampled as often as held-out problems."""
    interval: int = Field(25, ge=0)
    """Learner steps between two evaluations during training, on the engine of the first sampler. 0: none."""
    interval_problems: int = Field(64, ge=1)
    """Problems of each of these, from the headline's domains; more of them let newer weights wait for longer."""
    interval_samples: int = Field(4, ge=1)
    """Rollouts per problem of each of these."""

    @property
    def is_around(self) -> bool:
        """Whether anything is scored before and after training."""
        return bool((self.files and self.num_problems) or self.guards)


def curator_complaints(curator: Curator) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    if curator.choice == "worth" and curator.exploration + curator.unseen_share > 1:
        yield (
            f"curator.unseen_share = {curator.unseen_share}: with curator.exploration = {curator.exploration} the two "
            "are more than all picks; their sum is at most 1"
        )


def guard_complaints(evaluation: Evaluation) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    names = [guard.name for guard in evaluation.guards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"evaluation.guards: the name {twice[0]!r} is given twice; every guard needs a name of its own"
