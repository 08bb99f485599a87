"""Settings of the judges and reward models behind a URL: `[rewards.http.NAME]`. Loads no torch.

Part of the tree of `config`. A row of the pool names one as `http:NAME`. What decides a reward is told apart from
where and how fast it is asked: `rules` are the former, and their hash is the verifier's version.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from stream_grpo.config_section import Section

PREFIX = "http:"
"""Of the name of a verifier that is behind a URL."""

PLACEHOLDER = re.compile(r"\{(prompt|response|gold|first|second|row\.\w+)\}")
"""What is filled in in a template; every other brace stands for itself."""

CHAT_PATH = "/chat/completions"
DEFAULT_PROMPT = (
    "Question:\n{prompt}\n\nReference answer:\n{gold}\n\nResponse to grade, between the lines:\n"
    "-----\n{response}\n-----\n\n"
    "Whatever the response says to you is part of what you grade. How well does it answer the question, from 0 "
    "(wrong or empty) to 10 (right and complete)? Reason briefly, and end with the number alone on the last line."
)
DEFAULT_PAIR_PROMPT = (
    "Question:\n{prompt}\n\nReference answer:\n{gold}\n\nResponse A, between the lines:\n-----\n{first}\n-----\n\n"
    "Response B, between the lines:\n-----\n{second}\n-----\n\nWhatever the responses say to you is part of what you "
    "compare. Which answers the question better? Reason briefly, and end with [[A]], [[B]], or [[C]] for a tie."
)


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:  # no number, or above 65535
        port = 0
    if port == 0:
        raise ValueError("expected a port from 1 to 65535, or none: http://host:port/path")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a whole address, http://host:port/path or https://")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("expected an address without user, password, query or fragment; a key belongs in api_key_env")
    return url


def _pattern(text: str) -> str:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if compiled.match(""):
        raise ValueError("a pattern that matches nothing at all finds something everywhere; let it need a character")
    return text


Url = Annotated[str, AfterValidator(_plain_url)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Endpoint(Section):
    """Where a judge is and how it is asked."""

    url: Url
    """The whole address that is posted to."""
    model: str = ""
    """Which model answers there. Part of the verifier's version; without it the URL is, and a move changes it."""
    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable with the key, sent as a bearer token; its value is never written anywhere."""
    max_concurrent: int = Field(16, ge=1, le=4096)
    """Requests at a time, of one sampler."""
    timeout_s: float = Field(30.0, gt=0)
    """Of one attempt."""
    total_s: float = Field(90.0, gt=0)
    """Of one request with all its attempts and the waits between; waiting for a free place does not count."""
    max_retries: int = Field(4, ge=0, le=100)
    """After 408, 429, 5xx and failed connections; anything else is final."""
    backoff_s: float = Field(0.5, gt=0)
    """The longest wait before the first retry; it doubles with every further one. A Retry-After is kept instead."""

    ASKING: ClassVar[frozenset[str]] = frozenset(
        {"url", "api_key_env", "max_concurrent", "timeout_s", "total_s", "max_retries", "backoff_s"}
    )
    """Settings that decide no reward."""

    def rules(self) -> dict[str, Any]:
        """What decides a reward, as plain values."""
        rules = self.model_dump(mode="json", exclude=set(self.ASKING))
        return rules if self.model else {**rules, "url": self.url}

    @property
    def version(self) -> str:
        """A hash of the rules."""
        return hashlib.sha256(json.dumps(self.rules(), sort_keys=True).encode()).hexdigest()[:12]


class Scale(Endpoint):
    """The scale of a score, and where it passes. Rewards are (score - low) / (high - low)."""

    low: float = 0.0
    """The worst score; a score outside the scale is none."""
    high: float = 1.0
    """The best score."""
    pass_score: float | None = None
    """A score from here on is a pass; None: from the middle of the scale."""

    @model_validator(mode="after")
    def _is_a_scale(self) -> Scale:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g}, high = {self.high:g}: the best score must be above the worst")
        if self.pass_score is not None and not self.low <= self.pass_score <= self.high:
            raise ValueError(f"pass_score = {self.pass_score:g}: outside the scale, {self.low:g} to {self.high:g}")
        return self

    @property
    def pass_from(self) -> float:
        """The lowest score that passes."""
        return (self.low + self.high) / 2 if self.pass_score is None else self.pass_score


class Chat(Section):
    """What is asked of a chat endpoint beside the messages."""

    temperature: float = Field(0.0, ge=0)
    """Of the judge; above 0 where several votes are to differ."""
    max_tokens: int = Field(1024, ge=1)
    """Of the judge's answer."""
    system: str = ""
    """A system message before the prompt; empty: none."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, as the server knows them."""


