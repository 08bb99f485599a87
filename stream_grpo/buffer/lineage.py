"""The learner's version and the branches it came by: how old weights are, and which steps a version contains."""

from __future__ import annotations

import json

from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.types import Forks, PolicyVersion, forks_from_plain, forks_to_plain, policy_age


def contains(holder: PolicyVersion, version: PolicyVersion, forks: Forks) -> bool:
    """Whether `version` is `holder` or one it came by, over every fork in between.

    Raises ValueError for a branch without a recorded fork.
    """
    while holder.branch > version.branch:
        if holder.branch not in forks:
            raise ValueError(f"branch {holder.branch} has no recorded fork")
        holder = forks[holder.branch]
    return holder.branch == version.branch and version.step <= holder.step


class Lineage:
    """Where the learner is. A fold over `started` and `trained`."""

    folded = ("version", "forks", "_tips")

    def __init__(self) -> None:
        """Before the first start there is no version."""
        self.version: PolicyVersion | None = None
        self.forks: dict[int, PolicyVersion] = {}
        self._tips: dict[int, PolicyVersion] = {}
        """How far the learner came on each branch that a restore has left."""

    @property
    def learner(self) -> PolicyVersion:
        """The learner's version; branch and step -1 before it has started."""
        return self.version or PolicyVersion(-1, -1)

    def apply(self, row: Transition) -> None:
        """Follow a transition."""
        if row.kind is Kind.STARTED:
            if self.version:
                self._tips[self.version.branch] = self.version
            self.version = row.version
            self.forks |= forks_from_json(row.reason)
        elif row.kind is Kind.TRAINED:
            self.version = row.version

    def age(self, version: PolicyVersion) -> int:
        """Learner steps between a version and the learner, across branches; see `types.policy_age`.

        Weights of a step that the learner has published and not yet reported are ahead of it, and 0 old. Raises
        ValueError for a branch without a recorded fork.
        """
        if version.branch == self.learner.branch and version.step > self.learner.step:
            return 0
        if min(version) < 0:
            raise ValueError(f"version {version} is none")
        return policy_age(version, self.learner, self.forks)

    def age_in_flight(self, version: PolicyVersion) -> int:
        """The largest age of a token that a ticket issued for weights of `version` may bring, sampled up to now.

        On the learner's branch that is the age of `version` itself: weights never go back. Of a branch that a restore
        has left, its sampler may have applied any that were published there, at most the last that the learner
        reported; `selectors` has the proof. Raises ValueError as `age` does.
        """
        left = [tip for branch, tip in self._tips.items() if branch >= version.branch]
        return max(map(self.age, [version, *left]))


def forks_to_json(forks: Forks) -> str:
    """Forks as the text that a `started` row holds."""
    return json.dumps(forks_to_plain(forks))


def forks_from_json(text: str) -> dict[int, PolicyVersion]:
    """The inverse of `forks_to_json`."""
    return forks_from_plain(json.loads(text))
