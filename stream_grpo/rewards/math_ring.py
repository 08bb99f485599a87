"""Exact values of algebraic LaTeX: quotients of polynomials in roots, pi, i and letters, over the fractions.

A polynomial maps monomials to coefficients. A monomial is a sorted tuple of (atom, exponent). Atoms are primes (only
with an exponent that cannot be folded into the coefficient: 1/2 for a square root), "pi", "e", "i" and letters.
Products of different roots of primes are linearly independent over the rationals (Besicovitch 1940), so two values
without letters are equal only if their polynomials are: there is no tolerance anywhere. Two quotients a/b and c/d are
equal if a d = b c.

No number of more than MAX_BITS bits is ever made. A greater power of integers stays a monomial over its primes, so
that 2^(10^10) equals 4^(5 10^9) and differs from 2^(10^10 + 1) without being evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

MAX_BITS = 1 << 18
"""Of a numerator or denominator: 79 thousand digits."""

MAX_TERMS = 150
"""Of a polynomial: (a + b + c)^15 has 136."""

MAX_FACTORED = 10**12
"""Largest integer that is factored by trial division, for roots and for powers beyond MAX_BITS."""

Atom = str | int
Monomial = tuple[tuple[Atom, Fraction], ...]
Polynomial = Mapping[Monomial, Fraction]

ZERO: Polynomial = {}
ONE: Polynomial = {(): Fraction(1)}


class NotAlgebraic(Exception):
    """The text is not of this ring: it has a function, a root of letters, or something unreadable."""


class TooLarge(Exception):
    """The value cannot be held within MAX_BITS and MAX_TERMS."""


@dataclass(frozen=True, slots=True)
class Value:
    """numerator / denominator; the denominator is never the zero polynomial."""

    numerator: Polynomial
    denominator: Polynomial = field(default_factory=lambda: ONE)


def rational(number: Fraction | int) -> Value:
    """A number as a value."""
    return Value({(): Fraction(number)} if number else ZERO)


def atom(name: str) -> Value:
    """A letter, "pi", "e" or "i" as a value."""
    return Value({((name, Fraction(1)),): Fraction(1)})


def as_fraction(value: Value) -> Fraction | None:
    """The value as a fraction, or None if it is none by its form."""
    numerator, denominator = _constant(value.numerator), _constant(value.denominator)
    return None if numerator is None or denominator is None else numerator / denominator


def is_zero(value: Value) -> bool:
    """Whether the value is 0."""
    return not value.numerator


def equal(a: Value, b: Value) -> bool:
    """Whether a.numerator b.denominator = b.numerator a.denominator."""
    if a.denominator == b.denominator:
        return a.numerator == b.numerator
    return _multiply(a.numerator, b.denominator) == _multiply(b.numerator, a.denominator)


def add(a: Value, b: Value) -> Value:
    """The sum a + b."""
    if a.denominator == b.denominator:
        return Value(_add(a.numerator, b.numerator), a.denominator)
    numerator = _add(_multiply(a.numerator, b.denominator), _multiply(b.numerator, a.denominator))
    return Value(numerator, _multiply(a.denominator, b.denominator))


def negative(a: Value) -> Value:
    """The value -a."""
    return Value({monomial: -factor for monomial, factor in a.numerator.items()}, a.denominator)


def multiply(a: Value, b: Value) -> Value:
    """The product a b."""
    return Value(_multiply(a.numerator, b.numerator), _multiply(a.denominator, b.denominator))


def divide(a: Value, b: Value) -> Value:
    """The quotient a / b. Raises NotAlgebraic for b = 0."""
    if not b.numerator:
        raise NotAlgebraic("division by zero")
    numerator = _multiply(a.numerator, b.denominator)
    denominator = _multiply(a.denominator, b.numerator)
    if len(denominator) == 1:  # one monomial goes into the numerator: most values have the denominator 1
        ((monomial, factor),) = denominator.items()
        inverse = tuple((name, -exponent) for name, exponent in monomial)
        return Value(_multiply(numerator, _normal(inverse, 1 / factor)))
    return Value(numerator, denominator)


def power(base: Value, exponent: Value) -> Value:
    """base^exponent for a rational exponent; fractional ones only of positive monomials without letters."""
    number = as_fraction(exponent)
    if number is None:
        if any(isinstance(name, int) and abs(power) > 1 for monomial in exponent.numerator for name, power in monomial):
            raise TooLarge("a power of a power")
        raise NotAlgebraic("exponent is not a rational number")
    if number.denominator == 1 and abs(number) <= 1:
        return base if number == 1 else divide(rational(1), base) if number == -1 else rational(1)
    if is_zero(base):
        if number < 0:
            raise NotAlgebraic("division by zero")
        return base
    if len(base.numerator) == len(base.denominator) == 1:
        return divide(Value(_monomial_power(base.numerator, number)), Value(_monomial_power(base.denominator, number)))
    if number.denominator != 1:
        raise NotAlgebraic("root of a sum")
    steps = abs(int(number))
    if steps > MAX_TERMS:
        raise TooLarge(f"a sum to the power {steps}")
    result = rational(1)
    for _ in range(steps):
        result = multiply(result, base)
    return result if number > 0 else divide(rational(1), result)


def _constant(polynomial: Polynomial) -> Fraction | None:
    if not polynomial:
        return Fraction(0)
    return polynomial.get(()) if len(polynomial) == 1 else None


def _add(a: Polynomial, b: Polynomial) -> Polynomial:
    total = dict(a)
    for monomial, factor in b.items():
        total[monomial] = total.get(monomial, Fraction(0)) + factor
    return _bounded(total)


def _multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    if a is ONE or b is ONE:
        return b if a is ONE else a
    if len(a) * len(b) > MAX_TERMS * MAX_TERMS:
        raise TooLarge("a product of too many terms")
    total: dict[Monomial, Fraction] = {}
    for monomial_a, factor_a in a.items():
        for monomial_b, factor_b in b.items():
            exponents = dict(monomial_a)
            for name, exponent in monomial_b:
                exponents[name] = exponents.get(name, Fraction(0)) + exponent
            for monomial, factor in _normal(tuple(exponents.items()), factor_a * factor_b).items():
                total[monomial] = total.get(monomial, Fraction(0)) + factor
    return _bounded(total)


def _bounded(total: Mapping[Monomial, Fraction]) -> Polynomial:
    kept = {monomial: factor for monomial, factor in total.items() if factor}
    if len(kept) > MAX_TERMS:
        raise TooLarge(f"{len(kept)} terms")
    if any(_bits(factor) > MAX_BITS for factor in kept.values()):
        raise TooLarge("a coefficient of too many digits")
    return kept


def _normal(monomial: Monomial, factor: Fraction) -> Polynomial:
    """One monomial in canonical form: integer powers of primes in the coefficient where they fit, i^2 = -1."""
    kept: dict[Atom, Fraction] = {}
    for name, exponent in monomial:
        whole = math.floor(exponent)
        if isinstance(name, int):
            if abs(whole) * name.bit_length() > MAX_BITS:
                kept[name] = exponent
                continue
            factor *= Fraction(name) ** whole
            exponent -= whole
        elif name == "i" and exponent.denominator == 1:
            factor, exponent = factor * (-1 if whole % 4 >= 2 else 1), Fraction(whole % 2)
        if exponent:
            kept[name] = exponent
    for name, exponent in kept.items():
        if isinstance(name, int) and exponent not in (0, 1) and abs(exponent) > 1:
            valuation, factor = _take_out(name, factor)  # 2 x 2^n and 2^(n+1) get one form
            kept[name] = exponent + valuation
    return {tuple(sorted(kept.items(), key=lambda item: str(item[0]))): factor}


def _take_out(prime: int, factor: Fraction) -> tuple[int, Fraction]:
    valuation = 0
    while factor.numerator % prime == 0:
        factor, valuation = factor / prime, valuation + 1
    while factor.denominator % prime == 0:
        factor, valuation = factor * prime, valuation - 1
    return valuation, factor


def _monomial_power(polynomial: Polynomial, exponent: Fraction) -> Polynomial:
    ((monomial, factor),) = polynomial.items()
    has_letters = any(not isinstance(name, int) and name not in ("pi", "e") for name, _ in monomial)
    if exponent.denominator != 1 and (has_letters or factor < 0):
        return _root_of_negative(polynomial, exponent, has_letters)
    raised = tuple((name, power * exponent) for name, power in monomial)
    if exponent.denominator == 1 and _bits(factor) * abs(exponent) <= MAX_BITS:
        return _normal(raised, factor ** int(exponent))
    root = _exact_root(factor, exponent.denominator)
    if root is not None and _bits(root) * abs(exponent.numerator) <= MAX_BITS:
        return _normal(raised, root**exponent.numerator)
    total = dict(raised)
    for number, sign in ((abs(factor.numerator), 1), (factor.denominator, -1)):
        for prime, multiplicity in _prime_factors(number).items():
            total[prime] = total.get(prime, Fraction(0)) + sign * multiplicity * exponent
    is_negative = factor < 0 and exponent.numerator % 2 == 1
    return _normal(tuple(total.items()), Fraction(-1 if is_negative else 1))


def _exact_root(factor: Fraction, index: int) -> Fraction | None:
    """The rational root of a positive factor; only square roots are looked for."""
    if index != 2:
        return None
    roots = math.isqrt(factor.numerator), math.isqrt(factor.denominator)
    return Fraction(*roots) if roots[0] ** 2 == factor.numerator and roots[1] ** 2 == factor.denominator else None


def _root_of_negative(polynomial: Polynomial, exponent: Fraction, has_letters: bool) -> Polynomial:
    """The real root for an odd index, i times the root for a square root."""
    if has_letters:
        raise NotAlgebraic("root of letters")
    ((monomial, factor),) = polynomial.items()
    size = _monomial_power({monomial: -factor}, exponent)
    if exponent.denominator % 2 == 1:
        return {m: f * (-1) ** (exponent.numerator % 2) for m, f in size.items()}
    if exponent.denominator == 2:
        return _multiply(size, _normal((("i", Fraction(exponent.numerator)),), Fraction(1)))
    raise NotAlgebraic("even root of a negative number")


def _prime_factors(number: int) -> dict[int, int]:
    """Trial division. Raises TooLarge beyond MAX_FACTORED."""
    if number > MAX_FACTORED:
        raise TooLarge("a root or a power of an integer too large to factor")
    factors: dict[int, int] = {}
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors[divisor] = factors.get(divisor, 0) + 1
            number //= divisor
        divisor += 1 if divisor == 2 else 2
    if number > 1:
        factors[number] = factors.get(number, 0) + 1
    return factors


def _bits(factor: Fraction) -> int:
    return max(factor.numerator.bit_length(), factor.denominator.bit_length()) if abs(factor) != 1 else 0
