"""The elements of a JSON array in a file, one at a time, however large the file is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from curator.errors import PoolError, RowRefused

CHUNK_CHARACTERS = 1 << 20
_SPACE = " \t\r\n"


class WrittenFloat(float):
    """A float of a JSON file that prints as it is written there: a gold of `1.10` stays `1.10`."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Parse, and keep the text."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def _refuse_constant(name: str) -> NoReturn:
    raise RowRefused(f"not JSON: {name} is no number of JSON; write null where there is none")


DECODER = json.JSONDecoder(parse_float=WrittenFloat, parse_constant=_refuse_constant)
"""Of one row. Raises RowRefused for NaN and Infinity, which Python writes and no other reader of JSON takes."""
_LENIENT = json.JSONDecoder()
"""Finds where an element ends that is refused."""


def elements(
    path: Path, advance: Callable[[int], None] = lambda n: None, *, chunk_characters: int = CHUNK_CHARACTERS
) -> Iterator[Any]:
    """The elements of the array that a file is, each a value or a RowRefused.

    `advance` is told how many further characters are read.

    Raises PoolError, with the line, where it is no array, or the text goes on after it.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from _Array(file, advance, chunk_characters)
        except _NotJson as error:
            raise PoolError(f"{path}:{error.line}: not JSON: {error}") from error
        except (ValueError, RecursionError) as error:
            # Bytes that are no text, integers of thousands of digits, thousands of nested brackets.
            raise PoolError(f"{path}: not JSON that can be read: {error}") from error


class _NotJson(Exception):
    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


class _Array:
    """A window of text that is moved over the file; an element is parsed once it is whole in the window."""

    def __init__(self, file: TextIO, advance: Callable[[int], None], chunk_characters: int) -> None:
        self._file, self._advance, self._chunk = file, advance, chunk_characters
        self._text, self._at, self._line, self._is_at_end = "", 0, 1, False

    def __iter__(self) -> Iterator[Any]:
        self._expect("[", "the file does not begin with an array")
        if self._next() != "]":
            yield self._element()
            while self._next() == ",":
                self._at += 1
                yield self._element()
        self._expect("]", "expected ',' or ']' after an element")
        if self._next():
            raise _NotJson("the text goes on after the array", self._line_at(self._at))

    def _expect(self, character: str, otherwise: str) -> None:
        if self._next() != character:
            raise _NotJson(otherwise, self._line_at(self._at))
        self._at += 1

    def _next(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or self._is_at_end:
                return self._text[self._at : self._at + 1]
            self._read_on(self._chunk)

    def _element(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decoded()
            except json.JSONDecodeError as error:
                if self._is_at_end:
                    raise _NotJson(error.msg, self._line_at(error.pos)) from error
            else:
                # A number at the very end of the window may go on behind it.
                if end < len(self._text) or self._is_at_end:
                    self._at = end
                    return value
            # Twice as much each time: a large element is not parsed once a chunk.
            self._read_on(max(self._chunk, len(self._text) - self._at))

    def _decoded(self) -> tuple[Any, int]:
        try:
            return DECODER.raw_decode(self._text, self._at)
        except RowRefused as refusal:
            return refusal, _LENIENT.raw_decode(self._text, self._at)[1]

    def _read_on(self, num_characters: int) -> None:
        self._line = self._line_at(self._at)
        more = self._file.read(num_characters)
        self._is_at_end = not more
        self._advance(len(more))
        self._text, self._at = self._text[self._at :] + more, 0

    def _line_at(self, position: int) -> int:
        return self._line + self._text.count("\n", 0, position)
