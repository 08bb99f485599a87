"""Scoring by several verifiers: rows of a composition have their parts asked, and a sample has the hidden verifier.

What goes to the workers, and what that costs, is as for every other verifier: a part is a response of its own there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stream_grpo.config import Rewards
from stream_grpo.config_rewards import Asked
from stream_grpo.rewards.composition import Usage, chosen, compose, part_row, tails
from stream_grpo.rewards.gathering import Place
from stream_grpo.rewards.hidden import HiddenGap, is_sampled
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.rewards.scoring import UNSCORED_ENDS, Pool, Scoring, asked_verifiers, composition_version
from stream_grpo.types import Decision, EndReason, RewardResult


@dataclass(slots=True, eq=False)
class _Response:
    """A response whose parts are being asked."""

    task_id: str
    composition: str
    problem: VerifiableProblem
    text: str
    end_reason: EndReason
    place: Place | None
    usage: Usage
    results: dict[str, RewardResult] = field(default_factory=dict)
    seconds: dict[str, RewardResult] = field(default_factory=dict)
    num_out: int = 0
    """Parts that have not answered."""
    has_asked_tails: bool = False


@dataclass(slots=True, eq=False)
class _Pair:
    """A response of the hidden sample, until both of its results are there."""

    shown: RewardResult | None = None
    hidden: RewardResult | None = None


class ComposedScoring(Scoring):
    """Scores as `Scoring` does, and compositions besides. A response that is none of both passes through untouched.

    The hidden verifier's result is in no result that `poll` returns, and holds none up: it is counted in `gap`, and
    reaches nothing else.
    """

    def __init__(
        self,
        rewards: Rewards,
        expected: Iterable[str] = (),
        *,
        make_pool: Callable[[Rewards, Sequence[str]], Pool] | None = None,
    ) -> None:
        """As `Scoring`; `expected` may hold names of compositions."""
        super().__init__(rewards, asked_verifiers(expected, rewards), make_pool=make_pool)
        self._versions = {name: composition_version(name, rewards) for name in rewards.compose}
        self._numbers = itertools.count()
        self._parts: dict[str, tuple[_Response, str, bool]] = {}
        self._hidden_parts: dict[str, str] = {}
        self._pairs: dict[str, _Pair] = {}
        self._composed: list[tuple[str, RewardResult]] = []
        self._num_asked = 0
        self._hidden = rewards.hidden
        self.gap = None if rewards.hidden is None else HiddenGap(rewards.hidden)
        """Between rewards and the hidden verifier; None where there is none."""

    def submit(
        self,
        task_id: str,
        problem: VerifiableProblem,
        response_text: str,
        end_reason: EndReason,
        place: Place | None = None,
        *,
        num_tokens: int = 0,
        may_be_trained: bool = False,
    ) -> None:
        """As `Scoring.submit`, where `num_tokens` is for the costs of a composition.

        The hidden verifier sees a sample of those that `may_be_trained`: it watches what the policy is rewarded for.
        """
        self._num_asked += 1
        if may_be_trained and end_reason not in UNSCORED_ENDS:
            self._show_hidden(task_id, problem, response_text, end_reason)
        name = chosen(problem.verifier, self._rewards.compose)
        if name is None:
            super().submit(task_id, problem, response_text, end_reason, place)
            return
        composition = self._rewards.compose[name]
        usage = Usage(num_tokens=num_tokens, num_tool_calls=response_text.count(composition.tool_marker))
        response = _Response(task_id, name, problem, response_text, end_reason, place, usage)
        response.num_out = len(composition.components)
        for key, component in composition.components.items():
            self._ask(response, key, component, component.verifier)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        """As `Scoring.poll`: whole results alone."""
        found = list[tuple[str, RewardResult]]()
        for task_id, result in super().poll(0.0 if self._composed else timeout_s):
            if task_id in self._parts:
                self._take_part(*self._parts.pop(task_id), result)
            elif task_id in self._hidden_parts:
                self._compare(self._hidden_parts.pop(task_id), hidden=result)
            else:
                found.append((task_id, result))
        found, self._composed = found + self._composed, []
        self._num_asked -= len(found)
        for task_id, result in found:
            if task_id in self._pairs:
                self._compare(task_id, shown=result)
        return found

    def forget(self, group: str) -> None:
        """As `Scoring.forget`: a composition of which a part is dropped has no result either."""
        self._num_asked -= self._drop(group)
        of_group = {key for response, key, _ in self._parts.values() if _group_of(response) == group}
        dropped: set[_Response] = set()
        for key in of_group:
            if self._drop(f"{group}#{key}"):
                found = [name for name, (r, at, _) in self._parts.items() if at == key and _group_of(r) == group]
                dropped |= {self._parts.pop(name)[0] for name in found}
        self._num_asked -= len(dropped)

    def _drop(self, group: str) -> int:
        """How many responses that waited for others are dropped."""
        before = super().num_open
        super().forget(group)
        return before - super().num_open

    @property
    def num_open(self) -> int:
        """Responses submitted whose results `poll` has not returned; the hidden verifier's do not count."""
        return self._num_asked

    @property
    def hidden_alarm(self) -> str | None:
        """What is wrong between the reward and the hidden verifier, in a sentence; None while nothing is."""
        return None if self.gap is None else self.gap.alarm

    def status(self) -> dict[str, Any]:
        """As `Scoring.status`, where a part counts as a response; and the gap to the hidden verifier."""
        return super().status() | {"hidden": None if self.gap is None else self.gap.status()}

    def _ask(self, response: _Response, key: str, asked: Asked, verifier: str, *, is_second: bool = False) -> None:
        try:
            row = part_row(response.problem, asked, verifier, key)
        except ValueError as error:
            result = _no_row(verifier, error)
            self._unscored.settle(result)
            self._take_part(response, key, is_second, result)
            return
        part_id = self._part_id(response.task_id)
        self._parts[part_id] = response, key, is_second
        # A second verifier is asked about some of a group: there is nothing to wait for.
        place = None if is_second else _place_of(response, key)
        super().submit(part_id, row, response.text, response.end_reason, place)

    def _part_id(self, task_id: str) -> str:
        return f"{task_id}#{next(self._numbers)}"

    def _take_part(self, response: _Response, key: str, is_second: bool, result: RewardResult) -> None:
        """Keep what a part says; with the last of them ask what the tail needs, or make the whole."""
        (response.seconds if is_second else response.results)[key] = result
        response.num_out -= 1
        if response.num_out:
            return
        composition = self._rewards.compose[response.composition]
        if not response.has_asked_tails:
            response.has_asked_tails = True
            keys = tails(composition, response.results)
            response.num_out = len(keys)
            for key in keys:
                component = composition.components[key]
                assert component.tail_verifier is not None
                self._ask(response, key, component, component.tail_verifier, is_second=True)
            if keys:
                return
        version, parts = self._versions[response.composition], (response.results, response.seconds)
        result = compose(response.composition, version, composition, *parts, response.usage)
        self._composed.append((response.task_id, result))

    def _show_hidden(self, task_id: str, problem: VerifiableProblem, text: str, end_reason: EndReason) -> None:
        if self._hidden is None or not is_sampled(self._hidden, task_id):
            return
        self._pairs[task_id] = _Pair()
        try:
            row = part_row(problem, self._hidden, self._hidden.verifier, "the hidden verifier")
        except ValueError as error:
            self._compare(task_id, hidden=_no_row(self._hidden.verifier, error))
            return
        part_id = self._part_id(task_id)
        self._hidden_parts[part_id] = task_id
        super().submit(part_id, row, text, end_reason)

    def _compare(self, task_id: str, *, shown: RewardResult | None = None, hidden: RewardResult | None = None) -> None:
        pair = self._pairs[task_id]
        pair.shown, pair.hidden = shown or pair.shown, hidden or pair.hidden
        if pair.shown is not None and pair.hidden is not None:
            del self._pairs[task_id]
            assert self.gap is not None
            self.gap.add(pair.shown, pair.hidden)


def _group_of(response: _Response) -> str | None:
    return None if response.place is None else response.place.group


def _place_of(response: _Response, key: str) -> Place | None:
    """A part is compared with the same part of the others."""
    return None if response.place is None else Place(f"{response.place.group}#{key}", response.place.size)


def _no_row(verifier: str, error: ValueError) -> RewardResult:
    """Of a verifier that cannot be asked, because the row has not what it reads."""
    return RewardResult(
        decision=Decision.ENV_ERROR, reward=None, verifier=verifier, verifier_version="", evidence=str(error)
    )
