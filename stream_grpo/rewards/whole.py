"""A response that a composition scores, until all of its parts have answered. Pure.

Every component is asked first, then the second verifiers of those in their tail; then the whole is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stream_grpo.config_composition import Component
from stream_grpo.rewards.composition import Chosen, Usage, compose, part_row, tails
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.types import Decision, RewardResult


class Part(NamedTuple):
    """A verifier that is asked about a response."""

    key: str
    """The component's name."""
    component: Component
    verifier: str
    is_second: bool
    """Whether it is asked of the tail."""

    def row(self, problem: VerifiableProblem) -> ProblemRow:
        """The problem as this part sees it. Raises ValueError where the row has no such column."""
        return part_row(problem, self.component, self.verifier, self.key)


@dataclass(slots=True, eq=False)
class Whole:
    """What its parts have said so far. Ask those of `first`, and those that `take` returns."""

    chosen: Chosen
    version: str
    usage: Usage = field(default_factory=Usage)
    results: dict[str, RewardResult] = field(default_factory=dict)
    """By component."""
    seconds: dict[str, RewardResult] = field(default_factory=dict)
    """Of the second verifiers."""
    result: RewardResult | None = None
    """There once the last part has answered."""
    _num_out: int = 0
    _has_asked_tails: bool = False

    def first(self) -> list[Part]:
        """What is asked of every response."""
        parts = [Part(key, one, one.verifier, False) for key, one in self.chosen.composition.components.items()]
        self._num_out = len(parts)
        return parts

    def take(self, part: Part, result: RewardResult) -> list[Part]:
        """Keep what a part says; what is to be asked next, mostly nothing."""
        (self.seconds if part.is_second else self.results)[part.key] = result
        self._num_out -= 1
        if self._num_out:
            return []
        if not self._has_asked_tails:
            self._has_asked_tails = True
            more = self._tails()
            self._num_out = len(more)
            if more:
                return more
        name, composition = self.chosen
        self.result = compose(name, self.version, composition, self.results, self.seconds, self.usage)
        return []

    def said(self) -> Mapping[str, RewardResult]:
        """What every part says, in the order of the composition."""
        found = {key: self.results[key] for key in self.chosen.composition.components}
        return found | {f"{key} (tail)": result for key, result in self.seconds.items()}

    def _tails(self) -> list[Part]:
        components = self.chosen.composition.components
        return [
            Part(key, components[key], second, True)
            for key in tails(self.chosen.composition, self.results)
            if (second := components[key].tail_verifier) is not None
        ]


def no_row(verifier: str, error: ValueError) -> RewardResult:
    """Of a verifier that cannot be asked, because the row has not what it reads."""
    return RewardResult(
        decision=Decision.ENV_ERROR, reward=None, verifier=verifier, verifier_version="", evidence=str(error)
    )
