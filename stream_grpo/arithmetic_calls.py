"""The sums of `arithmetic` with a calculator: what the teacher writes who calls it, and what he reads. No torch.

The prompt "12+39=" is answered by a call, read, and answered by what was read:

    [12+39]     <- the action
    =51,        <- the observation
    #51         <- the action that is scored

The teacher copies each digit of the call wrong with some probability; what he reads he repeats as it stands. A model
that samples his errors at the same rate gets sums of d digits right at about (1 - error_rate)^(2 d).
"""

from __future__ import annotations

import random
from typing import NamedTuple

from stream_grpo.arithmetic import CHARACTERS as OF_SUMS
from stream_grpo.arithmetic import MARKER, prompt_of

OPEN, CLOSE = "[", "]"
"""The marks of a call; options `open` and `close` of the calculator, whose `body` is `plain`."""
PREFIX, SUFFIX = "=", ","
"""What stands around an observation: `environment.observation_prefix` and `observation_suffix`."""
CHARACTERS = OF_SUMS + OPEN + CLOSE
"""Every character that a prompt, a call or an observation can hold."""


class Part(NamedTuple):
    """A piece of a trajectory."""

    text: str
    is_action: bool
    """Whether the model is to write it, and its end."""


def parts_of(a: int, b: int, rng: random.Random, error_rate: float = 0.0) -> list[Part]:
    """Prompt, call, observation and answer of a teacher who copies each digit wrong with probability `error_rate`."""
    x, y = (int(_copied(str(operand), rng, error_rate)) for operand in (a, b))
    return [
        Part(prompt_of(a, b), is_action=False),
        Part(f"{OPEN}{x}+{y}{CLOSE}", is_action=True),
        Part(f"{PREFIX}{x + y}{SUFFIX}", is_action=False),
        Part(f"{MARKER}{x + y}", is_action=True),
    ]


def _copied(digits: str, rng: random.Random, error_rate: float) -> str:
    """The digits, each replaced by another one with probability `error_rate`; never with a zero before others."""
    written = ""
    for digit in digits:
        if rng.random() < error_rate:
            first = len(digits) > 1 and not written
            digit = rng.choice([d for d in "0123456789" if d != digit and not (first and d == "0")])
        written += digit
    return written
