"""The curator's state and its four questions, without a process or a socket: next, report, position, stats.

The state is a fold over the outcomes of the pool and is never rolled back. To embed a curator, use this class; to
share one between processes, `service.CuratorService` puts it behind a socket and `client.Curator` asks it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from curator import earlier
from curator.chooser import Chooser, Rules
from curator.difficulty import NoSignalCause, SlidingRate, counts, no_signal_cause
from curator.errors import PoolError, SequenceError
from curator.estimators.belief import Belief
from curator.pool import Pool
from curator.pool_features import features_of_pool
from curator.quarantine import quarantined_ids
from curator.schema import Outcome, Pick, Problem, outcomes_from_batch, outcomes_to_batch
from curator.selection import draw_parts, draw_rng, mixture
from curator.state import SavedState

SOLVED_RATE, TOO_HARD_RATE = 0.95, 0.05
MAX_ENDED_GROUPS = 4096
"""Ended groups whose pick is still known, for a late repeat of the question."""
MAX_OPEN_GROUPS = 65536
"""Above this many, the oldest group without an outcome counts as lost and its problem leaves flight."""
MAX_SUSPECTS_SHOWN = 20


class Position(NamedTuple):
    """How far the outcomes have come."""

    next_sequence: int
    """The outcome that is expected next."""
    durable_sequence: int
    """All outcomes before this one are in the pool's table; a restart expects this one."""


class _Choice(NamedTuple):
    problem: int
    probability: float
    group_size: int
    expected_signal: float


