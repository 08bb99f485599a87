"""Steps of a response, from characters to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.sampler.step_tokens import steps_in_tokens
from stream_grpo.types import StepScore


class Pieces:
    """A tokenizer of byte pieces, as byte-level ones are; a piece of no bytes is a special token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.ids, self._pieces = list(range(len(pieces))), pieces
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return b"".join(self._pieces[i] for i in token_ids).decode(errors="replace")


def steps(*ends_and_scores: tuple[int, float]) -> tuple[StepScore, ...]:
    return tuple(StepScore(end, score) for end, score in ends_and_scores)


def test_a_step_ends_with_the_token_that_completes_it_and_the_last_with_the_response() -> None:
    # "2+2\n" is characters 0 to 4, and ends inside the third token, "\n=": characters 3 to 5. The last is an end token.
    text = Pieces([b"2", b"+2", b"\n=", b"4", b""])
    assert steps_in_tokens(steps((4, 0.5), (6, 0.25)), text.ids, text.decode) == steps((3, 0.5), (5, 0.25))


def test_steps_that_end_with_one_token_are_one_with_their_mean() -> None:
    text = Pieces([b"a.b.c", b"d"])
    # "a." and "a.b." both end in the first token: (1 + 0) / 2.
    assert steps_in_tokens(steps((2, 1.0), (4, 0.0), (6, 0.5)), text.ids, text.decode) == steps((1, 0.5), (2, 0.5))


def test_a_character_that_is_cut_between_tokens_counts_where_it_is_whole() -> None:
    emoji = "\U0001f600".encode()
    text = Pieces([b"a", emoji[:1], emoji[1:3], emoji[3:], b"b", b"c"])
    # The step "a and the emoji" is 2 characters: whole with token 4 of 6.
    assert steps_in_tokens(steps((2, 1.0), (4, 1.0)), text.ids, text.decode) == steps((4, 1.0), (6, 1.0))


def test_ends_that_do_not_rise_are_refused() -> None:
    text = Pieces([b"a", b"b"])
    with pytest.raises(ValueError, match=r"\[2, 2\]: expected rising"):
        steps_in_tokens(steps((2, 1.0), (2, 1.0)), text.ids, text.decode)


@given(text=st.text(min_size=1, max_size=40), data=st.data())
def test_every_end_is_that_of_the_shortest_sufficient_prefix(text: str, data: st.DataObject) -> None:
    # A real U+FFFD at the end of a prefix cannot be told from an unfinished character.
    raw = text.replace("\ufffd", "x").encode(errors="replace")
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=20))})
    pieces = Pieces([raw[a:b] for a, b in pairwise(cuts)])
    length = len(raw.decode())
    ends = sorted(data.draw(st.sets(st.integers(1, length), min_size=1)))
    found = steps_in_tokens(tuple(StepScore(end, float(end)) for end in ends), pieces.ids, pieces.decode)
    whole = [len(pieces.decode(pieces.ids[:n]).rstrip("\ufffd")) for n in range(len(pieces.ids) + 1)]
    slow = [next(n for n, num in enumerate(whole) if num >= end) for end in ends]
    assert [end for end, _ in found] == sorted(set(slow))
    assert [a.end < b.end for a, b in pairwise(found)] == [True] * (len(found) - 1)


def test_an_end_costs_a_few_decodings_of_the_tokens_of_its_step() -> None:
    # 4096 tokens in 64 steps of 64. The guess is right at once; that no shorter prefix will do takes one more, and each
    # decodes a step and its context of 8, the context once alone.
    text = Pieces([b"x"] * 4096)
    steps_in_tokens(tuple(StepScore(64 * i, 1.0) for i in range(1, 65)), text.ids, text.decode)
    assert text.num_decoded <= 4096 + 64 * (2 * 72 + 8)


def test_tokens_of_very_different_lengths_cost_no_more_than_halving() -> None:
    # The first guesses fall far too late: one token has nearly all the characters.
    text = Pieces([b"x"] * 2048 + [b"y" * 100_000] + [b"x"] * 2047)
    assert steps_in_tokens(steps((2000, 1.0), (104095, 0.0)), text.ids, text.decode) == steps((2000, 1.0), (4096, 0.0))
    # 6 guesses and 12 halvings of at most 4096 tokens.
    assert text.num_decoded < 4096 * 20
