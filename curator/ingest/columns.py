"""How a value of a known column becomes a prompt or a gold. Each reader takes one raw value and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from curator.errors import RowRefused

Prompt = str | tuple[Mapping[str, str], ...]
SEPARATOR = "####"
_GROUPED_NUMBER = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


def read_prompt(value: Any) -> Prompt:
    """Text, or a list of messages of role and content. Raises RowRefused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowRefused(f"the prompt is a {type(value).__name__}, neither text nor a list of messages")
    return tuple(_read_message(message) for message in value)


def read_conversation(value: Any) -> Prompt:
    """A prompt whose last assistant turn is the answer: that turn is cut.

    Raises RowRefused where the conversation goes on after it, since the cut would drop what was asked last.
    """
    prompt = read_prompt(value)
    if isinstance(prompt, str):
        return prompt
    turns = [i for i, message in enumerate(prompt) if message["role"] == "assistant"]
    if not turns:
        return prompt
    if any(message["role"] == "user" for message in prompt[turns[-1] :]):
        raise RowRefused("a user turn follows the last assistant turn; to take the messages whole, map prompt to them")
    return prompt[: turns[-1]]


def _read_message(message: Any) -> Mapping[str, str]:
    if not isinstance(message, Mapping):
        raise RowRefused(f"a message is a {type(message).__name__}, not an object of role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowRefused("a message needs a role and a content that are text")
    return {"role": role, "content": content}


def is_blank(prompt: Prompt) -> bool:
    """Whether nothing is asked: no text but white space, or none outside system messages."""
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(m["content"].strip() for m in prompt if m["role"] != "system")


def read_gold(value: Any) -> str:
    """Text or a number, as text. Raises RowRefused."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise RowRefused(f"the gold is a {type(value).__name__}, neither text nor a number")


def read_ground_truth(value: Any) -> str:
    """As `read_gold`; also `{"value": gold}`."""
    return read_gold(value["value"] if isinstance(value, Mapping) and "value" in value else value)


def read_answer(value: Any) -> str:
    """As `read_gold`; of text with a '####' only what follows the last one."""
    gold = read_gold(value)
    return _after_separator(gold) if SEPARATOR in gold else gold


def read_solution(value: Any) -> str:
    """The last box, or else what follows the last '####': in worked solutions '####' may also be a heading."""
    text = read_gold(value)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if SEPARATOR in text:
        return _after_separator(text)
    raise RowRefused(f"the solution holds neither \\boxed nor '{SEPARATOR}'")


def _after_separator(text: str) -> str:
    gold = text.rpartition(SEPARATOR)[2].strip()
    return gold.replace(",", "") if _GROUPED_NUMBER.fullmatch(gold) else gold


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces close, or None."""
    for start in reversed([m.end() for m in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            # An escaped brace is a character of the answer: \boxed{\{1, 2\}}.
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[start:end]
    return None
