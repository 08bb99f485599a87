r"""Finds the final answer in a response: boxes, answer tags, then marked text.

The rules, in order:
1. What was thought does not count: with a closing </think> only the text after the last one is read; a <think> that
   never closes leaves nothing.
2. The last <answer>...</answer>, if there is one, is the text that is read further; an <answer> that never closes is
   no answer.
3. Boxes (\boxed, \fbox). Empty ones are ignored. The boxes of one sentence form a set; a box in a later sentence
   replaces all earlier ones. If the last box never closes, there is no answer.
4. Where there is no box: the text after the last marker ("#### ", "Final Answer:", "The answer is", "Answer:").
5. What stands in answer tags, or a response of one line, counts whole if it has neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_WHOLE_CHARACTERS = 200
"""A response without box and marker is read as nothing but an answer up to this length."""


WHOLE = "whole"
NO_ANSWER = "no box and no marked answer"


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer's parts as written, or why there is none."""

    parts: tuple[str, ...]
    source: str
    """box, marker, tags or WHOLE; where there are no parts, the reason."""


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE_BOX = re.compile(r"-?[\w.]+")
_ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKER = re.compile(
    r"(?:^|(?<=[^#]))####(?!#)"
    r"|(?:\bthe\s+)?(?:\bfinal\s+|\bcorrect\s+)?\banswers?\b(?:\s+(?:to|for|of)\b[^.\n:]{0,60}?)?[*_]*"
    r"(?:\s*[:=\uff1a][*_]*|\s+(?:is|are)\b[*_]*(?:\s*:)?)"
    r"|\bfinal\s+(?:answer|result)[*_]*\s*\n",
    re.IGNORECASE,
)
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|resp|vs|approx|cf|eq|no|etc)|\\)$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?。](?=[\"'\u201d\u2019)*\]$}]*(?:\s|$))|[!?。]")
_PARAGRAPH = re.compile(r"\n[ \t]*\n(?P<rest>.*)", re.DOTALL)
_JOINS_PARAGRAPHS = re.compile(r"(?:[-*$\\\[\](),;&\s]|\btext\b|[{}])*(?:and|or)?[-*$\\\[\](),;&\s{}]*$", re.IGNORECASE)
_REASON = re.compile(r",?\s+(?:because|since|as|so|which|where|when|for|after|by|I hope)\b", re.IGNORECASE)
_FILLER = re.compile(
    r"^(?:\s|[*_:]|\b(?:therefore|thus|then|simply|just|clearly|equal to|given by|either|both)\b,?)+", re.IGNORECASE
)
_MATH_SPAN = re.compile(r"(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINS_SPANS = re.compile(r"\s*(?:,?\s*(?:and|or)|,|;|=)?\s*$", re.IGNORECASE)


def extract(response_text: str, *, is_cut: bool = False) -> Extraction:
    """The final answer of a response by the rules above; `is_cut`: it ended at the length limit."""
    text = _after_thinking(response_text)
    if text is None:
        return Extraction((), "the thinking never ended")
    tags = list(_ANSWER_TAGS.finditer(text))
    opened = text.lower().rfind("<answer>")
    if opened >= 0 and (not tags or opened > tags[-1].start()):
        return Extraction((), "an unterminated answer tag")
    if tags:
        return _from_text(tags[-1][1], is_cut=False, source="tags")
    return _from_text(text, is_cut=is_cut, source=WHOLE)


def _from_text(text: str, *, is_cut: bool, source: str) -> Extraction:
    boxes = find_boxes(text)
    if boxes and boxes[-1].content is None:
        return Extraction((), "an unterminated box")
    parts = _last_sentence(text, [box for box in boxes if box.content])
    if parts:
        return Extraction(parts, "box")
    marked = _marked(text, is_cut=is_cut)
    if marked is not None:
        return marked
    whole = text.strip()
    if source == "tags" and whole and not boxes:
        return Extraction(_spans_or_text(whole), source)
    if whole and len(whole) <= MAX_WHOLE_CHARACTERS and "\n" not in whole and not boxes and not is_cut:
        return Extraction((whole,), source)
    return Extraction((), NO_ANSWER)


def _after_thinking(text: str) -> str | None:
    _, closing, rest = text.rpartition("</think>")
    if closing:
        text = rest
    return None if "<think>" in text else text


@dataclass(frozen=True, slots=True)
class Box:
    """One box; content is None if it never closes."""

    start: int
    end: int
    content: str | None


def find_boxes(text: str) -> list[Box]:
    """The outermost boxes, from left to right."""
    boxes: list[Box] = []
    position = 0
    while match := _BOX.search(text, position):
        box = _read_box(text, match)
        boxes.append(box)
        position = box.end
    return boxes


def _read_box(text: str, match: re.Match[str]) -> Box:
    if text[match.end() : match.end() + 1] != "{":
        bare = _BARE_BOX.match(text, match.end())
        return Box(match.start(), bare.end() if bare else match.end(), bare[0] if bare else "")
    end = closing_brace(text, match.end())
    if end is None:
        return Box(match.start(), len(text), None)
    return Box(match.start(), end + 1, _without_boxes(text[match.end() + 1 : end]).strip(" \n\t~"))


def closing_brace(text: str, opening: int) -> int | None:
    r"""The index of the brace that closes the one at `opening`, or None. \{ and \} are characters, not braces."""
    depth, position = 0, opening
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _without_boxes(content: str) -> str:
    inner = find_boxes(content)
    for box in reversed(inner):
        content = content[: box.start] + (box.content or "") + content[box.end :]
    return content


def _last_sentence(text: str, boxes: list[Box]) -> tuple[str, ...]:
    parts: list[str] = []
    previous_end = 0
    for box in boxes:
        if parts and _ends_sentence(text[previous_end : box.start]):
            parts = []
        parts.append(box.content or "")
        previous_end = box.end
    return tuple(parts)


def _ends_sentence(between: str) -> bool:
    paragraph = _PARAGRAPH.search(between)
    if paragraph and not _JOINS_PARAGRAPHS.match(between):
        return True
    return any(not _ABBREVIATION.search(between[: end.start()]) for end in _SENTENCE_END.finditer(between))


def _marked(text: str, *, is_cut: bool) -> Extraction | None:
    last = None
    for match in _MARKER.finditer(text):
        last = match
    if last is None:
        return None
    tail = text[last.end() :]
    tail = _FILLER.sub("", tail)
    display = re.match(r"\s*(?:\$\$|\\\[)(.+?)(?:\$\$|\\\])", tail, re.DOTALL)
    line, newline, _ = (display[0].strip(), "\n", "") if display else tail.lstrip(" \t").partition("\n")
    if is_cut and not newline:
        return Extraction((), "cut off in the marked answer")
    parts = _spans_or_text(_FILLER.sub("", _first_sentence(line)))
    return Extraction(parts, "marker") if any(parts) else Extraction((), "an empty marked answer")


def _first_sentence(line: str) -> str:
    for end in _SENTENCE_END.finditer(line):
        if line[end.start()] == "." and not _ABBREVIATION.search(line[: end.start()]):
            line = line[: end.start()]
            break
    return line.strip(" \t*_`.")


def _spans_or_text(text: str) -> tuple[str, ...]:
    """The formulas at the head of the text if it begins with one, joined by "and", "or" and commas; else the text."""
    spans: list[str] = []
    position = 0
    for span in _MATH_SPAN.finditer(text):
        if spans and not _JOINS_SPANS.match(text[position : span.start()]):
            break
        if not spans and text[: span.start()].strip(" *_("):
            return (_before_reason(text),)
        spans.append(next(group for group in span.groups() if group is not None))
        position = span.end()
    if not spans:
        return (_before_reason(text),)
    rest = _before_reason(text[position:]).strip(" *_).")
    if len(spans) == 1 and rest and re.fullmatch(r"[A-Za-z%°][\w %°/^]{0,30}", rest):
        return (f"{spans[0]} \\text{{ {rest}}}",)  # "$5$ apples": the unit stands outside
    return tuple(spans)


def _before_reason(text: str) -> str:
    match = _REASON.search(text)
    return (text[: match.start()] if match else text).strip(" \t\n*_`")
