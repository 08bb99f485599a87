"""The simulation of the stream where samplers hand over partials, fall silent, and go on with the groups of others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.transport.codec import decode_group, encode_group
from stream_grpo.types import EndReason, PolicyVersion, Ticket
from tests.buffer.fakes import group_for
from tests.buffer.test_stream import DEADLINE_S, Simulation

NUM_TOKENS = 4


class Continued(Simulation):
    """Rollouts of 4 tokens, of which up to 3 are handed over before the end. A sampler in ten is silent for a while."""

    def __init__(self, seed: int, *, max_policy_age: int, publish_interval: int, samplers: int) -> None:
        rules = {"max_policy_age": max_policy_age, "ticket_timeout_s": 6.0}
        super().__init__(seed, publish_interval=publish_interval, samplers=samplers, crashes=True, rules=rules)
        for sampler in range(samplers):
            self.buffer.intake.hello(f"s{sampler}", self.now)
        self.tokens: dict[tuple[str, int], list[PolicyVersion]] = {}
        self.num_continued = 0

    def turn(self) -> None:
        self.beat()
        self.buffer.intake.release_silent(self.now)
        self.partial()
        super().turn()
        assert not self.buffer.book.ledger.gap()

    def beat(self) -> None:
        for sampler in range(len(self.applied)):
            if self.rng.random() > 0.1:
                held = {ticket.group_id: 2 * NUM_TOKENS for _, ticket, of, _ in self.running if of == sampler}
                name, book = f"s{sampler}", self.buffer.book
                self.buffer.intake.owners.heartbeat(name, book.tickets.epoch_of(name), held, self.now)

    def ask(self) -> None:
        sampler = self.rng.randrange(len(self.applied))
        for ticket in self.buffer.issue(self.applied[sampler], self.rng.randint(1, 3), f"s{sampler}", self.now):
            draw = self.rng.random()
            took = DEADLINE_S * 2 if draw < 0.1 else self.rng.expovariate(0.3)
            begun = versions_of(ticket)
            self.num_continued += bool(begun)
            self.tokens[(ticket.group_id, ticket.owner_epoch)] = begun
            self.running.append((self.now + took, ticket, sampler, [self.applied[sampler]]))

    def partial(self) -> None:
        """One of the groups that run has a token more, of the weights of now."""
        if not self.running:
            return
        _, ticket, _, versions = self.rng.choice(self.running)
        tokens = self.tokens[(ticket.group_id, ticket.owner_epoch)]
        if len(tokens) < NUM_TOKENS - 1:
            tokens.append(versions[-1])
            group = group_for(ticket, tokens, [None, None], num_response=len(tokens), end_reason=EndReason.PARTIAL)
            self.buffer.intake.partial(encode_group(group), self.now)

    def finish(self) -> None:
        for finished in [group for group in self.running if group[0] <= self.now]:
            self.running.remove(finished)
            _, ticket, _, versions = finished
            tokens = self.tokens[(ticket.group_id, ticket.owner_epoch)]
            rest = [versions[-1]] * (NUM_TOKENS - len(tokens))
            rewards = (1.0, 0.0) if self.rng.random() < 0.7 else (1.0, 1.0)
            self.buffer.insert(group_for(ticket, [*tokens, *rest], rewards), self.now)


def versions_of(ticket: Ticket) -> list[PolicyVersion]:
    """The versions of the tokens that a ticket brings, of each of its rollouts."""
    if not ticket.prefix:
        return []
    rollout = decode_group(ticket.prefix).rollouts[0]
    pairs = zip(rollout.version_branch[3:].tolist(), rollout.version_step[3:].tolist(), strict=True)
    return [PolicyVersion(branch, step) for branch, step in pairs]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), max_policy_age=st.integers(1, 3), publish=st.integers(1, 4), samplers=st.integers(1, 3)
)
def test_no_leased_token_is_too_old_and_the_account_closes_whoever_goes_on_with_what(
    seed: int, max_policy_age: int, publish: int, samplers: int
) -> None:
    simulation = Continued(
        seed,
        max_policy_age=max_policy_age,
        publish_interval=min(publish, max_policy_age + 1),
        samplers=samplers,
    )
    for _ in range(300):
        simulation.turn()
    assert max(simulation.ages, default=0) <= max_policy_age
    ledger = simulation.buffer.book.ledger
    assert "stale: age" not in ledger.ends
    assert simulation.buffer.restarted().book.ledger.as_fields() == ledger.as_fields()


def test_groups_are_continued_in_it() -> None:
    simulation = Continued(3, max_policy_age=2, publish_interval=1, samplers=2)
    for _ in range(120):
        simulation.turn()
    assert simulation.num_continued > 0
    assert simulation.buffer.book.ledger.lost_in_sampler > 0
    assert simulation.ages
