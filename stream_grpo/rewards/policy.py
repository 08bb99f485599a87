"""What is done with a response that got no reward: try again, leave it out, stop the run. Pure, no clock of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from stream_grpo.errors import RewardError
from stream_grpo.types import Decision, RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class UnscoredPolicy:
    """What unknown and env_error mean for a run."""

    num_env_error_retries: int = 1
    """How often a response is given to the verifier again after an error."""
    num_unknown_retries: int = 0
    """The same after an unknown: a verifier that only reads says the same again."""
    retry_after_s: float = 1.0
    """How long after."""
    max_env_errors_in_row: int | None = 32
    """So many responses in a row that one verifier left out for errors stop the run; None: no number does."""


class UnscoredCount:
    """Applies a policy, and counts what was left out.

    A response is left out once its retries are used up. Each verifier has a row of errors of its own: one that is down
    is not hidden by another that works. Only an env_error adds to it, and any other final decision of the same verifier
    ends the row: unknown too, for it takes a working verifier to say so.
    """

    def __init__(self, policy: UnscoredPolicy) -> None:
        self._policy = policy
        self._num_in_row: Counter[str] = Counter()
        self._first_of_row: dict[str, str] = {}
        self._decisions: Counter[Decision] = Counter()
        self._num_retries = 0

    def retry_at(self, decision: Decision, *, num_tries: int, now_s: float) -> float | None:
        """When the response is to be tried again after its `num_tries`-th try; None: the decision is final."""
        allowed = {
            Decision.ENV_ERROR: self._policy.num_env_error_retries,
            Decision.UNKNOWN: self._policy.num_unknown_retries,
        }.get(decision, 0)
        if num_tries > allowed:
            return None
        self._num_retries += 1
        return now_s + self._policy.retry_after_s

    def settle(self, result: RewardResult, details: str = "") -> None:
        """Count a final result; `details`: the traceback of an error, or what there is instead.

        Raises RewardError at the env_error that makes the row too long, with the details of the first of the row.
        """
        self._decisions[result.decision] += 1
        verifier = result.verifier
        if result.decision is not Decision.ENV_ERROR:
            self._num_in_row[verifier] = 0
            return
        if self._num_in_row[verifier] == 0:
            self._first_of_row[verifier] = f"{verifier}: {details or result.evidence}"
        self._num_in_row[verifier] += 1
        limit = self._policy.max_env_errors_in_row
        if limit is not None and self._num_in_row[verifier] >= limit:
            raise RewardError(
                f"{self._num_in_row[verifier]} responses in a row could not be scored, which is the limit; the first "
                f"error was\n{self._first_of_row[verifier]}"
            )

    def status(self) -> dict[str, Any]:
        """Final decisions by name, retries, and the longest present row of errors."""
        return {
            "decisions": {decision.value: self._decisions[decision] for decision in Decision},
            "num_left_out": self._decisions[Decision.UNKNOWN] + self._decisions[Decision.ENV_ERROR],
            "num_retries": self._num_retries,
            "num_env_errors_in_row": max(self._num_in_row.values(), default=0),
        }
