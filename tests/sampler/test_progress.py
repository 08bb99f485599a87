"""Heartbeats and partials of a running sampler, and the groups that it continues, with a fake engine."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from curator.wire import Client, Server
from stream_grpo.buffer.process import BufferProcess, credits_for
from stream_grpo.config_stream import Buffer, Stream
from stream_grpo.sampler.progress import Progress
from stream_grpo.transport.channels import LearnerChannel, read_ledger
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import EndReason, PolicyVersion, RolloutGroup
from tests.fakes import FakeEngine
from tests.sampler.loop import Outside, Running, Slow, publish, ticket
from tests.sampler.test_scores import LateScoring

LONG = {"max_new_tokens": 200}
OFTEN = {"partial_interval_s": 0.02, "ticket_timeout_s": 0.5}


def test_a_sampler_says_what_it_holds_and_hands_over_what_it_has(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.holds_inserts = [[ticket("g0"), ticket("g1")]], True
    publish(tmp_path / "weights", 0)
    running = Running(outside, tmp_path, Slow(num_slots=8), sampler=LONG, stream=OFTEN)
    running.wait(lambda: len(outside.partials) >= 3)
    assert running.process is not None
    process = running.process
    running.wait(lambda: not process.status()["num_groups_in_progress"])
    num_beats = len(outside.heartbeats)
    # Both groups are finished and still this sampler's, as the buffer has not taken them.
    running.until(lambda: len(outside.heartbeats) > num_beats + 1)
    assert set(outside.heartbeats[-1]["tokens"]) == {"g0", "g1"}
    first = [beat["tokens"] for beat in outside.heartbeats if beat["tokens"]]
    assert 0 < first[1]["g0"] < 400
    assert {beat["incarnation"] for beat in outside.heartbeats} == {1}
    of_g0 = [group for group in outside.partials if group.group_id == "g0"]
    counts = [group.num_sampled_tokens for group in of_g0]
    assert counts == sorted(set(counts))
    assert 0 < counts[0] < 400
    for group in of_g0:
        assert {rollout.end_reason for rollout in group.rollouts} <= {EndReason.PARTIAL, EndReason.EOS}
        assert group.problem_id == "of-g0"
    assert process.status()["num_partials"] == len(outside.partials)


@pytest.mark.parametrize("stream", [{"partial_interval_s": 0.0}, {"partial_interval_s": 0.02, "max_policy_age": 0}])
def test_no_partials_where_none_are_wanted_or_would_be_used(
    outside: Outside, tmp_path: Path, stream: dict[str, Any]
) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    running = Running(outside, tmp_path, Slow(num_slots=8), sampler=LONG, stream={"ticket_timeout_s": 0.5, **stream})
    running.until(lambda: len(outside.groups) == 1 and bool(outside.heartbeats))
    assert outside.partials == []


def test_a_sampler_that_stops_hands_over_what_it_has(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    engine = Slow(num_slots=8)
    running = Running(outside, tmp_path, engine, sampler=LONG, stream={"partial_interval_s": 100.0})
    running.until(lambda: engine.events.count(("step", 2)) >= 10)
    (group,) = outside.partials
    assert group.num_sampled_tokens == 2 * engine.events.count(("step", 2))
    assert outside.groups == []


class Heard:
    """A buffer that has room for all and keeps what is handed over."""

    has_credit, waits_for_heartbeat = True, True

    def __init__(self) -> None:
        self.groups: list[str] = []

    def waits_for_partial(self, group_id: str) -> bool:
        return False

    def hand_over_partial(self, group: RolloutGroup) -> None:
        self.groups.append(group.group_id)

    def take_not_kept(self) -> dict[str, str]:
        return {}


class Growing:
    """A group that has one more token whenever it is looked at."""

    def __init__(self, group_id: str) -> None:
        self.ticket, self.group_id, self.unfinished = ticket(group_id), group_id, list[Any]()
        self._tokens = itertools.count()

    @property
    def num_tokens(self) -> int:
        return next(self._tokens)


def test_a_partial_is_due_an_interval_after_the_group_began_or_its_last_one() -> None:
    now, heard = [0.0], Heard()
    stream = Stream(groups_per_step=1, max_policy_age=2, partial_interval_s=10.0)
    record: Any = lambda group, running: group  # noqa: E731
    channel: Any = heard
    progress = Progress(stream, FakeEngine(num_slots=8), channel, list, record, lambda: now[0])
    groups: dict[str, Any] = {}

    def at(second: float) -> list[str]:
        now[0], num_before = second, len(heard.groups)
        progress.turn(groups)
        return heard.groups[num_before:]

    for second, name in ((0.0, "long"), (4.0, "short"), (6.0, "late")):
        now[0], groups[name] = second, Growing(name)
        progress.begin(groups[name])
    assert at(9.0) == []
    assert at(11.0) == ["long"]
    del groups["short"]  # it took 8 s of the 10 and costs none
    assert at(15.0) == []
    assert at(16.0) == ["late"]
    # The first again 10 s after 11.
    assert at(20.0) == []
    assert at(21.0) == ["long"]
    progress.last_turn(groups)
    assert heard.groups[-2:] == ["late", "long"]


def test_what_the_buffer_does_not_keep_is_handed_over_again(
    outside: Outside, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine samples nothing more after 60 steps: what is handed over from then on has been handed over before."""
    outside.blocks, outside.why_not_kept = [[ticket("g0")]], "the journal's disk is full"
    publish(tmp_path / "weights", 0)

    class Waiting(Slow):
        def step(self) -> list[Any]:
            return super().step() if self.events.count(("step", 2)) < 60 else []

    running = Running(outside, tmp_path, Waiting(num_slots=8), sampler=LONG, stream=OFTEN)
    running.wait(lambda: [group.num_sampled_tokens for group in outside.partials].count(120) >= 3)
    outside.why_not_kept = ""
    running.until(lambda: bool(running.process and running.process.status()["num_partials_not_kept"] >= 3))
    assert caplog.text.count("g0: the buffer does not keep what there is of it so far: the journal's disk is full") == 1


