"""What the model counts: groups and tokens by fate, ages and their parts, seconds of each side."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stream_grpo.planner import rule
from stream_grpo.planner.group import Group

Key = TypeVar("Key")
FATES = ("trained", "masked", "stale", "no_signal", "invalid")
"""Ends of tokens."""


@dataclass(slots=True)
class Account:
    """Sums from the start; `since` takes those up to a moment off."""

    groups: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    """Leased groups by age."""
    parts: Counter[str] = field(default_factory=Counter)
    """Sum of each part of the ages of leased groups."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of samplers (all together) and learner, by what they did."""

    def end(self, group: Group, fate: str) -> None:
        """A group has its end; tokens cut at the deadline are masked where the others are trained."""
        self.groups[fate] += 1
        self.tokens[fate] += group.num_tokens
        self.tokens["masked" if fate == "trained" else fate] += group.num_aborted_tokens

    def leased(self, group: Group, learner: int) -> None:
        """A step begins with a group."""
        self.ages[learner - group.oldest] += 1
        found = rule.parts(group.oldest, issued_at=group.issued_at, inserted_at=group.inserted_at, learner=learner)
        for name, steps in zip(found._fields, found, strict=True):
            self.parts[name] += steps

    def copy(self) -> Account:
        """As it is now."""
        return Account(
            Counter(self.groups),
            Counter(self.tokens),
            Counter(self.ages),
            Counter(self.parts),
            defaultdict(float, self.seconds),
        )

    def since(self, earlier: Account) -> Account:
        """What has come on top."""
        return Account(
            _minus(self.groups, earlier.groups),
            _minus(self.tokens, earlier.tokens),
            _minus(self.ages, earlier.ages),
            _minus(self.parts, earlier.parts),
            defaultdict(float, {name: s - earlier.seconds[name] for name, s in self.seconds.items()}),
        )


def _minus(now: Mapping[Key, int], then: Mapping[Key, int]) -> Counter[Key]:
    return Counter({key: count - then.get(key, 0) for key, count in now.items()})
