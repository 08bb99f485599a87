"""The verifiers by name: pure functions from a response and its problem to a structured result.

A verifier decides pass or fail, or raises; what a raise means is decided by `rewards.score`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from stream_grpo.types import Decision, RewardResult

DEFAULT_ANSWER_PREFIX = "####"
"""What stands before the answer where a problem names nothing else."""

MAX_EVIDENCE_CHARACTERS = 200
"""Longer extracted texts are cut in the evidence, which is stored with every rollout."""


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


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier and the version of its rules; the version changes whenever a decision can."""

    name: str
    version: str
    check: Callable[[str, VerifiableProblem, bool], RewardResult]
    """(response text, problem, whether the response was cut at the length limit) -> result."""


EXACT, EXACT_VERSION = "exact", "1"


def exact(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """Pass if the text after the last marker, up to the end of its line, is the problem's answer as text.

    The marker is `extra["answer_prefix"]`, by default "####". Surrounding white space does not count, on both sides.
    A response without a marker fails, and so does one that was cut before its line ended: more of the answer might
    have come.

    Raises ValueError for a problem whose answer or marker is empty: nothing could be told from such a comparison.
    """
    gold = problem.answer.strip()
    prefix = problem.extra.get("answer_prefix", DEFAULT_ANSWER_PREFIX)
    if not gold:
        raise ValueError(f"problem {problem.problem_id} has an empty answer")
    if not prefix:
        raise ValueError(f"problem {problem.problem_id} has an empty answer_prefix")
    _, marker, tail = response_text.rpartition(prefix)
    if not marker:
        return _exact_result(Decision.FAIL, "no answer marker")
    answer, line_end, _ = tail.partition("\n")
    answer = answer.strip()
    if is_cut and not line_end:
        return _exact_result(Decision.FAIL, f"cut off at answer {_shown(answer)}")
    evidence = f"answer {_shown(answer)}, expected {_shown(gold)}"
    return _exact_result(Decision.PASS if answer == gold else Decision.FAIL, evidence)


def _exact_result(decision: Decision, evidence: str) -> RewardResult:
    return RewardResult(
        decision=decision,
        reward=1.0 if decision is Decision.PASS else 0.0,
        verifier=EXACT,
        verifier_version=EXACT_VERSION,
        evidence=evidence,
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_EVIDENCE_CHARACTERS else text[:MAX_EVIDENCE_CHARACTERS] + "...")


VERIFIERS: Mapping[str, Verifier] = MappingProxyType({EXACT: Verifier(EXACT, EXACT_VERSION, exact)})
"""Every verifier that a problem can name."""
