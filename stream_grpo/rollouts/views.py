"""The groups of a run as its journal has them. Read-only and without the journal's lock, so also of a running run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from stream_grpo.buffer import layout
from stream_grpo.buffer.facts import GroupFacts, batch_of_record, facts_of
from stream_grpo.buffer.ledger import Ledger
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.recovery import check_first, read_record, rows_of
from stream_grpo.buffer.snapshot import set_folds
from stream_grpo.buffer.transitions import Kind, Location, Transition
from stream_grpo.errors import ConfigError
from stream_grpo.types import PolicyVersion, policy_age

STATES = ("accepted", "leased", "trained", "stale", "no_signal", "invalid")
"""Of groups that have a record."""
_ARRIVALS = frozenset({Kind.ACCEPTED, Kind.STALE, Kind.NO_SIGNAL, Kind.INVALID})


@dataclass(slots=True)
class GroupView:
    """A group that has come in: what the log says of it."""

    group_id: str
    problem_id: str
    sampler_id: str
    location: Location
    num_tokens: int
    came_at_s: float
    """Unix time at which it came in."""
    state: str
    reason: str
    learner: PolicyVersion | None
    """The learner at lease, or at the end of a group that was never leased; None while it waits."""
    made: PolicyVersion | None = None
    """The version that a step made of it."""


@dataclass(frozen=True, slots=True)
class GroupLine:
    """A group with what its record says."""

    view: GroupView
    facts: GroupFacts
    age: int | None
    """Policy age of its oldest token at lease, at its end, or now; None without tokens or of an unknown branch."""

    @property
    def reward_mean(self) -> float | None:
        """Of the valid rollouts; None where there is none."""
        return sum(self.facts.rewards) / len(self.facts.rewards) if self.facts.rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which groups are asked for; a field that is None asks for nothing."""

    state: str | None = None
    problem: str | None = None
    """A problem id, or a pattern with * and ?."""
    domain: str | None = None
    min_age: int | None = None
    step: int | None = None
    """Of the version that a step made of it: trained in this one."""
    min_reward: float | None = None
    """Mean reward of the valid rollouts, at least."""
    max_reward: float | None = None

    def __post_init__(self) -> None:
        if self.state not in (None, *STATES):
            raise ConfigError(f"--fate {self.state}: no state of a group that has come in; known: {', '.join(STATES)}")

    def may_take(self, view: GroupView) -> bool:
        """Whether the log speaks for the group."""
        is_of_step = self.step is None or (view.made is not None and view.made.step == self.step)
        return is_of_step and self.state in (None, view.state) and fnmatchcase(view.problem_id, self.problem or "*")

    def takes(self, line: GroupLine) -> bool:
        """Whether its record does too."""
        is_old_enough = self.min_age is None or (line.age is not None and line.age >= self.min_age)
        return self.domain in (None, line.facts.domain) and is_old_enough and self._takes_reward(line.reward_mean)

    def _takes_reward(self, mean: float | None) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        low = -math.inf if self.min_reward is None else self.min_reward
        high = math.inf if self.max_reward is None else self.max_reward
        return mean is not None and low <= mean <= high


def journal_of(run_dir: Path) -> Path:
    """The journal of a run. Raises ConfigError where there is none."""
    directory = run_dir / "journal"
    if not directory.is_dir() or not layout.logs(directory):
        raise ConfigError(f"{run_dir}: no journal there (no journal/{layout.LOG_NAME} or a later log)")
    return directory


