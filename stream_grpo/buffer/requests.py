"""The fields of messages, checked: what is malformed is refused with its name, before anything is done."""

from __future__ import annotations

from typing import Any

from curator.wire import Message
from stream_grpo.buffer.book import Refusal
from stream_grpo.transport.channels import forks_of, version_of
from stream_grpo.types import PolicyVersion


def _refuse(message: Message, name: str, expected: str) -> Refusal:
    return Refusal(f"{message.kind}: {name} = {message.fields.get(name)!r}: expected {expected}")


def text_of(message: Message, name: str) -> str:
    """A text that is not empty."""
    value = message.fields.get(name)
    if not isinstance(value, str) or not value:
        raise _refuse(message, name, "a text")
    return value


def count_of(message: Message, name: str) -> int:
    """A whole number from 0."""
    value = message.fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _refuse(message, name, "a count")
    return value


def optional_count_of(message: Message, name: str) -> int | None:
    """A whole number from 0, or nothing."""
    return None if message.fields.get(name) is None else count_of(message, name)


def list_of(message: Message, name: str) -> list[str]:
    """A list of texts."""
    value = message.fields.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refuse(message, name, "a list of texts")
    return value


def texts_of(message: Message, name: str) -> dict[str, str]:
    """A map of texts to texts."""
    value = message.fields.get(name)
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _refuse(message, name, "a map of texts to texts")
    return value


def record_of(message: Message) -> bytes:
    """The one body, an encoded group."""
    if len(message.body) != 1:
        raise Refusal(f"{message.kind}: expected one body, received {len(message.body)}")
    return message.body[0]


def tokens_of(message: Message) -> dict[str, dict[str, int]]:
    """Tokens by fate for each group."""
    value: Any = message.fields.get("tokens")
    is_map = isinstance(value, dict) and all(isinstance(by_fate, dict) for by_fate in value.values())
    if not is_map or not all(type(n) is int and n >= 0 for by_fate in value.values() for n in by_fate.values()):
        raise _refuse(message, "tokens", "counts by fate for every group")
    return dict(value)


def counts_of(message: Message, name: str) -> dict[str, int]:
    """A map of texts to whole numbers from 0."""
    value = message.fields.get(name)
    if not isinstance(value, dict) or not all(type(count) is int and count >= 0 for count in value.values()):
        raise _refuse(message, name, "a map of texts to counts")
    return value


def version_in(message: Message) -> PolicyVersion:
    """The policy version."""
    try:
        return version_of(message.fields)
    except (KeyError, TypeError, ValueError) as error:
        raise _refuse(message, "version", "[branch, step]") from error


def forks_in(message: Message) -> dict[int, PolicyVersion]:
    """The fork of every branch above 0."""
    try:
        return forks_of(message.fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refuse(message, "forks", "a map of branches to [branch, step]") from error
