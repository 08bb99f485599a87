"""Equality of expressions with functions (sin, log, e^x, integrals, ...), on math-verify's LaTeX parser and sympy.

Only what `math_latex` cannot read comes here. Nothing is evaluated before `_require_small` has walked the tree. There
is no time limit here: alarms do not work off the main thread, so whoever calls this keeps it in a worker process.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify.grader import should_treat_as_complex

from stream_grpo.rewards.math_ring import TooLarge

DIGITS = 100
"""To which two values are compared at the sample points, relative to their size."""

MAX_POWER_BITS = 10_000
"""Of a power of numbers within an expression."""

MAX_TOWER = 2
"""Of braced exponents within exponents: e^{e^{x^2}}."""

MAX_CHARACTERS = 1500
"""A longer text is not parsed: ANTLR is slow."""

_SAMPLES = (Fraction(7, 5), Fraction(13, 11), Fraction(3, 7), Fraction(17, 13), Fraction(29, 23), Fraction(5, 19))


class Unreadable(Exception):
    """math-verify's parser has no reading of the text."""


def equal(a: str, b: str) -> bool:
    """Whether two LaTeX expressions are equal: their difference is 0 at sample points, and exactly 0 if rational.

    Raises Unreadable or TooLarge.
    """
    left, right = read(a), read(b)
    if left == right:
        return True
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    return _is_zero_everywhere(left - right, left)


def proportional(a: str, b: str) -> bool:
    """Whether a = c b for a constant c other than 0: then a = 0 and b = 0 are one equation."""
    left, right = read(a), read(b)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    if left.free_symbols != right.free_symbols:
        return False
    ratios = [_evaluate(left, shift) / _evaluate(right, shift) for shift in range(3)]
    return all(_near_zero(ratio - ratios[0], ratios[0]) for ratio in ratios) and ratios[0] != 0


def approximate(latex: str) -> float:
    """The real value of an expression without letters. Raises Unreadable, TooLarge or TypeError."""
    return float(read(latex).evalf(30))


def read(latex: str) -> Any:
    """The sympy tree, decimals as fractions, checked to be small enough to evaluate."""
    if len(latex) > MAX_CHARACTERS:
        raise TooLarge(f"an expression of {len(latex)} characters")
    if _tower(latex) > MAX_TOWER:
        raise TooLarge("a tower of powers")
    for digits in re.findall(r"\\binom\s*\{(\d+)\}|(\d+)\s*!", latex):
        if len("".join(digits)) > 4:
            raise TooLarge("a factorial or binomial of a large number")
    text = re.sub(r"(\d+)\.(\d+)", lambda m: f"(\\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})", latex)
    text = re.sub(r"((?:\{[^{}]*\}|[\d.])+)\s*°", r"(\1\\cdot\\frac{\\pi}{180})", text.replace('"', " "))
    try:
        tree = latex2sympy(
            text,
            is_real=not should_treat_as_complex(text),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except RecursionError as error:
        raise TooLarge("an expression nested too deeply") from error
    except Exception as error:  # the parser raises bare Exception, and whatever sympy makes of a strange tree
        raise Unreadable(str(error).partition("\n")[0]) from error
    _require_small(tree)
    imaginary = [symbol for symbol in tree.free_symbols if symbol.name == "i"]
    return tree.subs(dict.fromkeys(imaginary, sympy.I)) if imaginary else tree


def _require_small(tree: Any) -> None:
    for node in sympy.preorder_traversal(tree):
        if isinstance(node, sympy.Pow):
            base, exponent = node.args
            if exponent.is_number and not exponent.has(sympy.Symbol):
                _require_small_power(base, exponent)
        elif isinstance(node, sympy.factorial | sympy.binomial) and any(_bits(part) > 13 for part in node.args):
            raise TooLarge("a factorial or binomial of a large number")


def _tower(latex: str) -> int:
    """How many braced exponents stand in one another; sympy evaluates towers of e while it builds them."""
    is_exponent: list[bool] = []
    highest = 0
    for position, character in enumerate(latex):
        if character == "{":
            is_exponent.append(latex[:position].rstrip().endswith("^"))
            highest = max(highest, sum(is_exponent))
        elif character == "}" and is_exponent:
            is_exponent.pop()
    return highest


def _require_small_power(base: Any, exponent: Any) -> None:
    size = _bits(exponent)
    if size > 20 or (base.is_number and _bits(base) * 2**size > MAX_POWER_BITS):
        raise TooLarge("a power too large to evaluate")
    if base.is_Add and size > 6:
        raise TooLarge("a power of a sum too large to expand")


def _bits(tree: Any) -> int:
    """A bound on the bits of a tree of numbers, without evaluating it."""
    if tree.is_Integer:
        return int(tree).bit_length()
    if tree.is_Rational:
        return max(int(tree.p).bit_length(), int(tree.q).bit_length())
    if isinstance(tree, sympy.Pow):
        size = _bits(tree.args[1])
        return _bits(tree.args[0]) * 2**size if size <= 20 else 2**20
    return min(2**20, sum(_bits(part) for part in tree.args) + len(tree.args)) if tree.args else 4


def _is_zero_everywhere(difference: Any, scale: Any) -> bool:
    is_real = not (difference.has(sympy.I) or scale.has(sympy.I))
    num_compared = 0
    for shift in range(3):
        value, size = _evaluate(difference, shift), _evaluate(scale, shift)
        if is_real and (value.has(sympy.I) or size.has(sympy.I)):
            continue  # outside the real domain, where ln a - ln b need not be ln(a / b)
        if not _near_zero(value, size):
            return False
        num_compared += 1
    expanded = sympy.expand(difference)
    return bool(expanded == 0) if expanded.is_Rational else num_compared > 0


def _evaluate(tree: Any, shift: int) -> Any:
    """The tree at one sample point: every letter gets a fraction of its own."""
    symbols = sorted(tree.free_symbols, key=str)
    if len(symbols) > len(_SAMPLES):
        raise Unreadable(f"an expression of {len(symbols)} letters")
    point = {
        symbol: sympy.Rational(_SAMPLES[(index + 2 * shift) % len(_SAMPLES)]) * (-1 if shift == 1 else 1)
        for index, symbol in enumerate(symbols)
    }
    return sympy.N(tree.subs(point).doit(), DIGITS + 20)


def _near_zero(value: Any, scale: Any) -> bool:
    """Below 10^-DIGITS of the scale; what is no finite number is not near 0."""
    if value == 0:
        return True
    if not value.is_number or value.is_finite is not True:
        return False
    return bool(abs(value) <= sympy.Float(10) ** -DIGITS * max(abs(sympy.N(scale)), sympy.Float(10) ** -DIGITS))
