r"""Reads the structure around the values of an answer: lists, tuples, intervals, sets, relations, matrices, words.

An `Item` is one value with its unit and the name it was given ("x = 3"). Everything else holds items or texts. What is
inside a value is read later, by `math_latex` or by math-verify's parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stream_grpo.rewards.math_units import split_unit


@dataclass(frozen=True, slots=True)
class Item:
    """One value. `name` is what stood before "=", `also` is what stood after an approximation sign."""

    text: str
    unit: str | None = None
    name: str | None = None
    also: str | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """An answer in words, in lower case."""

    text: str


@dataclass(frozen=True, slots=True)
class Equation:
    """left = right where the left side is no plain name."""

    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Inequality:
    """A chain such as -1 < x <= 3: sides and the operators between them, of "<", "<=", ">", ">=", "!="."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A tuple, vector or interval with its brackets: ( ), [ ), < >."""

    opening: str
    closing: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers: in braces, or just side by side."""

    items: tuple[Node, ...]
    has_braces: bool = False
    is_or: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Sets joined by "cup", "cap" or "setminus"."""

    operator: str
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class NamedSet:
    """R, Z, N, Q, C or the empty set ("0")."""

    name: str


Node = Item | Word | Equation | Inequality | Bracketed | Listing | Operation | Matrix | NamedSet

_SET_OPERATORS = {r"\cup": "cup", r"\cap": "cap", r"\setminus": "setminus"}
_COMPARISONS = {"<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!="}
_SPLIT_SETS = re.compile(r"\\(?:cup|cap|setminus)(?![A-Za-z])|(?<=[})])\s*(?:U|union|-)\s*(?=\\\{|[(\[])")
_SPLIT_COMPARISONS = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_SPLIT_LIST = re.compile(r",|;|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_BEGIN_MATRIX = re.compile(
    r"^\\begin\s*\{([pbvBV]?(?:small)?matrix|array)\}(?:\{[^}]*\})?(.*)\\end\s*\{\1\}$", re.DOTALL
)
_SET_NAMES = re.compile(r"^\(?(?:all |the )?(?:set of )?(?:all )?real(?: number)?s?\)?$|^\(?any real number\)?$")
_EMPTY_NAMES = re.compile(
    r"^(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)(?: exists?)?$|^(?:the )?empty set$|^none$"
)
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())}
_CHOICE = re.compile(r'^"?\(?([A-J])[).:]+(?:\s*"\s*|\s+)(?![+*/^=,(]|- |\\c)(\S.*)$', re.DOTALL)
_NAME = re.compile(r"^[^\d^]*$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z.]")


def parse(text: str) -> Node:
    """The structure of one normalised answer."""
    if text.startswith("]") and text.endswith("["):  # the French open interval
        return _bracketed(text) or _item(text)
    pieces = _split_top(text, _SPLIT_LIST)
    parts = [part for part in pieces[::2] if part.strip()]
    if len(parts) > 1:
        items = tuple(item for part in parts for item in _plus_minus(part))
        return Listing(items, is_or="or" in pieces[1::2])
    text = parts[0].strip() if parts else text.strip()
    items = tuple(_plus_minus(text))
    return items[0] if len(items) == 1 else Listing(items)


def choice_with_value(text: str) -> tuple[str, str] | None:
    """("B", "42") of "(B) 42"; None for other texts."""
    match = _CHOICE.match(text)
    return (match[1], match[2]) if match else None


def _plus_minus(text: str) -> Iterator[Node]:
    signed = re.sub(r"\\[pm]m(?![A-Za-z])", lambda m: "+" if m[0] == r"\pm" else "-", text)
    yield _parse_one(re.sub(r"^\+|(?<=[=(,])\s*\+", "", signed.strip()))
    if signed != text:
        yield _parse_one(re.sub(r"\\[pm]m(?![A-Za-z])", lambda m: "-" if m[0] == r"\pm" else "+", text).strip())


def _parse_one(text: str) -> Node:
    return (
        _set_operation(text)
        or _relation(text)
        or _matrix(text)
        or _bracketed(text)
        or _named_set(text)
        or _word(text)
        or _item(text)
    )


def _set_operation(text: str) -> Node | None:
    pieces = _split_top(text, _SPLIT_SETS)
    if len(pieces) < 3 or "|" in text:
        return None
    if "\\in" in pieces[0]:
        pieces[0] = re.split(r"\\in(?![A-Za-z])", pieces[0])[-1]
    operator = _SET_OPERATORS.get(pieces[1].strip(), "setminus" if pieces[1].strip() == "-" else "cup")
    return Operation(operator, tuple(parse(piece.strip()) for piece in pieces[::2]))


def _relation(text: str) -> Node | None:
    member = re.match(r"^([^\\{}()\[\]]{1,20}|\\[A-Za-z]+\s*)\\in(?![A-Za-z])(.*)$", text, re.DOTALL)
    if member:
        return parse(member[2].strip())
    pieces = _split_top(text, _SPLIT_COMPARISONS)
    if len(pieces) >= 3 and all(side.strip() for side in pieces[::2]):
        operators = tuple(_COMPARISONS[piece.strip()] for piece in pieces[1::2])
        return Inequality(tuple(side.strip() for side in pieces[::2]), operators)
    sides = [side.strip() for side in _split_top(text, re.compile(r"=|\\equiv(?![A-Za-z])"))[::2]]
    if len(sides) < 2 or not all(sides):
        return None
    left, right = sides[0], sides[-1]
    if is_name(right) and re.search("[A-Za-z]", right) and not _has_letters(left) and len(sides) == 2:
        return _item(left, name=right)
    if is_name(left) or len(sides) > 2 or not _has_letters(left):
        value = parse(right)
        return replace(value, name=left if is_name(left) else None) if isinstance(value, Item) else value
    return Equation(left, right)


