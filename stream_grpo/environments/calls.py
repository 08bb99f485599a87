"""A tool call in the text of an action: found, read, or told why it is none. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_MAX_NAME = 64
# Of JSON under a grammar, in a row: a new line and two levels of two.
_MAX_WHITE_SPACE = 5


@dataclass(frozen=True, slots=True)
class Call:
    """A tool and what it is given."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be made."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a call is written. `json`: an object with `name` and `arguments`, as chat models write it; `plain`: the one
    argument of the one tool, as it stands."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    body: Literal["json", "plain"] = "json"
    tools: Mapping[str, str] = field(default_factory=dict)
    """The tools by name, each with the name of its one argument, a text. `plain` has exactly one."""

    def structural_tag(self) -> dict[str, Any]:
        """The grammar of an action with such a call, as vLLM and xgrammar take it: free text until the opening mark,
        then what `find_call` reads as a call, and after the closing mark nothing but the end."""
        if self.body == "plain":
            content: dict[str, Any] = {"type": "any_text"}
        else:
            schemas = [_schema(tool, argument) for tool, argument in self.tools.items()]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            # A closing mark inside a text would be read as the end of the call.
            content = {"type": "json_schema", "json_schema": schema, "excludes": [self.close]}
            # Without a bound a poor policy spends its tokens on white space.
            content["max_whitespace_cnt"] = _MAX_WHITE_SPACE
        tag = {"type": "tag", "begin": self.open, "content": content, "end": self.close}
        tags = {"type": "triggered_tags", "triggers": [self.open], "tags": [tag], "stop_after_first": True}
        return {"type": "structural_tag", "format": tags}

    def shortest_calls(self) -> list[str]:
        """An action with nothing but a valid call, for each tool: as short as one can be, its argument empty."""
        if self.body == "plain":
            return [f"{self.open}{self.close}"]
        bodies = ({"name": tool, "arguments": {argument: ""}} for tool, argument in self.tools.items())
        return [f"{self.open}{json.dumps(body, separators=(',', ':'))}{self.close}" for body in bodies]

    def __post_init__(self) -> None:
        for name, mark in {"open": self.open, "close": self.close}.items():
            if not isinstance(mark, str):
                raise ValueError(f"{name} = {mark!r}: expected a text, the mark of a call")
        if not self.open or not self.close:
            raise ValueError("open and close are the marks of a call: neither can be empty")
        if self.body not in ("json", "plain"):
            raise ValueError(f"body = {self.body!r}: expected 'json' or 'plain'")


def _schema(tool: str, argument: str) -> dict[str, Any]:
    """A call of one tool, in JSON Schema."""
    arguments = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"name": {"const": tool}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def find_call(action: str, form: CallFormat) -> Call | Malformed | None:
    """The call of an action; None where it has none, and is an answer. What stands around the marks is not looked at.

    One action makes one call: a second one is malformed, and neither is made.
    """
    _, opened, rest = action.partition(form.open)
    if not opened:
        return None
    body, closed, after = rest.partition(form.close)
    if not closed:
        return Malformed(f"the call is not closed by {form.close!r}")
    if form.open in after:
        return Malformed("more than one call in one action")
    if form.body == "plain":
        ((tool, argument),) = form.tools.items()
        return Call(tool, {argument: body.strip()})
    return _from_json(body, form)


def _from_json(body: str, form: CallFormat) -> Call | Malformed:
    try:
        plain = json.loads(body)
    except (ValueError, RecursionError):
        return Malformed("the call is no JSON")
    if not isinstance(plain, dict) or not isinstance(plain.get("name"), str):
        return Malformed("the call is no object with a name")
    name, arguments = plain["name"], plain.get("arguments", {})
    if name not in form.tools:
        return Malformed(f"no tool is called {name[:_MAX_NAME]!r}; there are {', '.join(sorted(form.tools))}")
    if not isinstance(arguments, dict):
        return Malformed("the arguments are no object")
    argument = form.tools[name]
    if not isinstance(arguments.get(argument), str):
        return Malformed(f"{name} needs the argument {argument!r}, a text")
    return Call(name, {argument: arguments[argument]})