def test_a_ticket_that_is_issued_again_without_tokens_has_its_problem_too(outside: Outside, tmp_path: Path) -> None:
    """It asks for the problem by its id: for the group the curator could choose another one."""
    outside.blocks = [[replace(ticket("g0", epoch=1), problem_id="of-g0"), ticket("g1")]]
    publish(tmp_path / "weights", 0)
    Running(outside, tmp_path, FakeEngine(num_slots=8)).until(lambda: len(outside.groups) == 2)
    assert sorted(group.problem_id for group in outside.groups) == ["of-g0", "of-g1"]
    assert outside.picked == ["g1"]


def prefix_of(outside: Outside, directory: Path) -> RolloutGroup:
    """A group g0 as a sampler has it after some steps."""
    outside.blocks = [[ticket("g0")]]
    publish(directory / "weights", 0)
    running = Running(outside, directory, Slow(num_slots=8), sampler=LONG, stream=OFTEN)
    running.until(lambda: bool(outside.partials))
    return outside.partials[-1]


def test_a_ticket_with_a_prefix_is_continued_with_its_own_problem(outside: Outside, tmp_path: Path) -> None:
    prefix = prefix_of(outside, tmp_path)
    picked, num_begun = list(outside.picked), prefix.rollouts[0].num_sampled_tokens
    again = replace(ticket("g0", epoch=1), problem_id="of-g0", prefix=encode_group(prefix))
    outside.blocks = [[again, ticket("g1")]]
    publish(tmp_path / "weights", 3)
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine, sampler=LONG)
    running.until(lambda: len(outside.groups) == 2)
    group = next(group for group in outside.groups if group.group_id == "g0")
    assert (group.owner_epoch, group.dispatched_at_s) == (1, prefix.dispatched_at_s)
    for rollout in group.rollouts:
        steps = rollout.version_step[rollout.loss_mask].tolist()
        assert steps == [0] * num_begun + [3] * (200 - num_begun)
        assert rollout.reward.reward == 1.0
    # Only the other group was picked; that of the prefix has its problem from the record.
    assert outside.picked == [*picked, "g1"]
    assert running.process is not None
    status = running.process.status()
    assert (status["num_groups_continued"], status["num_tokens"]) == (1, 2 * (200 - num_begun) + 2 * 200)


