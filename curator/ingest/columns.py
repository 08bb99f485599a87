"""How a value of a known column becomes a prompt or a gold. Each reader takes one raw value and nothing else."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from curator.errors import RowRefused

Prompt = str | tuple[Mapping[str, str], ...]
SEPARATOR = "####"
_GROUPED_NUMBER = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


def read_prompt(value: Any) -> Prompt:
    """Text, or a list of messages of role and content, also as the text of a JSON list. Raises RowRefused."""
    if isinstance(value, str):
        messages = _messages_in(value)
        return value if messages is None else read_prompt(messages)
    if not isinstance(value, list):
        raise RowRefused(f"the prompt is a {type(value).__name__}, neither text nor a list of messages")
    return tuple(_read_message(message) for message in value)


def _messages_in(text: str) -> list[Any] | None:
    """The messages that a text is the JSON of; None for all other texts, which are prompts as they stand."""
    if not text.startswith("[") or '"role"' not in text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_messages = isinstance(value, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value
    )
    return value if is_messages else None


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


_SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Names of roles in turns of `from` and `value`."""


def read_turns(value: Any) -> Prompt:
    """As `read_conversation`, of turns with `from` and `value`; one question alone is its text. Raises RowRefused."""
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) and "from" in turn for turn in value):
        raise RowRefused("the turns are no list of objects with from and value")
    # The last turn may hold a gold instead of a text.
    messages = [{"role": _SPEAKERS.get(t["from"], t["from"]), "content": t.get("value") or ""} for t in value]
    prompt = read_conversation(messages)
    is_question = len(prompt) == 1 and not isinstance(prompt, str) and prompt[0]["role"] == "user"
    return prompt[0]["content"] if is_question and not isinstance(prompt, str) else prompt


def read_turns_gold(value: Any) -> str:
    """The `ground_truth` of the last turn. Raises RowRefused where it has none."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, Mapping) or last.get("ground_truth") is None:
        raise RowRefused("the last turn has no ground_truth")
    return read_ground_truth(last["ground_truth"])


def _read_message(message: Any) -> Mapping[str, str]:
    if not isinstance(message, Mapping):
        raise RowRefused(f"a message is a {type(message).__name__}, not an object of role and content")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = "".join(map(_read_part, content))
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowRefused("a message needs a role and a content that are text")
    return {"role": role, "content": content}


def _read_part(part: Any) -> str:
    """The text of one part of a message's content; parts that are joined are the same prompt as one text."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise RowRefused(f"a message has a part of type '{kind}'; only text can be sampled from")
    return str(part["text"])


def is_blank(prompt: Prompt) -> bool:
    """Whether nothing is asked: no text but white space, or none outside system messages."""
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(m["content"].strip() for m in prompt if m["role"] != "system")


def read_gold(value: Any) -> str:
    """Text or a number as text; a list of one as that one; a list of several as JSON text. Raises RowRefused.

    What several golds mean, all or any of them, is the verifier's to say.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        raise RowRefused("the gold is NaN or infinite, which is no number")
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(gold, str | int | float) for gold in value):
        golds = [gold if isinstance(gold, str) else read_gold(gold) for gold in value]
        return golds[0] if len(golds) == 1 else json.dumps(golds, ensure_ascii=False)
    raise RowRefused(f"the gold is a {_kind(value)}, neither text nor a number, nor a list of these")


def _one_of_a_list(text: str) -> str:
    """The only text of a JSON list of one text, such as `["12"]`; every other text as it is."""
    if not (text.startswith('["') and text.endswith('"]')):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return str(value[0]) if len(value) == 1 and isinstance(value[0], str) else text


def _kind(value: Any) -> str:
    return "list without elements" if value == [] else type(value).__name__


def read_ground_truth(value: Any) -> str:
    """As `read_gold`; also `{"value": gold}`, and the text of a JSON list of one text. Raises RowRefused."""
    gold = value["value"] if isinstance(value, Mapping) and "value" in value else value
    return _one_of_a_list(gold) if isinstance(gold, str) else read_gold(gold)


_GOLD_KEYS = ("ground_truth", "answer", "expected_answer", "solution")
_TEST_KEYS = frozenset({"tests", "test_cases", "inputs", "outputs", "input_output", "fn_name", "game_data_str"})


def read_check(value: Any) -> str:
    """What checks the answer, as an object, its JSON or its Python literal: the gold in it, or else its tests as JSON.

    Raises RowRefused where it holds neither.
    """
    found, text = _parsed(value) if isinstance(value, str) else (value, None)
    if isinstance(found, list) and found:
        return text or json.dumps(found, ensure_ascii=False)
    if not isinstance(found, Mapping):
        raise RowRefused(f"what checks the answer is {_kind(found)}, neither an object nor a list of tests")
    for key in _GOLD_KEYS:
        if found.get(key) is not None:
            return read_ground_truth(found[key])
    if _TEST_KEYS.isdisjoint(found):
        raise RowRefused(
            f"what checks the answer has {', '.join(sorted(map(str, found))) or 'no keys'}; looked for "
            f"{', '.join((*_GOLD_KEYS, *sorted(_TEST_KEYS)))}"
        )
    return text or json.dumps(found, ensure_ascii=False)


def _parsed(text: str) -> tuple[Any, str | None]:
    """The value of a text, and the text again where it is JSON."""
    try:
        return json.loads(text), text
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text), None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise RowRefused("what checks the answer is neither JSON nor a Python literal") from None


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
