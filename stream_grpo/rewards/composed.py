"""Scoring by several verifiers: rows of a composition have their parts asked, and a sample has the hidden verifier.

What goes to the workers, and what that costs, is as for every other verifier: a part is a response of its own there.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stream_grpo.config_rewards import Rewards
from stream_grpo.rewards.composition import absent, chosen, part_row, usage_of
from stream_grpo.rewards.gathering import Place
from stream_grpo.rewards.hidden import HiddenGap, is_sampled
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.rewards.scoring import UNSCORED_ENDS, Pool, Scoring, asked_verifiers, versions
from stream_grpo.rewards.whole import Part, Whole, no_row
from stream_grpo.types import EndReason, RewardResult


@dataclass(slots=True, eq=False)
class _Response:
    """A response whose parts are being asked."""

    task_id: str
    problem: VerifiableProblem
    text: str
    end_reason: EndReason
    place: Place | None
    whole: Whole


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
        expected = set(expected)
        super().__init__(rewards, asked_verifiers(expected, rewards), make_pool=make_pool)
        self._versions = versions([name for name in expected if chosen(name, rewards.compose)], rewards)
        self._absent: dict[str, Counter[str]] = defaultdict(Counter)
        self._numbers = itertools.count()
        self._parts: dict[str, tuple[_Response, Part]] = {}
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
        found = chosen(problem.verifier, self._rewards.compose)
        if found is None:
            super().submit(task_id, problem, response_text, end_reason, place)
            return
        usage = usage_of(problem, response_text, found.composition.tool_marker, num_tokens)
        whole = Whole(found, self._version(problem.verifier), usage)
        self._ask(_Response(task_id, problem, response_text, end_reason, place, whole), whole.first())

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        """As `Scoring.poll`: whole results alone."""
        found = list[tuple[str, RewardResult]]()
        for task_id, result in super().poll(0.0 if self._composed else timeout_s):
            if task_id in self._parts:
                self._take(*self._parts.pop(task_id), result)
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
        of_group = {part.key for response, part in self._parts.values() if _group_of(response) == group}
        dropped: set[_Response] = set()
        for key in of_group:
            if self._drop(f"{group}#{key}"):
                found = [name for name, (r, part) in self._parts.items() if part.key == key and _group_of(r) == group]
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
        """As `Scoring.status`, where a part counts as a response; what optional parts did not give; the hidden gap."""
        return super().status() | {
            "absent": {name: dict(counts) for name, counts in dict(self._absent).items()},
            "hidden": None if self.gap is None else self.gap.status(),
        }

    def _version(self, verifier: str) -> str:
        if verifier not in self._versions:
            self._versions |= versions([verifier], self._rewards)
        return self._versions[verifier]

    def _ask(self, response: _Response, parts: Iterable[Part]) -> None:
        for part in parts:
            try:
                row = part.row(response.problem)
            except ValueError as error:
                result = no_row(part.verifier, error)
                self._unscored.settle(result)
                self._take(response, part, result)
                continue
            part_id = self._part_id(response.task_id)
            self._parts[part_id] = response, part
            # A second verifier is asked about some of a group: there is nothing to wait for.
            place = None if part.is_second else _place_of(response, part.key)
            super().submit(part_id, row, response.text, response.end_reason, place)

    def _part_id(self, task_id: str) -> str:
        return f"{task_id}#{next(self._numbers)}"

    def _take(self, response: _Response, part: Part, result: RewardResult) -> None:
        """Keep what a part says; with the last of them ask what the tail needs, or hand the whole on."""
        whole = response.whole
        if more := whole.take(part, result):
            self._ask(response, more)
        elif whole.result is not None:
            if whole.result.reward is not None:
                self._absent[whole.chosen.name].update(absent(whole.chosen.composition, whole.results))
            self._composed.append((response.task_id, whole.result))

    def _show_hidden(self, task_id: str, problem: VerifiableProblem, text: str, end_reason: EndReason) -> None:
        if self._hidden is None or not is_sampled(self._hidden, task_id):
            return
        self._pairs[task_id] = _Pair()
        try:
            row = part_row(problem, self._hidden, self._hidden.verifier, "the hidden verifier")
        except ValueError as error:
            self._compare(task_id, hidden=no_row(self._hidden.verifier, error))
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
