r"""Reads algebraic LaTeX into an exact value: numbers, letters, + - * / ^, \frac, \sqrt, !, \binom, constant |x|.

Everything else raises NotAlgebraic, and is left to math-verify's parser.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

from stream_grpo.rewards import math_ring as ring
from stream_grpo.rewards.math_ring import NotAlgebraic, TooLarge, Value

MAX_FACTORIAL = 5000
MAX_DIGITS = 4000
"""Of a number as written; Python reads decimal text of up to 4300 digits."""

MAX_DEPTH = 60
"""Of brackets; deeper text is not an answer."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[A-Za-z]+)|(?P<letter>[A-Za-z])"
    r"|(?P<sign>[-+*/^_!(){}\[\]|°]))"
)
_GREEK_NAMES = (
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi "
    r"\rho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma \Phi \Psi "
    r"\Omega \ell \hbar"
)
_GREEK = frozenset(_GREEK_NAMES.split())
_CLOSING = {"(": ")", "{": "}", "[": "]", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_STARTS_FACTOR = frozenset({"(", "{", "[", r"\frac", r"\sqrt", r"\binom", r"\pi", r"\lfloor", r"\lceil"}) | _GREEK


def read(latex: str) -> Value:
    """The value of the text. Raises NotAlgebraic or TooLarge."""
    reader = _Reader(_tokens(latex))
    value = reader.sum()
    if reader.peek() is not None:
        raise NotAlgebraic(f"unread from {reader.peek()!r}")
    return value


def _tokens(latex: str) -> list[tuple[str, str]]:
    tokens, position, text = [], 0, latex.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAlgebraic(f"unreadable at {text[position : position + 10]!r}")
        tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
        position = match.end()
    return tokens


class _Reader:
    """Recursive descent over the tokens; each method reads one level of precedence."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def peek(self) -> str | None:
        return self._tokens[self._position][1] if self._position < len(self._tokens) else None

    def _take(self) -> tuple[str, str]:
        if self._position >= len(self._tokens):
            raise NotAlgebraic("ends too early")
        self._position += 1
        return self._tokens[self._position - 1]

    def _expect(self, text: str) -> None:
        if self._take()[1] != text:
            raise NotAlgebraic(f"{text!r} expected")

    def sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAlgebraic("too deep")
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self._take()[1] == "-" else sign
        total = self._product()
        total = ring.negative(total) if sign < 0 else total
        while self.peek() in ("+", "-"):
            is_minus = self._take()[1] == "-"
            term = self._product()
            total = ring.add(total, ring.negative(term) if is_minus else term)
        self._depth -= 1
        return total

    def _product(self) -> Value:
        total = self._signed_factor()
        while True:
            token = self.peek()
            if token in ("*", r"\cdot"):
                self._take()
                total = ring.multiply(total, self._signed_factor())
            elif token in ("/", r"\div"):
                self._take()
                total = ring.divide(total, self._signed_factor())
            elif token is not None and (token in _STARTS_FACTOR or token.isalpha() or self._is_factor_after_bracket()):
                total = ring.multiply(total, self._factor())
            else:
                return total

    def _is_factor_after_bracket(self) -> bool:
        """2^{3}3^{2} is a product; a number after a number or a letter is nothing."""
        return self._tokens[self._position][0] == "number" and self._tokens[self._position - 1][1] in (")", "}")

    def _signed_factor(self) -> Value:
        if self.peek() == "-":  # 2^3 * -1
            self._take()
            return ring.negative(self._factor())
        return self._factor()

    def _factor(self) -> Value:
        value = self._base()
        while self.peek() in ("!", "^", "°"):
            operator = self._take()[1]
            if operator == "!":
                value = ring.rational(math.factorial(_small_natural(value, MAX_FACTORIAL)))
            elif operator == "°":  # inside an expression a degree is a number; a trailing one was taken off as a unit
                value = ring.divide(ring.multiply(value, ring.atom("pi")), ring.rational(180))
            else:
                value = ring.power(value, self._argument())
        return value

    def _base(self) -> Value:
        kind, text = self._take()
        if kind == "number":
            return _number(text)
        if kind == "letter":
            return ring.atom(self._subscripted(text))
        if text in _CLOSING:
            value = self.sum()
            self._expect(_CLOSING[text])
            return _bracketed(text, value)
        if text == r"\pi":
            return ring.atom("pi")
        if text in _GREEK:
            return ring.atom(self._subscripted(text))
        if text == r"\frac":
            return ring.divide(self._argument(), self._argument())
        if text == r"\sqrt":
            index = self._optional_index()
            return ring.power(self._argument(), ring.rational(Fraction(1, index)))
        if text == r"\binom":
            top, bottom = self._argument(), self._argument()
            return ring.rational(math.comb(_small_natural(top, MAX_FACTORIAL), _small_natural(bottom, MAX_FACTORIAL)))
        raise NotAlgebraic(f"no value starts with {text!r}")

    def _argument(self) -> Value:
        """What a command or ^ takes: a group, one command, or one character, as in TeX; numbers are taken whole."""
        if self.peek() == "{":
            return self._base()
        if self.peek() == "-":
            self._take()
            return ring.negative(self._base())
        return self._base()

    def _optional_index(self) -> int:
        if self.peek() != "[":
            return 2
        index = as_natural(self._base())
        if index is None or index < 1:
            raise NotAlgebraic("the index of a root is not a natural number")
        return index

    def _subscripted(self, name: str) -> str:
        if self.peek() != "_":
            return name
        self._take()
        if self.peek() != "{":
            return f"{name}_{self._take()[1]}"
        parts = []
        while self.peek() != "}":
            parts.append(self._take()[1])
        self._take()
        return f"{name}_{''.join(parts[1:])}"


def as_natural(value: Value) -> int | None:
    """The value as an integer of 0 or more, or None."""
    number = ring.as_fraction(value)
    return int(number) if number is not None and number.denominator == 1 and number >= 0 else None


def _number(text: str) -> Value:
    if len(text) > MAX_DIGITS:
        raise TooLarge(f"a number of {len(text)} digits")
    return ring.rational(Fraction(text if text[-1] != "." else text[:-1]))


def _small_natural(value: Value, largest: int) -> int:
    natural = as_natural(value)
    if natural is None:
        raise NotAlgebraic("a factorial or binomial of what is not a natural number")
    if natural > largest:
        raise TooLarge(f"a factorial or binomial of {natural.bit_length()} bits")
    return natural


_ROUNDINGS: dict[str, Callable[[Fraction], Fraction | int]] = {"|": abs, r"\lfloor": math.floor, r"\lceil": math.ceil}


def _bracketed(opening: str, value: Value) -> Value:
    if opening not in _ROUNDINGS:
        return value
    number = ring.as_fraction(value)
    if number is None:
        raise NotAlgebraic("the absolute value or rounding of what is not a rational number")
    return ring.rational(_ROUNDINGS[opening](number))
