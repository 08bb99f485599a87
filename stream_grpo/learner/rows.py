"""How the sequences of a minibatch become rows, and rows microbatches: by themselves, sharing, packed. No torch.

A block is a prompt and the responses behind it: one sequence, or several of a group that share their prompt. A row is
one block, or with packing several.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from stream_grpo.learner.shared_prompts import cost, pays, share

Block = list[int]
"""Sequences that share a copy of their prompt, in order."""
Row = list[Block]


class Pack(NamedTuple):
    """One microbatch."""

    rank: int
    rows: list[Row]
    length: int
    """Of the longest row."""


def packs(
    lengths: Sequence[int],
    prompts: Callable[[], Sequence[tuple[int, ...]]],
    *,
    microbatch_tokens: int,
    num_ranks: int = 1,
    attention_cost: float | None = None,
    share_prompts: bool = True,
    packing: bool = False,
) -> list[Pack]:
    """Microbatches of each rank: each sequence a row, unless rows of several cost less by the model's `attention_cost`.

    None: never. The attention scores of a microbatch, rows x length^2, are no more than single sequences may have: its
    memory grows with them too. Each further way is taken where it costs a tenth less than what came before.
    """
    max_scores = microbatch_tokens * max(lengths, default=0)

    def laid_out(blocks: Sequence[Block], widths: Sequence[int], limit: int | None) -> list[Pack]:
        found = []
        for rank, dealt in enumerate(deal(widths, num_ranks)):
            rows = [[i] for i in dealt] if limit is None else fill(widths, dealt, limit)
            tokens = [sum(widths[i] for i in row) for row in rows]
            for chosen in pack(tokens, microbatch_tokens, max_scores):
                found.append(Pack(rank, [[blocks[i] for i in rows[r]] for r in chosen], tokens[chosen[0]]))
        return found

    single: tuple[Sequence[Block], Sequence[int]] = [[i] for i in range(len(lengths))], lengths
    best = laid_out(*single, None)
    if attention_cost is None or not lengths:
        return best
    most = min(microbatch_tokens, math.isqrt(max_scores))
    shared = share(prompts(), lengths, max_tokens=most) if share_prompts else None
    ways = [] if shared is None else [laid_out(*shared, None)]
    if packing:
        for blocks, widths in (single,) if shared is None else (single, shared):
            found = [laid_out(blocks, widths, limit) for limit in _limits(max(widths), microbatch_tokens, most)]
            ways.append(min(found, key=partial(_cost, attention_cost=attention_cost)))
    for other in ways:
        if pays(_cost(other, attention_cost), _cost(best, attention_cost)):
            best = other
    return best


def _limits(longest: int, microbatch_tokens: int, most: int) -> list[int]:
    """How long rows may be: as long as they have to be, which costs no more attention; twice as long, and so on."""
    limits = [min(longest, microbatch_tokens)]
    while limits[-1] < most:
        limits.append(min(2 * limits[-1], most))
    return limits


def _cost(packs: Sequence[Pack], attention_cost: float) -> float:
    return cost([(len(pack.rows), pack.length) for pack in packs], attention_cost=attention_cost)


def fill(widths: Sequence[int], chosen: Sequence[int], limit: int) -> list[list[int]]:
    """Put blocks into rows of at most `limit` tokens, the longest first, each into the fullest row that has room.

    Best fit decreasing: at most 11/9 of the fewest rows possible, and 4 more (Johnson 1974, Fast algorithms for bin
    packing). A longer block is a row of its own. In a row, and over rows, the order is that of their placing.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(chosen, key=lambda i: (-widths[i], i)):
        at = bisect_left(room, (widths[index], -1))
        left, number = room.pop(at) if at < len(room) else (limit, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(index)
        insort(room, (left - widths[index], number))
    return rows


def pack(lengths: Sequence[int], microbatch_tokens: int, max_scores: float = math.inf) -> list[list[int]]:
    """Cut sequences into packs whose padded size, count x longest, is at most `microbatch_tokens`.

    Their attention scores, count x longest^2, are at most `max_scores`.
    Longest first, so that little is padding and memory runs out at once or not at all; equal lengths keep their
    order. A sequence longer than the budget is a pack of its own.
    """
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[packs[-1][0]] if packs else 0
        num_tokens = (len(packs[-1]) + 1) * longest if packs else 0
        if packs and num_tokens <= microbatch_tokens and num_tokens * longest <= max_scores:
            packs[-1].append(index)
        else:
            packs.append([index])
    return packs


def deal(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal sequences to ranks so that all have about as many tokens: the longest first, each to the rank with fewest.

    The ranks' sums differ by at most the longest sequence, and the largest is at most 4/3 of the best possible (Graham
    1969, Bounds on multiprocessing timing anomalies). Each rank has its sequences in the order given.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = min(range(num_ranks), key=tokens.__getitem__)
        ranks[least].append(index)
        tokens[least] += lengths[index]
    return [sorted(rank) for rank in ranks]
