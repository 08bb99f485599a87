"""What the small model can be taught, by the name of the task: its tokens, its problems, and its teacher. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stream_grpo import arithmetic, arithmetic_calls, stock, stock_calls
from stream_grpo.arithmetic_calls import Part

Task = Literal["scratchpad", "calculator", "records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A task. Its problems are of kinds: numbers of digits, or names."""

    tokens: Sequence[str]
    """All but the special ones: single characters, or these and longer ones."""
    shares: Mapping[Any, float]
    """Share of training sequences by kind."""
    pool_counts: Mapping[Any, int]
    held_out_counts: Mapping[Any, int]
    example: Callable[[Any, random.Random, float], list[Part]]
    """Of a kind, a problem that is not held out and what the teacher makes of it at that rate of errors."""
    rows: Callable[..., Sequence[Mapping[str, Any]]]
    """Of counts by kind, a seed and `held_out` the lines of a problem file."""


def _scratchpad(digits: int, rng: random.Random, error_rate: float) -> list[Part]:
    a, b = arithmetic.draw(digits, rng, held_out=False)
    response = arithmetic.response_of(a, b, rng, error_rate)
    return [Part(arithmetic.prompt_of(a, b), is_action=False), Part(response, is_action=True)]


def _calculator(digits: int, rng: random.Random, error_rate: float) -> list[Part]:
    return arithmetic_calls.parts_of(*arithmetic.draw(digits, rng, held_out=False), rng, error_rate)


def _records(kind: str, rng: random.Random, error_rate: float) -> list[Part]:
    return stock_calls.parts_of(stock.draw(kind, rng, held_out=False), rng, error_rate)


_OF_SUMS: Mapping[str, Any] = {
    # The few of 5 digits put those sums just within reach.
    "shares": {1: 0.08, 2: 0.25, 3: 0.30, 4: 0.366, 5: 0.004},
    "pool_counts": arithmetic.POOL_COUNTS,
    "held_out_counts": arithmetic.HELD_OUT_COUNTS,
    "rows": arithmetic.rows,
}
LESSONS: Mapping[Task, Lesson] = {
    "scratchpad": Lesson(tokens=arithmetic.CHARACTERS, example=_scratchpad, **_OF_SUMS),
    "calculator": Lesson(tokens=arithmetic_calls.CHARACTERS, example=_calculator, **_OF_SUMS),
    "records": Lesson(
        tokens=stock_calls.TOKENS,
        shares={"set": 0.15, "add": 0.15, "drop": 0.1, "move": 0.2, "copy": 0.2, "restore": 0.2},
        pool_counts=stock.POOL_COUNTS,
        held_out_counts=stock.HELD_OUT_COUNTS,
        example=_records,
        rows=stock.rows,
    ),
}
