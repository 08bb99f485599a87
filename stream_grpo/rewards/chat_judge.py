"""A chat model that grades a response by a rubric: its messages, the score in its answer, several votes as one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import regex

from stream_grpo.config_http import Chat, ChatJudge
from stream_grpo.rewards.judging import Answer, EndpointError, Post, Results, filled, on_scale, reward_of, tails
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.types import RewardResult

MAX_READ_CHARACTERS = 20_000
"""A judge concludes at the end: no more than so much of the end of its answer is read."""

_PATTERN_S = 0.5
_MAX_OBJECTS = 64
# "8/10" and "8 out of 10" are 8, and only on a scale that ends at 10.
_NUMBER = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|\bout\s+of\b)\s*(\d+(?:\.\d+)?))?(?![\w]|\.\d)")


class ChatGrades:
    """Grades one response with `num_votes` answers of the judge."""

    def __init__(self, name: str, judge: ChatJudge) -> None:
        self._judge, self._results = judge, Results(name, judge.version)

    async def __call__(self, problem: ProblemRow, answers: Sequence[Answer], post: Post) -> list[RewardResult]:
        """One result for one answer: a score where more than half of the votes can be read, else unknown.

        Raises EndpointError where too many votes did not come, ValueError for a column that the row lacks.
        """
        (answer,) = answers
        body = chat_body(self._judge, self._judge.model, filled(self._judge.prompt, problem, response=answer.text))
        came = await asyncio.gather(*(ask(post, body) for _ in range(self._judge.num_votes)), return_exceptions=True)
        texts, failures = sorted_out(came)
        votes = [score for text in texts if (score := read_score(text, self._judge)) is not None]
        if 2 * len(votes) <= self._judge.num_votes:
            if 2 * len(texts) <= self._judge.num_votes:
                raise failures[0]
            return [
                self._results.unknown(f"no score in {len(texts) - len(votes)} of {len(texts)} votes: {tails(texts)}")
            ]
        return [self._result(votes, texts)]

    def _result(self, votes: Sequence[float], texts: Sequence[str]) -> RewardResult:
        judge = self._judge
        shown = f"votes {', '.join(f'{vote:g}' for vote in votes)} of {judge.num_votes}: {tails(texts)}"
        components = {f"vote_{i}": vote for i, vote in enumerate(votes)}
        if judge.combine == "majority":
            num_passes = sum(vote >= judge.pass_from for vote in votes)
            if 2 * num_passes == len(votes):
                return self._results.unknown(f"as many votes pass as fail, {shown}")
            passes = 2 * num_passes > len(votes)
            return self._results.scored(float(passes), passes, shown, components)
        score = fmean(votes) if judge.combine == "mean" else median(votes)
        return self._results.scored(reward_of(score, judge), score >= judge.pass_from, shown, components)


def chat_body(chat: Chat, model: str, prompt: str) -> dict[str, Any]:
    """The request of a chat completion, with the judge's own fields over the usual ones."""
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    return {
        "model": model,
        "messages": [*system, {"role": "user", "content": prompt}],
        "temperature": chat.temperature,
        "max_tokens": chat.max_tokens,
        **chat.body,
    }


async def ask(post: Post, body: dict[str, Any]) -> str:
    """The text of a chat completion, empty where the model gave none. Raises EndpointError for any other reply."""
    reply = await post(body)
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError(
            f"the reply has no choices[0].message.content; it has {', '.join(map(repr, reply))}"
        ) from None
    if text is not None and not isinstance(text, str):
        raise EndpointError(f"choices[0].message.content is {type(text).__name__}, not text")
    return text or ""


def sorted_out(came: Sequence[str | BaseException]) -> tuple[list[str], list[EndpointError]]:
    """The texts, and the failures of the endpoint. Raises whatever else there is."""
    texts = [item for item in came if isinstance(item, str)]
    failures = [item for item in came if isinstance(item, EndpointError)]
    for item in came:
        if isinstance(item, BaseException) and not isinstance(item, EndpointError):
            raise item
    return texts, failures


def concluded(text: str) -> str:
    """The end of a judge's answer, without what it thought."""
    return text[-MAX_READ_CHARACTERS:].rpartition("</think>")[2]


def read_score(text: str, judge: ChatJudge) -> float | None:
    """The score in an answer of the judge; None where there is none, or none of the scale."""
    end = concluded(text)
    if judge.read == "last_number":
        return _last_number(end, judge)
    found = _last_match(end, judge.pattern or "") if judge.read == "pattern" else _last_field(end, judge.field or "")
    if isinstance(found, str):
        found = judge.labels[found] if found in judge.labels else _as_number(found)
    return on_scale(found, judge)


def _last_number(text: str, judge: ChatJudge) -> float | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None or (last[2] is not None and float(last[2]) != judge.high):
        return None
    return on_scale(float(last[1]), judge)


def _last_match(text: str, pattern: str) -> str | None:
    """What the group of the pattern matches last; None too where the pattern takes too long."""
    last = None
    try:
        # Any pattern may go astray on any text: this engine has a time limit, and lets other threads run meanwhile.
        for match in regex.finditer(pattern, text, timeout=_PATTERN_S, concurrent=True):
            last = match
    except TimeoutError:
        return None
    return None if last is None else last[1]


def _last_field(text: str, field: str) -> Any:
    """The field of the last JSON object that has it and stands in no other that has it."""
    decoder, position, value, value_end = json.JSONDecoder(), len(text), None, 0
    for _ in range(_MAX_OBJECTS):
        if (position := text.rfind("{", 0, position)) < 0:
            break
        try:
            found, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            continue
        if field in found and end > value_end:  # around those that were found before it, or the first one
            value, value_end = found[field], end
    return value


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
