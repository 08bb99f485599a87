"""Calls between the tests and the program, which run in two processes that share nothing but two pipes.

Plain data crosses by value. Everything else of the program stays in its process; the tests hold a `Remote`, which
calls, reads attributes and items, and iterates there. The program can therefore put nothing into the process of the
tests that runs there, and no object of it equals plain data.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from stream_grpo.rewards.inside import values
from stream_grpo.rewards.inside.wire import WireClosedError, read_message, write_message


class CannotCrossError(TypeError):
    """The tests give the program an object that has no meaning in another process."""


class Peer:
    """One end of the two pipes. `answer` does what the other end asks; `may_export` says what it may get hold of."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        answer: Callable[[str, list[Any], dict[str, Any]], Any],
        may_export: Callable[[Any], bool],
    ) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._answer, self._may_export = answer, may_export
        self._exported: list[Any] = []

    def ask(self, operation: str, /, *arguments: Any, **named: Any) -> Any:
        """Have the other end do something, serving what it asks meanwhile; raise what it raised.

        Lists, dicts and sets among the arguments are changed here as they were changed there.
        """
        question = {
            "do": operation,
            "arguments": [self._encode(argument) for argument in arguments],
            "named": {name: self._encode(argument) for name, argument in named.items()},
        }
        write_message(self._write_fd, question)
        while "do" in (reply := read_message(self._read_fd)):
            self._serve(reply)
        if "raised" in reply:
            raise _from_program(*reply["raised"])
        for index, content in reply["changed"]:
            values.replace(arguments[index], self._decode(content))
        return self._decode(reply["value"])

    def serve(self) -> None:
        """Do what the other end asks until it is gone."""
        while True:
            try:
                question = read_message(self._read_fd)
            except WireClosedError:
                return
            self._serve(question)

    def _serve(self, question: dict[str, Any]) -> None:
        reply: dict[str, Any]
        try:
            arguments = [self._decode(argument) for argument in question["arguments"]]
            named = {name: self._decode(argument) for name, argument in question["named"].items()}
            value = self._encode(self._answer(question["do"], arguments, named))
            reply = {"value": value, "changed": self._changes(arguments, question["arguments"])}
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = {"raised": [kinds, str(error)[:1000]]}
        write_message(self._write_fd, reply)

    def _changes(self, arguments: list[Any], before: list[Any]) -> list[tuple[int, Any]]:
        after = [(i, self._encode(part)) for i, part in enumerate(arguments) if values.is_mutable(part)]
        return [(i, part) for i, part in after if part != before[i]]

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._refer)

    def _refer(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if not self._may_export(value):
            if values.is_iterator(value):
                return {"iterator": self._encode(list(value))}
            raise CannotCrossError(f"an object of type {type(value).__name__} cannot be given to the program")
        self._exported.append(value)
        return {"mine": len(self._exported) - 1}

    def _decode(self, value: Any) -> Any:
        return values.decode(value, self._resolve)

    def _resolve(self, tag: str, content: Any) -> Any:
        if tag == "mine":
            return Remote(self, int(content))
        if tag == "yours":
            return self._exported[content]
        if tag == "iterator":
            return iter(self._decode(content))
        raise ValueError(f"a value of the unknown kind {tag!r}")


class Remote:
    """An object in the other process. Equal to no plain data, whatever its class says."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it there."""
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __contains__(self, value: Any) -> bool:
        return bool(self._ask("contains", value))

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._ask("eq", other))

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_number"))

    def _ask(self, operation: str, /, *arguments: Any, **named: Any) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.ask(operation, self, *arguments, **named)


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **named: target(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda target, key: target[key],
    "setitem": lambda target, key, value: target.__setitem__(key, value),
    "contains": lambda target, value: value in target,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "eq": lambda target, other: target == other,
}


def program_peer(read_fd: int, write_fd: int, names: Mapping[str, Any], failure: BaseException | None) -> Peer:
    """The program's end: gives its names, or the exception it failed to load with, and does what it is asked."""

    def answer(operation: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if failure is not None:
            raise failure
        if operation == "name":
            value = names[arguments[0]]
            return ("module", value.__name__) if isinstance(value, ModuleType) else ("value", value)
        return _OPERATIONS[operation](*arguments, **named)

    return Peer(read_fd, write_fd, answer, lambda value: True)


def tests_peer(read_fd: int, write_fd: int) -> Peer:
    """The end of the tests: lends functions of the tests to the program, which may call them and nothing else."""

    def answer(operation: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if operation != "call":
            raise TypeError("functions of the tests can be called, and nothing else")
        return _OPERATIONS["call"](*arguments, **named)

    return Peer(read_fd, write_fd, answer, lambda value: callable(value) and not isinstance(value, type))


def is_from_program(error: BaseException) -> bool:
    """Whether the exception was raised in the program's process."""
    return getattr(error, "_is_from_program", False) is True


def _from_program(kinds: list[str], text: str) -> BaseException:
    error: BaseException = RuntimeError(f"{kinds[0]}: {text}")
    for name in kinds:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                error = kind(text)
            except TypeError:  # some want more than a text
                continue
            break
    error._is_from_program = True  # type: ignore[attr-defined]
    return error