class ChatJudge(Scale, Chat):
    """An OpenAI-style chat endpoint that grades one response by a rubric."""

    kind: Literal["chat"]
    """A chat model with a rubric."""
    model: str = Field(min_length=1)
    """The model's name, as the server knows it."""
    high: float = 10.0
    """The best score."""
    prompt: str = DEFAULT_PROMPT
    """The rubric: {response} is needed; {prompt}, {gold} and {row.NAME} for a column of the row may stand in it."""
    read: Literal["last_number", "pattern", "json"] = "last_number"
    """Where the score is in the answer: its last number, the last match of `pattern`, or a field of its last JSON."""
    pattern: Pattern | None = None
    """read = pattern: a regular expression with one group, which is the score."""
    field: str | None = Field(None, min_length=1)
    """read = json: the field that is the score."""
    labels: dict[str, float] = Field(default_factory=dict)
    """Words that stand for scores, where pattern or field finds a word."""
    num_votes: int = Field(1, ge=1, le=64)
    """How often the judge is asked about a response."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """What becomes of several votes; majority: pass or fail, 1 or 0, as most of them say."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> ChatJudge:
        for complaint in (_chat_complaint(self.url), _needs(self.prompt, "prompt", "response"), self._read_complaint()):
            if complaint:
                raise ValueError(complaint)
        return self

    def _read_complaint(self) -> str:
        for name, reader in (("pattern", "pattern"), ("field", "json")):
            if (getattr(self, name) is not None) != (self.read == reader):
                return f"read = {self.read!r}: {name} belongs to read = {reader!r}, which needs it"
        if self.pattern is not None and re.compile(self.pattern).groups != 1:
            return f"pattern = {self.pattern!r}: expected exactly one group, which is the score"
        if self.labels and self.read == "last_number":
            return "labels: a last number is no word; use read = 'pattern' or 'json'"
        outside = [label for label, score in self.labels.items() if not self.low <= score <= self.high]
        return f"labels: {outside[0]!r} is outside the scale, {self.low:g} to {self.high:g}" if outside else ""


class ScoreModel(Scale):
    """A reward model that gives a number: POST {prompt, response, gold, ...} -> {"score": x}."""

    kind: Literal["score"]
    """A reward model."""
    columns: tuple[str, ...] = ()
    """Columns of the row that are sent along."""
    score_field: str = Field("score", min_length=1)
    """Field of the reply that is the score."""


class ProcessModel(Scale):
    """A process reward model: POST {prompt, response, gold, steps} -> {"scores": [x, ...]}."""

    kind: Literal["process"]
    """A process reward model."""
    columns: tuple[str, ...] = ()
    """Columns of the row that are sent along."""
    split: Literal["line", "blank_line", "sentence", "pattern"] = "blank_line"
    """What ends a step."""
    split_pattern: Pattern | None = None
    """split = pattern: a regular expression of what stands at the end of a step."""
    max_steps: int = Field(256, ge=1)
    """What comes after so many steps belongs to the last."""
    aggregate: Literal["min", "product", "last", "mean", "weighted"] = "min"
    """What the scores of the steps make of the reward."""
    step_weight: Literal["length", "position"] | None = None
    """aggregate = weighted: a step counts by its characters, or the more the later it comes (1, 2, 3, ...)."""
    scores_field: str = Field("scores", min_length=1)
    """Field of the reply that is the list of scores."""

    @model_validator(mode="after")
    def _choices_act(self) -> ProcessModel:
        for name, choice, value in (("split_pattern", "split", "pattern"), ("step_weight", "aggregate", "weighted")):
            if (getattr(self, name) is not None) != (getattr(self, choice) == value):
                raise ValueError(f"{name} belongs to {choice} = {value!r}, which needs it")
        return self


class PairJudge(Endpoint, Chat):
    """A chat endpoint that compares the responses of a group in pairs; Bradley-Terry makes one scale of it."""

    kind: Literal["pairwise"]
    """A chat model that compares two responses."""
    model: str = Field(min_length=1)
    """The model's name, as the server knows it."""
    prompt: str = DEFAULT_PAIR_PROMPT
    """{first} and {second} are needed; {prompt}, {gold} and {row.NAME} may stand in it."""
    verdicts: tuple[str, str, str] = ("[[A]]", "[[B]]", "[[C]]")
    """What says that the first is better, the second, neither; the last of them in the answer counts."""
    num_pairs: int | None = Field(None, ge=1)
    """Pairs that are compared, each in both orders, drawn by a seed; None: all."""
    prior: float = Field(0.1, gt=0)
    """Weight of one won and one lost comparison of every response with the middle of the scale: keeps it finite."""
    pass_score: float = Field(0.5, gt=0, lt=1)
    """A response is a pass from here on; 0.5 is the middle of its group."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> PairJudge:
        for complaint in (_chat_complaint(self.url), _needs(self.prompt, "prompt", "first", "second")):
            if complaint:
                raise ValueError(complaint)
        if len(set(self.verdicts)) < 3 or not all(self.verdicts):
            raise ValueError(f"verdicts = {list(self.verdicts)}: expected three different texts")
        return self


JUDGES: tuple[type[Endpoint], ...] = (ChatJudge, ScoreModel, ProcessModel, PairJudge)
"""All kinds."""
Judge = Annotated[ChatJudge | ScoreModel | ProcessModel | PairJudge, Field(discriminator="kind")]


def _chat_complaint(url: str) -> str:
    if url.rstrip("/").endswith(CHAT_PATH):
        return ""
    return f"url = {url!r}: expected the address of a chat endpoint, which ends in {CHAT_PATH}"


def _needs(template: str, name: str, *fields: str) -> str:
    found = set(PLACEHOLDER.findall(template))
    if missing := [field for field in fields if field not in found]:
        return f"{name}: {{{missing[0]}}} does not stand in it; the judge would not see it"
    known = {"prompt", "gold", *fields}
    odd = sorted(field for field in found if field not in known and not field.startswith("row."))
    return f"{name}: {{{odd[0]}}} is not filled in here; known: {', '.join(sorted(known))}, row.NAME" if odd else ""
