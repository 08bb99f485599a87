"""Multiple choice: the letters that a response settles on."""

from __future__ import annotations

import re

from stream_grpo.rewards.math_extract import NO_ANSWER, WHOLE, extract
from stream_grpo.rewards.result import Verdicts, VerifiableProblem, require_gold, shown
from stream_grpo.types import RewardResult

NAME, VERSION = "choice", "1"
_VERDICTS = Verdicts(NAME, VERSION)

_COMMANDS = re.compile(
    r"\\(?:text(?:bf|rm|it|sf|tt)?|math(?:bf|rm|it|sf|tt)?|mbox|bf|rm|boldsymbol)(?![A-Za-z])|\\[ ,;!$]|~"
)
_DRESS = re.compile(r"[{}$*_`\"'“”]|\\[()\[\]]")
_LETTER = r"(?:\(\s*[A-Za-z]\s*\)|\[\s*[A-Za-z]\s*\]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
_JOIN = r"\s*(?:,?\s*\b(?:and|or)\b|,|/|&|;)\s*"
_LEAD = re.compile(
    r"^(?:(?:the\s+)?(?:options?|choices?|answers?|letters?|statements?)\b\s*:?\s*)?(?:either|both)?\s*", re.I
)
_LETTERS = re.compile(rf"({_LETTER})((?:{_JOIN}{_LETTER})*)\s*(?P<after>[.):,\-]|$|\s)", re.I)
_SETTLED = re.compile(r"\(\s*([A-Z])\s*\)|\b(?:[Oo]ption|[Cc]hoice)\s+([A-Z])\b|^\s*([A-Z])[.)]?\s*$", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def choice(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """Pass if the letters that the response settles on are those of the gold: one, or several for "A, C".

    They are read from the last answer tag, the boxes of the last sentence that has one, or the last marked answer
    ("The answer is (B)"); without any of these, from the last sentence with a letter in brackets or after "option".
    Two different letters there are two answers, so "A or B" fails for a single gold.

    The time is linear in the response, whatever it is. Raises ValueError for a gold that is not a letter or a list of
    letters.
    """
    gold = _gold_letters(problem)
    extraction = extract(response_text, is_cut=is_cut)
    found = " and ".join(extraction.parts)
    answer = frozenset(letter for part in extraction.parts for letter in letters_of(part, several=len(gold) > 1))
    if not answer and extraction.source in (WHOLE, NO_ANSWER) and not is_cut:
        answer = _settled(response_text)
    if not answer:
        return _VERDICTS.failed(f"no letter in {shown(found)}" if found else f"no answer: {extraction.source}")
    return _VERDICTS.compared(answer == gold, ", ".join(sorted(answer)), ", ".join(sorted(gold)))


def letters_of(text: str, *, several: bool = False) -> frozenset[str]:
    """The choice letters that a short answer begins with; "AC" is two letters only if several are asked for."""
    # One space between words: a pattern with white space on both sides of a join would read a long run over and over.
    plain = " ".join(_DRESS.sub(" ", _COMMANDS.sub(" ", text)).split()).rstrip(".").strip()
    plain = _LEAD.sub("", plain, count=1)
    if several and re.fullmatch(r"[A-Z]{2,}", plain):
        return frozenset(plain)
    match = _LETTERS.match(plain)
    if match is None:
        return frozenset()
    rest = plain[match.end() :].strip()
    is_bare = match[1].isalpha() and not match[2] and match["after"].isspace() and rest
    if is_bare and (match[1] in "AI" or match[1].islower()):
        return frozenset()  # "A train ...": an article, not a choice
    return frozenset(letter.strip("()[] ").upper() for letter in re.findall(_LETTER, match[1] + match[2]))


def _settled(text: str) -> frozenset[str]:
    for sentence in reversed(_SENTENCE.split(text.rpartition("</think>")[2])):
        letters = frozenset(next(group for group in match.groups() if group) for match in _SETTLED.finditer(sentence))
        if letters:
            return letters
    return frozenset()


def _gold_letters(problem: VerifiableProblem) -> frozenset[str]:
    gold = require_gold(problem)
    letters = letters_of(gold, several=True)
    if not letters or re.search(r"[A-Za-z]{2,}", re.sub(r"\b(?:and|or|[A-Z]+)\b", "", _COMMANDS.sub(" ", gold))):
        raise ValueError(
            f"problem {problem.problem_id} has answer {shown(gold)}: a letter or letters A to Z are needed"
        )
    return letters
