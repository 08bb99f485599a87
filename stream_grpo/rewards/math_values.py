"""Whether two values are equal: exactly in the ring of `math_ring`, and by `math_symbolic` what that cannot hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from stream_grpo.rewards import math_ring as ring
from stream_grpo.rewards.math_latex import read
from stream_grpo.rewards.math_ring import NotAlgebraic, TooLarge, Value

_BASE_NAMES = "two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen"
_BASE = re.compile(rf"^\(?([0-9A-Fa-f]+)\)?_\{{?\(?(?:\d+|{_BASE_NAMES})\)?\}}?$")
_RATIO = re.compile(r"^[^:]+(?::[^:]+)+$")
_T = TypeVar("_T")


def values_equal(a: str, b: str) -> bool:
    """Whether two normalised texts have one value. What neither reader can read is compared as text."""
    if _bare(a) == _bare(b):
        return True
    if _is_base(a) or _is_base(b):
        return _digits(a) == _digits(b)
    if ":" in a or ":" in b:
        return _ratios_equal(a, b)
    try:
        values = [_algebraic(a), _algebraic(b)]
        if values[0] is not None and values[1] is not None:
            return ring.equal(values[0], values[1])
    except TooLarge:  # an equal text has passed above, and no other gold is too large
        return False
    return _symbolic(lambda: _equal_trees(a, b), default=False)


def is_percent_of(a: str, b: str) -> bool:
    """Whether b = a / 100."""
    return values_equal(f"({a})/100", b)


def equations_equal(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether left - right of one is a multiple of that of the other."""
    left, right = (f"({x})-({y})" for x, y in (a, b))
    try:
        return _proportional(_read(left).numerator, _read(right).numerator) is not None
    except NotAlgebraic:
        return _symbolic(lambda: _proportional_trees(left, right), default=False)
    except TooLarge:
        return False


def direction(a: tuple[str, str], b: tuple[str, str]) -> int:
    """The sign of c where (left - right) of a is c times that of b; 0 if there is no such number."""
    try:
        factor = _proportional(*(_read(f"({x})-({y})").numerator for x, y in (a, b)))
    except (NotAlgebraic, TooLarge):
        return 0
    return 0 if factor is None else 1 if factor > 0 else -1


def approximate(text: str) -> float | None:
    """The real value of a text without letters, or None."""
    try:
        value = _read(text)
        numerator, denominator = _float(value.numerator), _float(value.denominator)
        return None if numerator is None or denominator is None else numerator / denominator
    except (NotAlgebraic, OverflowError, ZeroDivisionError):
        return _symbolic(lambda: _approximate_tree(text), default=None)
    except TooLarge:
        return None


def is_decimal(text: str) -> bool:
    """Whether the text is a number written with a decimal point."""
    return bool(re.fullmatch(r"-?\d*\.\d+", text.strip()))


def _read(text: str) -> Value:
    return read(text.replace('"', " "))


def _algebraic(text: str) -> Value | None:
    try:
        return _read(text)
    except NotAlgebraic:
        return None


def _bare(text: str) -> str:
    return re.sub(r'[\s"]|(?<=\^|_)\{(?=\w\})|(?<=[\^_]\{\w)\}', "", text)


def _is_base(text: str) -> bool:
    return bool(_BASE.match(_bare(text))) and bool(re.search(r"\d", _bare(text)[:2]) or re.search(r"_\{?\d", text))


def _digits(text: str) -> str:
    match = _BASE.match(_bare(text))
    return match[1].upper().lstrip("0") if match else _bare(text).upper().lstrip("0")


def _ratios_equal(a: str, b: str) -> bool:
    """a:b equals c:d term by term, and the fraction a/b."""
    terms = [text.split(":") if _RATIO.match(text) else [text] for text in (a, b)]
    if max(map(len, terms)) == 1:
        return False  # a colon that makes no ratio, and the texts differ
    if len(terms[0]) == len(terms[1]):
        return all(values_equal(x, y) for x, y in zip(*terms, strict=True))
    (one,), two = sorted(terms, key=len) if min(map(len, terms)) == 1 else ([""], [])
    return len(two) == 2 and values_equal(f"({two[0]})/({two[1]})", one)


def _proportional(a: ring.Polynomial, b: ring.Polynomial) -> Fraction | None:
    if not a or a.keys() != b.keys():
        return None
    factors = {a[monomial] / b[monomial] for monomial in a}
    return factors.pop() if len(factors) == 1 else None


def _float(polynomial: ring.Polynomial) -> float | None:
    total = 0.0
    for monomial, factor in polynomial.items():
        product = float(factor)
        for name, exponent in monomial:
            base = {"pi": math.pi, "e": math.e}.get(str(name), name)
            if not isinstance(base, int | float):
                return None
            product *= float(base) ** float(exponent)
        total += product
    return total


def _symbolic(ask: Callable[[], _T], *, default: _T) -> _T:
    """The answer of sympy, or the default where it has none; sympy raises whatever its algorithms run into.

    A missing library, a lack of memory and a time limit are not sympy's opinion of the answer, and are raised.
    """
    try:
        return ask()
    except (ImportError, MemoryError, TimeoutError):
        raise
    except Exception:
        return default


def _equal_trees(a: str, b: str) -> bool:
    from stream_grpo.rewards import math_symbolic  # sympy takes half a second to import

    return math_symbolic.equal(a, b)


def _proportional_trees(a: str, b: str) -> bool:
    from stream_grpo.rewards import math_symbolic

    return math_symbolic.proportional(a, b)


def _approximate_tree(text: str) -> float | None:
    from stream_grpo.rewards import math_symbolic

    return math_symbolic.approximate(text)
