"""What the model says of a setting: rates, who waits for whom, ages, what is lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stream_grpo.planner.account import FATES, Account
from stream_grpo.planner.world import Settings

QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run in figures. Shares are of wall time; samplers are taken together."""

    duration_s: float
    num_steps: int
    sampled_tokens_per_s: float
    trained_tokens_per_s: float
    step_s: float
    """From one learner step to the next."""
    sampler: Mapping[str, float]
    """Shares: sampling, between two engine steps, updating weights, and idle, which is waiting for tickets."""
    learner: Mapping[str, float]
    """Shares: steps, publishes, checkpoints, and waits, which is waiting for a batch."""
    age_mean: float
    age_max: int
    age_quantiles: Mapping[float, float]
    """Of trained groups, interpolated within a step of age; see `quantile`."""
    age_parts: Mapping[str, float]
    """Means of publish lag, in flight, in queue: they add up to the mean."""
    token_shares: Mapping[str, float]
    """Of the tokens that had their end: by fate."""
    group_ends: Mapping[str, int]
    account: Mapping[str, int]
    """Tokens of the whole run, those without an end included."""
    sampled_tokens: int
    """By the engines, counted apart: the account closes if it adds up to this."""

    @property
    def discarded_share(self) -> float:
        """Of the tokens that had their end, those that were not trained on."""
        return 1.0 - self.token_shares["trained"] if any(self.token_shares.values()) else 0.0

    @property
    def utilisation(self) -> tuple[float, float]:
        """Share of time that engines sample, and that the learner makes steps."""
        return self.sampler["sampling"], self.learner["steps"]

    def bottleneck(self) -> str:
        """Who waits for whom, in words."""
        learner_waits, sampler_waits = self.learner["waits"], self.sampler["idle"]
        if max(learner_waits, sampler_waits) < 0.05:
            return "balanced: neither side waits for as much as 5% of the time"
        if learner_waits >= sampler_waits:
            return f"sampling is the bottleneck: the learner waits {learner_waits:.0%} of the time"
        return f"the learner is the bottleneck: samplers wait {sampler_waits:.0%} of the time"

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"discarded_share": self.discarded_share, "bottleneck": self.bottleneck()}


def predict(
    found: Account,
    whole: Account,
    settings: Settings,
    *,
    duration_s: float,
    num_steps: int,
    sampled_tokens: int,
    open_tokens: Mapping[str, int],
    all_sampled_tokens: int,
) -> Prediction:
    """The figures of an account: `found` of the part of the run that is reported, `whole` of all of it."""
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    num_groups = sum(found.ages.values())
    ended = sum(found.tokens[fate] for fate in FATES)
    sampler = {
        name: found.seconds[name] * per_s / settings.num_samplers for name in ("sampling", "between", "updating")
    }
    learner = {name: found.seconds[name] * per_s for name in ("steps", "publishes", "checkpoints", "waits")}
    return Prediction(
        duration_s=duration_s,
        num_steps=num_steps,
        sampled_tokens_per_s=sampled_tokens * per_s,
        trained_tokens_per_s=found.tokens["trained"] * per_s,
        step_s=duration_s / num_steps if num_steps else 0.0,
        sampler={**sampler, "idle": max(0.0, 1.0 - sum(sampler.values()))},
        learner=learner,
        age_mean=sum(age * count for age, count in found.ages.items()) / num_groups if num_groups else 0.0,
        age_max=max((age for age, count in found.ages.items() if count), default=0),
        age_quantiles={q: quantile(found.ages, q) for q in QUANTILES},
        age_parts={
            name: found.parts[name] / num_groups if num_groups else 0.0
            for name in ("publish_lag", "in_flight", "in_queue")
        },
        token_shares={fate: found.tokens[fate] / ended if ended else 0.0 for fate in FATES},
        group_ends=dict(found.groups),
        account={**{fate: whole.tokens[fate] for fate in FATES}, **open_tokens},
        sampled_tokens=all_sampled_tokens,
    )


def quantile(counts: Mapping[int, int], q: float) -> float:
    """The quantile of grouped whole numbers, each spread over [value - 1/2, value + 1/2), and not below 0.

    For q = 1/2 it is the grouped median (`statistics.median_grouped`). A plain quantile of small whole numbers jumps by
    one where two distributions differ by next to nothing.
    """
    total, below = sum(counts.values()), 0
    if not total:
        return 0.0
    for value in sorted(value for value, count in counts.items() if count):
        if below + counts[value] >= q * total:
            return max(0.0, value - 0.5 + (q * total - below) / counts[value])
        below += counts[value]
    return 0.0
