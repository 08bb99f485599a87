"""The process over a real wire: durable before acknowledged, killed at any moment, never silent."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from curator.client import Curator
from curator.wire import Client, RemoteError, Server
from stream_grpo.buffer.layout import LOG_NAME
from stream_grpo.buffer.process import BufferProcess, credits_for
from stream_grpo.config_stream import Buffer as BufferSettings
from stream_grpo.config_stream import Stream
from stream_grpo.transport.channels import LearnerChannel, Lease, SamplerChannel, Taken, read_ledger
from stream_grpo.transport.codec import decode_group, encode_group
from stream_grpo.types import EndReason, Fate, PolicyVersion, RolloutGroup, Ticket
from tests.buffer.fakes import FakeCurator, group_for
from tests.fakes import make_rollout

V0 = PolicyVersion(0, 0)
WAIT_S = 10.0


class Running:
    """A buffer on a thread, and how to talk to it. `kill` leaves it as a kill would; `again` starts it anew."""

    def __init__(self, directory: Path, curator: FakeCurator | None = None, buffer: Any = None, **stream: Any) -> None:
        self.directory, self.curator = directory, curator
        self.stream = Stream(**{"groups_per_step": 2, "max_policy_age": 2, **stream})
        # Smaller values than a configuration may have: a test is short.
        self.buffer = BufferSettings().model_copy(update=buffer or {})
        self.settings: dict[str, Any] = {}
        self._address = "tcp://127.0.0.1:*"
        self.clients: list[Client] = []
        self.again()

    def again(self) -> None:
        self.server = Server(self._address, credits=credits_for(self.stream))
        self._address = self.server.address
        curator = Curator(self.curator.address, name="buffer", resend_s=0.2) if self.curator else None
        self.process = BufferProcess(
            self.server, curator, directory=self.directory, stream=self.stream, buffer=self.buffer, seed=7,
            **self.settings,
        )  # fmt: skip
        self._curator_client, self._stop = curator, threading.Event()
        self._thread = threading.Thread(target=self.process.run, args=(self._stop,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End the thread before its next commit: what is pending is lost, as with SIGKILL."""
        self.process._commit = lambda: None  # type: ignore[method-assign]
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.server.close()
        if self._curator_client:
            self._curator_client.close()

    def client(self) -> Client:
        client = Client(self.server.address, name="test", peer="buffer", resend_s=0.2)
        self.clients.append(client)
        return client

    def sampler(self, name: str = "s0") -> SamplerChannel:
        channel = SamplerChannel(self.client(), name)
        channel.hello()
        return channel

    def learner_channel(self) -> LearnerChannel:
        return LearnerChannel(self.client())

    def learner(self, version: PolicyVersion = V0) -> LearnerChannel:
        channel = self.learner_channel()
        channel.start(version, {})
        return channel


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(**settings: Any) -> Running:
        running.append(Running(tmp_path / "journal", **settings))
        return running[-1]

    yield begin
    for each in running:
        each.stop()
        for client in each.clients:
            client.close()
        if each.curator:
            each.curator.close()


def tickets_for(sampler: SamplerChannel, count: int, version: PolicyVersion = V0) -> list[Ticket]:
    sampler.ask_tickets(version, count, {})
    deadline = time.monotonic() + WAIT_S
    while sampler.waits_for_tickets:
        assert time.monotonic() < deadline
        tickets, _ = sampler.poll(0.05)
        if tickets:
            return tickets
    return []


def insert(sampler: SamplerChannel, tickets: list[Ticket], version: PolicyVersion = V0, **group: Any) -> list[Taken]:
    for ticket in tickets:
        sampler.insert(group_for(ticket, version, **group))
    return all_taken(sampler)


def all_taken(sampler: SamplerChannel) -> list[Taken]:
    taken: list[Taken] = []
    deadline = time.monotonic() + WAIT_S
    while sampler.num_unacknowledged and time.monotonic() < deadline:
        taken += sampler.poll(0.05)[1]
    return taken


