"""A process reward model behind a URL: a response in steps, a score for each, one reward of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import regex

from stream_grpo.config_http import ProcessModel
from stream_grpo.rewards.judging import Answer, EndpointError, Post, Results, on_scale, reward_of, row_body
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.types import RewardResult, StepScore

_ENDS = {
    "line": re.compile(r"\n"),
    "blank_line": re.compile(r"\n(?:[ \t\r]*\n)+"),
    "sentence": re.compile(r"(?<=[.!?\u3002])\s+|\n"),
}
_PATTERN_S = 0.5
_MAX_SHOWN = 20


class SplitTimeout(Exception):
    """A pattern took too long on a response."""


class StepScores:
    """Scores the steps of one response."""

    def __init__(self, name: str, model: ProcessModel) -> None:
        self._model, self._results = model, Results(name, model.version)

    async def __call__(self, problem: ProblemRow, answers: Sequence[Answer], post: Post) -> list[RewardResult]:
        """One result with steps for one answer: a response without text, or one that its splitter hangs on, is wrong.

        Unknown where a score is null or outside the scale. Raises EndpointError for a reply without a score for every
        step, ValueError for a column that the row lacks.
        """
        (answer,) = answers
        try:
            ends = step_ends(answer.text, self._model)
        except SplitTimeout as error:
            return [self._results.scored(0.0, False, str(error))]
        if not ends:
            return [self._results.scored(0.0, False, "no step in a response without text")]
        steps = [answer.text[start:end] for start, end in pairwise([0, *ends])]
        reply = await post({**row_body(problem, answer.text, self._model.columns), "steps": steps})
        field = self._model.scores_field
        scores = reply.get(field)
        if not isinstance(scores, list) or len(scores) != len(steps):
            found = f"{len(scores)} scores" if isinstance(scores, list) else repr(type(scores).__name__)
            raise EndpointError(f"{field!r} of the reply is {found} for {len(steps)} steps; it has {', '.join(reply)}")
        read = [on_scale(score, self._model) for score in scores]
        valid = [score for score in read if score is not None]
        if len(valid) < len(read):
            place, low, high = read.index(None), self._model.low, self._model.high
            return [self._results.unknown(f"step {place}: {scores[place]!r} is no number from {low:g} to {high:g}")]
        return [self._result(ends, valid)]

    def _result(self, ends: Sequence[int], scores: Sequence[float]) -> RewardResult:
        model = self._model
        rewards = [reward_of(score, model) for score in scores]
        reward = aggregated(rewards, model.aggregate, _weights(ends, model))
        more = ", ..." if len(scores) > _MAX_SHOWN else ""
        shown = ", ".join(f"{score:.3g}" for score in scores[:_MAX_SHOWN])
        evidence = f"{model.aggregate} of {len(scores)} steps by {model.split}: {shown}{more}"
        components = {"num_steps": float(len(rewards)), "min_step": min(rewards), "mean_step": fmean(rewards)}
        steps = tuple(map(StepScore, ends, rewards))
        return self._results.scored(reward, reward >= reward_of(model.pass_from, model), evidence, components, steps)


def step_ends(text: str, model: ProcessModel) -> list[int]:
    """Where the steps of a text end, exclusive: rising, the last at the end of the text; empty without any letter.

    What separates two steps belongs to the first, and white space alone is no step: it belongs to the step before, at
    the beginning to the first. Linear in the text. Raises SplitTimeout where `split_pattern` takes too long.
    """
    if not text.strip():
        return []
    ends: list[int] = []
    start = 0
    for end in _separator_ends(text, model):
        if len(ends) == model.max_steps - 1:
            break
        if text[start:end].strip():
            ends.append(end)
            start = end
        elif ends:
            ends[-1] = start = end
    if ends and not text[ends[-1] :].strip():
        ends.pop()
    return [*ends, len(text)]


def aggregated(rewards: Sequence[float], method: str, weights: Sequence[float] | None = None) -> float:
    """One reward from those of the steps: min, product, last, mean, or weighted, sum w r / sum w.

    As `algo.process_rewards.aggregate_steps`, whose sources hold here too; this one loads no torch.
    """
    if weights is not None:
        return math.fsum(w * r for w, r in zip(weights, rewards, strict=True)) / math.fsum(weights)
    if method == "last":
        return rewards[-1]
    if method == "product":
        return math.prod(rewards)
    return min(rewards) if method == "min" else fmean(rewards)


def _separator_ends(text: str, model: ProcessModel) -> list[int]:
    if model.split_pattern is None:
        return [match.end() for match in _ENDS[model.split].finditer(text)]
    try:
        # The policy writes the text: this engine has a time limit, and lets other threads run meanwhile.
        found = regex.finditer(model.split_pattern, text, timeout=_PATTERN_S, concurrent=True)
        return [match.end() for match in found if match.end() > match.start()]
    except TimeoutError:
        raise SplitTimeout(f"split_pattern = {model.split_pattern!r} took over {_PATTERN_S:g} s on it") from None


def _weights(ends: Sequence[int], model: ProcessModel) -> list[float] | None:
    if model.step_weight is None:
        return None
    if model.step_weight == "length":
        return [float(end - start) for start, end in pairwise([0, *ends])]
    return [float(place) for place in range(1, len(ends) + 1)]
