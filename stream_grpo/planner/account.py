"""What the model counts: groups and tokens by fate, ages and their parts, seconds of each side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stream_grpo.planner import rule
from stream_grpo.planner.group import Group

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
    seconds: Counter[str] = field(default_factory=Counter)
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
        return Account(*(Counter(counts) for counts in self._counts()))

    def since(self, earlier: Account) -> Account:
        """What has come on top."""
        pairs = zip(self._counts(), earlier._counts(), strict=True)
        return Account(*(Counter({key: now[key] - then[key] for key in now}) for now, then in pairs))

    def _counts(self) -> tuple[Counter[str], Counter[str], Counter[int], Counter[str], Counter[str]]:
        return self.groups, self.tokens, self.ages, self.parts, self.seconds
