"""At which tokens the steps of a response end, where a verifier says at which characters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import fmean

from stream_grpo.types import StepScore

Decode = Callable[[Sequence[int]], str]

# Tokens that are decoded before those that are measured: a tokenizer may write the first token of a text differently.
_NUM_CONTEXT = 8
# What the tokens of an unfinished character decode to.
_UNFINISHED = "\ufffd"


def steps_in_tokens(steps: Sequence[StepScore], token_ids: Sequence[int], decode: Decode) -> tuple[StepScore, ...]:
    """The steps with their ends as token indices of the response: exclusive, rising, at most len(token_ids).

    A step ends with the token that completes its last character. Steps that end with one token become one step with
    the mean of their scores. A step that ends where the text does ends with the response: an end token belongs to it.

    Each end is looked for by doubling and halving from the one before, on the text of the tokens between alone: S
    steps of n tokens cost some S log(n / S) decodings of about n / S tokens, never S of the whole response.

    Raises ValueError for ends that do not rise.
    """
    if any(after.end <= before.end for before, after in pairwise(steps)):
        raise ValueError(f"steps end at characters {[step.end for step in steps]}: expected rising ends")
    num_characters, num_tokens, length = len(decode(token_ids)), 0, 0
    found: list[StepScore] = []
    for step in steps:
        if step.end >= num_characters:
            num_tokens = len(token_ids)
        else:
            num_tokens, length = _advance(step.end, token_ids, decode, num_tokens, length)
        found.append(StepScore(num_tokens, step.score))
    return tuple(StepScore(end, fmean(s.score for s in same)) for end, same in groupby(found, key=attrgetter("end")))


def _advance(end: int, token_ids: Sequence[int], decode: Decode, start: int, length: int) -> tuple[int, int]:
    """The fewest tokens, from `start` on, whose text has `end` characters, and how many it has then.

    `length`: characters of the first `start` tokens.
    """
    context = max(0, start - _NUM_CONTEXT)
    before = _num_whole(decode(token_ids[context:start]))

    def length_of(num_tokens: int) -> int:
        return length + _num_whole(decode(token_ids[context:num_tokens])) - before

    low, width = start, 1  # fewer than `end` characters at `low`, or `low` is the answer
    if length >= end:
        return start, length
    while start + width < len(token_ids) and length_of(start + width) < end:
        low, width = start + width, 2 * width
    high = min(start + width, len(token_ids))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length_of(middle) < end else (low, middle)
    return high, length_of(high)


def _num_whole(text: str) -> int:
    """Characters of the text, without one that is unfinished at its end."""
    return len(text.rstrip(_UNFINISHED))
