"""A chat model that compares the responses of a group in pairs, and the scale that its preferences make."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stream_grpo.config_http import PairJudge
from stream_grpo.rewards.bradley_terry import Triads, bradley_terry, triads
from stream_grpo.rewards.chat_judge import ask, chat_body, concluded
from stream_grpo.rewards.judging import Answer, EndpointError, Post, Results, filled
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.types import RewardResult

_FIRST, _SECOND, _TIE = range(3)


@dataclass(slots=True)
class _Comparisons:
    """What came of the pairs of N answers."""

    wins: NDArray[np.float64]
    """[N, N] half of a tie each."""
    num_readable: NDArray[np.int64]
    """[N] comparisons of an answer that could be read."""
    num_contradictions: int = 0
    """Pairs of which both orders prefer the same place."""
    failures: list[EndpointError] = field(default_factory=list)
    num_unreadable: int = 0


class PairPreferences:
    """Compares the answers of a group, and gives each its strength within the group."""

    def __init__(self, name: str, judge: PairJudge) -> None:
        self._judge, self._results = judge, Results(name, judge.version)

    async def __call__(self, problem: ProblemRow, answers: Sequence[Answer], post: Post) -> list[RewardResult]:
        """A strength in (0, 1) for every answer of which a comparison could be read; the others are unknown.

        Raises EndpointError where half of the comparisons or more did not come, ValueError for a column that the row
        lacks.
        """
        if len(answers) < 2:
            return [self._results.unknown("there is nothing to compare this response with") for _ in answers]
        pairs = chosen_pairs(len(answers), self._judge.num_pairs, seed=_seed(answers))
        found = await self._compare(problem, answers, pairs, post)
        if len(found.failures) >= len(pairs):  # of 2 comparisons each
            raise found.failures[0]
        strengths = bradley_terry(found.wins, prior=self._judge.prior)
        return [
            self._result(place, float(strengths[place]), found, triads(found.wins), len(pairs))
            for place in range(len(answers))
        ]

    async def _compare(
        self, problem: ProblemRow, answers: Sequence[Answer], pairs: Sequence[tuple[int, int]], post: Post
    ) -> _Comparisons:
        """Every pair in both orders: a judge that prefers a place then prefers neither response."""
        orders = [order for i, j in pairs for order in ((i, j), (j, i))]
        came = await asyncio.gather(
            *(self._ask(problem, answers[i].text, answers[j].text, post) for i, j in orders), return_exceptions=True
        )
        size = len(answers)
        found = _Comparisons(np.zeros((size, size)), np.zeros(size, np.int64))
        for (i, j), verdict in zip(orders, came, strict=True):
            if isinstance(verdict, EndpointError):
                found.failures.append(verdict)
            elif isinstance(verdict, BaseException):
                raise verdict
            elif verdict is None:
                found.num_unreadable += 1
            else:
                found.wins[i, j] += {_FIRST: 1.0, _TIE: 0.5, _SECOND: 0.0}[verdict]
                found.wins[j, i] += {_FIRST: 0.0, _TIE: 0.5, _SECOND: 1.0}[verdict]
                found.num_readable[[i, j]] += 1
        found.num_contradictions = sum(
            verdict in (_FIRST, _SECOND) and verdict == back
            for verdict, back in zip(came[::2], came[1::2], strict=True)
        )
        return found

    async def _ask(self, problem: ProblemRow, first: str, second: str, post: Post) -> int | None:
        prompt = filled(self._judge.prompt, problem, first=first, second=second)
        return verdict_of(await ask(post, chat_body(self._judge, self._judge.model, prompt)), self._judge.verdicts)

    def _result(self, place: int, strength: float, found: _Comparisons, of: Triads, num_pairs: int) -> RewardResult:
        if not found.num_readable[place]:
            return self._results.unknown("no comparison with this response could be read")
        num_won, num_lost = found.wins[place].sum(), found.wins[:, place].sum()
        evidence = (
            f"{num_won:g} to {num_lost:g} in {num_pairs} pairs of {len(found.wins)} responses, "
            f"{found.num_contradictions} against their other order, {of.num_circular} of {of.num} triads circular, "
            f"{found.num_unreadable} unreadable, {len(found.failures)} without a reply"
        )
        components = {
            "won": float(num_won),
            "lost": float(num_lost),
            "contradicted_pairs": found.num_contradictions / num_pairs,
            "circular_triads": of.num_circular / of.num if of.num else 0.0,
        }
        return self._results.scored(strength, strength >= self._judge.pass_score, evidence, components)


def chosen_pairs(num: int, num_pairs: int | None, *, seed: int) -> list[tuple[int, int]]:
    """Pairs out of `num` places, all of them or a budget, the same for the same seed.

    The places are put on a circle by the seed, and pairs are taken at distance 1, then 2, and so on: every place is in
    as many pairs as any other, give or take 2, and from num - 1 pairs on all are connected.
    """
    order = list(range(num))
    random.Random(seed).shuffle(order)
    circle = [
        (order[place], order[(place + distance) % num])
        for distance in range(1, num // 2 + 1)
        for place in range(num if 2 * distance < num else num // 2)
    ]
    return circle[:num_pairs]


def verdict_of(text: str, verdicts: Sequence[str]) -> int | None:
    """0: the first is better, 1: the second, 2: neither; the verdict that the answer has last. None: it has none."""
    end = concluded(text)
    found = [end.rfind(verdict) for verdict in verdicts]
    return None if max(found) < 0 else found.index(max(found))


def _seed(answers: Sequence[Answer]) -> int:
    """From the ids of the responses, so that a repeated group is compared alike."""
    digest = hashlib.sha256("\0".join(answer.task_id for answer in answers).encode()).digest()
    return int.from_bytes(digest[:8], "big")
