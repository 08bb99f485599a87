"""A reward model behind a URL: POST {prompt, response, gold, ...} -> {"score": x}."""

from __future__ import annotations

from collections.abc import Sequence

from stream_grpo.config_http import ScoreModel
from stream_grpo.rewards.judging import Answer, EndpointError, Post, Results, on_scale, reward_of, row_body
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.types import RewardResult


class ModelScores:
    """Gives one response the score of the model."""

    def __init__(self, name: str, model: ScoreModel) -> None:
        self._model, self._results = model, Results(name, model.version)

    async def __call__(self, problem: ProblemRow, answers: Sequence[Answer], post: Post) -> list[RewardResult]:
        """One result for one answer; unknown for null and for a score outside the scale.

        Raises EndpointError for a reply without the field, ValueError for a column that the row lacks.
        """
        (answer,) = answers
        reply = await post(row_body(problem, answer.text, self._model.columns))
        field = self._model.score_field
        if field not in reply:
            raise EndpointError(f"the reply has no {field!r}; it has {', '.join(map(repr, reply)) or 'nothing'}")
        if (score := on_scale(reply[field], self._model)) is None:
            low, high = self._model.low, self._model.high
            return [self._results.unknown(f"{field} {reply[field]!r} is no number from {low:g} to {high:g}")]
        evidence = f"{field} {score:g}, pass from {self._model.pass_from:g}"
        passes = score >= self._model.pass_from
        return [self._results.scored(reward_of(score, self._model), passes, evidence, {"score": score})]
