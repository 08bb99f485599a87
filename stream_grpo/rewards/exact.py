"""The answer as text after a marker, compared character by character."""

from __future__ import annotations

from stream_grpo.rewards.result import Verdicts, VerifiableProblem, require_gold, shown
from stream_grpo.types import RewardResult

DEFAULT_ANSWER_PREFIX = "####"
"""What stands before the answer where a problem names nothing else."""

NAME, VERSION = "exact", "1"
_VERDICTS = Verdicts(NAME, VERSION)


def exact(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """Pass if the text after the last marker, up to the end of its line, is the problem's answer as text.

    The marker is `extra["answer_prefix"]`, by default "####". Surrounding white space does not count, on both sides.
    A response without a marker fails, and so does one that was cut before its line ended: more of the answer might
    have come.

    Raises ValueError for a problem whose answer or marker is empty: nothing could be told from such a comparison.
    """
    gold = require_gold(problem)
    prefix = problem.extra.get("answer_prefix", DEFAULT_ANSWER_PREFIX)
    if not prefix:
        raise ValueError(f"problem {problem.problem_id} has an empty answer_prefix")
    _, marker, tail = response_text.rpartition(prefix)
    if not marker:
        return _VERDICTS.failed("no answer marker")
    answer, line_end, _ = tail.partition("\n")
    answer = answer.strip()
    if is_cut and not line_end:
        return _VERDICTS.failed(f"cut off at answer {shown(answer)}")
    return _VERDICTS.compared(answer == gold, answer, gold)
