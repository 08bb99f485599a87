"""The families of reasoning-gym, each by its own scorer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from stream_grpo.rewards.result import Verdicts, VerifiableProblem, shown
from stream_grpo.types import RewardResult

NAME, VERSION = "reasoning_gym", "1"
_VERDICTS = Verdicts(NAME, VERSION)

PASS_SCORE = 1.0
"""Every scorer gives 1 to a right answer and less to everything else."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_EVALUATES_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Scorers that call eval on the answer, to accept a Python list."""

_EVALUATES_FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Scorers that give the answer to sympy.parse_expr, which calls eval."""

_FUNCTIONS = (
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs abs sign erf Rational"
)
_CODE = re.compile(r"__|\blambda\b|\bfor\b|\bimport\b|(?<![\d\s])\s*\.\s*[A-Za-z_]|[A-Za-z_)\]]\s*\.\s*[A-Za-z_]")


def reasoning_gym(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """Pass if the family's scorer gives the answer 1; its score is the component "score".

    The answer is the last <answer>...</answer>, or the whole response where there is none. The entry that the scorer
    needs is rebuilt from the row: `extra["metadata"]` (a mapping or JSON text), the question where the row has it, and
    the problem's answer, which is empty in families that have no single one. The family is the metadata's
    source_dataset, else `extra["family"]` or `extra["source_dataset"]`.

    Raises ValueError for a row without family or metadata, and whatever the scorer raises on the gold itself. A scorer
    that fails on the response alone found it wrong.
    """
    entry = _entry(problem)
    family = _family(problem, entry["metadata"])
    answer = _answer(response_text)
    if answer is None:
        return _VERDICTS.failed("no answer: an unterminated answer tag", {"score": 0.0})
    if runs_code(family, answer):
        return _VERDICTS.failed(f"{family} would run the answer as code: {shown(answer)}", {"score": 0.0})
    scorer = _scorer(family)
    try:
        score = min(1.0, float(scorer(answer, entry)))
    except Exception as error:
        scorer(entry["answer"] or "", entry)  # raises if the row, not the response, is at fault
        message = f"{family} could not read the answer ({type(error).__name__}): {shown(answer)}"
        return _VERDICTS.failed(message, {"score": 0.0})
    gold = shown(str(entry["answer"])) if entry["answer"] else "any that its scorer accepts"
    if score >= PASS_SCORE and family in _STRICTER and not _STRICTER[family](answer, entry["answer"] or ""):
        evidence = f"{family} scored {score:g} for a wrong answer: {shown(answer)}, expected {gold}"
        return _VERDICTS.failed(evidence, {"score": 0.0})
    evidence = f"{family} scored {score:g}: answer {shown(answer)}, expected {gold}"
    result = _VERDICTS.passed if score >= PASS_SCORE else _VERDICTS.failed
    return result(evidence, {"score": score})


def _same_text(answer: str, gold: str) -> bool:
    return answer.strip().casefold() == gold.strip().casefold()


def _same_number(answer: str, gold: str) -> bool:
    return abs(Fraction(answer.replace(",", "")) - Fraction(gold)) <= Fraction(1, 10_000)


def _same_length(answer: str, gold: str) -> bool:
    return len(answer.split()) == len(gold.split())


_STRICTER: Mapping[str, Callable[[str, str], bool]] = {
    "coin_flip": _same_number,  # gives 1 to any number whose digits begin the gold's: 0 for 0.17
    "game_of_life_halting": _same_text,  # compares bool("False") with bool("True")
    "letter_jumble": _same_length,  # compares no further than the shorter text
    "spell_backward": _same_text,  # gives more than 1 to the gold with something behind it
}
"""What an answer must meet besides, in families whose scorer in reasoning-gym 0.1.25 gives 1 to wrong answers."""


def runs_code(family: str, answer: str) -> bool:
    """Whether the family's scorer would evaluate the answer as Python and the answer is more than data or a formula."""
    if family in _EVALUATES_LITERALS:
        return bool(_CODE.search(answer) or re.search(r"[\w)\]]\s*\(", answer))
    if family in _EVALUATES_FORMULAS:
        called = set(re.findall(r"([A-Za-z_]\w*)\s*\(", answer)) - set(_FUNCTIONS.split())
        called = {name for name in called if len(name) > 1}  # "x(x + 1)" is a product
        return bool(called or _CODE.search(answer) or re.search(r"[\[\]{}'\":;@`=\\]", answer))
    return False


def _answer(response_text: str) -> str | None:
    text = response_text.rpartition("</think>")[2]
    found = list(_TAGS.finditer(text))
    if text.rfind("<answer>") > (found[-1].start() if found else -1):
        return None
    return (found[-1][1] if found else text).strip()


def _entry(problem: VerifiableProblem) -> dict[str, Any]:
    metadata = problem.extra.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError as error:
            raise ValueError(f"problem {problem.problem_id} has metadata that is not JSON: {error}") from error
    if not isinstance(metadata, Mapping):
        raise ValueError(f"problem {problem.problem_id} has no metadata: the scorer of reasoning-gym needs it")
    question = problem.extra.get("question") or problem.extra.get("prompt") or ""
    return {"question": question, "answer": problem.answer or None, "metadata": _restored(metadata)}


def _restored(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as the generator made it: boards of the ARC families are tuples, which JSON turns into lists."""
    restored = dict(metadata)
    if metadata.get("source_dataset") in ("arc_agi", "rearc"):
        restored["output"] = tuple(tuple(row) for row in metadata["output"])
    return restored


def _family(problem: VerifiableProblem, metadata: Mapping[str, Any]) -> str:
    family = metadata.get("source_dataset") or problem.extra.get("family") or problem.extra.get("source_dataset")
    if not family:
        raise ValueError(f"problem {problem.problem_id} names no family: set source_dataset in its metadata")
    return str(family)


@lru_cache(maxsize=128)
def _scorer(family: str) -> Any:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if family not in DATASETS or family == "composite":
        raise ValueError(f"reasoning-gym has no family {family!r} with a scorer of its own")
    return get_score_answer_fn(family)
