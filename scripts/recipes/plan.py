"""Which cells are run, and in what order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

NUM_STEPS, NUM_LONG_STEPS = 40, 200
SCREEN_LAG, LONG_LAG = 16, 64
SCREEN_SEED, LAGS, SEEDS = 0, (0, 4, 16), (1, 2, 3)
NUM_BEST, NUM_LONG = 6, 3
ALWAYS = ("grpo", "decoupled")
"""Presets that are measured with the best of the screen, whatever the screen says of them."""
MAX_AGE_ERROR = 0.2
"""Share by which the mean age may be off."""

T = TypeVar("T")


class BenchError(Exception):
    """What was measured cannot be used; the message says what and why."""


class Cell(NamedTuple):
    """One training: a preset, with weights that are `lag` learner steps old."""

    preset: str
    lag: int
    seed: int
    num_steps: int
    """Learner steps after the first `lag`, in which the age still grows."""


class Delay(Generic[T]):
    """Hands out what was put in `lag` puts before the last one; the first while there are fewer.

    With version n put in before learner step n, `value` is version max(0, n - lag).
    """

    def __init__(self, lag: int) -> None:
        self._kept: deque[T] = deque(maxlen=lag + 1)

    def put(self, value: T) -> None:
        """The newest."""
        self._kept.append(value)

    @property
    def value(self) -> T:
        """The one whose turn it is."""
        return self._kept[0]


def check_age(cell: Cell, mean_age: float) -> None:
    """Raise BenchError where the age measured on the trained tokens is not the one imposed."""
    if abs(mean_age - cell.lag) > MAX_AGE_ERROR * cell.lag:
        raise BenchError(
            f"{cell.preset}, seed {cell.seed}: the mean age of trained tokens is {mean_age:g}, imposed was lag = "
            f"{cell.lag}"
        )


def screen(presets: Iterable[str]) -> list[Cell]:
    """Every preset once, at one lag."""
    return [Cell(preset, SCREEN_LAG, SCREEN_SEED, NUM_STEPS) for preset in presets]


def seeds(best: Sequence[str]) -> list[Cell]:
    """The first presets of `best` and those of ALWAYS at every lag with every seed; whole sweeps of a seed first."""
    presets = dict.fromkeys([*best[:NUM_BEST], *ALWAYS])
    return [Cell(preset, lag, seed, NUM_STEPS) for seed in SEEDS for preset in presets for lag in LAGS]


def long(best: Sequence[str]) -> list[Cell]:
    """The first presets of `best` at the largest lag."""
    return [Cell(preset, LONG_LAG, 0, NUM_LONG_STEPS) for preset in best[:NUM_LONG]]