def test_a_problem_that_has_left_the_pool_ends_its_group_with_the_reason_and_no_other(
    outside: Outside, tmp_path: Path
) -> None:
    prefix = prefix_of(outside, tmp_path)
    outside.left_pool = frozenset({"of-g0"})
    outside.blocks = [[replace(ticket("g0", epoch=1), problem_id="of-g0", prefix=encode_group(prefix)), ticket("g1")]]
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), sampler=LONG)
    running.until(lambda: len(outside.groups) == 2)
    groups = {group.group_id: group for group in outside.groups}
    assert groups["g0"].problem_id == "of-g0"
    assert groups["g0"].owner_epoch == 1
    assert {rollout.reward.evidence for rollout in groups["g0"].rollouts} == {"the problem has left the curator's pool"}
    assert [rollout.reward.reward for rollout in groups["g1"].rollouts] == [1.0, 1.0]
    assert running.process is not None
    assert running.process.status()["num_prompts_refused"] == 1


def test_a_complete_group_of_other_rewards_is_scored_again_and_nothing_is_sampled(
    outside: Outside, tmp_path: Path
) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    Running(outside, tmp_path, FakeEngine(num_slots=8)).until(lambda: len(outside.groups) == 1)
    before = outside.groups[0]
    outside.answers = {"g0": "43"}
    again = replace(ticket("g0", epoch=1), problem_id="of-g0", prefix=encode_group(before))
    outside.blocks = [[again]]
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine, rewards={"code_total_s": 31.0})
    running.until(lambda: len(outside.groups) == 2)
    after = outside.groups[1]
    assert after.config_hash != before.config_hash
    assert [r.reward.reward for r in before.rollouts] == [1.0, 1.0]
    assert [r.reward.reward for r in after.rollouts] == [0.0, 0.0]
    assert [r.token_ids.tolist() for r in after.rollouts] == [r.token_ids.tolist() for r in before.rollouts]
    assert not [event for event in engine.events if event[0] in ("add", "step")]


def test_groups_that_are_only_scored_count_as_running(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0"), ticket("g1")]]
    publish(tmp_path / "weights", 0)
    Running(outside, tmp_path, FakeEngine(num_slots=8)).until(lambda: len(outside.groups) == 2)
    outside.asked.clear()
    outside.blocks = [
        [
            replace(ticket(group.group_id, epoch=1), problem_id=f"of-{group.group_id}", prefix=encode_group(group))
            for group in outside.groups
        ]
    ]
    scoring = LateScoring(lambda task_id: True)
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring, rewards={"code_total_s": 31.0})
    running.wait(lambda: len(scoring.held) == 4)
    # 8 slots hold 4 groups of 2, and 2 are wanted ahead; 2 groups wait for their scores alone.
    assert outside.asked[0]["num_wanted"] == 4 + 2
    running.wait(lambda: outside.asked[-1]["num_wanted"] == 2 + 2)
    scoring.holds = lambda task_id: False
    running.until(lambda: len(outside.groups) == 4)


