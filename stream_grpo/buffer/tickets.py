"""Tickets: how many may be issued, under which ids and seeds, and those in flight. A fold over transitions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.types import PolicyVersion, Ticket

IN_FLIGHT_ENDS = frozenset({Kind.ACCEPTED, Kind.STALE, Kind.NO_SIGNAL, Kind.INVALID})
"""Rows after which a group is no longer in flight."""


def room(live: int, lag: int, *, max_policy_age: int, groups_per_step: int) -> int:
    """How many tickets may be issued: until live = (max_policy_age + 1 - lag) * groups_per_step.

    `lag` is the policy age of the weights that the sampler has applied.
    """
    return max(0, (max_policy_age + 1 - lag) * groups_per_step - live)


def block_size(missing: int, expected_share: float) -> int:
    """Tickets of a block at `max_policy_age` 0: ceil(missing / expected share with signal)."""
    # A quotient that is whole but for rounding is not one more: 3 / (3 / 4) is 4.
    return math.ceil(missing / expected_share - 1e-9)


def group_id_of(number: int) -> str:
    """The id of the group that is issued as number 1, 2, 3, ...; ids sort by issue. Example: g00000001."""
    return f"g{number:08d}"


def seed_of(run_seed: int, group_id: str) -> int:
    """The seed of a group, 63 bits: a hash that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{group_id}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A ticket that was issued and has no end yet."""

    ticket: Ticket
    sampler_id: str
    version: PolicyVersion
    """Weights of the sampler at issue."""
    request: str
    """The request it answered, so that a repeat of it gets the same tickets."""


class TicketBook:
    """The tickets in flight and the next id. `lineage` must have seen the same transitions."""

    folded = ("_in_flight", "_released", "_lost", "_problems", "_sizes", "_epochs", "_next_number")

    def __init__(self, lineage: Lineage, *, run_seed: int, sample_deadline_s: float) -> None:
        """No ticket yet."""
        self._lineage, self._run_seed, self._sample_deadline_s = lineage, run_seed, sample_deadline_s
        self._in_flight: dict[str, InFlight] = {}
        self._released: dict[str, None] = {}
        self._lost: set[str] = set()
        """Of the released those whose owner was only not heard of, and may still be."""
        self._problems: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        """Rollouts that groups in flight are to have, as far as their samplers have said."""
        self._epochs: dict[str, int] = {}
        self._next_number = 1

    def apply(self, row: Transition) -> None:
        """Follow a transition."""
        if row.kind is Kind.TICKETED:
            self._issue(row)
        elif row.kind in (Kind.PICKED, Kind.PARTIAL) and row.group_id in self._in_flight:
            self._name(row)
        elif row.kind is Kind.HELLO:
            self._epochs[row.sampler_id] = row.owner_epoch
            mine = [group_id for group_id, held in self._in_flight.items() if held.sampler_id == row.sampler_id]
            self._lost.difference_update(mine)
            self._release(mine)
        elif row.kind is Kind.LOST and row.group_id in self._in_flight:
            self._lost.add(row.group_id)
            self._release([row.group_id])
        elif row.kind is Kind.RESCORED:
            self._name(row)
            self._hold(row, request="")
            self._release([row.group_id])
        elif row.kind in IN_FLIGHT_ENDS:
            self._in_flight.pop(row.group_id, None)
            self._problems.pop(row.group_id, None)
            self._sizes.pop(row.group_id, None)
            self._unrelease(row.group_id)

    def _name(self, row: Transition) -> None:
        self._problems[row.group_id] = row.problem_id
        if row.num_rollouts:
            self._sizes[row.group_id] = row.num_rollouts

    def _release(self, group_ids: Iterable[str]) -> None:
        # Oldest first, before those that were released earlier and nobody took.
        self._released = dict.fromkeys(sorted({*self._released, *group_ids}))

    def _unrelease(self, group_id: str) -> None:
        self._released.pop(group_id, None)
        self._lost.discard(group_id)

    def _hold(self, row: Transition, request: str) -> None:
        ticket = Ticket(
            group_id=row.group_id,
            owner_epoch=row.owner_epoch,
            step=self._lineage.learner.step,
            seed=seed_of(self._run_seed, row.group_id),
            issued_at_s=row.time_s,
            deadline_s=row.time_s + self._sample_deadline_s,
            problem_id=self._problems.get(row.group_id, ""),
            group_size=self._sizes.get(row.group_id, 0),
        )
        self._in_flight[row.group_id] = InFlight(
            ticket=ticket, sampler_id=row.sampler_id, version=row.version, request=request
        )

    def _issue(self, row: Transition) -> None:
        self._hold(row, request=row.reason)
        self._unrelease(row.group_id)
        self._next_number = max(self._next_number, int(row.group_id[1:]) + 1)

    def extend_deadlines(self, not_before_s: float, group_ids: Iterable[str] | None = None) -> None:
        """No ticket in flight ends before, of these groups or of all.

        A buffer that was down gives samplers time to send again.
        """
        for group_id in list(self._in_flight if group_ids is None else group_ids):
            held = self._in_flight[group_id]
            deadline_s = max(held.ticket.deadline_s, not_before_s)
            self._in_flight[group_id] = replace(held, ticket=replace(held.ticket, deadline_s=deadline_s))

    def __len__(self) -> int:
        """Groups in flight, those to be issued again included."""
        return len(self._in_flight)

    def __iter__(self) -> Iterator[InFlight]:
        """Groups in flight, oldest first."""
        return iter([self._in_flight[group_id] for group_id in sorted(self._in_flight)])

    def get(self, group_id: str) -> InFlight | None:
        """The group's ticket while it is in flight."""
        return self._in_flight.get(group_id)

    def was_issued(self, group_id: str) -> bool:
        """Whether this id was ever on a ticket."""
        digits = group_id[1:]
        return digits.isdecimal() and group_id == group_id_of(int(digits)) and 0 < int(digits) < self._next_number

    def next_epoch(self, sampler_id: str) -> int:
        """The number of the incarnation that says hello now; the first is 0."""
        return self.epoch_of(sampler_id) + 1

    def epoch_of(self, sampler_id: str) -> int:
        """The number of the incarnation that said hello last; -1 for a sampler that never did."""
        return self._epochs.get(sampler_id, -1)

    def released(self) -> list[InFlight]:
        """Tickets to be issued again before any new one, oldest first.

        Their samplers began anew or were not heard of for too long, or their groups are to be scored again.
        """
        return [self._in_flight[group_id] for group_id in self._released]

    def has_owner(self, group_id: str) -> bool:
        """Whether the sampler that a group in flight was issued to may still hold it: until it begins anew."""
        return group_id in self._in_flight and (group_id not in self._released or group_id in self._lost)

    def is_lost(self, group_id: str) -> bool:
        """Whether a group in flight was released because its owner was not heard of."""
        return group_id in self._lost

    def answered(self, request: str) -> list[Ticket]:
        """The tickets in flight that this very request was answered with."""
        return [held.ticket for held in self if held.request == request and held.ticket.group_id not in self._released]

    def new_group_ids(self, count: int) -> list[str]:
        """The ids of the next `count` groups."""
        return [group_id_of(self._next_number + i) for i in range(count)]

    def problem_of(self, group_id: str) -> str:
        """The problem that was picked for a group in flight; empty where its sampler has not said."""
        return self._problems.get(group_id, "")

    def overdue(self, now: float) -> list[InFlight]:
        """Tickets past their deadline, oldest first."""
        return [held for held in self if now > held.ticket.deadline_s]
