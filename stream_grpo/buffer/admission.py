"""What an inserted group is: accepted, or the end it has at once. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from stream_grpo.buffer.facts import GroupFacts
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.staleness import oldest_trained
from stream_grpo.types import Fate


class Admission(NamedTuple):
    """How a group is taken, and why."""

    fate: Fate
    reason: str


def admit(
    facts: GroupFacts,
    lineage: Lineage,
    *,
    max_policy_age: int,
    signal_tolerance: float | None,
    config_hash: str | None,
    counts_steps: bool = False,
    by_rollout: bool = False,
    uniform_group_version: bool = False,
) -> Admission:
    """Judge a group: invalid before no_signal before stale, else accepted.

    A group without signal is one whose valid rewards, and with `counts_steps` its step scores, differ by no more than
    `signal_tolerance`, found by largest minus smallest, never by a deviation. `signal_tolerance` None takes groups
    without signal, `config_hash` None any hash. Stale is a group with a token older than `max_policy_age`;
    `by_rollout`, one where every valid rollout has such one. With `uniform_group_version` a group with tokens of two
    versions is invalid.
    """
    wrong = _what_is_wrong(facts, config_hash)
    if not wrong and uniform_group_version and len(facts.versions) > 1:
        wrong = f"versions: {', '.join(map(str, sorted(facts.versions)))}, stream.uniform_group_version allows one"
    if wrong:
        return Admission(Fate.INVALID, wrong)
    spread = max(facts.spread, facts.step_spread) if counts_steps else facts.spread
    if signal_tolerance is not None and spread <= signal_tolerance:
        return Admission(Fate.NO_SIGNAL, _cause(facts))
    try:
        ages = {version: lineage.age(version) for version in facts.versions}
    except ValueError as error:
        return Admission(Fate.INVALID, f"version: {error}")
    parts = [rollout.versions for rollout in facts.rollouts] if by_rollout else [facts.versions]
    age = ages[oldest_trained(parts, ages.__getitem__, max_policy_age)]
    if age > max_policy_age:
        return Admission(Fate.STALE, f"age: {age} at insert, max_policy_age is {max_policy_age}")
    return Admission(Fate.ACCEPTED, "")


def _what_is_wrong(facts: GroupFacts, config_hash: str | None) -> str:
    if config_hash not in (None, facts.config_hash):
        return config_changed(facts.config_hash, config_hash)
    if len(facts.rewards) < 2:
        return f"rollouts: {len(facts.rewards)} valid, a group needs 2"
    if not all(math.isfinite(reward) for reward in facts.rewards):
        return f"rewards: not finite: {facts.rewards}"
    return facts.fault


def _cause(facts: GroupFacts) -> str:
    if facts.num_passed == len(facts.rewards):
        return "all_right"
    if facts.num_failed == len(facts.rewards):
        return "all_wrong"
    return "same_reward"


def config_changed(of_group: str, of_run: str | None) -> str:
    """The reason by which a group of another configuration ends."""
    return f"config changed: the group has {of_group}, the run {of_run}"
