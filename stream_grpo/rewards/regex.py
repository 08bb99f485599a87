"""A regular expression over the response."""

from __future__ import annotations

import re
from functools import lru_cache

from stream_grpo.rewards.result import Verdicts, VerifiableProblem, shown
from stream_grpo.types import RewardResult

NAME, VERSION = "regex", "1"
_VERDICTS = Verdicts(NAME, VERSION)
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def regex(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """Pass if the pattern of the problem matches the response, without white space around it.

    `extra["pattern"]` is the pattern, or else the problem's answer; `extra["match"]` is "search" (default: anywhere)
    or "full"; `extra["flags"]` is made of the letters i, m, s, x.

    Patterns can take exponential time on some texts. There is no limit here: it is that of the worker process.
    Raises ValueError for an empty or malformed pattern, and for another value of `match` or `flags`.
    """
    pattern = problem.extra.get("pattern") or problem.answer
    mode = problem.extra.get("match") or "search"
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"problem {problem.problem_id} has no pattern: set the field pattern to a regular expression")
    if mode not in ("search", "full"):
        raise ValueError(f"problem {problem.problem_id} has match {mode!r}: 'search' or 'full' are possible")
    compiled = _compiled(pattern, str(problem.extra.get("flags") or ""), problem.problem_id)
    text = response_text.strip()
    match = compiled.fullmatch(text) if mode == "full" else compiled.search(text)
    if match is None:
        return _VERDICTS.failed(f"pattern {shown(pattern)} ({mode}) does not match {shown(text)}")
    return _VERDICTS.passed(f"pattern {shown(pattern)} ({mode}) matches {shown(match[0])}")


@lru_cache(maxsize=256)
def _compiled(pattern: str, flags: str, problem_id: str) -> re.Pattern[str]:
    unknown = sorted(set(flags) - _FLAGS.keys())
    if unknown:
        raise ValueError(f"problem {problem_id} has flags {flags!r}: only the letters i, m, s, x are possible")
    try:
        return re.compile(pattern, sum(_FLAGS[letter] for letter in set(flags)))
    except re.error as error:
        raise ValueError(f"problem {problem_id} has pattern {shown(pattern)}: {error}") from error
