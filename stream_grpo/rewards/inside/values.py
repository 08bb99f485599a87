"""Plain data as JSON and back: numbers, text, bytes, None, lists, tuples, dicts, sets, dates; the rest by a hook.

An object of a class that the program defines is never flattened to the built-in type below it: it is not plain.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

PROGRAM_MODULE = "solution"
"""The name under which a program's own classes are defined."""

_TYPES: tuple[type, ...] = (int, float, str, bool, list, tuple, dict, set, bytes, complex)
NAMED_TYPES: dict[str, type] = {kind.__name__: kind for kind in _TYPES}
_EXACT_INTEGER = 2**53  # from here on JSON readers may round
_BY_TEXT: dict[tuple[str, str], tuple[str, str]] = {  # (module, type) -> how to write it, how to read it
    ("fractions", "Fraction"): ("__str__", ""),
    ("decimal", "Decimal"): ("__str__", ""),
    ("datetime", "date"): ("isoformat", "fromisoformat"),
    ("datetime", "datetime"): ("isoformat", "fromisoformat"),
    ("datetime", "time"): ("isoformat", "fromisoformat"),
}


def encode(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
    """The value as JSON; `refer` says how to write what is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < _EXACT_INTEGER else {"int": hex(value)}  # no limit on the digits of hex
    plain = _plain(value)
    if plain is None:
        return refer(value)
    tag, content = plain
    if tag in ("list", "tuple", "set", "frozenset"):
        return {tag: [encode(part, refer) for part in content]}
    if tag == "dict":
        return {tag: [[encode(key, refer), encode(part, refer)] for key, part in content]}
    if tag == "value":
        return encode(content, refer)
    return {tag: content}


def _plain(value: Any) -> tuple[str, Any] | None:
    """The tag and content of plain data; tag "value" for what stands for another plain value; None for the rest."""
    kind = type(value)
    if kind.__module__ == PROGRAM_MODULE and not isinstance(value, tuple):
        return None
    for built_in, tag, content_of in _BUILT_IN:
        if isinstance(value, built_in):
            return tag, content_of(value)
    if (kind.__module__, kind.__name__) in _BY_TEXT:
        writer, _ = _BY_TEXT[kind.__module__, kind.__name__]
        return "text", [kind.__module__, kind.__name__, getattr(value, writer)()]
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return "value", value.tolist()
    if kind is type and value in _TYPES:
        return "type", value.__name__
    return None


_BUILT_IN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (  # (type, tag, content), also for subclasses
    (list, "list", list.__iter__),
    (tuple, "tuple", tuple.__iter__),
    (set, "set", set.__iter__),
    (frozenset, "frozenset", frozenset.__iter__),
    (dict, "dict", dict.items),
    (int, "value", int.__int__),
    (float, "value", float.__float__),
    (str, "value", str.__str__),
    (bytes, "bytes", bytes.hex),
    (bytearray, "bytes", bytearray.hex),
    (complex, "complex", lambda value: [value.real, value.imag]),
    (range, "range", lambda value: [hex(part) for part in (value.start, value.stop, value.step)]),
)


def decode(value: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` wrote; `resolve` reads what its `refer` wrote."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _READERS[tag](content, resolve) if tag in _READERS else resolve(tag, content)


def _read_text(content: Any) -> Any:
    module, name, text = content
    maker = getattr(importlib.import_module(module), name) if (module, name) in _BY_TEXT else None
    if maker is None:
        raise ValueError(f"{module}.{name} is not a type that crosses as text")
    reader = _BY_TEXT[module, name][1]
    return getattr(maker, reader)(text) if reader else maker(text)


def _read_all(content: Any, resolve: Callable[[str, Any], Any]) -> list[Any]:
    return [decode(part, resolve) for part in content]


_READERS: dict[str, Callable[[Any, Callable[[str, Any], Any]], Any]] = {
    "list": _read_all,
    "tuple": lambda content, resolve: tuple(_read_all(content, resolve)),
    "set": lambda content, resolve: set(_read_all(content, resolve)),
    "frozenset": lambda content, resolve: frozenset(_read_all(content, resolve)),
    "dict": lambda content, resolve: {decode(key, resolve): decode(part, resolve) for key, part in content},
    "int": lambda content, _: int(content, 16),
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, _: complex(*content),
    "range": lambda content, _: range(*(int(part, 16) for part in content)),
    "text": lambda content, _: _read_text(content),
    "type": lambda content, _: NAMED_TYPES[content],
}


def replace(target: Any, content: Any) -> None:
    """Give a list, dict or set the content that a copy of it got in the other process."""
    if isinstance(target, list):
        target[:] = content
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(content)


def is_mutable(value: Any) -> bool:
    """Whether a call may have changed the value in place in a way that `replace` can repeat."""
    return type(value) in (list, dict, set)


def is_iterator(value: Any) -> bool:
    """Whether the value is a generator or another iterator that the other process can only be given as a list."""
    return hasattr(value, "__next__") and not isinstance(value, itertools.count | itertools.cycle)