class Alone:
    """The buffer as it is, on the journal of a folder, and a learner that has started."""

    def __init__(self, outside: Outside, directory: Path) -> None:
        stream = Stream(groups_per_step=1, max_policy_age=2, **OFTEN)
        outside.buffer.close()
        outside.buffer = Server(credits=credits_for(stream))
        self._stop = threading.Event()
        self.process = BufferProcess(
            outside.buffer, None, directory=directory / "journal", stream=stream, buffer=Buffer(), seed=0
        )
        self._thread = threading.Thread(target=self.process.run, args=(self._stop,))
        self._thread.start()
        self._client = Client(outside.buffer.address, name="learner", peer="buffer")
        LearnerChannel(self._client).start(PolicyVersion(0, 0), {})

    def ledger(self) -> dict[str, Any]:
        return dict(read_ledger(self._client))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


class Killed(Slow):
    """An engine whose sampler dies at its 60th step, without a word to anybody."""

    def step(self) -> list[Any]:
        if self.events.count(("step", 6)) >= 60:
            raise KeyboardInterrupt("killed")
        return super().step()


def test_what_a_killed_sampler_had_goes_on_in_the_next_and_is_counted_once(tmp_path: Path) -> None:
    outside = Outside(plays_buffer=False)
    buffer = Alone(outside, tmp_path)
    publish(tmp_path / "weights", 0)
    settings: dict[str, Any] = {"sampler": LONG, "stream": {"groups_per_step": 1, "max_policy_age": 2, **OFTEN}}
    try:
        # 3 tickets: (2 + 1) x 1 may be live. Their 6 rollouts run side by side.
        first = Running(outside, tmp_path, Killed(num_slots=16), **settings)
        first.wait(lambda: False)
        assert isinstance(first.error, KeyboardInterrupt)
        killed = buffer.ledger()
        in_flight = killed["tokens"]["in_flight"]
        assert 0 < in_flight == killed["tokens"]["generated"] <= 6 * 60
        second = Running(outside, tmp_path, FakeEngine(num_slots=16), **settings)
        second.until(lambda: buffer.process.status()["ledger"]["groups"]["no_signal"] >= 3)
        assert second.process is not None
        assert second.process.status()["num_groups_continued"] == 3
        account = buffer.ledger()
        assert account["closes"]
        # Every rollout has 200 tokens, those of the first sampler among them; all are right, so that none has signal.
        num_ended = account["groups"]["no_signal"]
        assert account["tokens"]["no_signal"] == num_ended * 2 * 200
        assert account["tokens"]["stale"] == account["tokens"]["refused"] == 0
        rows = [row for row in buffer.process._journal.replay() if row.kind == "no_signal"][:3]
        assert [row.owner_epoch for row in rows] == [1, 1, 1]
        assert 0 <= account["lost_in_sampler"] <= 6 * 60
    finally:
        buffer.close()
        outside.close()


def test_a_sampler_that_hangs_loses_its_ticket_to_another(tmp_path: Path) -> None:
    outside = Outside(plays_buffer=False)
    buffer = Alone(outside, tmp_path)
    publish(tmp_path / "weights", 0)
    settings: dict[str, Any] = {"sampler": LONG, "stream": {"groups_per_step": 1, "max_policy_age": 2, **OFTEN}}
    hangs = threading.Event()

    class Hanging(Slow):
        def step(self) -> list[Any]:
            if self.events.count(("step", 6)) >= 60:
                hangs.wait(10)
            return super().step()

    try:
        first = Running(outside, tmp_path, Hanging(num_slots=16), **settings)
        first.wait(lambda: buffer.process.status()["ledger"]["tokens"]["in_flight"] > 0)
        second = Running(outside, tmp_path, FakeEngine(num_slots=16), sampler_id="s1", **settings)
        second.until(lambda: buffer.process.status()["ledger"]["groups"]["no_signal"] >= 3)
        hangs.set()
        # What the first brings after all is refused as a copy, and the account closes.
        first.until(lambda: buffer.process.status()["ledger"]["groups"]["refused"] >= 3)
        assert buffer.ledger()["closes"]
    finally:
        hangs.set()
        buffer.close()
        outside.close()
