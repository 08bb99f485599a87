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

The time is linear in the response, whatever a policy writes: nothing is searched from every position, and a pattern
that could give back what it has read is possessive (`*+`), so that no run of characters is read over and over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
_BARE_BOX = re.compile(r"(?:-?[\w.]+)?")
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_MARKER = re.compile(
    r"(?:^|(?<=[^#]))####(?!#)"
    r"|(?:\bthe\s++)?(?:\bfinal\s++|\bcorrect\s++)?\banswers?\b(?:\s++(?:to|for|of)\b[^.\n:]{0,60}?)?[*_]*+"
    r"(?:\s*+[:=\uff1a][*_]*|\s++(?:is|are)\b[*_]*+(?:\s*+:)?)"
    r"|\bfinal\s+(?:answer|result)[*_]*\s*\n",
    re.IGNORECASE,
)
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|resp|vs|approx|cf|eq|no|etc)|\\)$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?。](?=[\"'\u201d\u2019)*\]$}]*(?:\s|$))|[!?。]")
_PARAGRAPH = re.compile(r"\n[ \t]*+\n")
_JOINS_PARAGRAPHS = re.compile(
    r"(?:[-*$\\\[\](),;&\s]|\btext\b|[{}])*+(?:and|or)?[-*$\\\[\](),;&\s{}]*+$", re.IGNORECASE
)
_REASON = re.compile(r"(?:,|(?<!\s))\s++(?:because|since|as|so|which|where|when|for|after|by|I hope)\b", re.IGNORECASE)
_FILLER = re.compile(
    r"^(?:\s|[*_:]|\b(?:therefore|thus|then|simply|just|clearly|equal to|given by|either|both)\b,?)+", re.IGNORECASE
)
_MATH_SPAN = re.compile(r"(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATH_OPENING = re.compile(r"(?<!\\)\$|\\[(\[]")
_MATH_CLOSING = {"$": re.compile(r"(?<!\\)\$"), "\\(": re.compile(r"\\\)"), "\\[": re.compile(r"\\\]")}
_JOINS_SPANS = re.compile(r"(?:,?\s*+(?:and|or)|,|;|=)?", re.IGNORECASE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# The longest abbreviation, and a line end after it.
_ABBREVIATION_CHARACTERS = 8
_PADDING = " \n\t~"


def extract(response_text: str, *, is_cut: bool = False) -> Extraction:
    """The final answer of a response by the rules above; `is_cut`: it ended at the length limit."""
    text = _after_thinking(response_text)
    if text is None:
        return Extraction((), "the thinking never ended")
    opening, closing, is_open = _last_tags(text)
    if is_open:
        return Extraction((), "an unterminated answer tag")
    if opening and closing:
        return _from_text(text[opening.end() : closing.start()], is_cut=False, source="tags")
    return _from_text(text, is_cut=is_cut, source=WHOLE)


def _last_tags(text: str) -> tuple[re.Match[str] | None, re.Match[str] | None, bool]:
    """The last answer tags, from the first that opens to the one that closes it; whether one opens after the former."""
    first = last = opening = closing = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            first, last = first or tag, tag
        elif first is not None:
            opening, closing, first = first, tag, None
    is_open = last is not None and (opening is None or last.start() > opening.start())
    return opening, closing, is_open


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
    braces: Mapping[int, int] | None = None
    position = 0
    while match := _BOX.search(text, position):
        braces = closing_braces(text) if braces is None else braces
        box = _read_box(text, match, braces)
        boxes.append(box)
        position = box.end
    return boxes


def _read_box(text: str, match: re.Match[str], braces: Mapping[int, int]) -> Box:
    if not text.startswith("{", match.end()):
        content = _bare_content(text, match.end())
        return Box(match.start(), match.end() + len(content), content)
    end = braces.get(match.end())
    if end is None:
        return Box(match.start(), len(text), None)
    return Box(match.start(), end + 1, _without_boxes(text, match.end() + 1, end, braces))


def closing_braces(text: str) -> dict[int, int]:
    r"""For every brace that opens and is closed, the index of the one that closes it. \{ and \} are characters."""
    closed_by, open_ones = dict[int, int](), list[int]()
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_ones.append(match.start())
        elif match[0] == "}" and open_ones:
            closed_by[open_ones.pop()] = match.start()
    return closed_by


def _without_boxes(text: str, start: int, end: int, braces: Mapping[int, int]) -> str:
    """text[start:end], in which every box gives way to its content, each without padding around it."""
    boxes = {box.start(): box.end() for box in _BOX.finditer(text, start, end)}
    if not boxes:
        return text[start:end].strip(_PADDING)
    # Boxes may be nested as deep as the text is long: one pass, with the boxes that are open as a list. Each has its
    # closing brace, and the length of `kept` at which its content began.
    kept, open_boxes, position = list[str](), [(end, 0)], start
    while open_boxes:
        closing, length = open_boxes[-1]
        if position == closing:
            while len(kept) > length and kept[-1] in _PADDING:
                kept.pop()
            open_boxes.pop()
            position += 1
        elif (opening := boxes.get(position)) is None:
            if len(kept) > length or text[position] not in _PADDING:
                kept.append(text[position])
            position += 1
        elif text.startswith("{", opening):
            open_boxes.append((braces[opening], len(kept)))
            position = opening + 1
        else:
            bare = _bare_content(text, opening)
            kept += bare
            position = opening + len(bare)
    return "".join(kept)


def _bare_content(text: str, position: int) -> str:
    """What a box without braces holds."""
    match = _BARE_BOX.match(text, position)
    return match[0] if match else ""


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
    return any(not _is_abbreviation(between, end.start()) for end in _SENTENCE_END.finditer(between))


def _is_abbreviation(text: str, end: int) -> bool:
    """Whether an abbreviation stands before `end`."""
    return _ABBREVIATION.search(text, max(0, end - _ABBREVIATION_CHARACTERS), end) is not None


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
        if line[end.start()] == "." and not _is_abbreviation(line, end.start()):
            line = line[: end.start()]
            break
    return line.strip(" \t*_`.")


def _spans_or_text(text: str) -> tuple[str, ...]:
    """The formulas at the head of the text if it begins with one, joined by "and", "or" and commas; else the text."""
    spans: list[str] = []
    position = 0
    for span in _math_spans(text):
        if spans and not _JOINS_SPANS.fullmatch(text[position : span.start()].strip()):
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


def _math_spans(text: str) -> Iterator[re.Match[str]]:
    """The formulas, from left to right. One that opens and never closes is not looked for to the end of the text."""
    last = {opening: _last_start(closing, text) for opening, closing in _MATH_CLOSING.items()}
    position = 0
    while opening := _MATH_OPENING.search(text, position):
        position = opening.end()
        # What closes it must come after one character at least.
        if last[opening[0]] > position and (span := _MATH_SPAN.match(text, opening.start())):
            yield span
            position = span.end()


def _last_start(pattern: re.Pattern[str], text: str) -> int:
    """Where the last match begins; -1 where there is none."""
    last = -1
    for match in pattern.finditer(text):
        last = match.start()
    return last


def _before_reason(text: str) -> str:
    match = _REASON.search(text)
    return (text[: match.start()] if match else text).strip(" \t\n*_`")
