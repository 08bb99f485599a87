"""The buffer of the model: tickets, what has come in, leases; see `rule` for the rules."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator

from stream_grpo.planner import rule
from stream_grpo.planner.account import Account
from stream_grpo.planner.cohort import Cohort
from stream_grpo.planner.group import Drawn, Group
from stream_grpo.planner.world import Settings

SIGNAL_WINDOW = 256
"""Groups that the expected share with signal looks back on, as the buffer does."""
MAX_WITHOUT_SIGNAL = 20_000
"""So many groups in a row without signal are taken for a stream that has none."""
_HAND_OVER_S, _HAND_OVER_SHARE = 1.0, 0.1
"""A late group is handed over so long before its deadline, as samplers do."""


class Stream:
    """Follows every group from its ticket to its end."""

    def __init__(self, settings: Settings, draw: Iterator[Drawn], account: Account) -> None:
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
        self._available: dict[int, list[tuple[int, Group]]] = {}
        """By the version of the oldest token; of each a heap by dispatch."""
        self.num_available = 0
        self._leased: list[Group] = []
        self._staged: list[Group] = []
        self._recent: deque[bool] = deque(maxlen=SIGNAL_WINDOW)
        self._num_without_signal = 0

    @property
    def live(self) -> int:
        """In flight + buffered with signal + leased."""
        return self.num_in_flight + self.num_available + len(self._leased)

    # -- tickets ------------------------------------------------------------------------------------------------------

    def room(self, version: int) -> int:
        """Tickets that may be issued for weights of `version`."""
        n, age = self._settings.groups_per_step, self._settings.max_policy_age
        if age == 0:
            return self._block(version)
        return rule.room(self.live, self.step - version, max_policy_age=age, groups_per_step=n)

    def _block(self, version: int) -> int:
        missing = self._settings.groups_per_step - self.num_available - len(self._leased)
        if version != self.step or self.num_in_flight or missing <= 0:
            return 0
        return rule.block_size(missing, (sum(self._recent) + 1) / (len(self._recent) + 2))

    def issue(self, cohort: Cohort, num_wanted: int, now_s: float) -> int:
        """Give a cohort tickets, up to `num_wanted`; how many there were."""
        count = min(num_wanted, self.room(cohort.version))
        if not count:
            return 0
        for _ in range(count):
            self._num_issued += 1
            lengths, has_signal = next(self._draw)
            due_s = now_s + self._due_after_s
            cohort.add(Group(self._num_issued, lengths, has_signal, cohort.version, self.step, due_s))
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
            self._end_surplus()

    def _take(self, group: Group) -> None:
        """Judge a group as the buffer admits it: invalid before no signal before stale."""
        self.num_in_flight -= 1
        self._in_flight[group.version] -= 1
        if not self._in_flight[group.version]:
            del self._in_flight[group.version]
        group.inserted_at = self.step
        has_signal = group.num_ended >= 2 and group.has_signal
        self._recent.append(has_signal)
        self._num_without_signal = 0 if has_signal else self._num_without_signal + 1
        if self._num_without_signal > MAX_WITHOUT_SIGNAL:
            raise ValueError(f"{MAX_WITHOUT_SIGNAL} groups in a row have no signal: the learner never gets a batch")
        if group.num_ended < 2:
            self._account.end(group, "invalid")
        elif not has_signal:
            self._account.end(group, "no_signal")
        elif self.step - group.oldest > self._settings.max_policy_age:
            self._account.end(group, "stale")
        else:
            heapq.heappush(self._available.setdefault(group.oldest, []), (group.number, group))
            self.num_available += 1

    def _end_surplus(self) -> None:
        """At age 0: of a block the first groups fill the batch."""
        num_missing = self._settings.groups_per_step - len(self._leased)
        ordered = self._take_available(self.num_available)
        for group in ordered[num_missing:]:
            self._account.end(group, "stale")
        for group in ordered[:num_missing]:
            heapq.heappush(self._available.setdefault(group.oldest, []), (group.number, group))
            self.num_available += 1

    # -- the learner --------------------------------------------------------------------------------------------------

    def lease(self) -> list[Group] | None:
        """The groups of the next step, or None where it must wait."""
        settings, n = self._settings, self._settings.groups_per_step
        if settings.too_old != "wait":
            self._drop_too_old()
        if self.num_available < n:
            return None
        begins = rule.may_begin(
            self.num_available,
            self._left_behind(n),
            self._in_flight,
            learner=self.step,
            max_policy_age=settings.max_policy_age,
            groups_per_step=n,
            waits=settings.too_old == "wait",
        )
        if begins:
            self._leased = self._take_available(n)
        return self._leased if begins else None

    def _drop_too_old(self) -> None:
        for version in [v for v in self._available if self.step - v > self._settings.max_policy_age]:
            for _, group in self._available.pop(version):
                self.num_available -= 1
                self._account.end(group, "stale")

    def _left_behind(self, num_taken: int) -> Iterator[tuple[int, int]]:
        """Groups by version that a step of `num_taken` does not take."""
        for version in sorted(self._available):
            count = len(self._available[version])
            yield version, max(0, count - num_taken)
            num_taken = max(0, num_taken - count)

    def _take_available(self, count: int) -> list[Group]:
        """Take groups out: with fewest steps left first, then oldest dispatched."""
        taken: list[Group] = []
        for version in sorted(self._available):
            groups = self._available[version]
            while groups and len(taken) < count:
                taken.append(heapq.heappop(groups)[1])
            if not groups:
                del self._available[version]
        self.num_available -= len(taken)
        return taken

    def trained(self) -> None:
        """The step is made and reported."""
        for group in self._leased:
            self._account.end(group, "trained")
        self._leased = []
        self.step += 1

    # -- the account --------------------------------------------------------------------------------------------------

    def buffered_tokens(self) -> int:
        """Tokens of groups that have come in and have no end yet."""
        available = (group for groups in self._available.values() for _, group in groups)
        return sum(group.num_sampled for group in (*available, *self._staged, *self._leased))
