"""At which tokens the steps of a response end, where a verifier says at which characters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, groupby, pairwise
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from stream_grpo.types import StepScore

Decode = Callable[[Sequence[int]], str]

# Tokens that are decoded before those that are measured: a tokenizer may write the first token of a text differently.
_NUM_CONTEXT = 8
# So often an end is guessed, then what is left is halved.
_NUM_GUESSES = 6
# What the tokens of an unfinished character decode to.
_UNFINISHED = "\ufffd"


def steps_in_tokens(steps: Sequence[StepScore], token_ids: Sequence[int], decode: Decode) -> tuple[StepScore, ...]:
    """The steps with their ends as token indices of the response: exclusive, rising, at most len(token_ids).

    A step ends with the token that completes its last character. Steps that end with one token become one step with
    the mean of their scores. A step that ends where the text does ends with the response: an end token belongs to it.

    Each end is looked for from the one before, on the text of the tokens between alone, where it would be if all tokens
    were of one length: S steps of n tokens cost a few S decodings of about n / S tokens, never S of the whole response.

    Raises ValueError for ends that do not rise.
    """
    if any(after.end <= before.end for before, after in pairwise(steps)):
        raise ValueError(f"steps end at characters {[step.end for step in steps]}: expected rising ends")
    whole = _Prefix(len(token_ids), len(decode(token_ids)))
    found, at = list[StepScore](), _Prefix(0, 0)
    for step in steps:
        if at.num_characters < step.end:
            at = whole if step.end >= whole.num_characters else _shortest(step.end, token_ids, decode, at, whole)
        found.append(StepScore(at.num_tokens, step.score))
    return tuple(StepScore(end, fmean(s.score for s in same)) for end, same in groupby(found, key=attrgetter("end")))


class _Prefix(NamedTuple):
    """The first tokens of a response, and how many whole characters they have."""

    num_tokens: int
    num_characters: int


def _shortest(end: int, token_ids: Sequence[int], decode: Decode, low: _Prefix, high: _Prefix) -> _Prefix:
    """The shortest prefix with `end` characters; `low` has fewer, `high` as many or more."""
    context = max(0, low.num_tokens - _NUM_CONTEXT)
    before = low.num_characters - _num_whole(decode(token_ids[context : low.num_tokens]))
    for num_tries in count():
        width, missing = high.num_tokens - low.num_tokens, end - low.num_characters
        if width == 1:
            break
        if num_tries < _NUM_GUESSES:
            step = round(missing * width / (high.num_characters - low.num_characters))
        else:  # tokens of very different lengths
            step = width // 2
        num_tokens = low.num_tokens + min(max(step, 1), width - 1)
        middle = _Prefix(num_tokens, before + _num_whole(decode(token_ids[context:num_tokens])))
        low, high = (middle, high) if middle.num_characters < end else (low, middle)
    return high


def _num_whole(text: str) -> int:
    """Characters of the text, without one that is unfinished at its end."""
    return len(text.rstrip(_UNFINISHED))
