"""The age bound and progress, whatever arrives when: a simulation of samplers, learner, publishes and deadlines."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.buffer.leases import Batch
from stream_grpo.buffer.lineage import contains
from stream_grpo.buffer.stock import Held
from stream_grpo.types import PolicyVersion, Ticket, policy_age
from tests.buffer.fakes import Buffer, group_by_rollout, group_for

DEADLINE_S = 30.0


class Simulation:
    """One run in simulated seconds. Samplers apply what is published late, finish late, or never."""

    def __init__(
        self, seed: int, *, publish_interval: int, samplers: int, crashes: bool, rules: Mapping[str, Any]
    ) -> None:
        self.rng, self.now, self.crashes = random.Random(seed), 0.0, crashes
        self.buffer = Buffer(sample_deadline_s=DEADLINE_S, max_groups_without_signal=10_000, **rules)
        self.rules, self.publish_interval = self.buffer.book.rules, publish_interval
        self.learner = self.published = self.to_publish = PolicyVersion(0, 0)
        self.forks: dict[int, PolicyVersion] = {}
        self.buffer.start(self.learner)
        self.applied = [self.published] * samplers
        self.running: list[tuple[float, Ticket, int, list[PolicyVersion]]] = []
        self.trained: list[tuple[PolicyVersion, list[str]]] = []
        """Versions that the learner's contains, and the groups of the steps that made them."""
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
            # The first rollout begins with the weights of the ticket, the others when there is room for them.
            tokens = [sorted(self.rng.choices(versions, k=4)) for _ in range(3)]
            tokens[0][0] = versions[0]
            rewards = [(1.0, 0.0, 0.0), (1.0, 0.0, None), (1.0, 1.0, 1.0)][self.rng.choices(range(3), [5, 2, 3])[0]]
            self.buffer.insert(group_by_rollout(ticket, tokens, rewards), self.now)

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
        batch = self.buffer.leases.lease(self.learner, self.rules.groups_per_step, self.now)
        if not batch.groups:
            assert self.now - self.last_progress < 12 * DEADLINE_S, batch.cause
            return []
        self.check(batch)
        self.ages += batch.ages
        self.last_progress = self.now
        return [held.group_id for held in batch.groups]

    def check(self, batch: Batch) -> None:
        """Every age by its definition, every group new or used no more often than allowed, no more live than may be."""
        rules, earlier = self.rules, [group_id for _, trained in self.trained for group_id in trained]
        num_uses = [earlier.count(held.group_id) for held in batch.groups]
        assert num_uses.count(0) == rules.fresh_per_step
        assert len(num_uses) <= rules.groups_per_step
        assert max(num_uses) < rules.max_uses
        for held, age, parts in zip(batch.groups, batch.ages, batch.staleness, strict=True):
            assert age == self.age(held) <= rules.max_policy_age
            assert sum(parts) == age
            assert min(parts) >= 0
        assert self.buffer.book.num_live <= (rules.max_policy_age + 1) * rules.fresh_per_step

    def age(self, held: Held) -> int:
        """Of the oldest token that is trained: with baseline_only, of rollouts with a reward and no token too old."""
        ages = [[self.distance(version) for version in rollout.versions] for rollout in held.rollouts]
        if self.rules.too_old == "baseline_only":
            return max(max(of_one) for of_one in ages if max(of_one) <= self.rules.max_policy_age)
        return max(self.distance(version) for version in held.versions)

    def distance(self, version: PolicyVersion) -> int:
        return policy_age(version, self.learner, self.forks)

    def crash(self) -> None:
        """The buffer dies, or a sampler begins anew, or the learner, whose last report may be lost, opens a branch."""
        what = self.rng.randrange(5)
        if what == 0:
            self.buffer = self.buffer.restarted(self.now)
        elif what == 1:
            self.buffer.intake.hello("s0", self.now)
            self.applied[0] = self.published
        elif what == 2:
            self.restore(max(self.learner.step - self.rng.randint(0, 3), self._oldest_step()))
        elif what == 3:
            step = max(self.learner.step - self.rng.randint(0, 3), self._oldest_step())
            self.buffer.leases.checkpointed(PolicyVersion(self.learner.branch, step), self.now)
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

    def _oldest_step(self) -> int:
        """Of this branch, from the oldest kept checkpoint on."""
        fork, final = self.forks.get(self.learner.branch), self.buffer.book.stock.final
        return max(fork.step if fork else 0, final.step if final else 0)


