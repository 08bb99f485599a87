"""Rows in which the rollouts of a group share one copy of their prompt: prompt, response, response, ... No torch.

B sequences, T tokens of one padded on the right, R rows, L tokens of a row. Each response sees the prompt and itself,
and its positions go on from the prompt's, so that a row gives every token the logits that its own sequence gives it.
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
    """The same tokens as a padded [B, T] microbatch, each prompt once a row, and where each sequence lies."""

    token_ids_RL: NDArray[np.int64]
    """0 in the padding."""
    position_ids_RL: NDArray[np.int64]
    part_RL: NDArray[np.int64]
    """0 of the prompt, i of the i-th response of the row, PADDING beyond."""
    row_B: NDArray[np.int64]
    num_prompt_B: NDArray[np.int64]
    start_B: NDArray[np.int64]
    """Column of the first token of the response."""

    def before(self, lengths_B: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """[B, K - 1] column of what stands before each token from `first` + 1 on: of what gives it its logits.

        `first` lies before every response; of padding it is the last token of the sequence.
        """
        token_T = np.arange(first + 1, int(lengths_B.max()))
        token_BT = np.minimum(token_T, lengths_B[:, None])
        is_response = token_BT > self.num_prompt_B[:, None]
        shift_B = self.start_B - self.num_prompt_B
        at_BT: NDArray[np.int64] = token_BT - 1 + np.where(is_response, shift_B[:, None], 0)
        return at_BT

    def sees(self) -> NDArray[np.bool_]:
        """[R, L, L] whether a token (second axis) sees another (third): of the prompt or its own part, not later."""
        part, width = self.part_RL, self.part_RL.shape[1]
        same = part[:, :, None] == part[:, None, :]
        of_prompt = (part == 0)[:, None, :] & (part != PADDING)[:, :, None]
        sees: NDArray[np.bool_] = (same | of_prompt) & np.tri(width, dtype=np.bool_)
        return sees


def shared_prompts(
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    num_prompt_B: NDArray[np.int64],
    row_B: NDArray[np.int64],
) -> SharedPrompts:
    """Lay each sequence into its row, in order; those of one row have the same prompt."""
    rows = [np.flatnonzero(row_B == number).tolist() for number in range(int(row_B.max()) + 1)]
    widths = [_width(lengths_B, num_prompt_B, row) for row in rows]
    shape = (len(rows), max(widths))
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    part = np.full(shape, PADDING, np.int64)
    start_B = np.zeros(len(lengths_B), np.int64)
    for number, row in enumerate(rows):
        num_prompt = end = int(num_prompt_B[row[0]])
        ids[number, :end] = token_ids_BT[row[0], :end]
        positions[number, :end] = np.arange(end)
        part[number, :end] = 0
        for which, index in enumerate(row, start=1):
            length = int(lengths_B[index])
            to = slice(end, end + length - num_prompt)
            ids[number, to] = token_ids_BT[index, num_prompt:length]
            positions[number, to] = np.arange(num_prompt, length)
            part[number, to] = which
            start_B[index] = end
            end = to.stop
    return SharedPrompts(
        token_ids_RL=ids, position_ids_RL=positions, part_RL=part,
        row_B=row_B, num_prompt_B=num_prompt_B, start_B=start_B,
    )  # fmt: skip


def _width(lengths_B: NDArray[np.int64], num_prompt_B: NDArray[np.int64], row: Sequence[int]) -> int:
    return int(num_prompt_B[row[0]]) + sum(int(lengths_B[i] - num_prompt_B[i]) for i in row)


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


def pays(shared: float, plain: float) -> bool:
    """Whether to share prompts, by the `cost` of both ways: not for a gain that an estimate may be wrong by."""
    return shared <= (1 - _LEAST_GAIN) * plain
