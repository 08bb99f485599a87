"""Tests of exact values: sums, products and powers in the ring, and its bounds."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.rewards import math_ring as ring
from stream_grpo.rewards.math_latex import read
from stream_grpo.rewards.math_ring import NotAlgebraic, TooLarge

FRACTIONS = st.fractions(min_value=-1000, max_value=1000, max_denominator=1000)


@given(FRACTIONS, FRACTIONS)
def test_rational_numbers_are_added_multiplied_and_divided_as_fractions(a: Fraction, b: Fraction) -> None:
    x, y = ring.rational(a), ring.rational(b)
    assert ring.as_fraction(ring.add(x, y)) == a + b
    assert ring.as_fraction(ring.multiply(x, y)) == a * b
    if b:
        assert ring.as_fraction(ring.divide(x, y)) == a / b


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_product_of_two_roots_is_the_root_of_the_product(a: int, b: int) -> None:
    assert ring.equal(read(rf"\sqrt{{{a}}}\sqrt{{{b}}}"), read(rf"\sqrt{{{a * b}}}"))
    assert ring.equal(read(rf"\sqrt{{{a}}}"), read(rf"\sqrt{{{a + b}}}")) is False


@settings(deadline=None)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(0, 6))
def test_a_power_of_a_sum_is_its_expansion(a: int, b: int, n: int) -> None:
    # (a + b sqrt 2)^n by repeated multiplication of pairs (p, q) standing for p + q sqrt 2.
    p, q = 1, 0
    for _ in range(n):
        p, q = p * a + 2 * q * b, p * b + q * a
    assert ring.equal(read(rf"(({a})+({b})\sqrt2)^{{{n}}}"), read(rf"({p})+({q})\sqrt2"))


@pytest.mark.parametrize(
    ("latex", "value"),
    [
        ("2^{-3}", Fraction(1, 8)),
        ("-2^2", Fraction(-4)),
        ("2/3/4", Fraction(1, 6)),
        ("2(3+4)5^{2}", Fraction(350)),
        (r"\frac{1}{2}\cdot 4", Fraction(2)),
        (r"8^{\frac{2}{3}}", Fraction(4)),
        (r"\sqrt{\frac{4}{9}}", Fraction(2, 3)),
        (r"\lfloor 2.7 \rfloor + |{-3}|", Fraction(5)),
        ("0.125", Fraction(1, 8)),
        ("i^2", Fraction(-1)),
        ("0^0", Fraction(1)),
    ],
)
def test_latex_is_read_by_the_rules_of_precedence(latex: str, value: Fraction) -> None:
    assert ring.as_fraction(read(latex)) == value


def test_great_powers_keep_their_primes_and_are_compared_without_being_evaluated() -> None:
    assert ring.equal(read("6^{10^{12}}"), read("2^{10^{12}}3^{10^{12}}"))
    assert not ring.equal(read("6^{10^{12}}"), read("6^{10^{12}-1}"))
    assert ring.equal(read(r"\frac{6^{10^{12}}}{6}"), read("6^{10^{12}-1}"))


@pytest.mark.parametrize("latex", ["(x+1)^{1000}", "2^{2^{2^{100}}}", "10^6!", r"\binom{10^6}{3}", "1" * 4001])
def test_what_has_too_many_terms_or_digits_is_refused(latex: str) -> None:
    with pytest.raises(TooLarge):
        read(latex)


@pytest.mark.parametrize(
    "latex", [r"\sin x", r"\sqrt{x}", "1/0", "x^x", "(1", "", "2 3", "x2", r"\sqrt[4]{-1}", '5"cm"']
)
def test_what_is_not_algebraic_is_refused(latex: str) -> None:
    with pytest.raises(NotAlgebraic):
        read(latex)
