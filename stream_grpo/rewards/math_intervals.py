"""Sets of real numbers as pieces, so that intervals, unions and inequalities can be compared with one another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stream_grpo.rewards.math_structure import (
    Bracketed,
    Inequality,
    Item,
    Listing,
    NamedSet,
    Node,
    Operation,
)
from stream_grpo.rewards.math_values import approximate, values_equal


@dataclass(frozen=True, slots=True)
class Bound:
    """An end of a piece: its text, for exact comparison, and its value, for the order."""

    text: str
    value: float
    is_closed: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """The numbers between two bounds; a point is a piece with equal closed bounds."""

    low: Bound
    high: Bound


RealSet = tuple[Piece, ...]
"""Disjoint pieces that do not touch, in order."""

MINUS_INFINITY, INFINITY = Bound("", -math.inf, False), Bound("", math.inf, False)
REALS: RealSet = (Piece(MINUS_INFINITY, INFINITY),)


def real_set(node: Node) -> RealSet | None:
    """The set of real numbers that an answer describes, or None if it is no such set."""
    if isinstance(node, NamedSet):
        return REALS if node.name == "R" else () if node.name == "0" else None
    if isinstance(node, Bracketed):
        return _interval(node)
    if isinstance(node, Inequality):
        return _solutions(node)
    if isinstance(node, Operation):
        return _operation(node)
    if isinstance(node, Listing):
        return _listing(node)
    return None


def sets_equal(a: RealSet, b: RealSet) -> bool:
    """Whether two sets have the same pieces, bound by bound."""
    return len(a) == len(b) and all(_same(x.low, y.low) and _same(x.high, y.high) for x, y in zip(a, b, strict=True))


def variable_of(node: Node) -> str | None:
    """The letter that an inequality bounds."""
    if isinstance(node, Inequality):
        letters = [side for side in node.sides if _bound(side, is_closed=True) is None]
        return letters[0] if len(letters) == 1 else None
    if isinstance(node, Listing):
        found = {variable_of(item) for item in node.items}
        return found.pop() if len(found) == 1 else None
    return None


def _same(a: Bound, b: Bound) -> bool:
    if math.isinf(a.value) or math.isinf(b.value):
        return a.value == b.value
    return a.is_closed == b.is_closed and values_equal(a.text, b.text)


def _bound(text: str, *, is_closed: bool) -> Bound | None:
    bare = text.replace(" ", "")
    if bare in (r"\infty", r"+\infty"):
        return INFINITY
    if bare == r"-\infty":
        return MINUS_INFINITY
    value = approximate(text)
    return None if value is None else Bound(text, value, is_closed)


def _interval(node: Bracketed) -> RealSet | None:
    if len(node.items) != 2 or not all(isinstance(item, Item) for item in node.items):
        return None
    low, high = (
        _bound(item.text, is_closed=bracket in "[]")
        for item, bracket in zip(node.items, (node.opening, node.closing), strict=True)
        if isinstance(item, Item)
    )
    return None if low is None or high is None or low.value > high.value else _normal([Piece(low, high)])


def _solutions(node: Inequality) -> RealSet | None:
    """Of c < x, x != c, c < x <= d: one letter against constants."""
    letters = [index for index, side in enumerate(node.sides) if _bound(side, is_closed=True) is None]
    if len(letters) != 1 or len(node.sides[letters[0]].replace("\\", "")) > 8 or len(node.sides) > 3:
        return None
    solutions = REALS
    for index, operator in enumerate(node.operators):
        is_left = index == letters[0]
        constant = _bound(node.sides[index + 1 if is_left else index], is_closed="=" in operator and operator != "!=")
        if constant is None or abs(index + (0 if is_left else 1) - letters[0]) > 0:
            return None
        solutions = intersection(solutions, _half_line(constant, operator, is_left=is_left))
    return solutions


def _half_line(constant: Bound, operator: str, *, is_left: bool) -> RealSet:
    if operator == "!=":
        return complement((Piece(replace(constant, is_closed=True), replace(constant, is_closed=True)),))
    is_below = operator.startswith("<") == is_left
    return (Piece(MINUS_INFINITY, constant),) if is_below else (Piece(constant, INFINITY),)


def _operation(node: Operation) -> RealSet | None:
    sets = [_points(operand) if isinstance(operand, Listing) else real_set(operand) for operand in node.operands]
    result = sets[0]
    for other in sets[1:]:
        if result is None or other is None:
            return None
        if node.operator == "cup":
            result = union(result, other)
        else:
            result = intersection(result, complement(other) if node.operator == "setminus" else other)
    return result


def _listing(node: Listing) -> RealSet | None:
    """Inequalities side by side: "or" joins, a comma or "and" intersects unless nothing would be left."""
    sets = [real_set(item) for item in node.items if isinstance(item, Inequality | Bracketed | Operation)]
    if len(sets) != len(node.items) or any(part is None for part in sets):
        return None
    if all(isinstance(item, Bracketed) for item in node.items) and not node.is_or:
        return None  # (0,1), (2,3) are two points
    joined: RealSet = ()
    common: RealSet = REALS
    for part in sets:
        joined, common = union(joined, part or ()), intersection(common, part or ())
    return joined if node.is_or or not common else common


def _points(node: Listing) -> RealSet | None:
    bounds = [_bound(item.text, is_closed=True) if isinstance(item, Item) else None for item in node.items]
    return _normal([Piece(bound, bound) for bound in bounds if bound]) if all(bounds) and node.has_braces else None


def union(a: RealSet, b: RealSet) -> RealSet:
    """Numbers of either set."""
    return _normal([*a, *b])


def intersection(a: RealSet, b: RealSet) -> RealSet:
    """Numbers of both sets."""
    return complement(union(complement(a), complement(b)))


def complement(a: RealSet) -> RealSet:
    """Numbers that are not of the set."""
    gaps: list[Piece] = []
    low = MINUS_INFINITY
    for piece in a:
        if piece.low.value > -math.inf:
            gaps.append(Piece(low, replace(piece.low, is_closed=not piece.low.is_closed)))
        low = replace(piece.high, is_closed=not piece.high.is_closed)
    if not a or a[-1].high.value < math.inf:
        gaps.append(Piece(low, INFINITY))
    return _normal(gaps)


def _normal(pieces: list[Piece]) -> RealSet:
    """Sorted, without empty pieces, with touching ones joined."""
    kept = [piece for piece in pieces if not _is_empty(piece)]
    kept.sort(key=lambda piece: (piece.low.value, not piece.low.is_closed))
    merged: list[Piece] = []
    for piece in kept:
        if merged and _touch(merged[-1].high, piece.low):
            if _reaches_further(piece.high, merged[-1].high):
                merged[-1] = Piece(merged[-1].low, piece.high)
        else:
            merged.append(piece)
    return tuple(merged)


def _is_empty(piece: Piece) -> bool:
    low, high = piece.low, piece.high
    if _meet(low, high):
        return not (low.is_closed and high.is_closed)
    return low.value > high.value


def _touch(high: Bound, low: Bound) -> bool:
    if _meet(high, low):
        return high.is_closed or low.is_closed
    return low.value < high.value


def _reaches_further(a: Bound, b: Bound) -> bool:
    return a.is_closed if _meet(a, b) else a.value > b.value


def _meet(a: Bound, b: Bound) -> bool:
    if math.isinf(a.value) or math.isinf(b.value):
        return a.value == b.value
    return math.isclose(a.value, b.value, rel_tol=1e-9, abs_tol=1e-9) and values_equal(a.text, b.text)