def train(learner: LearnerChannel, lease: Lease, version: PolicyVersion) -> Any:
    tokens = {group.group_id: {"trained": group.num_sampled_tokens} for group in lease.groups}
    after = PolicyVersion(version.branch, version.step + 1)
    return learner.trained(after, [group.group_id for group in lease.groups], tokens)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_groups_go_from_ticket_to_trained(run: Callable[..., Running]) -> None:
    running = run(curator=FakeCurator())
    learner, sampler = running.learner(), running.sampler()
    tickets = tickets_for(sampler, 4)
    assert [taken.fate for taken in insert(sampler, tickets)] == [Fate.ACCEPTED] * 4
    lease = learner.lease(V0, 2)
    assert [group.group_id for group in lease.groups] == ["g00000001", "g00000002"]
    assert lease.ages == (0, 0)
    ledger = train(learner, lease, V0)
    assert ledger["closes"]
    assert ledger["groups"]["trained"] == ledger["groups"]["accepted"] == 2
    learner.checkpointed(PolicyVersion(0, 1))
    eventually(lambda: running.curator is not None and len(running.curator.outcomes) == 4)
    assert [outcome.sequence for outcome in running.curator.outcomes] == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert ledger["ends"] == {"trained": 2}
    assert read_ledger(running.client()) | {"checkpoint_wanted": False, "ends": {"trained": 2}} == ledger


def test_an_acknowledged_group_is_in_the_journal_when_the_answer_arrives(run: Callable[..., Running]) -> None:
    running = run()
    running.learner()
    sampler = running.sampler()
    for ticket in tickets_for(sampler, 3):
        insert(sampler, [ticket])
        log = pa.ipc.open_stream((running.directory / LOG_NAME).read_bytes()).read_all().to_pylist()
        assert (log[-1]["kind"], log[-1]["group_id"]) == ("accepted", ticket.group_id)


def test_a_kill_before_the_commit_loses_no_group_and_doubles_none(run: Callable[..., Running]) -> None:
    running = run()
    learner, sampler = running.learner(), running.sampler()
    tickets = tickets_for(sampler, 4)
    insert(sampler, tickets[:1])
    running.process._commit = lambda: None  # type: ignore[method-assign]
    for ticket in tickets[1:]:
        sampler.insert(group_for(ticket, V0))
    eventually(lambda: running.process._book.stock.num_live == 4)
    running.kill()
    running.again()
    # The client sends again what was not answered, and gets its answers from the new buffer.
    taken = all_taken(sampler)
    assert [answer.fate for answer in taken] == [Fate.ACCEPTED] * 3
    assert learner.lease(V0, 2).groups
    ledger = read_ledger(running.client())
    assert ledger["tokens"]["generated"] == 4 * 8
    assert ledger["groups"] == dict.fromkeys(ledger["groups"], 0) | {"accepted": 2, "leased": 2}


def test_a_leased_batch_stays_leased_over_a_kill_and_may_be_trained(run: Callable[..., Running]) -> None:
    running = run()
    learner, sampler = running.learner(), running.sampler()
    insert(sampler, tickets_for(sampler, 4))
    before = learner.lease(V0, 2)
    running.kill()
    running.again()
    after = learner.lease(V0, 2)
    assert [group.group_id for group in after.groups] == [group.group_id for group in before.groups]
    assert train(learner, before, V0)["groups"]["trained"] == 2
    running.kill()
    running.again()
    # The answer to `trained` was lost: a repeat by a new request is answered alike, and counted once.
    assert train(learner, before, V0)["groups"]["trained"] == 2


def test_a_lease_that_must_wait_says_for_whom(run: Callable[..., Running]) -> None:
    running = run(groups_per_step=2, max_policy_age=0)
    learner, sampler = running.learner(), running.sampler("s4")
    tickets = tickets_for(sampler, 1)
    began = time.monotonic()
    lease = learner.lease(V0, 2)
    assert 0.9 < time.monotonic() - began < 5
    assert lease.groups == ()
    assert lease.cause == (
        "0 groups buffered, 4 in flight, 2 needed; waits for group g00000001 of s4 with 0 steps left"
    )
    for ticket in tickets:
        sampler.insert(group_for(ticket, V0))
    # A held lease is answered as soon as there is a batch.
    began = time.monotonic()
    assert len(learner.lease(V0, 2).groups) == 2
    assert time.monotonic() - began < 0.9


