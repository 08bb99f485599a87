"""Whether an answer is equivalent to the gold: structure against structure, value against value."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stream_grpo.rewards.math_intervals import real_set, sets_equal, variable_of
from stream_grpo.rewards.math_latex import MAX_DIGITS
from stream_grpo.rewards.math_structure import (
    Bracketed,
    Equation,
    Inequality,
    Item,
    Listing,
    Matrix,
    NamedSet,
    Node,
    Operation,
    Word,
    choice_with_value,
    parse,
)
from stream_grpo.rewards.math_text import normalise, without_thousands
from stream_grpo.rewards.math_units import PERCENT, units_agree
from stream_grpo.rewards.math_values import direction, equations_equal, is_decimal, is_percent_of, values_equal

MAX_CHARACTERS = 2000
MAX_DEPTH = 40
"""Of brackets."""

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_SETS = (Inequality, Operation, NamedSet)


def equivalent(gold_parts: Sequence[str], answer_parts: Sequence[str]) -> bool:
    """Whether the parts of an answer, taken together, are the parts of the gold, taken together.

    Texts with a choice letter before a value ("(B) 42") may match by either, unless both sides have a letter.
    """
    if not all(map(is_readable, answer_parts)) or not all(map(is_readable, gold_parts)):
        return [part.strip() for part in gold_parts] == [part.strip() for part in answer_parts]
    golds = [normalise(part) for part in gold_parts]
    answers = [normalise(part) for part in answer_parts]
    if not any(answers):
        return False
    if len(golds) == len(answers) == 1:
        gold_choice, answer_choice = choice_with_value(golds[0]), choice_with_value(answers[0])
        if gold_choice and answer_choice:
            return gold_choice[0] == answer_choice[0]
        pairs = [(gold, answer) for gold in gold_choice or golds for answer in answer_choice or answers]
        return any(_texts_equivalent([gold], [answer]) for gold, answer in pairs)
    return _texts_equivalent(golds, answers)


def is_readable(text: str) -> bool:
    """Whether an answer is short and flat enough to be read; others are compared as text."""
    if len(text) > MAX_CHARACTERS:
        return len(text) <= MAX_DIGITS and bool(re.fullmatch(r"\s*-?[\d,]+\s*", text))
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, abs(depth))
    return deepest <= MAX_DEPTH


def _texts_equivalent(golds: Sequence[str], answers: Sequence[str]) -> bool:
    if golds == answers:
        return True
    return any(nodes_equivalent(gold, answer) for gold in _readings(golds) for answer in _readings(answers))


def _readings(texts: Sequence[str]) -> list[Node]:
    """The texts with thousands joined and, where that makes a difference, with every comma as a separator."""
    joined = [without_thousands(text) for text in texts]
    readings = [_together(joined)]
    return readings if joined == list(texts) else [*readings, _together(texts)]


def _together(texts: Sequence[str]) -> Node:
    nodes = [parse(text) for text in texts if text]
    if len(nodes) == 1:
        return nodes[0]
    items: list[Node] = []
    for node in nodes:
        items += node.items if isinstance(node, Listing) and not node.has_braces else (node,)
    return Listing(tuple(items))


def nodes_equivalent(gold: Node, answer: Node) -> bool:
    """Whether two structures are equivalent. Symmetric."""
    if gold == answer:
        return True
    if _is_set(gold) or _is_set(answer):
        return _sets_equivalent(gold, answer)
    if isinstance(gold, Listing) or isinstance(answer, Listing):
        return _listings_equivalent(gold, answer)
    if isinstance(gold, Equation) or isinstance(answer, Equation):
        return _equations_equivalent(gold, answer)
    if isinstance(gold, Item) and isinstance(answer, Item):
        return _items_equivalent(gold, answer)
    gold_entries, answer_entries = _entries(gold), _entries(answer)
    if gold_entries is not None and answer_entries is not None:
        return _brackets_agree(gold, answer) and _in_order(gold_entries, answer_entries)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return len(gold.rows) == len(answer.rows) and all(map(_in_order, gold.rows, answer.rows))
    return isinstance(gold, Word) and isinstance(answer, Word) and gold.text == answer.text


def _items_equivalent(gold: Item, answer: Item) -> bool:
    if gold.name and answer.name and _names_differ(gold.name, answer.name):
        return False
    if PERCENT in (gold.unit, answer.unit) and gold.unit != answer.unit:
        percent, other = (gold, answer) if gold.unit == PERCENT else (answer, gold)
        if other.unit is not None:
            return False
        return values_equal(percent.text, other.text) or is_percent_of(percent.text, other.text)
    if not units_agree(gold.unit, answer.unit):
        return False
    if values_equal(gold.text, answer.text):
        return True
    return (answer.also is not None and is_decimal(gold.text) and values_equal(gold.text, answer.also)) or (
        gold.also is not None and values_equal(gold.also, answer.text)
    )


def _names_differ(a: str, b: str) -> bool:
    """Two single letters; "f(x) = ..." and "y = ..." may be the same."""
    plain = [re.sub(r"[\s{}]", "", name) for name in (a, b)]
    return plain[0] != plain[1] and all(re.fullmatch(r"\\?[A-Za-z]+(?:_\w+)?", name) for name in plain)


def _listings_equivalent(gold: Node, answer: Node) -> bool:
    for one, other in ((gold, answer), (answer, gold)):
        entries = _entries(other)
        if isinstance(one, Listing) and entries is not None and not _holds_tuples(one):
            return not one.has_braces and _in_order(one.items, entries)
    golds, answers = (_distinct(node.items if isinstance(node, Listing) else (node,)) for node in (gold, answer))
    if max(len(golds), len(answers)) > 2 * min(len(golds), len(answers)) + 8:
        return False  # equal sets in other words do not differ that much, and every pair costs time
    return all(any(nodes_equivalent(g, a) for a in answers) for g in golds) and all(
        any(nodes_equivalent(g, a) for g in golds) for a in answers
    )


def _distinct(items: Sequence[Node]) -> list[Node]:
    return list(dict.fromkeys(items))


def _holds_tuples(node: Listing) -> bool:
    return any(_entries(item) is not None for item in node.items)


def _entries(node: Node) -> tuple[Node, ...] | None:
    """The entries of a tuple, a vector, or a matrix of one row or column."""
    if isinstance(node, Bracketed):
        return node.items
    if isinstance(node, Matrix) and (len(node.rows) == 1 or all(len(row) == 1 for row in node.rows)):
        return tuple(cell for row in node.rows for cell in row)
    return None


def _brackets_agree(gold: Node, answer: Node) -> bool:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return len(gold.rows) == len(answer.rows)
    if not (isinstance(gold, Bracketed) and isinstance(answer, Bracketed)):
        return True
    brackets = [{"<": "(", ">": ")"}.get(side, side) for side in (gold.opening, gold.closing)]
    others = [{"<": "(", ">": ")"}.get(side, side) for side in (answer.opening, answer.closing)]
    return brackets == others or (len(gold.items) != 2 and {*brackets, *others} == {*"()[]"})


def _in_order(golds: Sequence[Node], answers: Sequence[Node]) -> bool:
    return len(golds) == len(answers) and all(map(nodes_equivalent, golds, answers))


def _equations_equivalent(gold: Node, answer: Node) -> bool:
    sides = [_sides(gold), _sides(answer)]
    return sides[0] is not None and sides[1] is not None and equations_equal(sides[0], sides[1])


def _sides(node: Node) -> tuple[str, str] | None:
    if isinstance(node, Equation):
        return node.left, node.right
    return (node.name, node.text) if isinstance(node, Item) and node.name else None


def _is_set(node: Node) -> bool:
    return isinstance(node, _SETS) or (
        isinstance(node, Listing) and not node.has_braces and any(isinstance(item, _SETS) for item in node.items)
    )


def _sets_equivalent(gold: Node, answer: Node) -> bool:
    variables = [variable_of(gold), variable_of(answer)]
    if all(variables) and variables[0] != variables[1]:
        return False
    gold_set, answer_set = real_set(gold), real_set(answer)
    if gold_set is not None and answer_set is not None:
        return sets_equal(gold_set, answer_set)
    if isinstance(gold, Inequality) and isinstance(answer, Inequality):
        return _inequalities_equivalent(gold, answer)
    if isinstance(gold, Operation) and isinstance(answer, Operation) and gold.operator == answer.operator:
        if gold.operator == "setminus":
            return _in_order(gold.operands, answer.operands)
        return _listings_equivalent(Listing(gold.operands), Listing(answer.operands))
    if isinstance(gold, Listing) and isinstance(answer, Listing):
        return _listings_equivalent(gold, answer)
    return False


def _inequalities_equivalent(gold: Inequality, answer: Inequality) -> bool:
    if len(gold.operators) != len(answer.operators):
        return False
    if len(gold.operators) == 1:
        sign = direction((gold.sides[0], gold.sides[1]), (answer.sides[0], answer.sides[1]))
        wanted = gold.operators[0] if sign > 0 else _FLIPPED[gold.operators[0]]
        return sign != 0 and (answer.operators[0] == wanted)
    for sides, operators in (
        (answer.sides, answer.operators),
        (answer.sides[::-1], tuple(_FLIPPED[operator] for operator in answer.operators[::-1])),
    ):
        if operators == gold.operators and all(map(values_equal, gold.sides, sides)):
            return True
    return False
