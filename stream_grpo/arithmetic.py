"""Addition problems with a written scratchpad: rendering, the pool, the held-out set. No torch.

The prompt "12+39=" has the answer 51. A response adds digit by digit, least significant first; each step writes the two
digits and then carry and digit of their sum, after the last step come the marker and the answer:

    2+9=11,1+3=05,#51

A problem is held out by its content alone, so that the pool, the training data of the small model and the held-out
set never share one. One-digit sums are only 55 unordered pairs, about a tenth of them held out: too few for a figure
with a useful interval. They are the domain `add-1`, scored apart from the headline.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import TypedDict

MARKER = "#"
"""Stands before the answer; the `answer_prefix` of every row."""

CHARACTERS = "0123456789+=," + MARKER
"""Every character that a prompt or a response can hold."""

HELD_OUT_ONE_IN = 10
"""One unordered pair of operands in so many is held out."""

POOL_COUNTS: Mapping[int, int] = {1: 90, 2: 400, 3: 600, 4: 900, 5: 800, 6: 300}
"""Problems per number of digits: 1 is solved, 2 to 4 are useful, 5 and 6 are out of the small model's reach."""

HELD_OUT_COUNTS: Mapping[int, int] = {1: 100, 2: 100, 3: 100, 4: 100, 5: 100}
"""Held-out problems per number of digits; of one digit there are fewer, and all of them are taken."""


class Row(TypedDict):
    """One line of a problem file."""

    id: str
    prompt: str
    answer: str
    verifier: str
    answer_prefix: str
    domain: str
    digits: int


def is_held_out(a: int, b: int) -> bool:
    """Whether the sum of a and b is held out: from a hash of the unordered pair, the same for every seed and order."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def domain_of(digits: int) -> str:
    """The domain of problems whose operands have so many digits."""
    return f"add-{digits}"


def prompt_of(a: int, b: int) -> str:
    """The prompt of a problem, "12+34="."""
    return f"{a}+{b}="


def response_of(a: int, b: int, rng: random.Random, error_rate: float = 0.0) -> str:
    """The response of a teacher who gets each scratchpad step wrong with probability `error_rate`.

    A wrong step has either the other carry or another digit, evenly; the steps after it and the answer go on from what
    was written. The answer of d digits is thus right with probability near (1 - error_rate)^d.

    Raises ValueError for operands of different lengths.
    """
    if len(str(a)) != len(str(b)):
        raise ValueError(f"operands {a} and {b} have different numbers of digits")
    steps, answer, carry = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        if rng.random() < error_rate:
            carry, digit = _wrong(carry, digit, rng)
        steps.append(f"{x}+{y}={carry}{digit},")
        answer = f"{digit}{answer}"
    return "".join(steps) + MARKER + ("1" if carry else "") + answer


def _wrong(carry: int, digit: int, rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.5:
        return 1 - carry, digit
    return carry, (digit + rng.randrange(1, 10)) % 10


def draw(digits: int, rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    """Two operands of so many digits, uniform over the pairs on the asked side of the held-out split."""
    low, high = _bounds(digits)
    while True:
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        if is_held_out(a, b) == held_out:
            return a, b


def _bounds(digits: int) -> tuple[int, int]:
    return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits


def rows(counts: Mapping[int, int], seed: int, *, held_out: bool) -> list[Row]:
    """Distinct problems, `counts[d]` of d digits, on the asked side of the held-out split; in a seeded order.

    Of one digit there may be fewer than asked: all there are. Raises ValueError when more is asked than there is of
    two digits or more.
    """
    rng = random.Random(seed)
    made = [_row(a, b, digits) for digits, count in counts.items() for a, b in _pairs(digits, count, rng, held_out)]
    rng.shuffle(made)
    return made


def _pairs(digits: int, count: int, rng: random.Random, held_out: bool) -> list[tuple[int, int]]:
    low, high = _bounds(digits)
    if digits <= 2:  # few enough to list; drawing until enough distinct ones are found might never end
        known = [(a, b) for a in range(low, high) for b in range(low, high) if is_held_out(a, b) == held_out]
        if digits == 1:
            count = min(count, len(known))
        return rng.sample(known, count)
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        found[draw(digits, rng, held_out=held_out)] = None
    return list(found)


def _row(a: int, b: int, digits: int) -> Row:
    domain = domain_of(digits)
    return Row(
        id=f"{domain}:{a}+{b}",
        prompt=prompt_of(a, b),
        answer=str(a + b),
        verifier="exact",
        answer_prefix=MARKER,
        domain=domain,
        digits=digits,
    )
