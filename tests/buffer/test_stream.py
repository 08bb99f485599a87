"""The age bound and progress, whatever arrives when: a simulation of samplers, learner, publishes and deadlines."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.buffer.lineage import contains
from stream_grpo.types import PolicyVersion, Ticket
from tests.buffer.fakes import Buffer, group_for

DEADLINE_S = 30.0


class Simulation:
    """One run in simulated seconds. Samplers apply what is published late, finish late, or never."""

    def __init__(self, seed: int, *, max_policy_age: int, publish_interval: int, samplers: int, crashes: bool) -> None:
        self.rng, self.now, self.crashes = random.Random(seed), 0.0, crashes
        self.buffer = Buffer(
            max_policy_age=max_policy_age, sample_deadline_s=DEADLINE_S, max_groups_without_signal=10_000
        )
        self.max_policy_age, self.publish_interval = max_policy_age, publish_interval
        self.learner = self.published = self.to_publish = PolicyVersion(0, 0)
        self.forks: dict[int, PolicyVersion] = {}
        self.buffer.start(self.learner)
        self.applied = [self.published] * samplers
        self.running: list[tuple[float, Ticket, int, list[PolicyVersion]]] = []
        self.trained: list[tuple[PolicyVersion, list[str]]] = []
        self.ages: list[int] = []
        self.last_progress = 0.0

    def turn(self) -> None:
        self.now += self.rng.expovariate(1.0)
        self.buffer.intake.expire(self.now)
        actions: list[Callable[[], None]] = [self.ask, self.apply, self.finish, self.learn, self.publish]
        if self.crashes:
            actions += [self.crash] * (self.rng.random() < 0.04)
        for action in self.rng.sample(actions, len(actions)):
            action()

    def ask(self) -> None:
        sampler = self.rng.randrange(len(self.applied))
        for ticket in self.buffer.issue(self.applied[sampler], self.rng.randint(1, 3), f"s{sampler}", self.now):
            # One in ten never comes back, one in ten nearly takes its whole time.
            draw = self.rng.random()
            took = DEADLINE_S * 2 if draw < 0.1 else DEADLINE_S * 0.9 if draw < 0.2 else self.rng.expovariate(0.3)
            self.running.append((self.now + took, ticket, sampler, [self.applied[sampler]]))

    def apply(self) -> None:
        sampler = self.rng.randrange(len(self.applied))
        self.applied[sampler] = self.published
        for _, _, of, versions in self.running:
            if of == sampler:
                versions.append(self.published)

    def finish(self) -> None:
        for finished in [group for group in self.running if group[0] <= self.now]:
            self.running.remove(finished)
            _, ticket, _, versions = finished
            tokens = sorted([versions[0], *self.rng.choices(versions, k=3)])
            rewards = (1.0, 0.0) if self.rng.random() < 0.7 else (1.0, 1.0)
            self.buffer.insert(group_for(ticket, tokens, rewards), self.now)

    def publish(self) -> None:
        self.published = self.to_publish

    def learn(self) -> None:
        if not self.lease():
            return
        self.publish()
        version = self.learner
        self.learner = PolicyVersion(version.branch, version.step + 1)
        self.trained.append((self.learner, self.buffer.train(version)))
        if self.learner.step % self.publish_interval == 0:
            self.to_publish = self.learner

    def lease(self) -> list[str]:
        batch = self.buffer.leases.lease(self.learner, 2, self.now)
        if not batch.groups:
            assert self.now - self.last_progress < 12 * DEADLINE_S, batch.cause
            return []
        ids = [held.group_id for held in batch.groups]
        assert not {*ids} & {group_id for _, trained in self.trained for group_id in trained}
        for held in batch.groups:
            for version in held.versions:
                assert self.buffer.book.lineage.age(version) <= self.max_policy_age
        self.ages += batch.ages
        self.last_progress = self.now
        return ids

    def crash(self) -> None:
        """The buffer dies, or a sampler begins anew, or the learner, whose last report may be lost, opens a branch."""
        what = self.rng.randrange(4)
        if what == 0:
            self.buffer = self.buffer.restarted(self.now)
        elif what == 1:
            self.buffer.intake.hello("s0", self.now)
            self.applied[0] = self.published
        elif what == 2:
            self.restore(max(self.learner.step - self.rng.randint(0, 3), self._fork_step()))
        elif ids := self.lease():
            made = PolicyVersion(self.learner.branch, self.learner.step + 1)
            self.trained.append((made, ids))
            self.restore(made.step)

    def restore(self, step: int) -> None:
        """Go on from a checkpoint of this branch. Samplers hear of it with the next publish, and not before."""
        branch, fork = self.learner.branch + 1, PolicyVersion(self.learner.branch, step)
        self.forks[branch] = fork
        self.learner = self.to_publish = PolicyVersion(branch, step)
        self.trained = [entry for entry in self.trained if contains(self.learner, entry[0], self.forks)]
        self.buffer.start(self.learner, **{f"b{number}": fork for number, fork in self.forks.items()})

    def _fork_step(self) -> int:
        fork = self.forks.get(self.learner.branch)
        return fork.step if fork else 0


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), max_policy_age=st.integers(0, 3), publish=st.integers(1, 4), samplers=st.integers(1, 3)
)
def test_no_leased_token_is_too_old_and_the_stream_goes_on(
    seed: int, max_policy_age: int, publish: int, samplers: int
) -> None:
    simulation = Simulation(
        seed,
        max_policy_age=max_policy_age,
        publish_interval=min(publish, max_policy_age + 1),
        samplers=samplers,
        crashes=False,
    )
    for _ in range(400):
        simulation.turn()
    assert max(simulation.ages, default=0) <= max_policy_age
    assert "stale: age" not in simulation.buffer.book.ledger.ends
    assert simulation.buffer.book.ledger.as_fields()["closes"]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), max_policy_age=st.integers(0, 3), publish=st.integers(1, 4), samplers=st.integers(1, 3)
)
def test_the_same_holds_with_crashes_branches_and_restarts(
    seed: int, max_policy_age: int, publish: int, samplers: int
) -> None:
    simulation = Simulation(
        seed,
        max_policy_age=max_policy_age,
        publish_interval=min(publish, max_policy_age + 1),
        samplers=samplers,
        crashes=True,
    )
    for _ in range(400):
        simulation.turn()
    assert "stale: age" not in simulation.buffer.book.ledger.ends
    ledger = simulation.buffer.book.ledger.as_fields()
    assert ledger["closes"]
    assert simulation.buffer.restarted().book.ledger.as_fields() == ledger


def test_one_group_that_takes_fifty_steps_is_waited_for_and_trained_in_time() -> None:
    """Age 4, 2 groups a step. A straggler is issued at step 0; the learner may be 4 steps ahead of it, and no more."""
    buffer = Buffer(max_policy_age=4)
    buffer.start()
    (straggler,) = buffer.issue(PolicyVersion(0, 0), 1)
    step = 0
    for _ in range(50):
        version = PolicyVersion(0, step)
        buffer.fill(version, 2)
        step += bool(buffer.train(version))
    # Steps 0 to 3 leave it behind with 4, 3, 2, 1 steps left; step 4 may not, as it would be 5 steps old then.
    assert step == 4
    assert "waits for group g00000001 of s0 with 0 steps left" in buffer.leases.lease(PolicyVersion(0, 4), 2, 0.0).cause
    buffer.insert(group_for(straggler, PolicyVersion(0, 0)))
    batch = buffer.leases.lease(PolicyVersion(0, 4), 2, 0.0)
    assert batch.groups[0].group_id == straggler.group_id
    assert batch.ages[0] == 4


def test_a_straggler_that_never_comes_holds_the_stream_no_longer_than_its_deadline() -> None:
    buffer = Buffer(max_policy_age=0)
    buffer.start()
    tickets = buffer.issue(PolicyVersion(0, 0), 1)
    for ticket in tickets[1:]:
        buffer.insert(group_for(ticket, PolicyVersion(0, 0)))
    assert not buffer.train(PolicyVersion(0, 0))
    buffer.intake.expire(101.0)
    assert len(buffer.train(PolicyVersion(0, 0))) == 2
