"""The buffer of the model: tickets, what has come in, leases. Groups are counted by mass; see `rule` for the rules."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

from stream_grpo.planner import rule
from stream_grpo.planner.account import Account
from stream_grpo.planner.cohort import Cohort
from stream_grpo.planner.group import Group
from stream_grpo.planner.world import Settings

SIGNAL_WINDOW = 256
"""Groups that the expected share with signal looks back on, as the buffer does."""
_HAND_OVER_S, _HAND_OVER_SHARE = 1.0, 0.1


class Stream:
    """Follows every group from its ticket to its end."""

    def __init__(self, settings: Settings, draw: Iterator[tuple[list[int], bool]], account: Account) -> None:
        """`draw` gives lengths and signal of the next group; ends are noted in `account`."""
        self._settings, self._draw, self._account = settings, draw, account
        deadline_s = settings.sample_deadline_s
        self._due_after_s = deadline_s - min(_HAND_OVER_S, _HAND_OVER_SHARE * deadline_s)
        self.step = 0
        """The learner's, as far as it is reported."""
        self._num_issued = 0
        self._in_flight: Counter[int] = Counter()
        """By the version that the ticket was issued for."""
        self.num_in_flight = 0
        self._available: list[tuple[int, int, Group]] = []
        """Version, order of dispatch, group: in the order in which a step takes them."""
        self.num_available = 0
        self._leased: list[Group] = []
        self.num_leased = 0
        self._staged: list[Group] = []
        self._recent: deque[bool] = deque(maxlen=SIGNAL_WINDOW)

    @property
    def live(self) -> int:
        """In flight + buffered with signal + leased."""
        return self.num_in_flight + self.num_available + self.num_leased

    # -- tickets ------------------------------------------------------------------------------------------------------

    def room(self, version: int) -> int:
        """Tickets that may be issued for weights of `version`."""
        n, age = self._settings.groups_per_step, self._settings.max_policy_age
        if age == 0:
            return self._block(version)
        return rule.room(self.live, self.step - version, max_policy_age=age, groups_per_step=n)

    def _block(self, version: int) -> int:
        missing = self._settings.groups_per_step - self.num_available - self.num_leased
        if version != self.step or self.num_in_flight or missing <= 0:
            return 0
        return rule.block_size(missing, (sum(self._recent) + 1) / (len(self._recent) + 2))

    def issue(self, cohort: Cohort, num_wanted: int, now_s: float) -> int:
        """Give a cohort tickets, up to `num_wanted`; how many there were."""
        count = min(num_wanted, self.room(cohort.version))
        for mass in _shares(count, cohort.size):
            self._num_issued += 1
            lengths, has_signal = next(self._draw)
            group = Group(
                number=self._num_issued,
                mass=mass,
                lengths=lengths,
                has_signal=has_signal,
                version=cohort.version,
                issued_at=self.step,
                due_s=now_s + self._due_after_s,
            )
            cohort.add(group)
        self._in_flight[cohort.version] += count
        self.num_in_flight += count
        return count

    # -- inserts ------------------------------------------------------------------------------------------------------

    def insert(self, group: Group) -> None:
        """A group comes in; at age 0 it is taken once its block has ended."""
        if self._settings.max_policy_age > 0:
            self._take(group)
            return
        self._staged.append(group)
        if len(self._staged) == self.num_in_flight:
            for staged in sorted(self._staged, key=lambda staged: staged.number):
                self._take(staged)
            self._staged.clear()
            num_missing = self._settings.groups_per_step - self.num_leased
            for surplus in self._take_available(self.num_available - num_missing, from_the_end=True):
                self._account.end(surplus, "stale")

    def _take(self, group: Group) -> None:
        self.num_in_flight -= group.mass
        self._in_flight[group.version] -= group.mass
        if not self._in_flight[group.version]:
            del self._in_flight[group.version]
        group.inserted_at = self.step
        is_valid = group.num_ended >= 2
        self._recent.append(is_valid and group.has_signal)
        if not is_valid:
            self._account.end(group, "invalid")
        elif not group.has_signal:
            self._account.end(group, "no_signal")
        elif self.step - group.oldest > self._settings.max_policy_age:
            self._account.end(group, "stale")
        else:
            insort(self._available, (group.oldest, group.number, group))
            self.num_available += group.mass

    # -- the learner --------------------------------------------------------------------------------------------------

    def lease(self) -> list[Group] | None:
        """The groups of the next step, or None where it must wait."""
        settings = self._settings
        if settings.too_old != "wait":
            self._drop_too_old()
        if self.num_available < settings.groups_per_step:
            return None
        begins = rule.may_begin(
            self.num_available,
            self._left_behind(settings.groups_per_step),
            self._in_flight,
            learner=self.step,
            max_policy_age=settings.max_policy_age,
            groups_per_step=settings.groups_per_step,
            waits=settings.too_old == "wait",
        )
        if not begins:
            return None
        self._leased = list(self._take_available(settings.groups_per_step))
        self.num_leased = settings.groups_per_step
        return self._leased

    def _drop_too_old(self) -> None:
        limit = bisect_left(self._available, (self.step - self._settings.max_policy_age,))
        for _, _, group in self._available[:limit]:
            self.num_available -= group.mass
            self._account.end(group, "stale")
        del self._available[:limit]

    def _left_behind(self, num_taken: int) -> Iterator[tuple[int, int]]:
        for version, _, group in self._available:
            num_left = group.mass - min(num_taken, group.mass)
            num_taken -= group.mass - num_left
            if num_left:
                yield version, num_left

    def _take_available(self, mass: int, *, from_the_end: bool = False) -> Iterator[Group]:
        """Take `mass` groups out; the last of them may be cut in two, of which one stays."""
        while mass > 0:
            place = -1 if from_the_end else 0
            version, number, group = self._available.pop(place)
            if group.mass > mass:
                group, rest = _split(group, mass)
                self._available.insert(len(self._available) if from_the_end else 0, (version, number, rest))
            mass -= group.mass
            self.num_available -= group.mass
            yield group

    def trained(self) -> None:
        """The step is made and reported."""
        for group in self._leased:
            self._account.end(group, "trained")
        self._leased, self.num_leased = [], 0
        self.step += 1

    # -- the account --------------------------------------------------------------------------------------------------

    def buffered_tokens(self) -> int:
        """Tokens of groups that have come in and have no end yet."""
        waiting = [*(group for *_, group in self._available), *self._staged, *self._leased]
        return sum(group.num_sampled * group.mass for group in waiting)


def _shares(count: int, size: int) -> Iterator[int]:
    """`count` groups as ones of all samplers of a cohort, and one of some of them."""
    for _ in range(count // size):
        yield size
    if count % size:
        yield count % size


def _split(group: Group, mass: int) -> tuple[Group, Group]:
    return replace(group, mass=mass), replace(group, mass=group.mass - mass)
