"""What is believed of the problems of a pool, and with which probability each is drawn next.

Joins an estimator, the expected cost of groups and a rule of choice. A fold over outcomes; numpy alone.
P: problems; C: candidates of a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from curator.clock import PolicyClock
from curator.cost import ExpectedTokens
from curator.difficulty import SlidingRate, expected_signal
from curator.estimators.belief import Belief
from curator.estimators.estimator import Estimator
from curator.estimators.features import Features
from curator.estimators.item_response import ItemResponse
from curator.estimators.memory import DiscountedBeta, LastMean
from curator.estimators.value import VALUES, mixed_K
from curator.group_size import best_size, checked_sizes, of_place
from curator.schema import Outcome
from curator.selection import Part, Shares, candidates, selection_parts, shared_parts
from curator.snapshot import Fold
from curator.standing import probability_of_none, retired, suspects

EstimatorName = Literal["sliding_rate", "last_mean", "beta", "item_response"]
ChoiceName = Literal["signal", "worth"]
SignalName = Literal["mixed", "centered", "scaled"]

MAX_CANDIDATES = 1 << 13
"""Of a larger pool each draw looks at a random part of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How problems are estimated and chosen; the fields are those of `[curator]` in a run's configuration."""

    estimator: EstimatorName = "item_response"
    choice: ChoiceName = "signal"
    signal: SignalName = "mixed"
    group_sizes: tuple[int, ...] = ()
    rate_step: float = 0.3
    domain_step: float = 0.05
    unseen_rate: float = 0.5
    keep: float = 0.98
    exploration: float = 0.05
    sharpness: float = 4.0
    unseen_share: float = 0.05
    domain_share: float = 0.5
    doubt: float = 0.5


class Odds(NamedTuple):
    """Probabilities of the next draw."""

    index_C: NDArray[np.int64]
    parts: list[Part]
    """Over the candidates; their mixture is the probability of a draw."""
    size_C: NDArray[np.int64]
    """Rollouts of the next group."""
    signal_C: NDArray[np.float64]
    """Predicted probability that its rewards differ."""
    share_drawn_from: float
    """Candidates by problems: q times this is the probability of a draw that has yet to find its candidates."""


class Suspect(NamedTuple):
    """A problem that looks broken, and what speaks against it."""

    problem: int
    """Its index."""
    num_groups: int
    num_scored: int
    """Rollouts; none of them earned anything."""
    expected_rate: float
    """Pass rate that is expected of it by what is like it."""
    surprise: float
    """Probability of so many failures, were it as those are."""


