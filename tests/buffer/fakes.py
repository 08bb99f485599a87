"""A journal in memory, a curator that only remembers, and short ways to drive the buffer."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from threading import Event, Thread
from typing import Any

import numpy as np

from curator.schema import OUTCOME_SCHEMA, Outcome, batch_from_bytes, outcomes_from_batch
from curator.wire import Request, Server
from stream_grpo.buffer.book import Book, Rules
from stream_grpo.buffer.intake import Answer, Intake
from stream_grpo.buffer.leases import Leases
from stream_grpo.buffer.transitions import Location, Transition
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import PolicyVersion, Rollout, RolloutGroup, Ticket
from tests.fakes import START, make_group

_request_numbers = itertools.count()


class MemoryJournal:
    """A journal that is as durable as the test: what `buffer.book.Records` asks for. Every record has a segment."""

    def __init__(self) -> None:
        self.rows: list[Transition] = []
        self.records: list[bytes] = []

    def replay(self) -> Iterator[Transition]:
        return iter(list(self.rows))

    def append(self, transition: Transition) -> None:
        self.rows.append(transition)

    def append_group(self, data: bytes, transition: Transition) -> Transition:
        place: dict[str, Any] = {
            "segment": len(self.records) + 1,
            "offset": 0,
            "length": len(data),
            "crc32": zlib.crc32(data),
        }
        self.records.append(data)
        self.rows.append(replace(transition, **place))
        return self.rows[-1]

    def read(self, location: Location, group_id: str = "") -> bytes:
        return self.records[location.segment - 1]


class FakeCurator:
    """A curator that only remembers outcomes, behind a real socket, in a thread. A gap is refused."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.num_durable = 0
        self.is_paused = False
        self._server, self._stop = Server(), Event()
        self.address = self._server.address
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            request = None if self.is_paused else self._server.receive(0.01)
            if request is None:
                self._stop.wait(0.001)
            elif request.message.kind == "report":
                self._report(request)
            else:
                fields = {"next_sequence": len(self.outcomes), "durable_sequence": self.num_durable}
                self._server.reply(request, "position", fields)

    def _report(self, request: Request) -> None:
        received = outcomes_from_batch(batch_from_bytes(request.message.body[0], OUTCOME_SCHEMA))
        expected = len(self.outcomes)
        if received[0].sequence > expected:
            self._server.refuse(request, f"gap: expected {expected}, received {received[0].sequence}")
            return
        self.outcomes += [outcome for outcome in received if outcome.sequence >= expected]
        self._server.reply(request, "reported", {"next_sequence": len(self.outcomes)})

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._server.close()


def rules(**changes: Any) -> Rules:
    """2 groups a step, age at most 2, a deadline after 100 s, an end after 50 groups without signal."""
    values: dict[str, Any] = {
        "groups_per_step": 2,
        "max_policy_age": 2,
        "sample_deadline_s": 100.0,
        "max_groups_without_signal": 50,
        "run_seed": 7,
    }
    return Rules(**values | changes)


def group_for(
    ticket: Ticket,
    version: PolicyVersion | Sequence[PolicyVersion],
    rewards: Sequence[float | None] = (1.0, 0.0),
    **rollout: Any,
) -> RolloutGroup:
    """A finished group of a ticket: 4 sampled tokens a rollout, of one version or one each."""
    group = make_group(ticket.group_id, rewards, owner_epoch=ticket.owner_epoch, version=version, **rollout)
    return replace(group, ticket_step=ticket.step)


def group_by_rollout(
    ticket: Ticket, versions: Sequence[Sequence[PolicyVersion]], rewards: Sequence[float | None]
) -> RolloutGroup:
    """A finished group whose rollouts each have 4 sampled tokens of their own versions."""
    groups = [group_for(ticket, list(of_one), rewards) for of_one in versions]
    rollouts = tuple(group.rollouts[index] for index, group in enumerate(groups))
    return replace(groups[0], rollouts=rollouts)


def as_branching(group: RolloutGroup, num_trunk: int = 2) -> RolloutGroup:
    """The same with so many first response tokens as a trunk, which the first rollout has sampled for all."""

    def of(rollout: Rollout, is_first: bool) -> Rollout:
        places = np.arange(len(rollout.token_ids)) - rollout.num_prompt_tokens
        is_trunk = (places >= 0) & (places < num_trunk)
        if is_first:
            return replace(rollout, loss_mask=rollout.loss_mask & ~is_trunk)
        return replace(
            rollout,
            loss_mask=rollout.loss_mask & ~is_trunk,
            behavior_logprobs=np.where(is_trunk, 0.0, rollout.behavior_logprobs).astype(np.float32),
            version_branch=np.where(is_trunk, -1, rollout.version_branch).astype(np.int32),
            version_step=np.where(is_trunk, -1, rollout.version_step).astype(np.int32),
        )

    return replace(group, rollouts=tuple(of(rollout, i == 0) for i, rollout in enumerate(group.rollouts)))


class Buffer:
    """Book, intake and leases of one run, without process and wire; everything is acknowledged at once."""

    def __init__(self, journal: MemoryJournal | None = None, *, now: float = 0.0, **changes: Any) -> None:
        self.journal = journal or MemoryJournal()
        self.book = Book(self.journal, rules(**changes), now=now)
        self.intake, self.leases = Intake(self.book, now=now), Leases(self.book)
        self.book.outbox.close()

    def restarted(self, now: float = 0.0) -> Buffer:
        """Another buffer on the same journal."""
        return Buffer(self.journal, now=now, **asdict(self.book.rules))

    def start(self, version: PolicyVersion = START, **forks: PolicyVersion) -> None:
        self.leases.start(version, {int(name[1:]): fork for name, fork in forks.items()}, 0.0)
        self.intake.settle(0.0)

    def issue(self, version: PolicyVersion, count: int, sampler: str = "s0", now: float = 0.0) -> list[Ticket]:
        return self.intake.issue(sampler, version, count, f"request-{next(_request_numbers)}", now)[0]

    def insert(self, group: RolloutGroup, now: float = 0.0) -> Answer | None:
        self.intake.insert("me", encode_group(group), now)
        answers = self.intake.take_answers()
        return answers[-1] if answers else None

    def fill(self, version: PolicyVersion, count: int) -> list[str]:
        """Tickets for these weights, and a group with signal for each."""
        tickets = self.issue(version, count)
        for ticket in tickets:
            self.insert(group_for(ticket, version))
        return [ticket.group_id for ticket in tickets]

    def train(self, version: PolicyVersion) -> list[str]:
        """Lease the batch of the step from `version` and train on all of it; the ids of its groups."""
        batch = self.leases.lease(version, self.book.rules.groups_per_step, 0.0)
        ids = [held.group_id for held in batch.groups]
        tokens = {held.group_id: {"trained": held.num_tokens} for held in batch.groups}
        if ids:
            self.leases.trained(PolicyVersion(version.branch, version.step + 1), ids, tokens, 0.0)
        return ids

    @property
    def groups(self) -> dict[str, int]:
        """Groups by state, those that are 0 left out."""
        fields = self.book.ledger.as_fields()
        assert fields["closes"]
        return {name: count for name, count in fields["groups"].items() if count}

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens by fate, those that are 0 left out."""
        return {name: count for name, count in self.book.ledger.as_fields()["tokens"].items() if count}