def test_tickets_are_held_back_and_then_refused_with_a_cause(run: Callable[..., Running]) -> None:
    running = run()
    running.learner()
    sampler, client = running.sampler(), running.client()
    tickets = tickets_for(sampler, 9)
    assert len(tickets) == 6
    fields = {"sampler_id": "s1", "version": [0, 0], "num_wanted": 1, "problems": {}, "group_sizes": {}}
    began = time.monotonic()
    answer = client.call("tickets", fields)
    assert 0.4 < time.monotonic() - began < 5
    assert answer.fields == {"tickets": [], "cause": "6 groups are live, the limit for weights 0 steps old is 6"}
    # With a group that ends without signal a place is free, and whoever is held back gets it at once.
    waiting = running.client()
    waiting.post("tickets", fields)
    insert(sampler, tickets[:1], rewards=[0.0, 0.0])
    arrived = waiting.poll(0.4)
    assert [ticket["group_id"] for ticket in arrived[0].fields["tickets"]] == ["g00000007"]


def test_age_0_waits_for_the_curator_between_blocks(run: Callable[..., Running]) -> None:
    running = run(curator=FakeCurator(), max_policy_age=0)
    assert running.curator
    running.learner()
    sampler = running.sampler()
    tickets = tickets_for(sampler, 1)
    eventually(lambda: running.process._book.outbox.num_acknowledged == 0)
    running.curator.is_paused = True
    time.sleep(0.05)
    taken = insert(sampler, tickets[::-1], rewards=[0.0, 0.0])
    assert [answer.fate for answer in taken] == [Fate.NO_SIGNAL] * 4
    assert tickets_for(sampler, 1) == []
    running.curator.is_paused = False
    # 0 of 4 had signal: 2 missing at a share of (0 + 1) / (4 + 2) are 12 tickets.
    assert len(tickets_for(sampler, 1)) == 12
    assert [outcome.group_id for outcome in running.curator.outcomes] == [t.group_id for t in tickets]


def test_a_block_larger_than_the_usual_credits_does_not_hang(run: Callable[..., Running]) -> None:
    running = run(max_policy_age=0, groups_per_step=40)
    running.learner()
    sampler = running.sampler()
    tickets = tickets_for(sampler, 1)
    assert len(tickets) == 80
    assert len(insert(sampler, tickets)) == 80
    assert read_ledger(running.client())["groups"]["stale"] == 40


def test_outcomes_survive_a_kill_of_buffer_or_curator(run: Callable[..., Running]) -> None:
    running = run(curator=FakeCurator())
    curator = running.curator
    assert curator
    running.learner()
    sampler = running.sampler()
    curator.is_paused = True
    time.sleep(0.05)
    insert(sampler, tickets_for(sampler, 3))
    running.kill()
    curator.is_paused = False
    running.again()
    eventually(lambda: len(curator.outcomes) == 3)
    # The curator forgets what it had not written; nobody tells the buffer, which asks from time to time.
    del curator.outcomes[1:]
    eventually(lambda: len(curator.outcomes) == 3)
    assert [outcome.group_id for outcome in curator.outcomes] == [f"g0000000{n}" for n in (1, 2, 3)]


def test_report_c29_over_the_wire_with_a_warning_on_the_way(
    run: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    running = run(max_groups_without_signal=8)
    learner, sampler = running.learner(), running.sampler()
    for _ in range(2):
        insert(sampler, tickets_for(sampler, 4), rewards=[0.0, 0.0, 0.0])
    with pytest.raises(RemoteError, match="8 groups in a row had no signal: 0 all right, 8 all wrong, 0 same reward"):
        learner.lease(V0, 2)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.split(" ")[0] for message in warnings] == ["2", "4"]