class Curation:
    """Chooses problems and learns from outcomes. Not for several threads."""

    folded = (
        *("_next_sequence", "_requeued", "_fates", "_causes"),
        *("_num_scored_groups", "_num_unknown", "_num_earlier"),
    )

    def __init__(
        self,
        pool: Pool,
        *,
        group_size: int,
        flush_outcomes: int = 512,
        text_numbers: int = 32,
        start_from: Path | Pool | None = None,
        seed: int = 0,
        at_point: Callable[[str], None] = lambda name: None,
        **rules: Any,
    ) -> None:
        """Become the pool's writer and rebuild the state from its outcomes, or from the file of an earlier state and
        those after it, see `state`. `rules` are the fields of `Rules`; `group_size` is that of every group, unless
        these have several to choose from.

        `start_from` is the folder of another run, or a pool, whose outcomes are learned first; see `earlier`.
        Which groups are in flight is not part of that state: after a restart it is empty. `at_point` is told of
        `outcomes.flush` and `outcomes.flushed`, before and after outcomes are written, for tests of crashes there.

        Raises PoolError where outcomes are missing in the pool's table, or another process writes to it.
        """
        self._pool = pool
        self._flush_outcomes = flush_outcomes
        self._seed = seed
        self._at_point = at_point
        made = Rules(**rules)
        pool.become_writer()
        features = features_of_pool(pool, text_numbers) if made.estimator == "item_response" else None
        self._chooser = Chooser(pool.domain_numbers, group_size, made, features)
        self._num_in_flight_P = np.zeros(len(pool.problem_ids), np.int64)
        self._num_of_domain = dict(zip(pool.domain_names, np.bincount(pool.domain_numbers).tolist(), strict=True))
        self._aside = {index for each in quarantined_ids(pool) if (index := pool.index_of(each)) is not None}
        """Problems that are not drawn."""
        self._among = _all_but(self._aside, len(pool.problem_ids))
        self._open: OrderedDict[str, _Choice] = OrderedDict()
        self._ended: OrderedDict[str, _Choice] = OrderedDict()
        self._requeued: dict[int, None] = {}
        """Problems to be picked before any draw, by the outcomes, oldest first."""
        self._first: dict[int, None] = {}
        """Of these the ones that were not picked since, and may be."""
        self._pending: list[Outcome] = []
        self._next_sequence = 0
        self._fates: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._num_scored_groups = 0
        self._num_unknown = 0
        self._num_picks_of: Counter[int] = Counter()
        """By the size of the group."""
        if start_from is not None:
            earlier.start_from(pool, start_from)
        self._num_earlier = 0
        folds = {"curation": self, **self._chooser.folds}
        self._saved = SavedState(pool, folds, made, self._chooser.depends_on)
        self._rebuild()

    def _learn_earlier(self) -> int:
        num = 0
        for outcome in filter(counts, earlier.earlier_outcomes(self._pool)):
            if (index := self._pool.index_of(outcome.problem_id)) is not None:
                self._chooser.observe(index, outcome)
                num += 1
        if num:
            self._chooser.advance(earlier.EARLIER_STEPS)
        return num

    def _rebuild(self) -> None:
        if not self._saved.restore():
            self._num_earlier = self._learn_earlier()
        self._first = {index: None for index in self._requeued if index not in self._aside}
        for batch in self._pool.outcomes(self._next_sequence).to_batches(max_chunksize=4096):
            for outcome in outcomes_from_batch(batch):
                if outcome.sequence != self._next_sequence:
                    raise PoolError(
                        f"{self._pool.path}: outcome {outcome.sequence} where {self._next_sequence} is expected"
                    )
                self._apply(outcome)
        self._saved.save_if_due(self._next_sequence)

    @property
    def rate(self) -> SlidingRate:
        """The sliding success rate, kept and reported whatever the estimator is."""
        return self._chooser.rate

    def belief(self) -> Belief:
        """What is believed of every problem's pass rate now, by index."""
        return self._chooser.estimator.predict()

    def next(self, group_ids: Sequence[str]) -> list[Pick]:
        """One problem for each group. A group that has a pick keeps it, so repeating the question is harmless.

        Within a call problems differ as long as there are enough. The choice depends on the state, the seed and the
        first group id that has no pick yet, not on earlier draws. Problems that the buffer requeued come first.
        """
        new = [g for g in dict.fromkeys(group_ids) if g not in self._open and g not in self._ended]
        if new:
            self._choose(new)
        choices = [self._open.get(g) or self._ended[g] for g in group_ids]
        problems = self._pool.take([choice.problem for choice in choices])
        picks = [
            Pick(
                group_id=g,
                problem=problem,
                probability=choice.probability,
                expected_signal=choice.expected_signal,
                group_size=choice.group_size,
            )
            for g, problem, choice in zip(group_ids, problems, choices, strict=True)
        ]
        self._forget()
        return picks

    def get(self, problem_ids: Sequence[str]) -> list[Problem]:
        """The problems of these ids, in order; nothing is picked. Raises PoolError for an id that is not there."""
        unknown = [problem_id for problem_id in problem_ids if self._pool.index_of(problem_id) is None]
        if unknown:
            raise PoolError(f"{self._pool.path}: {len(unknown)} problems are not in the pool, first: {unknown[0]!r}")
        return self.find(problem_ids)

    def find(self, problem_ids: Sequence[str]) -> list[Problem]:
        """As `get`, without those that are not there."""
        found = [self._pool.index_of(problem_id) for problem_id in problem_ids]
        return self._pool.take([index for index in found if index is not None])

    def _choose(self, group_ids: list[str]) -> None:
        rng = draw_rng(self._seed, group_ids[0])
        left = list(reversed(group_ids))
        while left and self._first:
            index = next(iter(self._first))
            del self._first[index]
            self._pick(left.pop(), _Choice(index, 1.0, *self._chooser.next_group(index)))
        while left:
            odds = self._chooser.odds(self._num_in_flight_P, rng, self._among)
            q_C = mixture(odds.parts) * odds.share_drawn_from
            # When all that q allows are drawn, the next round has a q over what is then free.
            for place in draw_parts(odds.parts, len(left), rng).tolist():
                index = int(odds.index_C[place])
                size, signal = int(odds.size_C[place]), float(odds.signal_C[place])
                self._pick(left.pop(), _Choice(index, float(q_C[place]), size, signal))

    def _pick(self, group_id: str, choice: _Choice) -> None:
        self._open[group_id] = choice
        self._num_in_flight_P[choice.problem] += 1
        self._num_picks_of[choice.group_size] += 1

    def _forget(self) -> None:
        while len(self._open) > MAX_OPEN_GROUPS:
            self._end(next(iter(self._open)))
        while len(self._ended) > MAX_ENDED_GROUPS:
            self._ended.popitem(last=False)

    def report(self, outcomes: Iterable[Outcome]) -> int:
        """Learn from outcomes in order; returns the sequence number expected next. Repeats are ignored.

        Raises SequenceError, and learns nothing, where an outcome is missing; PoolError where the table cannot be
        written: the outcomes are learned all the same, and the next report or flush tries again.
        """
        new = [outcome for outcome in outcomes if outcome.sequence >= self._next_sequence]
        for expected, outcome in enumerate(new, start=self._next_sequence):
            if outcome.sequence != expected:
                raise SequenceError(f"expected outcome {expected}, received {outcome.sequence}")
        for outcome in new:
            self._apply(outcome)
            self._pending.append(outcome)
        if len(self._pending) >= self._flush_outcomes:
            self.flush()
        return self._next_sequence

    def _apply(self, outcome: Outcome) -> None:
        self._next_sequence = outcome.sequence + 1
        self._fates[outcome.fate] += 1
        self._end(outcome.group_id)
        self._requeue(outcome)
        if not counts(outcome):
            return
        index = self._pool.index_of(outcome.problem_id)
        if index is None:
            self._num_unknown += 1
            return
        self._chooser.observe(index, outcome)
        self._num_scored_groups += 1
        if outcome.fate == "no_signal":
            self._causes[no_signal_cause(outcome)] += 1

    def _requeue(self, outcome: Outcome) -> None:
        """Put a problem first, until a group of it has its outcome: a restart has forgotten what was picked."""
        index = self._pool.index_of(outcome.problem_id)
        if index is None:
            return
        self._requeued.pop(index, None)
        self._first.pop(index, None)
        if outcome.fate == "requeued":
            self._requeued[index] = None
            if index not in self._aside:
                self._first[index] = None

    def _end(self, group_id: str) -> None:
        choice = self._open.pop(group_id, None)
        if choice is not None:
            self._num_in_flight_P[choice.problem] -= 1
            self._ended[group_id] = choice

    def flush(self) -> int:
        """Write what is not in the table yet; returns the durable sequence number. Raises PoolError."""
        last = self._pool.last_sequence()
        # An append that failed may have been committed all the same.
        self._pending = [outcome for outcome in self._pending if outcome.sequence > last]
        if self._pending:
            self._at_point("outcomes.flush")
            self._pool.append_outcomes(outcomes_to_batch(self._pending))
            self._at_point("outcomes.flushed")
            self._pending = []
            self._saved.save_if_due(self._next_sequence)
        return self.position().durable_sequence

    def position(self) -> Position:
        """Where the sender of outcomes goes on."""
        return Position(self._next_sequence, self._next_sequence - len(self._pending))

    def stats(self) -> dict[str, Any]:
        """The state in figures, as JSON can hold them. Shares are of the groups that moved a rate."""
        seen, unseen_D = self.rate.seen_and_unseen()
        num_scored = max(1, self._num_scored_groups)
        causes = {cause.value: self._causes[cause] for cause in NoSignalCause}
        return {
            "problems": len(self._num_in_flight_P),
            "seen": int(seen.size),
            "mean_rate": float(seen.mean()) if seen.size else None,
            "domain_rates": dict(zip(self._pool.domain_names, self.rate.domain_rate_D.tolist(), strict=True)),
            "domain_problems": self._num_of_domain,
            "mean_expected_signal": self._mean_expected_signal(seen, unseen_D),
            "solved": int(np.count_nonzero(seen > SOLVED_RATE)),
            "useful": int(np.count_nonzero((seen >= TOO_HARD_RATE) & (seen <= SOLVED_RATE))),
            "too_hard": int(np.count_nonzero(seen < TOO_HARD_RATE)),
            "picks": self._num_picks_of.total(),
            "picks_by_size": {str(size): num for size, num in sorted(self._num_picks_of.items())},
            "in_flight": len(self._open),
            "requeued": len(self._first),
            "next_sequence": self._next_sequence,
            "durable_sequence": self.position().durable_sequence,
            **self._chooser.standing(),
            "state": self._saved.as_fields(),
            "quarantined": len(self._aside),
            "suspects": self.suspects()[:MAX_SUSPECTS_SHOWN],
            "fates": dict(self._fates),
            "scored_groups": self._num_scored_groups,
            "earlier_groups": self._num_earlier,
            "no_signal": causes,
            "no_signal_share": {cause: count / num_scored for cause, count in causes.items()},
            "unknown_problems": self._num_unknown,
            "clipped_rewards": self.rate.num_clipped,
        }

    def _mean_expected_signal(self, seen: NDArray[np.float64], unseen_D: NDArray[np.int64]) -> float:
        """Over all problems; those never seen have the rate of their domain."""
        of_seen = self._chooser.signal_at(seen).sum()
        of_unseen = unseen_D @ self._chooser.signal_at(self.rate.domain_rate_D)
        return float(of_seen + of_unseen) / len(self._num_in_flight_P)

    def suspects(self) -> list[str]:
        """Ids of problems that fail although all that is like them passes: wrong golds or broken verifiers, to review.

        Only the item-response model knows what is alike. See `standing.suspects`.
        """
        ids = self._pool.problem_ids
        return [ids[suspect.problem] for suspect in self._chooser.suspects() if suspect.problem not in self._aside]

    def close(self) -> None:
        """Flush, save the state, and let another process write to the pool."""
        try:
            self.flush()
            self._saved.save(self._next_sequence)
        finally:
            self._pool.close()


def _all_but(aside: set[int], num_problems: int) -> NDArray[np.int64] | None:
    """The indices that may be drawn; None for all. Where all are put aside, all are drawn: a run must not stall."""
    if not aside or len(aside) >= num_problems:
        return None
    return np.setdiff1d(np.arange(num_problems), np.fromiter(aside, np.int64))
