"""Rows of several sequences: prompt, response, response, ..., then perhaps another prompt and its responses. No torch.

B sequences, T tokens of one padded on the right, R rows, L tokens of a row. A prompt and the responses that share it
are a block. Each response sees the prompt of its block and itself, and its positions go on from the prompt's, so that a
row gives every token the logits that its own sequence gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PADDING = -1
_LEAST_GAIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The same tokens as a padded [B, T] microbatch, each prompt once a block, and where each sequence lies."""

    token_ids_RL: NDArray[np.int64]
    """0 in the padding."""
    position_ids_RL: NDArray[np.int64]
    block_RL: NDArray[np.int64]
    """Whose prompt it is or belongs to, PADDING beyond."""
    part_RL: NDArray[np.int64]
    """0 of the prompt, i of the i-th response of the block, PADDING beyond."""
    row_B: NDArray[np.int64]
    num_prompt_B: NDArray[np.int64]
    prompt_start_B: NDArray[np.int64]
    """Column of the first token of the prompt."""
    start_B: NDArray[np.int64]
    """Column of the first token of the response."""

    @property
    def is_packed(self) -> bool:
        """Whether a row has more than one block."""
        return bool(self.prompt_start_B.any())

    def before(self, lengths_B: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """[B, K - 1] column of what stands before each token from `first` + 1 on: of what gives it its logits.

        Every sequence is longer than `first`, so that no column before `first` is in the result: a token stands in its
        row at or behind its place in its own sequence. What is before the first target, a prompt or the trunk of a
        branching group, may end behind `first`. Of padding it is the last token of the sequence.
        """
        token_T = np.arange(first + 1, int(lengths_B.max()))
        token_BT = np.minimum(token_T, lengths_B[:, None])
        is_response = token_BT > self.num_prompt_B[:, None]
        shift_B = self.start_B - self.num_prompt_B
        at_BT: NDArray[np.int64] = token_BT - 1 + np.where(is_response, shift_B[:, None], self.prompt_start_B[:, None])
        return at_BT

    def sees(self) -> NDArray[np.bool_]:
        """[R, L, L] whether a token (second axis) sees another (third): of its prompt or its own part, not later."""
        block, part, width = self.block_RL, self.part_RL, self.part_RL.shape[1]
        sees: NDArray[np.bool_] = part[:, :, None] == part[:, None, :]
        sees |= (part == 0)[:, None, :]
        sees &= block[:, :, None] == block[:, None, :]
        sees &= np.tri(width, dtype=np.bool_)
        return sees


def shared_prompts(
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    num_prompt_B: NDArray[np.int64],
    row_B: NDArray[np.int64],
    block_B: NDArray[np.int64] | None = None,
) -> SharedPrompts:
    """Lay each sequence into its row, in order, behind the others of its block; those of one have the same prompt.

    `block_B` None: the sequences of a row are a block.
    """
    blocks_B = row_B if block_B is None else block_B
    shape = int(row_B.max()) + 1, int(row_widths(lengths_B, num_prompt_B, row_B, blocks_B).max())
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    block_RL, part_RL = np.full(shape, PADDING, np.int64), np.full(shape, PADDING, np.int64)
    prompt_start_B, start_B = np.zeros(len(lengths_B), np.int64), np.zeros(len(lengths_B), np.int64)
    ends = np.zeros(shape[0], np.int64)
    for block in _in_order(blocks_B):
        members = np.flatnonzero(blocks_B == block).tolist()
        row, num_prompt, begin = int(row_B[members[0]]), int(num_prompt_B[members[0]]), 0
        prompt_start_B[members] = ends[row]
        for part, index in enumerate([members[0], *members]):
            # Part 0 is the prompt, a piece of the first member as of any other.
            tokens = slice(begin, int(lengths_B[index]) if part else num_prompt)
            to = slice(int(ends[row]), int(ends[row]) + tokens.stop - tokens.start)
            ids[row, to] = token_ids_BT[index, tokens]
            positions[row, to] = np.arange(tokens.start, tokens.stop)
            block_RL[row, to], part_RL[row, to] = block, part
            if part:
                start_B[index] = to.start
            ends[row], begin = to.stop, num_prompt
    return SharedPrompts(
        token_ids_RL=ids, position_ids_RL=positions, block_RL=block_RL, part_RL=part_RL, row_B=row_B,
        num_prompt_B=num_prompt_B, prompt_start_B=prompt_start_B, start_B=start_B,
    )  # fmt: skip


def row_widths(
    lengths_B: NDArray[np.int64],
    num_prompt_B: NDArray[np.int64],
    row_B: NDArray[np.int64],
    block_B: NDArray[np.int64],
) -> NDArray[np.int64]:
    """[R] tokens of each row: its responses, and the prompt of each block once."""
    _, first = np.unique(block_B, return_index=True)
    widths = np.zeros(int(row_B.max()) + 1, np.int64)
    np.add.at(widths, row_B, lengths_B - num_prompt_B)
    np.add.at(widths, row_B[first], num_prompt_B[first])
    return widths


def _in_order(blocks_B: NDArray[np.int64]) -> list[int]:
    return list(dict.fromkeys(blocks_B.tolist()))


def share(
    prompts: Iterable[tuple[int, ...]], lengths: Sequence[int], *, max_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Rows of sequences with equal prompts, in order, each of at most `max_tokens`; and how many tokens each has.

    A sequence that is longer alone is a row of its own.
    """
    rows: list[list[int]] = []
    widths: list[int] = []
    open_rows: dict[tuple[int, ...], int] = {}
    for index, prompt in enumerate(prompts):
        more = lengths[index] - len(prompt)
        number = open_rows.get(prompt)
        if number is None or widths[number] + more > max_tokens:
            number = open_rows[prompt] = len(rows)
            rows.append([])
            widths.append(len(prompt))
        rows[number].append(index)
        widths[number] += more
    return rows, widths


def cost(sizes: Iterable[tuple[int, int]], *, attention_cost: float) -> float:
    """Of forward and backward over blocks of (rows, padded length), in tokens: rows x length x (1 + c x length).

    `attention_cost` c: what a token costs for every token of its row, whether it sees it or not, over what it costs by
    itself.
    """
    return sum(rows * length * (1 + attention_cost * length) for rows, length in sizes)


def pays(other: float, plain: float) -> bool:
    """Whether to take the other way, by the `cost` of both: not for a gain that an estimate may be wrong by."""
    return other <= (1 - _LEAST_GAIN) * plain