class Groups:
    """The groups whose records some of the newest logs name, oldest first."""

    def __init__(self, directory: Path, num_logs: int | None = None) -> None:
        """Read so many of the newest logs; None: all. Raises JournalError for damage."""
        self.directory, self.lineage = directory, Lineage()
        self.views: dict[str, GroupView] = {}
        paths = list(layout.logs(directory).values())
        for number, path in enumerate(paths[-num_logs:] if num_logs else paths):
            for row in _rows_while_there(path):
                if row.kind is not Kind.SNAPSHOT:
                    self._apply(row)
                elif number == 0:
                    set_folds({"lineage": self.lineage}, row)

    def _apply(self, row: Transition) -> None:
        self.lineage.apply(row)
        view = self.views.get(row.group_id)
        if row.location and row.kind in _ARRIVALS:
            learner = None if row.kind is Kind.ACCEPTED else row.version
            self.views[row.group_id] = GroupView(
                row.group_id, row.problem_id, row.sampler_id, row.location, row.num_tokens, row.time_s, row.kind.value,
                row.reason, learner,
            )  # fmt: skip
        elif view is None:
            return
        elif row.kind is Kind.RESCORED:
            del self.views[row.group_id]  # it comes in again, with other rewards
        elif row.kind is Kind.TRAINED:
            view.state, view.made = "trained", row.version
        elif row.kind is Kind.RESTORED:
            view.state, view.learner, view.made = "accepted", None, None
        elif row.kind in (Kind.LEASED, Kind.STALE, Kind.INVALID):
            view.state, view.reason, view.learner = row.kind.value, row.reason, row.version

    def line(self, view: GroupView) -> GroupLine | None:
        """A group with what its record says; None where its segment has left the disk meanwhile."""
        try:
            facts = facts_of(batch_of_record(self.data(view)))
        except FileNotFoundError:
            return None
        return GroupLine(view, facts, self._age(view, facts))

    def data(self, view: GroupView) -> bytes:
        """The record of a group. Raises JournalError where it is damaged, FileNotFoundError where it has left."""
        return read_record(self.directory, view.location, view.group_id)

    def _age(self, view: GroupView, facts: GroupFacts) -> int | None:
        learner = view.learner or self.lineage.learner
        try:
            return max(
                (
                    # Weights that were published before their step was reported are ahead, and 0 old.
                    0 if v.branch == learner.branch and v > learner else policy_age(v, learner, self.lineage.forks)
                    for v in facts.versions
                ),
                default=None,
            )
        except ValueError:
            return None

    def lines(
        self, filters: Filters, *, newest_first: bool, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[GroupLine]:
        """The groups that pass the filters, as far as one gets before `is_over`."""
        views: Iterable[GroupView] = self.views.values()
        for view in reversed(list(views)) if newest_first else views:
            if is_over():
                return
            if filters.may_take(view) and (line := self.line(view)) and filters.takes(line):
                yield line


def _backwards(directory: Path) -> Iterator[Groups]:
    """The groups of the newest log, then of the two newest, the four newest, ...; at last those of all."""
    num_logs, num_there = 1, len(layout.logs(directory))
    while num_logs < num_there:
        yield Groups(directory, num_logs)
        num_logs *= 2
    yield Groups(directory)


def newest_lines(
    directory: Path, filters: Filters, limit: int, is_over: Callable[[], bool] = lambda: False
) -> list[GroupLine]:
    """The newest groups that pass, at most `limit`, oldest first, as far as one gets before `is_over`.

    Reads no more logs than that takes.
    """
    found: list[GroupLine] = []
    for groups in _backwards(directory):
        lines = groups.lines(filters, newest_first=True, is_over=is_over)
        found = [line for line, _ in zip(lines, range(limit), strict=False)]
        if len(found) == limit or is_over():
            break
    return found[::-1]


def groups_with(directory: Path, group_id: str) -> Groups:
    """The groups of so many of the newest logs as it takes to find one; of all where it is in none."""
    for groups in _backwards(directory):
        if group_id in groups.views:
            break
    return groups


def find(directory: Path, group_id: str) -> tuple[GroupLine, bytes]:
    """One group with its record. Raises ConfigError where there is none of this id."""
    groups = groups_with(directory, group_id)
    view = groups.views.get(group_id)
    line = groups.line(view) if view else None
    if view is None or line is None:
        ids: Sequence[str] = list(groups.views)
        there = f"{ids[0]} to {ids[-1]}" if ids else "none"
        raise ConfigError(f"group {group_id}: no record in {directory}; there are {len(ids)} groups, {there}")
    return line, groups.data(view)


def _rows_while_there(log: Path) -> Iterator[Transition]:
    """The rows of a log; none where it has left the disk meanwhile. Raises JournalError as `_rows_of` does."""
    with suppress(FileNotFoundError):
        yield from _rows_of(log)


def _rows_of(log: Path) -> Iterator[Transition]:
    """The rows of a log. Raises JournalError where it does not begin as the log of its number."""
    rows = rows_of(log)
    first = next(rows, None)
    check_first(log, first)
    if first:
        yield first
    yield from rows


def read_account(directory: Path) -> tuple[Ledger, Lineage]:
    """The account as the newest log has it, and where the learner is.

    Raises JournalError for damage, LedgerError where the rows contradict each other.
    """
    ledger, lineage = Ledger(), Lineage()
    folds: Sequence[Callable[[Transition], None]] = (ledger.apply, lineage.apply)
    for row in _rows_of(list(layout.logs(directory).values())[-1]):
        if row.kind is Kind.SNAPSHOT:
            set_folds({"ledger": ledger, "lineage": lineage}, row)
            continue
        for apply in folds:
            apply(row)
    return ledger, lineage
