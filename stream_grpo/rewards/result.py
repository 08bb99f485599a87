"""The results of a verifier, built with evidence that stays short: it is stored with every rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stream_grpo.types import Decision, RewardResult

MAX_EVIDENCE_CHARACTERS = 200
"""Longer extracted texts are cut in the evidence."""


class VerifiableProblem(Protocol):
    """What a verifier may read of a problem."""

    @property
    def problem_id(self) -> str:
        """For messages."""

    @property
    def answer(self) -> str:
        """The gold."""

    @property
    def verifier(self) -> str:
        """A name in VERIFIERS."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Every further field of the problem's row."""


Check = Callable[[str, VerifiableProblem, bool], RewardResult]
"""(response text, problem, whether the response was cut at the length limit) -> result."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier and the version of its rules; the version changes whenever a decision can."""

    name: str
    version: str
    check: Check
    is_cheap: bool = False
    """Whether its time is linear in the text, whatever the text, so that it is checked where the text is; others run in
    the pool."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Makes the results of one verifier."""

    verifier: str
    version: str

    def passed(self, evidence: str, components: Mapping[str, float] | None = None) -> RewardResult:
        """Reward 1."""
        return self._result(Decision.PASS, 1.0, evidence, components)

    def failed(self, evidence: str, components: Mapping[str, float] | None = None) -> RewardResult:
        """Reward 0: the verifier knows that the response is wrong."""
        return self._result(Decision.FAIL, 0.0, evidence, components)

    def unknown(self, evidence: str) -> RewardResult:
        """No reward: the verifier works and cannot tell."""
        return self._result(Decision.UNKNOWN, None, evidence)

    def compared(self, is_equal: bool, answer: str, gold: str) -> RewardResult:
        """Pass or fail, showing both sides."""
        evidence = f"answer {shown(answer)}, expected {shown(gold)}"
        return self.passed(evidence) if is_equal else self.failed(evidence)

    def _result(
        self, decision: Decision, reward: float | None, evidence: str, components: Mapping[str, float] | None = None
    ) -> RewardResult:
        return RewardResult(
            decision=decision,
            reward=reward,
            verifier=self.verifier,
            verifier_version=self.version,
            components=components or {},
            evidence=evidence,
        )


def shown(text: str) -> str:
    """The text in quotes, cut after MAX_EVIDENCE_CHARACTERS."""
    return repr(text if len(text) <= MAX_EVIDENCE_CHARACTERS else text[:MAX_EVIDENCE_CHARACTERS] + "...")


def require_gold(problem: VerifiableProblem) -> str:
    """The problem's answer without surrounding white space. Raises ValueError if nothing is left: it equals nothing."""
    gold = problem.answer.strip()
    if not gold:
        raise ValueError(f"problem {problem.problem_id} has an empty answer")
    return gold
