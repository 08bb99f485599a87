"""What is wrong with a run, one function an alarm: what was seen of it so far -> a sentence and the likely cause. Pure.

A check that cannot tell, because its figures are missing or too few, finds nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any, NamedTuple

from stream_grpo.config_alarms import Alarms

Line = Mapping[str, Any]
MIN_TOKENS = 64
"""Of age 0, in a window: with fewer their mismatch is not known."""
MIN_GROUPS = 32
"""Fewer say nothing of a share."""
MIN_PAIRS = 100
"""With both rewards: with fewer the gap to the hidden verifier is not known."""
GROUPS_PER_DOMAIN = 32
"""What a domain would have of the trained groups, from which on one that has few can be told to starve."""
USEFUL_RATES = (0.2, 0.8)
"""Success rates of a domain that the curator should sample from, far from solved and from too hard."""
MIN_BLIND_STEPS = 8
"""With tokens of older weights, or the whole window where that is shorter: fewer say nothing of a correction."""
MIN_HELDOUT = 16
"""Of a row of held-out scores: with fewer problems its interval says nothing, and of a single one it has no width."""
MISMATCH_FACTOR = 1.5
"""Old weights show only where their mean |log ratio| is so many times the mismatch."""


class Finding(NamedTuple):
    """What is wrong."""

    sentence: str
    """What is seen, with its figures."""
    cause: str
    """What is likely behind it, and what to look at."""


@dataclass(slots=True)
class Seen:
    """What the checks look at."""

    steps: deque[Line]
    """The newest learner steps, at most two windows of them."""
    parts: dict[str, Line] = field(default_factory=dict)
    """The newest status of every part."""
    curator_then: Line = field(default_factory=dict)
    """The status of the curator at the newest learner step; before the first, its first."""
    overrated_lowest: dict[str, float] = field(default_factory=dict)
    """By sampler."""
    heldout: Line | None = None
    """The newest evaluation."""
    heldout_best: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The best score of every row of the evaluations before it."""

    @property
    def samplers(self) -> dict[str, Line]:
        """The newest status of every sampler."""
        return {name: status for name, status in self.parts.items() if "num_running" in status}


Check = Callable[[Seen, Alarms], Finding | None]


