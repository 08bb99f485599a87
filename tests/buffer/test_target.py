"""A target below the maximum age: fewer tickets, and everything else as it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.types import PolicyVersion
from tests.buffer.fakes import Buffer, group_for
from tests.buffer.test_process import Running
from tests.buffer.test_stream import Simulation

V0, V1, V2 = (PolicyVersion(0, step) for step in range(3))


def started(**changes: Any) -> Buffer:
    buffer = Buffer(**changes)
    buffer.start()
    return buffer


@pytest.mark.parametrize(("target", "expected"), [(0, 2), (1, 4), (2, 6), (9, 6), (None, 6)])
def test_the_target_takes_the_maximums_place_and_never_exceeds_it(target: int | None, expected: int) -> None:
    # max_policy_age 2, 2 groups a step, weights of the learner: (target + 1) x 2 tickets.
    buffer = started()
    buffer.intake.aim_at(target)
    assert len(buffer.issue(V0, 99)) == expected


def test_weights_older_than_the_target_get_no_new_ticket_and_are_told_why() -> None:
    buffer = started()
    buffer.fill(V0, 2)
    buffer.train(V0)
    buffer.intake.aim_at(0)
    assert buffer.intake.issue("s0", V0, 1, "r", 0.0) == (
        [],
        "0 groups are live, the limit for weights 1 steps old is 0 with target_policy_age = 0",
    )
    assert len(buffer.issue(V1, 99)) == 2


def test_a_lower_target_ends_nothing_and_a_ticket_is_still_issued_again() -> None:
    buffer = started()
    tickets = buffer.issue(V0, 6)
    buffer.intake.aim_at(0)
    buffer.intake.hello("s0", 0.0)
    # Six live of the two that the target allows: none is new, and none of the six is lost.
    assert [ticket.group_id for ticket in buffer.issue(V0, 99)] == [ticket.group_id for ticket in tickets]
    assert not buffer.issue(V0, 1)


def test_ages_are_judged_by_the_maximum_whatever_the_target_is() -> None:
    buffer = started()
    (slow,) = buffer.issue(V0, 1)
    buffer.intake.aim_at(1)
    for version in (V0, V1):
        buffer.fill(version, 2)
        buffer.train(version)
    buffer.intake.aim_at(0)
    answer = buffer.insert(group_for(slow, V0))
    assert answer
    assert answer.fate == "accepted"
    buffer.fill(V2, 1)
    batch = buffer.leases.lease(V2, 2, 0.0)
    assert batch.ages == [2, 0]


def test_a_buffer_that_begins_anew_has_no_target_until_it_is_told_again() -> None:
    buffer = started()
    buffer.intake.aim_at(0)
    assert len(buffer.restarted().issue(V0, 99)) == 6


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    process = Running(tmp_path / "journal")
    yield process
    process.stop()
    for client in process.clients:
        client.close()


def test_every_lease_tells_the_target(running: Running) -> None:
    learner, sampler = running.learner(), running.sampler()
    assert not learner.lease(V0, 2, target_policy_age=1).groups
    sampler.ask_tickets(V0, 99, {})
    tickets = []
    while sampler.waits_for_tickets:
        tickets += sampler.poll(0.05)[0]
    assert len(tickets) == 4
    assert not learner.lease(V0, 2).groups
    sampler.ask_tickets(V0, 99, {})
    while sampler.waits_for_tickets:
        tickets += sampler.poll(0.05)[0]
    assert len(tickets) == 6


class Steered(Simulation):
    """A run whose target moves at random, down to what the lag of weights needs, and is forgotten with the buffer."""

    def lease(self) -> list[str]:
        rules, lowest = self.rules, self.publish_interval - 1
        if self.rng.random() < 0.5:
            self.buffer.intake.aim_at(self.rng.randint(lowest, rules.max_policy_age))
        return super().lease()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_age=st.integers(1, 4),
    publish=st.integers(1, 4),
    too_old=st.sampled_from(["wait", "wait", "drop", "baseline_only"]),
    samplers=st.integers(1, 3),
    crashes=st.booleans(),
)
def test_with_a_target_that_moves_no_token_is_too_old_and_the_stream_goes_on(
    seed: int, max_age: int, publish: int, too_old: str, samplers: int, crashes: bool
) -> None:
    rules = {"max_policy_age": max_age, "groups_per_step": 2, "too_old": too_old}
    simulation = Steered(
        seed, publish_interval=min(publish, max_age + 1), samplers=samplers, crashes=crashes, rules=rules
    )
    for _ in range(300):
        simulation.turn()
    assert simulation.ages  # `check` has held every age and the number of live groups against the maximum
    fields = simulation.buffer.book.ledger.as_fields()
    assert fields["closes"]
    assert too_old != "wait" or "stale: age" not in simulation.buffer.book.ledger.ends