class Chooser:
    """Learns from groups, and says which problem is worth the next one."""

    def __init__(
        self,
        domain_P: NDArray[np.int64],
        group_size: int,
        rules: Rules = Rules(),
        features: Features | None = None,
    ) -> None:
        """`domain_P`: each problem's domain as a number from 0; `features` are for the item-response model alone.

        `group_size`: rollouts of every group, where the rules name no sizes to choose from. Raises ValueError for rules
        that cannot be.
        """
        self._domain_P, self._rules, self._features = domain_P, rules, features
        self._sizes = checked_sizes(rules.group_sizes or (group_size,))
        self._mixed_SK = [mixed_K(size) for size in self._sizes]
        self._value_SK = [VALUES[rules.signal](size) for size in self._sizes]
        self.rate = SlidingRate(
            domain_P,
            rate_step=rules.rate_step,
            domain_step=rules.domain_step,
            unseen_rate=rules.unseen_rate,
        )
        """Reported whatever the estimator is."""
        self.estimator = _make_estimator(rules, self.rate, features)
        self._tokens = ExpectedTokens(domain_P)
        self._clock = PolicyClock()
        self._shares = _shares(rules) if rules.choice == "worth" else Shares()

    def observe(self, index: int, outcome: Outcome) -> None:
        """Learn from one outcome, one that `counts`, of the problem at `index`."""
        self.rate.apply(index, outcome)
        num_scored = outcome.num_passed + outcome.num_failed
        self._tokens.observe(index, outcome.num_tokens / (num_scored + outcome.num_unscored))
        if self.estimator is not self.rate:
            time = self._clock.time(outcome.branch, outcome.mean_step)
            passed = min(1.0, max(0.0, outcome.mean_reward)) * num_scored
            self.estimator.observe(index, passed, num_scored, time)

    @property
    def folds(self) -> dict[str, Fold]:
        """What observations have made, by name."""
        folds: dict[str, Fold] = {"rate": self.rate, "tokens": self._tokens, "clock": self._clock}
        return folds if self.estimator is self.rate else {**folds, "estimator": self.estimator}

    @property
    def depends_on(self) -> list[NDArray[Any]]:
        """What is known of the problems beforehand, beside their domains."""
        features = self._features
        if features is None:
            return []
        known: list[NDArray[Any]] = [
            features.domain_P,
            features.number_PX,
            features.is_vector_X,
            np.array(features.expected_bias),
        ]
        return known if features.expected_weight_X is None else [*known, features.expected_weight_X]

    def advance(self, steps: float) -> None:
        """Let so many policy steps pass without a group."""
        self._clock.advance(steps)
        self.estimator.advance(self._clock.now)

    def odds(
        self,
        num_in_flight_P: NDArray[np.int64],
        rng: np.random.Generator,
        among: NDArray[np.int64] | None = None,
    ) -> Odds:
        """Probabilities of the next draw over its candidates, of the indices `among` where these are given.

        `rng` picks the candidates where there are many.
        """
        rules = self._rules
        num = len(num_in_flight_P) if among is None else len(among)
        index_C = candidates(num, MAX_CANDIDATES, rng)
        share = len(index_C) / num
        if among is not None:
            index_C = among[index_C]
        belief = self.estimator.predict(index_C)
        place_C, signal_C = self._sized(belief)
        # Averaged over all that is possible, problems that one is sure of come before others that are likely as good.
        value_C = of_place(_values(belief.narrowed(rules.doubt), self._value_SK), place_C)
        size_C = np.asarray(self._sizes)[place_C]
        in_flight_C = num_in_flight_P[index_C] > 0
        if rules.choice == "signal":
            parts = selection_parts(value_C, in_flight_C, rules.exploration, rules.sharpness)
            return Odds(index_C, parts, size_C, signal_C, share)
        num_groups_C = self.rate.num_groups_P[index_C]
        solved_C, hopeless_C = retired(belief, num_groups_C)
        worth_C = np.where(solved_C | hopeless_C, 0.0, value_C / (size_C * self._tokens.predict(index_C)))
        domain_C = self._domain_P[index_C]
        parts = shared_parts(worth_C, in_flight_C, num_groups_C == 0, domain_C, self._shares)
        return Odds(index_C, parts, size_C, signal_C, share)

    def _sized(self, belief: Belief) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of each problem the place of the next group's size, and the probability that its rewards differ."""
        mixed_SP = _values(belief, self._mixed_SK)
        place_P = best_size(mixed_SP, self._sizes)
        return place_P, of_place(mixed_SP, place_P)

    def next_group(self, index: int) -> tuple[int, float]:
        """Rollouts of the next group of a problem, and the predicted probability that its rewards differ."""
        place_P, signal_P = self._sized(self.estimator.predict(np.array([index])))
        return self._sizes[int(place_P[0])], float(signal_P[0])

    def signal_at(self, rate_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same probability of problems whose pass rates are these, [P]."""
        mixed_SP = np.stack([expected_signal(rate_P, size) for size in self._sizes])
        return of_place(mixed_SP, best_size(mixed_SP, self._sizes))

    def standing(self) -> dict[str, int]:
        """Retired problems by cause."""
        rate = self.rate
        index = np.flatnonzero(rate.num_groups_P >= 2)
        solved, hopeless = retired(self.estimator.predict(index), rate.num_groups_P[index])
        return {"retired_solved": int(solved.sum()), "retired_hopeless": int(hopeless.sum())}

    def suspects(self) -> list[Suspect]:
        """Problems that fail although all that is like them passes; none without a model of the likeness."""
        if not isinstance(self.estimator, ItemResponse):
            return []
        rate = self.rate
        index = np.flatnonzero((rate.num_groups_P >= 2) & ~rate.has_passed_P)
        others = self.estimator.predict_from_others(index)
        flags = suspects(others, rate.has_passed_P[index], rate.num_scored_P[index], rate.num_groups_P[index])
        index = index[flags]
        others, num_scored = self.estimator.predict_from_others(index), rate.num_scored_P[index]
        columns = (index, rate.num_groups_P[index], num_scored, others.mean_P, probability_of_none(others, num_scored))
        return [Suspect(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _values(belief: Belief, value_SK: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Expected value of the next group, were it of each size, [S, P]."""
    return np.stack([belief.group_value_P(value_K) for value_K in value_SK])


def _make_estimator(rules: Rules, rate: SlidingRate, features: Features | None) -> Estimator:
    num_problems = len(rate.num_groups_P)
    if rules.estimator == "last_mean":
        return LastMean(num_problems, unseen_rate=rules.unseen_rate)
    if rules.estimator == "beta":
        return DiscountedBeta(num_problems, keep=rules.keep)
    if rules.estimator == "item_response":
        if features is None:
            raise ValueError("estimator = item_response: needs the features of the problems")
        return ItemResponse(features)
    return rate


def _shares(rules: Rules) -> Shares:
    return Shares(
        sharpness=rules.sharpness, floor=rules.exploration, unseen=rules.unseen_share, domain=rules.domain_share
    )