def _has_letters(text: str) -> bool:
    return bool(re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))


def is_name(text: str) -> bool:
    """Whether the left side of an equation names what is asked for: x, x_1, f(2), P(A), \\angle ABC, a + b."""
    text = re.sub(r"_\s*(?:\{[^{}]*\}|\w)", "", text)
    text = re.sub(r"\([^()]*\)|\|[^|]*\|", "", text)
    return bool(_NAME.match(text)) and not re.search(r"\\(?:sin|cos|tan|log|ln|sqrt|int|sum)", text)


def _matrix(text: str) -> Node | None:
    match = _BEGIN_MATRIX.match(text.strip("()[]").strip())
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr", match[2]) if row.strip()]
    return Matrix(tuple(tuple(parse(cell.strip()) for cell in row.split("&")) for row in rows))


def _bracketed(text: str) -> Node | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _braced(text[2:-2].strip())
    vector = re.match(r"^(?:\\langle|<)(.*)(?:\\rangle|>)$", text, re.DOTALL)
    if vector:
        return Bracketed("<", ">", _items(vector[1]))
    if len(text) < 3 or text[0] not in "([]{" or text[-1] not in ")][}":
        return None
    inner = text[1:-1]
    if len(_split_top(inner, re.compile("[,;]"))) < 3 or not _is_balanced(inner):
        return None
    if text[0] == "{" or text[-1] == "}":
        return Listing(_items(inner), has_braces=True)
    opening = "(" if text[0] == "]" else text[0]
    closing = ")" if text[-1] == "[" else text[-1]
    return Bracketed(opening, closing, _items(inner))


def _braced(inner: str) -> Node:
    builder = re.match(r"^([^|:]{1,30})(?:\||:)(.*)$", inner, re.DOTALL)
    if builder and re.search(r"<|>|\\(?:le|ge|ne|in)(?![A-Za-z])", builder[2]):
        return parse(builder[2].strip())
    if not inner:
        return NamedSet("0")
    return Listing(_items(inner), has_braces=True)


def _items(text: str) -> tuple[Node, ...]:
    parts = [part.strip() for part in _split_top(text, re.compile("[,;]"))[::2]]
    return tuple(item for part in parts if part for item in _plus_minus(part))


def _named_set(text: str) -> Node | None:
    plain = text.replace('"', "").strip().lower()
    if text in (r"\emptyset", r"\{\}") or _EMPTY_NAMES.match(plain):
        return NamedSet("0")
    named = re.match(r"^\\mathbb\s*\{?\s*([RZNQC])\s*\}?$", text)
    if named or _SET_NAMES.match(plain):
        return NamedSet(named[1] if named else "R")
    return None


def _word(text: str) -> Node | None:
    plain = re.sub(r"\s+", " ", text.replace('"', " ")).strip(" .'")
    if plain.lower() in _DIGITS:
        return Item(_DIGITS[plain.lower()])
    if _WORDS.fullmatch(plain) and (re.search(r"[A-Za-z]{3}", plain) or plain.lower() in ("no", "am", "pm")):
        return Word(re.sub(r"^(?:the|a|an) ", "", plain.lower()))
    return None


def _item(text: str, name: str | None = None) -> Item:
    exact, approximation, decimal = text.partition(r"\approx")
    if approximation:
        if is_name(exact) and exact.strip() not in (r"\pi", "e"):  # "x \approx 3.14"
            return _item(decimal.strip(), name=exact.strip())
        value, unit = split_unit(decimal.strip())
        stated, stated_unit = split_unit(exact.strip())
        return Item(stated, stated_unit or unit, name, value)
    value, unit = split_unit(text)
    return Item(_without_outer_brackets(value), unit, name)


def _without_outer_brackets(text: str) -> str:
    while len(text) > 2 and text[0] in "([{" and text[-1] in ")]}" and _is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    return text.rstrip(")") if text.count(")") > text.count("(") and re.fullmatch(r"[A-Z]\)", text) else text


def _split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """[part, separator, part, ...], split only outside all brackets and quotes."""
    pieces: list[str] = []
    depth = start = position = 0
    while position < len(text):
        if depth == 0 and (match := separator.match(text, position)) and match.end() > position:
            pieces += [text[start:position], match[0]]
            start = position = match.end()
            continue
        step = _step(text, position)
        depth = max(0, depth + _depth_change(text, position))
        position += step
    return [*pieces, text[start:]]


def _step(text: str, position: int) -> int:
    if text[position] == '"':
        end = text.find('"', position + 1)
        return end + 1 - position if end > 0 else 1
    if text.startswith(r"\begin{", position):
        end = text.find(r"\end{", position)
        return end - position if end > 0 else 1
    return 2 if text[position] == "\\" and text[position + 1 : position + 2] in ("{", "}") else 1


def _depth_change(text: str, position: int) -> int:
    character = text[position]
    if character == "\\":
        if re.match(r"\\langle(?![A-Za-z])", text[position:]):
            return 1
        if re.match(r"\\rangle(?![A-Za-z])", text[position:]):
            return -1
        character = text[position + 1 : position + 2]
        return 1 if character == "{" else -1 if character == "}" else 0
    return 1 if character in "([{" else -1 if character in ")]}" else 0


def _is_balanced(inner: str) -> bool:
    depth = position = 0
    while position < len(inner):
        depth += _depth_change(inner, position)
        if depth < 0:
            return False
        position += _step(inner, position)
    return depth == 0