def test_a_full_disk_holds_groups_until_there_is_room_and_says_so(
    run: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    running = run(sample_deadline_s=0.5)
    learner, sampler = running.learner(), running.sampler()
    tickets = tickets_for(sampler, 4)
    insert(sampler, tickets[:2])
    running.process._disk.free_bytes = lambda: 1 << 20
    eventually(lambda: bool(caplog.records))
    sampler.insert(group_for(tickets[2], V0))
    fields = {"sampler_id": "s1", "version": [0, 0], "num_wanted": 1, "problems": {}, "group_sizes": {}}
    assert "disk is full" in running.client().call("tickets", fields).fields["cause"]
    # What was acknowledged is trained all the same, and rubbish is refused once it is looked at.
    assert train(learner, learner.lease(V0, 2), V0)["groups"]["trained"] == 2
    rubbish = running.client()
    rubbish.post("insert", {}, (b"rubbish",))
    # A lease that waits says that this is why, before it says whom it waits for.
    waiting = learner.lease(PolicyVersion(0, 1), 2)
    assert waiting.cause.startswith("the journal's disk is full: 1 MiB are free")
    assert "0 groups buffered, 2 in flight, 2 needed" in waiting.cause
    # No ticket ends meanwhile: its group may be held, or on its way.
    time.sleep(0.6)
    assert sampler.poll(0.0) == ([], [])
    assert sampler.num_unacknowledged == 1
    running.process._disk.free_bytes = lambda: 1 << 40
    assert [taken.fate for taken in all_taken(sampler)] == [Fate.ACCEPTED]
    assert [answer.kind for answer in rubbish.poll(WAIT_S)] == ["error"]
    assert read_ledger(running.client())["groups"]["stale"] == 0
    assert [record.message for record in caplog.records] == [
        "the journal's disk is full: 1 MiB are free, buffer.min_free_bytes asks for 256 MiB; groups are held and no "
        "tickets issued until there is room"
    ]


def test_a_held_group_outlives_its_sampler(run: Callable[..., Running]) -> None:
    running = run()
    running.learner()
    sampler = running.sampler()
    tickets = tickets_for(sampler, 1)
    running.process._disk.free_bytes = lambda: 0
    sampler.insert(group_for(tickets[0], V0))
    running.sampler()  # the same name begins anew
    running.process._disk.free_bytes = lambda: 1 << 40
    assert [taken.fate for taken in all_taken(sampler)] == [Fate.ACCEPTED]


def test_names_of_problems_are_taken_at_once_and_without_tickets(run: Callable[..., Running]) -> None:
    running = run(max_policy_age=0, sample_deadline_s=0.4)
    running.learner()
    sampler = running.sampler()
    tickets = tickets_for(sampler, 1)
    began = time.monotonic()
    sampler.ask_tickets(V0, 0, {tickets[1].group_id: "add/1"})
    while sampler.waits_for_tickets:
        assert sampler.poll(0.05) == ([], [])
    assert time.monotonic() - began < 0.4
    # Its sampler dies: the log names the problem all the same.
    eventually(lambda: running.process.status()["ends"].get("stale: deadline") == 4)
    log = pa.ipc.open_stream((running.directory / LOG_NAME).read_bytes()).read_all().to_pylist()
    ends = {row["group_id"]: row["problem_id"] for row in log if row["kind"] == "stale"}
    assert ends == {ticket.group_id: "add/1" if ticket is tickets[1] else "" for ticket in tickets}


def test_tickets_that_end_reach_the_curator_in_journal_order(run: Callable[..., Running]) -> None:
    running = run(curator=FakeCurator(), sample_deadline_s=1.0)
    assert running.curator
    running.learner()
    sampler = running.sampler()
    tickets = tickets_for(sampler, 2)
    insert(sampler, tickets[1:])
    outcomes = running.curator.outcomes
    eventually(lambda: len(outcomes) == 2)
    assert [(o.sequence, o.group_id, o.fate) for o in outcomes] == [
        (0, "g00000002", "accepted"), (1, "g00000001", "stale")
    ]  # fmt: skip
    running.kill()
    outcomes.clear()
    running.again()
    eventually(lambda: len(outcomes) == 2)
    assert [o.group_id for o in outcomes] == ["g00000002", "g00000001"]


def test_a_group_the_learner_would_refuse_never_reaches_it(run: Callable[..., Running]) -> None:
    running = run()
    running.kill()
    running.settings = {"vocab_size": 11, "config_hash": "c0"}
    running.again()
    running.learner()
    sampler = running.sampler()
    # The ids of these groups are 5 to 11.
    (taken,) = insert(sampler, tickets_for(sampler, 1))
    assert (taken.fate, taken.reason) == (
        Fate.INVALID, "token ids: token 6 of rollout 0 is 11, outside the vocabulary of 11"
    )  # fmt: skip


def test_a_batch_is_given_again_and_not_remembered(run: Callable[..., Running]) -> None:
    running = run()
    learner, sampler = running.learner(), running.sampler()
    insert(sampler, tickets_for(sampler, 4))
    first = learner.lease(V0, 2)
    assert [group.group_id for group in learner.lease(V0, 2).groups] == [group.group_id for group in first.groups]
    remembered = [answer for answer in running.server._answers.values() if answer is not None]
    assert remembered
    assert all(len(frames) == 1 for frames in remembered)  # headers alone, no bodies


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("dance", {}, "unknown message 'dance'; known: hello, goodbye, tickets"),
        ("hello", {}, "hello: sampler_id = None: expected a text"),
        ("tickets", {"sampler_id": "s", "version": [0], "num_wanted": 1, "problems": {}}, "tickets: version = "),
        (
            "tickets",
            {"sampler_id": "s", "version": [0, 0], "num_wanted": -1, "problems": {}},
            "num_wanted = -1: expected",
        ),
        ("lease", {"version": [0, 0], "num_groups": "2"}, "lease: num_groups = '2': expected a count"),
        ("start", {"version": [1, 0], "forks": [1]}, "start: forks = "),
        ("trained", {"version": [0, 1], "group_ids": ["g"], "tokens": {"g": {"trained": "x"}}}, "trained: tokens = "),
        ("insert", {"group_id": "g"}, "insert: expected one body, received 0"),
    ],
)
def test_malformed_messages_are_refused_with_field_and_reason(
    run: Callable[..., Running], kind: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RemoteError) as refused:
        run().client().call(kind, fields)
    assert reason in str(refused.value)


