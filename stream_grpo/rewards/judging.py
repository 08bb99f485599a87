"""What every judge behind a URL has in common: what it is given, what it may ask, what it makes of a score. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from stream_grpo.config_http import PLACEHOLDER, Endpoint, Scale
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS
from stream_grpo.types import Decision, RewardResult, StepScore

_MIN_SHOWN = 40


class EndpointError(Exception):
    """No usable reply: the message has the reason, and never a key."""


class Post(Protocol):
    """Asks the endpoint, as `http_client.EndpointClient.post` does."""

    def __call__(self, body: Any) -> Awaitable[dict[str, Any]]:
        """The JSON object of the reply. Raises EndpointError."""


class Answer(NamedTuple):
    """A response to be judged."""

    task_id: str
    text: str


class JudgeFunction(Protocol):
    """A judge: gives every answer its result, in their order."""

    async def __call__(self, problem: ProblemRow, answers: Sequence[Answer], post: Post) -> list[RewardResult]:
        """More than one answer only where the judge compares. Raises EndpointError."""


@dataclass(frozen=True, slots=True)
class Results:
    """Makes the results of one judge."""

    verifier: str
    version: str

    def scored(
        self,
        reward: float,
        passes: bool,
        evidence: str,
        components: Mapping[str, float] | None = None,
        steps: tuple[StepScore, ...] = (),
    ) -> RewardResult:
        """A reward, and whether the response passes with it."""
        decision = Decision.PASS if passes else Decision.FAIL
        return RewardResult(
            decision=decision,
            reward=reward,
            verifier=self.verifier,
            verifier_version=self.version,
            components=components or {},
            evidence=evidence,
            steps=steps,
        )

    def unknown(self, evidence: str) -> RewardResult:
        """The judge answers, and what it says is no score."""
        return self._unscored(Decision.UNKNOWN, evidence)

    def env_error(self, evidence: str) -> RewardResult:
        """The judge does not answer, or answers in another form than it should."""
        return self._unscored(Decision.ENV_ERROR, evidence)

    def _unscored(self, decision: Decision, evidence: str) -> RewardResult:
        return RewardResult(
            decision=decision,
            reward=None,
            verifier=self.verifier,
            verifier_version=self.version,
            evidence=evidence[: 4 * MAX_EVIDENCE_CHARACTERS],
        )


def api_key(settings: Endpoint) -> str:
    """The key of an endpoint, empty where it needs none. Raises ConfigError where its variable is not set."""
    name = settings.api_key_env
    if name is None:
        return ""
    if not (key := os.environ.get(name, "").strip()):
        raise ConfigError(f"api_key_env = {name!r}: this environment variable is not set, or empty")
    return key


def filled(template: str, problem: ProblemRow, **texts: str) -> str:
    """The template with {prompt}, {gold}, {row.NAME} and `texts` in it; a text that has such a word in it keeps it.

    Raises ValueError for a column that the row lacks.
    """
    known = {"prompt": prompt_text(problem), "gold": problem.answer, **texts}

    def fill(match: Any) -> str:
        name: str = match[1]
        if not name.startswith("row."):
            return known[name]
        column = name.removeprefix("row.")
        if column not in problem.extra:
            has = ", ".join(sorted(problem.extra)) or "none"
            raise ValueError(
                f"problem {problem.problem_id} has no column {column!r} for the judge's prompt; it has {has}"
            )
        return str(problem.extra[column])

    return PLACEHOLDER.sub(fill, template)


def prompt_text(problem: ProblemRow) -> str:
    """The prompt as one text: chat messages with the role before each."""
    if problem.prompt is None or isinstance(problem.prompt, str):
        return problem.prompt or ""
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in problem.prompt)


def row_body(problem: ProblemRow, response: str, columns: Sequence[str]) -> dict[str, Any]:
    """What a reward model is posted. Raises ValueError for a column that the row lacks."""
    if missing := [column for column in columns if column not in problem.extra]:
        raise ValueError(f"problem {problem.problem_id} has no column {missing[0]!r} to be sent along")
    sent = {column: problem.extra[column] for column in columns}
    return {**sent, "prompt": problem.prompt, "response": response, "gold": problem.answer}


def on_scale(score: Any, scale: Scale) -> float | None:
    """The score as a number, or None where it is none or outside its scale."""
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        return None
    return float(score) if scale.low <= score <= scale.high else None


def reward_of(score: float, scale: Scale) -> float:
    """The score in [0, 1]."""
    return (score - scale.low) / (scale.high - scale.low)


def tails(texts: Sequence[str]) -> str:
    """The ends of several texts, where a judge concludes, cut so that all together stay short."""
    most = max(_MIN_SHOWN, MAX_EVIDENCE_CHARACTERS // max(1, len(texts)))
    return " | ".join(repr(text if len(text) <= most else f"...{text[-most:]}") for text in texts)
