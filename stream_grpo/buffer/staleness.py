"""How old a group is, where its age comes from, and what is lost to age. Pure.

The age of a group at lease is that of its oldest token, w, against the learner. It has three parts, which add up to it:

    publish lag   age of w against the learner as it was when the group's ticket was issued
    in flight     what its age had grown by when the group came in
    in queue      what it had grown by at lease

A ticket that is issued again with what was sampled so far goes on from the one before, so that its issue is the first
one; a group that is scored again has come in when it first did.

Weights newer than the learner was at one of these moments have the age 0 then. On one branch that is all. A restore may
bring the learner nearer to w, so that an age falls: the parts are then cut at the age, the publish lag last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from stream_grpo.buffer.stock import Held
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.types import Forks, PolicyVersion, policy_age

NUM_PROBLEMS = 1024
"""Problems that lost groups, of which counts are kept: the last ones."""
NUM_SHOWN = 10
"""Of these, the most lossy ones are shown."""

AgeOf = Callable[[PolicyVersion], int]


class Staleness(NamedTuple):
    """The parts of a group's age, in learner steps."""

    publish_lag: int
    in_flight: int
    in_queue: int


def oldest_trained(parts: Iterable[frozenset[PolicyVersion]], age_of: AgeOf, max_policy_age: int) -> PolicyVersion:
    """The version of the oldest token that would be trained, of a group in parts that are trained whole or not at all.

    Parts with a token above `max_policy_age` are not trained. Where that is all of them, the least old of their oldest.
    """
    oldest = [max(versions, key=age_of) for versions in parts]
    trained = [version for version in oldest if age_of(version) <= max_policy_age]
    return max(trained, key=age_of) if trained else min(oldest, key=age_of)


def staleness(
    version: PolicyVersion,
    *,
    issued_at: PolicyVersion,
    inserted_at: PolicyVersion,
    learner: PolicyVersion,
    forks: Forks,
) -> Staleness:
    """Where the age of `version` against the learner comes from; the others are where the learner was before."""
    at_issue, at_insert, age = (
        policy_age(version, then, forks) if version <= then else 0 for then in (issued_at, inserted_at, learner)
    )
    publish_lag = min(at_issue, age)
    grown = max(publish_lag, min(at_insert, age))
    return Staleness(publish_lag, grown - publish_lag, age - grown)


@dataclass(slots=True)
class Totals:
    """Sums over groups of one fate."""

    num_groups: int = 0
    num_rollouts: int = 0
    num_valid: int = 0
    num_tokens: int = 0
    reward_sum: float = 0.0

    def add(self, row: Transition, sign: int = 1) -> None:
        """Add the counts of the record that `row` brought, or take them off again."""
        self.num_groups += sign
        self.num_rollouts += sign * row.num_rollouts
        self.num_valid += sign * row.num_valid
        self.num_tokens += sign * row.num_tokens
        self.reward_sum += sign * row.reward_sum

    @property
    def length(self) -> float | None:
        """Mean sampled tokens of a rollout."""
        return self.num_tokens / self.num_rollouts if self.num_rollouts else None

    @property
    def reward(self) -> float | None:
        """Mean reward of the valid rollouts: how hard their problems are."""
        return self.reward_sum / self.num_valid if self.num_valid else None

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "groups": self.num_groups,
            "tokens": self.num_tokens,
            "length_mean": self.length,
            "reward_mean": self.reward,
        }


@dataclass(slots=True)
class Share:
    """What became of the groups of a problem, since it first lost one."""

    num_lost: int = 0
    num_trained: int = 0


class Losses:
    """What ended as stale beside what was trained, and which problems are never fresh. A fold over transitions."""

    folded = ("_lost", "_trained", "_requeues", "_num_requeued", "_shares", "_never_fresh")

    def __init__(self, max_requeues: int) -> None:
        """Nothing lost yet."""
        self._max_requeues = max_requeues
        self._lost, self._trained = Totals(), Totals()
        self._requeues: Counter[str] = Counter()
        """Of each problem, since a group of it was last trained."""
        self._num_requeued = 0
        # In both the problem that lost a group last is the last one.
        self._shares: dict[str, Share] = {}
        self._never_fresh: dict[str, int] = {}

    def apply(self, row: Transition, held: Held | None) -> None:
        """Follow a transition; `held` is its group as it was before, if the buffer held it."""
        record = held.record if held else row
        if held and held.state is Kind.TRAINED and row.kind in (Kind.RESTORED, Kind.STALE, Kind.INVALID):
            self._trained.add(record, -1)
        if row.kind is Kind.TRAINED:
            self._trained.add(record)
            self._requeues.pop(record.problem_id, None)
            self._never_fresh.pop(record.problem_id, None)
            if record.problem_id in self._shares:
                self._shares[record.problem_id].num_trained += 1
        elif row.kind is Kind.STALE:
            self._lose(record, is_of_age=row.reason.startswith("age"))
        elif row.kind is Kind.REQUEUED:
            self._requeues[row.problem_id] += 1
            self._num_requeued += 1

    def _lose(self, record: Transition, *, is_of_age: bool) -> None:
        problem_id = record.problem_id
        # A ticket has no record, and what was sampled of its group is lost all the same.
        if record.length or record.num_tokens:
            self._lost.add(record)
        if not problem_id:
            return
        share = self._shares[problem_id] = self._shares.pop(problem_id, Share())
        share.num_lost += 1
        if is_of_age and not self.may_requeue(problem_id):
            self._never_fresh[problem_id] = self._never_fresh.pop(problem_id, 0) + 1
        for counts in (self._shares, self._never_fresh):
            if len(counts) > NUM_PROBLEMS:
                del counts[next(iter(counts))]

    def may_requeue(self, problem_id: str) -> bool:
        """Whether a problem has not been requeued `max_requeues` times since it was last trained."""
        return self._requeues.get(problem_id, 0) < self._max_requeues

    def num_lost_after_requeues(self, problem_id: str) -> int:
        """Groups of a problem that were too old after its last requeue."""
        return self._never_fresh.get(problem_id, 0)

    def as_fields(self) -> dict[str, Any]:
        """As plain values: `lost` and `trained` groups in figures, the differences of their means, and the problems."""
        lost, trained = self._lost, self._trained
        worst = sorted(self._shares, key=lambda name: (-self._shares[name].num_lost, name))[:NUM_SHOWN]
        return {
            "lost": lost.as_fields(),
            "trained": trained.as_fields(),
            "length_difference": _difference(lost.length, trained.length),
            "reward_difference": _difference(lost.reward, trained.reward),
            "requeued": self._num_requeued,
            "never_fresh": dict(self._never_fresh),
            "by_problem": {name: asdict(self._shares[name]) for name in worst},
        }


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