def test_rubbish_is_no_group(run: Callable[..., Running]) -> None:
    running = run()
    with pytest.raises(RemoteError, match="not a rollout group"):
        running.client().call("insert", {"group_id": "g"}, (b"rubbish",))
    assert not read_ledger(running.client())["tokens"]["generated"]


def test_status_is_plain_and_complete(run: Callable[..., Running]) -> None:
    running = run()
    running.learner()
    sampler = running.sampler()
    insert(sampler, tickets_for(sampler, 2), mixed_context_from=5)
    eventually(lambda: running.process.status()["buffered"] == 2)
    status = running.process.status()
    assert (status["live"], status["in_flight"], status["leased"]) == (2, 0, 0)
    assert status["expected_share"] == 3 / 4
    assert status["bytes_on_disk"] == sum(path.stat().st_size for path in running.directory.glob("*.arrow"))
    assert status["ledger"]["closes"]
    assert status["mixed_context_tokens"] == 8  # of 3 + 4 tokens the last 2, in 2 groups of 2 rollouts
    assert 0 < status["longest_commit_s"] <= status["commit_s"]


def test_many_groups_share_a_commit(run: Callable[..., Running]) -> None:
    running = run(groups_per_step=64)
    running.learner()
    sampler = running.sampler()
    tickets = tickets_for(sampler, 60)
    before = running.process.status()["num_commits"]
    assert len(insert(sampler, tickets)) == 60
    eventually(lambda: running.process.status()["buffered"] == 60)
    assert running.process.status()["num_commits"] - before < 60


