"""Which sequences lie in one row: all of them once, rows within bounds, and longer rows only where they pay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.learner.rows import Pack, fill, packs


def test_blocks_fill_the_fullest_row_that_has_room() -> None:
    # Limit 10, longest first: 7 | 6 | 4 goes with 6 (4 free, not with 7: 3 free) | 3 with 7 | 2 begins a row.
    assert fill([2, 4, 7, 3, 6], range(5), 10) == [[2, 3], [4, 1], [0]]
    # One that is longer than a row is a row, and nothing joins it.
    assert fill([12, 1], [0, 1], 10) == [[0], [1]]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(5, 80))
def test_every_block_is_in_one_row_and_no_two_rows_could_be_one(widths: list[int], limit: int) -> None:
    rows = fill(widths, range(len(widths)), limit)
    assert sorted(i for row in rows for i in row) == list(range(len(widths)))
    tokens = sorted(sum(widths[i] for i in row) for row in rows)
    assert all(total <= limit or len(row) == 1 for row in rows for total in [sum(widths[i] for i in row)])
    assert len(tokens) < 2 or tokens[0] + tokens[1] > limit


def packed(lengths: list[int], **settings: Any) -> list[Pack]:
    given = {"microbatch_tokens": 1000, "attention_cost": 0.0, "share_prompts": False, "packing": True}
    return packs(lengths, lambda: [(i,) for i in range(len(lengths))], **(given | settings))


def test_short_sequences_fill_up_rows_no_longer_than_the_longest() -> None:
    # One of 100 and 10 of 10. Alone: 10 rows of 100, which are 1,000 tokens, and one of 10. Packed: 2 rows of 100, for
    # 200 (1 + 1) = 400; all 200 in one row would be 200 (1 + 2) = 600.
    (found,) = packed([100] + [10] * 10, attention_cost=0.01)
    assert found.length == 100
    assert sorted(len(row) for row in found.rows) == [1, 10]


def test_long_rows_are_taken_where_attention_costs_little() -> None:
    # 8 of 60 and 8 of 50 are 960 tokens padded, and no two fit into 60. Rows of up to isqrt(60 x 1000) = 244 tokens
    # have all 880 without padding, which is not a tenth less.
    lengths = [60, 50] * 8
    assert packed(lengths) == packed(lengths, packing=False)
    # One of 60 and 15 of 40: 960 padded, 660 in rows of 60 + 4 x 40, 6 x 40 and 5 x 40. As 2 x 240^2 scores are more
    # than 60 x 1000, each is a microbatch.
    lengths = [60] + [40] * 15
    assert [(len(pack.rows), pack.length) for pack in packed(lengths)] == [(1, 240), (1, 220), (1, 200)]
    # Where a token costs a hundredth of itself for every other: 240 x 3.4 + 220 x 3.2 + 200 x 3 = 2120 of 960 x 1.6.
    assert [(len(pack.rows), pack.length) for pack in packed(lengths, attention_cost=0.01)] == [(16, 60)]


def test_rows_of_prompts_that_are_shared_are_packed_together() -> None:
    # 4 groups of 5 with a prompt of 10 and responses of 2: 4 rows of 20 have no padding to lose.
    prompts = [(group,) * 10 for group in range(4) for _ in range(5)]
    given: dict[str, Any] = {"microbatch_tokens": 200, "share_prompts": True, "attention_cost": 0.01}
    (found,) = packs([12] * 20, lambda: prompts, packing=True, **given)
    assert [list(map(len, row)) for row in found.rows] == [[5]] * 4
    # Three of these and one of 40 tokens by itself: rows of 20, 20, 20 and 40, and two of 20 fit into 40.
    lengths, prompts = [12] * 15 + [40], [*prompts[:15], (9,) * 10]
    (found,) = packs(lengths, lambda: prompts, packing=True, **given)
    assert found.length == 40
    assert [list(map(len, row)) for row in found.rows] == [[1], [5, 5], [5]]


def test_rows_are_as_long_as_pays_best() -> None:
    # 12 of 65 and 12 of 24: 24 rows of 65 alone, 1,560 tokens for 1,068. Two of 24 fit into 65: 18 rows, 1,170 tokens.
    lengths = [65] * 12 + [24] * 12
    (found,) = packed(lengths, microbatch_tokens=4000, attention_cost=0.0005)
    assert (len(found.rows), found.length) == (18, 65)
    # Where attention is as good as free rows have no padding: up to isqrt(65 x 4000) = 509 tokens in one.
    nearly_free = packed(lengths, microbatch_tokens=4000, attention_cost=0.0001)
    assert sum(len(pack.rows) * pack.length for pack in nearly_free) == 1068


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(20, 200),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.001, 0.1, None]),
    st.booleans(),
    st.booleans(),
)
def test_every_sequence_is_there_once_and_microbatches_are_bounded(
    drawn: list[tuple[int, int, int]],
    tokens: int,
    num_ranks: int,
    attention_cost: float | None,
    share_prompts: bool,
    packing: bool,
) -> None:
    prompts = [(name,) * num_prompt for num_prompt, _, name in drawn]
    lengths = [num_prompt + num_response for num_prompt, num_response, _ in drawn]
    found = packs(
        lengths, lambda: prompts, microbatch_tokens=tokens, num_ranks=num_ranks, attention_cost=attention_cost,
        share_prompts=share_prompts, packing=packing,
    )  # fmt: skip
    blocks = [block for pack in found for row in pack.rows for block in row]
    assert sorted(i for block in blocks for i in block) == list(range(len(lengths)))
    assert all(len({prompts[i] for i in block}) == 1 for block in blocks)
    for pack in found:
        widths = [
            sum(len(prompts[block[0]]) + sum(lengths[i] - len(prompts[i]) for i in block) for block in row)
            for row in pack.rows
        ]
        assert pack.length == max(widths)
        assert 0 <= pack.rank < num_ranks
        if len(pack.rows) > 1:
            assert len(widths) * pack.length <= tokens
            assert len(widths) * pack.length**2 <= tokens * max(lengths)
        elif sum(map(len, pack.rows[0])) > 1:
            assert pack.length <= tokens
    if attention_cost is None or not (share_prompts or packing):
        assert all(len(row) == 1 and len(row[0]) == 1 for pack in found for row in pack.rows)


@pytest.mark.parametrize("packing", [False, True])
def test_nothing_is_no_microbatch(packing: bool) -> None:
    assert packed([], packing=packing) == []