def halves(seen: Seen, name: str, window: int) -> tuple[list[float], list[float]] | None:
    """A figure in both halves of the newest window; None where a step lacks it, or there are too few steps."""
    values = newest(seen, name, window)
    return (values[: window // 2], values[window // 2 :]) if values else None


def newest(seen: Seen, name: str, num: int) -> list[float]:
    """A figure in the newest `num` steps; empty where a step lacks it, or there are too few."""
    values = [step[name] for step in list(seen.steps)[-num:] if step.get(name) is not None]
    return values if len(values) == num else []


def no_signal(seen: Seen, limits: Alarms) -> Finding | None:
    """Groups in a row of whose rollouts none was better than another."""
    buffer = seen.parts.get("buffer", {})
    num = buffer.get("groups_without_signal", 0)
    if num < limits.groups_without_signal:
        return None
    causes = buffer.get("without_signal", {})
    right, wrong = causes.get("all_right", 0), causes.get("all_wrong", 0)
    sentence = f"{num:,} groups in a row had no signal: {right:,} all right, {wrong:,} all wrong"
    if right > wrong:
        return Finding(sentence, "the problems that are picked are solved: add harder ones, or end the run")
    return Finding(
        sentence,
        "the problems that are picked are too hard, or the verifier refuses right answers: look at some with "
        "`stream-grpo rollouts RUN --fate no_signal`",
    )


def truncated(seen: Seen, limits: Alarms) -> Finding | None:
    """Responses end at the length limit, in the batches or in groups that never get into one."""
    shares = [(step.get("end_share") or {}).get("length") for step in list(seen.steps)[-limits.window // 2 :]]
    known = [value for value in shares if value is not None]
    cause = "sampler.max_new_tokens is too low for these problems, or the model has forgotten how to end a response"
    if len(known) >= limits.window // 2 and fmean(known) >= limits.truncated_share:
        return Finding(
            f"{fmean(known):.0%} of the responses of the newest {len(known)} steps were cut off at the length limit",
            cause,
        )
    # Where all groups are so, there is no further step. Counts are of the whole run: what a good start has gathered
    # would hide a collapse.
    now, then = seen.parts.get("curator", {}), seen.curator_then
    num = now.get("scored_groups", 0) - then.get("scored_groups", 0)
    num_cut = num_truncated(now) - num_truncated(then)
    if num >= MIN_GROUPS and num_cut >= limits.truncated_share * num:
        return Finding(
            f"in {num_cut} of the {num} groups since the newest learner step all was wrong and cut off at the length "
            f"limit",
            cause,
        )
    return None


def num_truncated(curator: Line) -> int:
    """Groups so far of which all was wrong and cut off, by a status of the curator."""
    return int(curator.get("no_signal", {}).get("truncated", 0))


def entropy(seen: Seen, limits: Alarms) -> Finding | None:
    """The policy narrows down fast."""
    found = halves(seen, "entropy", limits.window)
    if found is None:
        return None
    before, now = map(fmean, found)
    if before <= 0 or now > (1 - limits.entropy_fall) * before:
        return None
    return Finding(
        f"entropy fell from {before:.3g} to {now:.3g} nats within {limits.window} steps",
        "the policy is collapsing to few answers: a learning rate that is too high, an upper clip that is too low, or "
        "a reward that one answer always gets",
    )


def mismatch(seen: Seen, limits: Alarms) -> Finding | None:
    """Sampler and learner disagree about the same weights."""
    steps = [step for step in list(seen.steps)[-limits.window :] if step.get("engine_mismatch_tokens")]
    num_tokens = sum(step["engine_mismatch_tokens"] for step in steps)
    if num_tokens < MIN_TOKENS or limits.mismatch is None:
        return None
    mean = sum(step["engine_mismatch"] * step["engine_mismatch_tokens"] for step in steps) / num_tokens
    if mean <= limits.mismatch:
        return None
    return Finding(
        f"on {num_tokens} tokens of the learner's own version sampler and learner differ by {mean:.2g} nats in the "
        f"mean, above {limits.mismatch:.2g}",
        "the two engines compute other logprobs from the same weights: precision, sampling settings that are not in "
        "the logprobs, or a kernel; it is no staleness, and a smaller age does not help",
    )


def idle_correction(seen: Seen, limits: Alarms) -> Finding | None:
    """A correction is asked for and has nothing to correct, or should have acted and has not."""
    steps = list(seen.steps)[-limits.window :]
    if len(steps) < limits.window:
        return None
    if (blind := _blind(steps)) is not None:
        return blind
    figures = [(name, 0.0) for name in ("clip_share_low", "clip_share_high", "clip_share_dual", "mask_share")]
    figures.append(("correction_mean", 1.0))
    asked = [(name, idle) for name, idle in figures if name in steps[-1]]
    ess = [step["ess"] for step in steps if step.get("ess") is not None]
    if not asked or not ess or fmean(ess) >= limits.idle_ess:
        return None
    if any(abs(step.get(name, idle) - idle) > 1e-9 for step in steps for name, idle in asked):
        return None
    return Finding(
        f"in {len(steps)} steps {' and '.join(name for name, _ in asked)} have not acted once, at an effective sample "
        f"size of {fmean(ess):.0%}",
        "the bounds of the recipe are too wide for this staleness: see docs/recipes.md, or lower stream.max_policy_age",
    )


def _blind(steps: Sequence[Line]) -> Finding | None:
    """Tokens of older weights look like those of the learner's own, although publishes move the policy."""
    known = [step for step in steps if step.get("staleness") is not None and step.get("publish_movement") is not None]
    floors = [step["engine_mismatch"] for step in steps if step.get("engine_mismatch") is not None]
    if not floors or len(known) < min(MIN_BLIND_STEPS, len(steps)):
        return None
    bound, largest = MISMATCH_FACTOR * fmean(floors), max(step["staleness"] for step in known)
    moved = fmean(step["publish_movement"] for step in known)
    if largest >= bound or moved <= bound:
        return None
    return Finding(
        f"tokens of older weights differ from the learner's by at most {largest:.1e} nats in {len(known)} steps, no "
        f"more than two engines do, while a publish moves logprobs by {moved:.1e}",
        "the behavior logprobs may not be the sampler's: every correction for staleness is then off",
    )


def hidden_gap(seen: Seen, limits: Alarms) -> Finding | None:
    """The reward rises where the hidden verifier sees nothing."""
    for name, status in seen.samplers.items():
        hidden = (status.get("rewards") or {}).get("hidden") or {}
        lowest, now = seen.overrated_lowest.get(name), hidden.get("overrated")
        if lowest is not None and now is not None and now >= lowest + limits.hidden_rise:
            return Finding(
                f"{now:.0%} of the responses pass and should not, by the hidden verifier; it was {lowest:.0%}",
                "the policy learns the weak spots of its verifier: read responses that pass, and mend the verifier",
            )
    return None


def reward_by_length(seen: Seen, limits: Alarms) -> Finding | None:
    """Rewards rise because responses get longer."""
    rewards, lengths = (halves(seen, name, limits.window) for name in ("reward_mean", "response_tokens_mean"))
    within = newest(seen, "reward_length_correlation_within", limits.window // 2)
    if rewards is None or lengths is None or not within:
        return None
    growth = fmean(lengths[1]) / max(fmean(lengths[0]), 1e-9) - 1
    rise = fmean(rewards[1]) - fmean(rewards[0])
    # Two standard errors of the difference of two means of h steps.
    noise = 2 * ((pvariance(rewards[0]) + pvariance(rewards[1])) / len(rewards[1])) ** 0.5
    if growth < limits.length_rise or rise <= noise or fmean(within) < limits.length_correlation:
        return None
    return Finding(
        f"within {limits.window} steps rewards rose by {rise:.3f} and responses by {growth:.0%}, and the longer "
        f"answer to a problem gets more (correlation {fmean(within):.2f})",
        "the reward may pay for length: compare right and wrong ones of one length, and see rewards.shaping and "
        "algo.length_deviation",
    )


def open_ledger(seen: Seen, limits: Alarms) -> Finding | None:
    """The account does not close."""
    ledger = seen.parts.get("buffer", {}).get("ledger", {})
    if ledger.get("closes", True):
        return None
    tokens = dict(ledger.get("tokens", {}))
    gap = tokens.pop("generated", 0) - sum(tokens.values())
    return Finding(
        f"the ledger does not close: {gap} tokens have no fate or two",
        "a fault of the buffer: keep the run's folder, and see `stream-grpo ledger RUN`",
    )


def starving(seen: Seen, limits: Alarms) -> Finding | None:
    """A domain that could be learnt from gets hardly any group."""
    curator = seen.parts.get("curator", {})
    rates, sizes = curator.get("domain_rates", {}), curator.get("domain_problems", {})
    low, high = USEFUL_RATES
    useful = sorted(name for name, rate in rates.items() if low <= rate <= high)
    if len(useful) < 2 or not seen.steps or any("by_domain" not in step for step in seen.steps):
        return None
    counts: Counter[str] = Counter()
    for step in seen.steps:
        counts.update({name: row["num_groups"] for name, row in step["by_domain"].items()})
    # An even share of the groups, or of a small domain what an even draw over the problems gives it.
    num_problems = sum(sizes.get(name, 1) for name in useful)
    shares = {name: min(1 / len(useful), sizes.get(name, 1) / num_problems) for name in useful}
    due = {
        name: share * counts.total() for name, share in shares.items() if share * counts.total() >= GROUPS_PER_DOMAIN
    }
    least = min(due, key=lambda name: counts[name] / due[name], default="")
    if not due or counts[least] >= limits.domain_share * due[least]:
        return None
    return Finding(
        f"domain {least!r} has {counts[least]} of the {counts.total()} groups of {len(seen.steps)} steps, at a success "
        f"rate of {rates[least]:.0%}",
        "the curator prefers other domains: see curator.exploration and curator.sharpness, or its groups never come in "
        "(too old, no reward): see `stream-grpo ledger RUN`",
    )


def heldout_drop(seen: Seen, limits: Alarms) -> Finding | None:
    """Held-out problems are solved less often than they were, beyond what chance does."""
    if seen.heldout is None:
        return None
    for name, score in seen.heldout["heldout"].items():
        if score.get("num_problems", 0) < MIN_HELDOUT:
            continue
        best = seen.heldout_best.get(name)
        if best and score["high"] is not None and best["low"] is not None and score["high"] < best["low"]:
            return Finding(
                f"held-out pass@1 of {name!r} fell to {score['pass_at_1']:.1%} (at most {score['high']:.1%}), from "
                f"{best['pass_at_1']:.1%} (at least {best['low']:.1%})",
                "the policy forgets what it could: a learning rate that is too high, a pool without such problems, or "
                "a reward that is hacked",
            )
    return None


CHECKS: Mapping[str, Check] = {
    "no_signal": no_signal,
    "truncated": truncated,
    "entropy": entropy,
    "mismatch": mismatch,
    "idle_correction": idle_correction,
    "hidden_gap": hidden_gap,
    "reward_by_length": reward_by_length,
    "ledger": open_ledger,
    "starving_domain": starving,
    "heldout_drop": heldout_drop,
}
"""Every alarm by its name."""

LOOKED_AT: Mapping[str, frozenset[str]] = {
    "no_signal": frozenset({"buffer"}),
    "truncated": frozenset({"step", "curator"}),
    "entropy": frozenset({"step"}),
    "mismatch": frozenset({"step"}),
    "idle_correction": frozenset({"step"}),
    "hidden_gap": frozenset({"sampler"}),
    "reward_by_length": frozenset({"step"}),
    "ledger": frozenset({"buffer"}),
    "starving_domain": frozenset({"step", "curator"}),
    "heldout_drop": frozenset({"evaluation"}),
}
"""The kinds of lines, as `registry.names.kind_of` tells them, without which nothing changes for an alarm."""