def test_an_evaluation_is_counted_once_makes_no_outcome_and_survives_a_kill(run: Callable[..., Running]) -> None:
    running = run(curator=FakeCurator())
    learner, sampler = running.learner(), running.sampler()

    def report(channel: SamplerChannel, step: int, num_tokens: int) -> None:
        channel.report_evaluation(PolicyVersion(0, step), num_tokens)
        assert channel.waits_for_evaluation
        all_taken(channel)
        assert not channel.waits_for_evaluation

    report(sampler, 25, 30)
    report(sampler, 25, 31)  # a sampler that died before it knew repeats it
    report(sampler, 50, 5)
    insert(sampler, tickets_for(sampler, 2))
    running.kill()
    running.again()
    report(running.sampler(), 50, 5)
    ledger = train(learner, learner.lease(V0, 2), V0)
    # 2 groups of 2 rollouts of 4 tokens are trained.
    assert {name: count for name, count in ledger["tokens"].items() if count} == {
        "generated": 51, "trained": 16, "evaluation": 35
    }  # fmt: skip
    assert ledger["closes"]
    curator = running.curator
    assert curator is not None
    eventually(lambda: len(curator.outcomes) == 2)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampler_id": "s0", "version": [0, 1], "num_tokens": -1}, "evaluated: num_tokens = -1: expected a count"),
        ({"sampler_id": "s0", "version": [0], "num_tokens": 1}, r"evaluated: version = \[0\]: expected"),
    ],
)
def test_a_malformed_evaluation_is_refused(run: Callable[..., Running], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RemoteError, match=named):
        run().client().call("evaluated", fields)


def test_a_used_group_comes_from_the_journal_over_a_kill_with_the_parts_of_its_age(run: Callable[..., Running]) -> None:
    running = run(max_uses=2, reuse_share=0.5)  # one fresh group a step, and one used one
    learner, sampler = running.learner(), running.sampler()
    insert(sampler, tickets_for(sampler, 1))
    first = learner.lease(V0, 2)
    train(learner, first, V0)
    V1 = PolicyVersion(0, 1)
    insert(sampler, tickets_for(sampler, 1))  # of weights 0 still: 1 step of publish lag
    before = learner.lease(V1, 2)
    running.kill()
    running.again()
    lease = learner.lease(V1, 2)
    assert [group.group_id for group in lease.groups] == ["g00000002", "g00000001"]
    assert (lease.ages, lease.staleness) == ((1, 1), ((1, 0, 0), (0, 0, 1)))
    assert lease.staleness == before.staleness
    assert lease.groups[1].rollouts[0].token_ids.tolist() == first.groups[0].rollouts[0].token_ids.tolist()
    ledger = train(learner, lease, V1)
    assert ledger["reused"] == {"uses": 1, "tokens": 8}
    assert (ledger["groups"]["trained"], ledger["tokens"]["trained"], ledger["closes"]) == (2, 16, True)


def test_a_requeue_reaches_the_curator_after_the_outcome_of_its_group(run: Callable[..., Running]) -> None:
    running = run(curator=FakeCurator(), too_old="requeue", groups_per_step=1, max_policy_age=1)
    learner, sampler = running.learner(), running.sampler()
    slow = tickets_for(sampler, 1)
    for step in (0, 1):
        version = PolicyVersion(0, step)
        insert(sampler, tickets_for(sampler, 1, version), version)
        train(learner, learner.lease(version, 1), version)
    assert [taken.reason for taken in insert(sampler, slow)] == ["age: 2 at insert, max_policy_age is 1"]
    eventually(lambda: running.curator is not None and len(running.curator.outcomes) == 4)
    outcomes = running.curator.outcomes[2:]  # type: ignore[union-attr]
    assert [(o.sequence, o.group_id, o.problem_id, o.fate, o.num_tokens) for o in outcomes] == [
        (2, "g00000001", "problem-of-g00000001", "stale", 8),
        (3, "g00000001", "problem-of-g00000001", "requeued", 0),
    ]
    losses = read_ledger(running.client())["losses"]
    assert losses["lost_share"] == 8 / 24
    assert (losses["requeued"], losses["lost"]["groups"]) == (1, 1)