@st.composite
def settings_of_a_run(draw: Callable[..., Any]) -> dict[str, Any]:
    """All that the configuration lets through."""
    age = draw(st.integers(0, 3))
    rules: dict[str, Any] = {"max_policy_age": age, "groups_per_step": 2}
    if age:
        rules["too_old"] = draw(st.sampled_from(["wait", "drop", "requeue", "baseline_only"]))
        if draw(st.booleans()):
            rules |= {"groups_per_step": 3, "reused_per_step": 1, "max_uses": draw(st.integers(2, 3))}
    if rules.get("too_old", "wait") != "wait":
        rules["selector"] = draw(st.sampled_from(["fewest_steps_left", "freshest_first", "expected_signal"]))
    return rules


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rules=settings_of_a_run(),
    publish=st.integers(1, 4),
    samplers=st.integers(1, 3),
    crashes=st.booleans(),
)
def test_no_leased_token_is_too_old_and_the_stream_goes_on(
    seed: int, rules: dict[str, Any], publish: int, samplers: int, crashes: bool
) -> None:
    publish_interval = min(publish, rules["max_policy_age"] + 1)
    simulation = Simulation(seed, publish_interval=publish_interval, samplers=samplers, crashes=crashes, rules=rules)
    for _ in range(400):
        simulation.turn()
    assert simulation.ages
    ledger = simulation.buffer.book.ledger
    if rules.get("too_old", "wait") == "wait":
        assert "stale: age" not in ledger.ends
    num_uses = sum(map(len, (trained for _, trained in simulation.trained)))
    fields = ledger.as_fields()
    assert fields["closes"]
    # Every use of a step that the learner's version contains is in the account, and no other.
    assert fields["groups"]["trained"] + fields["reused"]["uses"] == num_uses
    restarted = simulation.buffer.restarted().book
    assert restarted.ledger.as_fields() == fields
    assert restarted.losses.as_fields() == simulation.buffer.book.losses.as_fields()


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


def test_the_learner_is_killed_three_steps_after_its_checkpoint_with_a_full_buffer() -> None:
    """Age 4, 2 groups a step, a checkpoint at 2; the buffer is full at step 5, the learner dies and goes on at 2."""
    buffer = Buffer(max_policy_age=4)
    buffer.start()
    for step in range(5):
        buffer.fill(PolicyVersion(0, step), 2)
        buffer.train(PolicyVersion(0, step))
    buffer.leases.checkpointed(PolicyVersion(0, 2), 0.0)
    assert len(buffer.fill(PolicyVersion(0, 5), 99)) == 10  # (4 + 1) x 2
    buffer.start(PolicyVersion(1, 2), b1=PolicyVersion(0, 2))
    # Back to the fork at 0.2: weights 0.2, 0.3, 0.4, 0.5 are 0, 1, 2, 3 old, and have 4, 3, 2, 1 steps left.
    # Places with up to 1 step left: (1 + 1) x 2 = 4 of the ten of 0.5; up to 2: 6, with both of 0.4; then all.
    assert buffer.groups == {"trained": 4, "accepted": 10, "stale": 6}
    assert buffer.book.ledger.ends["stale: restore"] == 6
    ages = []
    for step in range(2, 7):
        version = PolicyVersion(1, step)
        batch = buffer.leases.lease(version, 2, 0.0)
        ages.append(batch.ages)
        assert batch.ages == [max(policy_age(v, version, {1: PolicyVersion(0, 2)}) for v in held.versions)
                              for held in batch.groups]  # fmt: skip
        buffer.train(version)
    # Two of 0.5 at once; each step adds 1 to the rest: 0.5 with 3 + 1, 0.4 with 2 + 2, 0.3 with 1 + 3, 0.2 with 0 + 4.
    assert ages == [[3, 3], [4, 4], [4, 4], [4, 4], [4, 4]]
    assert buffer.groups == {"trained": 14, "stale": 6}


def test_a_straggler_that_never_comes_holds_the_stream_no_longer_than_its_deadline() -> None:
    buffer = Buffer(max_policy_age=0)
    buffer.start()
    tickets = buffer.issue(PolicyVersion(0, 0), 1)
    for ticket in tickets[1:]:
        buffer.insert(group_for(ticket, PolicyVersion(0, 0)))
    assert not buffer.train(PolicyVersion(0, 0))
    buffer.intake.expire(101.0)
    assert len(buffer.train(PolicyVersion(0, 0))) == 2
