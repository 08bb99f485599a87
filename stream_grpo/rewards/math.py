"""Mathematical equivalence of a response's final answer and the gold. The rules are a table in docs/rewards.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from stream_grpo.rewards.math_compare import equivalent
from stream_grpo.rewards.math_extract import extract, find_boxes
from stream_grpo.rewards.math_text import normalise
from stream_grpo.rewards.result import Verdicts, VerifiableProblem
from stream_grpo.types import RewardResult

NAME, VERSION = "math", "1"
_VERDICTS = Verdicts(NAME, VERSION)


def math(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    r"""Pass if the final answer of the response (`math_extract`) is equivalent to the gold (`math_compare`).

    The gold is LaTeX or plain text, with or without $ and \boxed, a solution that ends in "#### answer", or a list of
    answers (a list, or the text of a JSON list of strings), all of which must be given.

    Raises ValueError for an empty gold. Has no time limit of its own: it belongs in a worker process.
    """
    golds = gold_parts(problem.answer)
    if not golds:
        raise ValueError(f"problem {problem.problem_id} has an empty answer")
    extraction = extract(response_text, is_cut=is_cut)
    if not extraction.parts:
        return _VERDICTS.failed(f"no answer: {extraction.source}")
    return _VERDICTS.compared(equivalent(golds, extraction.parts), " and ".join(extraction.parts), " and ".join(golds))


def gold_parts(gold: str | Sequence[str]) -> tuple[str, ...]:
    """The answers that a gold asks for, without those that are empty."""
    if not isinstance(gold, str):
        return tuple(part for entry in gold for part in gold_parts(str(entry)))
    return _text_parts(gold)


@lru_cache(maxsize=1024)  # a gold is compared with group_size responses
def _text_parts(gold: str) -> tuple[str, ...]:
    listed = _json_strings(gold)
    if listed is not None:
        return gold_parts(listed)
    boxes = find_boxes(gold)
    if boxes:
        return tuple(box.content for box in boxes if box.content)
    answer = re.split(r"####(?!#)", gold)[-1].strip()
    return (answer,) if normalise(answer) else ()


def _json_strings(text: str) -> list[str] | None:
    """The strings of a JSON list; [1, 2] without quotes is an interval, not a list."""
    if not text.lstrip().startswith('["'):
        return None
    try:
        listed = json.loads(text)
    except ValueError:
        return None
    return listed if all(isinstance(entry, str) for entry in listed) else None