def partial(group: RolloutGroup, num_tokens: int) -> RolloutGroup:
    """The group as it was after the first `num_tokens` of each rollout."""
    return replace(
        group,
        rollouts=tuple(
            make_rollout(None, num_response=num_tokens, seed=r.seed, end_reason=EndReason.PARTIAL)
            for r in group.rollouts
        ),
    )


def test_a_partial_that_was_answered_survives_a_kill_and_travels_with_its_ticket(run: Callable[..., Running]) -> None:
    running = run()
    running.learner()
    sampler = running.sampler()
    first, second = tickets_for(sampler, 2)
    group = group_for(first, V0)
    sampler.hand_over_partial(partial(group, 3))
    assert sampler.waits_for_partial(first.group_id)
    assert not sampler.waits_for_partial(second.group_id)
    eventually(lambda: not sampler.poll(0.05)[0] and not sampler.num_partials_on_their_way)
    running.kill()
    running.again()
    other = running.sampler("s0")
    again = tickets_for(other, 2)
    assert [(ticket.group_id, ticket.owner_epoch) for ticket in again] == [
        (first.group_id, 1), (second.group_id, 1)
    ]  # fmt: skip
    assert decode_group(again[0].prefix).num_sampled_tokens == 6
    assert (again[0].problem_id, again[1].prefix) == (group.problem_id, b"")
    insert(other, again)
    ledger = read_ledger(running.client())
    assert ledger["tokens"]["generated"] == ledger["tokens"]["buffered"] == 16
    assert ledger["closes"]


def test_heartbeats_hold_tickets_and_silence_loses_them(run: Callable[..., Running]) -> None:
    running = run(ticket_timeout_s=0.3)
    running.learner()
    silent, lively = running.sampler("s0"), running.sampler("s1")
    (lost,), (held,) = tickets_for(silent, 1), tickets_for(lively, 1)

    def beat() -> bool:
        lively.heartbeat({held.group_id: 3})
        assert lively.waits_for_heartbeat
        while lively.waits_for_heartbeat:
            lively.poll(0.05)
        return lost.group_id in {h.ticket.group_id for h in running.process._book.tickets.released()}

    eventually(beat)
    (again,) = tickets_for(lively, 1)
    assert (again.group_id, again.owner_epoch) == (lost.group_id, 1)
    assert [taken.fate for taken in insert(lively, [held])] == [Fate.ACCEPTED]


def test_on_a_full_disk_partials_are_passed_over_and_not_held(run: Callable[..., Running]) -> None:
    running = run()
    running.learner()
    sampler = running.sampler()
    (ticket,) = tickets_for(sampler, 1)
    running.process._disk.free_bytes = lambda: 0
    answer = running.client().call("partial", {}, (encode_group(partial(group_for(ticket, V0), 2)),))
    assert answer.fields["is_kept"] is False
    assert "disk is full" in answer.fields["reason"]


@pytest.mark.parametrize(
    ("kind", "fields", "body", "named"),
    [
        (
            "heartbeat",
            {"sampler_id": "s0", "incarnation": 0, "tokens": {"g": -1}},
            (),
            "heartbeat: tokens = .*: expected",
        ),
        ("heartbeat", {"sampler_id": "s0", "tokens": {}}, (), "heartbeat: incarnation = None: expected a count"),
        ("partial", {}, (), "partial: expected one body, received 0"),
        ("partial", {}, (b"rubbish",), "not a rollout group"),
    ],
)
def test_a_malformed_word_of_an_owner_is_refused(
    run: Callable[..., Running], kind: str, fields: dict[str, Any], body: tuple[bytes, ...], named: str
) -> None:
    with pytest.raises(RemoteError, match=named):
        run().client().call(kind, fields, body)
