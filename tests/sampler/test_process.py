"""The sampler's loop against a buffer and a curator on the real wire, with a fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from curator.client import Curator
from curator.schema import Pick, Problem, batch_to_bytes, picks_to_batch
from curator.wire import Client, Server
from stream_grpo.config_file import parse
from stream_grpo.errors import ProbeError, StallError
from stream_grpo.rewards.score import Scorer
from stream_grpo.sampler.process import SamplerProcess
from stream_grpo.sampler.prompts import PromptRefused
from stream_grpo.transport.channels import SamplerChannel
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import EndReason, Generation, PolicyVersion, RolloutGroup, Ticket
from stream_grpo.weights.manifest import Probe
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.fakes import FakeEngine

PROBE = Probe(((1, 2, 3),), ((-1.0, -1.0),))


class FakePrompts:
    """Prompt ids 1, 2, 3; every response ends in "#### 42"."""

    fingerprint = "tokenizer"

    def token_ids(self, problem: Problem) -> tuple[int, ...]:
        if problem.answer == "too long":
            raise PromptRefused("too long")
        return (1, 2, 3)

    def decode(self, token_ids: list[int]) -> str:
        return "so #### 42"


class Slow(FakeEngine):
    """A step takes a while, so that the test can act in between."""

    def step(self) -> list[Generation]:
        time.sleep(0.001)
        return super().step()


@dataclass
class Outside:
    """Buffer and curator: hands out `blocks` of tickets, one block a request, and keeps what it is told."""

    blocks: list[list[Ticket]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    groups: list[RolloutGroup] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    num_hellos: int = 0
    holds_inserts: bool = False

    def __post_init__(self) -> None:
        self.buffer, self.curator, self.stop = Server(), Server(), threading.Event()
        self.threads = [threading.Thread(target=t) for t in (self._serve_buffer, self._serve_curator)]
        for thread in self.threads:
            thread.start()

    def _serve_buffer(self) -> None:
        while not self.stop.is_set():
            if (request := self.buffer.receive(0.01)) is None:
                continue
            kind, fields = request.message.kind, request.message.fields
            if kind == "hello":
                self.num_hellos += 1
                self.buffer.reply(request, "welcome", {"epoch": 1})
            elif kind == "tickets":
                self.asked.append(dict(fields))
                self.problems |= fields["problems"]
                tickets = self.blocks.pop(0) if self.blocks and fields["num_wanted"] else []
                self.buffer.reply(request, "tickets", {"tickets": [asdict(t) for t in tickets], "cause": ""})
            elif not self.holds_inserts:
                self.groups.append(decode_group(request.message.body[0]))
                self.buffer.reply(request, "taken", {"fate": "accepted", "reason": ""})

    def _serve_curator(self) -> None:
        while not self.stop.is_set():
            if (request := self.curator.receive(0.01)) is not None:
                # Answered in reverse: the sampler has an order of its own.
                ids = sorted(request.message.fields["group_ids"], reverse=True)
                body = batch_to_bytes(picks_to_batch([self._pick(group_id) for group_id in ids]))
                self.curator.reply(request, "picks", body=[body])

    def _pick(self, group_id: str) -> Pick:
        problem = Problem(
            problem_id=f"of-{group_id}", prompt="6*7=", answer=self.answers.get(group_id, "42"), verifier="exact"
        )
        return Pick(group_id=group_id, problem=problem, probability=0.5, expected_signal=0.5)

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        self.buffer.close()
        self.curator.close()


@pytest.fixture
def outside() -> Iterator[Outside]:
    servers = Outside()
    yield servers
    servers.close()


def ticket(group_id: str, deadline_s: float | None = None, epoch: int = 0) -> Ticket:
    return Ticket(
        group_id=group_id,
        owner_epoch=epoch,
        step=0,
        seed=3,
        issued_at_s=time.time(),
        deadline_s=time.time() + 60 if deadline_s is None else deadline_s,
    )


def publish(directory: Path, step: int, value: float = 0.0) -> None:
    Publisher(directory, 3).publish(PolicyVersion(0, step), {}, {"w": torch.full((2,), value)}, PROBE)


class Running:
    """A sampler in a thread of its own, until `until` holds."""

    def __init__(self, outside: Outside, tmp_path: Path, engine: FakeEngine, **sections: dict[str, Any]) -> None:
        sampler = {"group_size": 2, "max_new_tokens": 3, "max_num_seqs": 8} | sections.get("sampler", {})
        tree = {"model": {"path": "m"}, **sections, "sampler": sampler}
        self.weights, self.error, self._stop = tmp_path / "weights", None, threading.Event()
        self._tree, self._outside, self._engine = tree, outside, engine
        self.process: SamplerProcess | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        buffer = Client(self._outside.buffer.address, name="s0", peer="buffer")
        curator = Curator(self._outside.curator.address, name="s0")
        self.process = SamplerProcess(
            parse(self._tree, source="test"),
            "s0",
            self._engine,
            SamplerChannel(buffer, "s0"),
            curator,
            Subscriber(self.weights),
            FakePrompts(),  # type: ignore[arg-type]
            Scorer(["exact"]),
        )
        try:
            self.process.run(self._stop)
        except Exception as error:
            self.error = error
        buffer.close()
        curator.close()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not condition() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert condition()


def test_no_traffic_before_the_first_weights(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine)
    time.sleep(0.1)
    assert outside.num_hellos == 1
    assert (outside.asked, engine.events) == ([], [])
    publish(running.weights, 7)
    running.until(lambda: len(outside.groups) == 1)
    assert engine.events[0] == ("weights", PolicyVersion(0, 7))
    assert outside.asked[0]["version"] == [0, 7]


def test_a_group_goes_from_ticket_to_buffer_scored(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.answers = [[ticket("g0", epoch=4), ticket("g1")]], {"g1": "43"}
    publish(tmp_path / "weights", 7)
    running = Running(outside, tmp_path, FakeEngine(num_slots=8))
    running.until(lambda: len(outside.groups) == 2 and len(outside.problems) == 2)
    groups = {group.group_id: group for group in outside.groups}
    right, wrong = groups["g0"], groups["g1"]
    assert [r.reward.reward for r in right.rollouts] == [1.0, 1.0]
    assert [r.reward.reward for r in wrong.rollouts] == [0.0, 0.0]
    assert right.owner_epoch == 4
    assert right.versions() == {PolicyVersion(0, 7)}
    assert right.rollouts[0].token_ids.tolist() == [1, 2, 3, 7, 7, 7]
    assert right.rollouts[0].seed != right.rollouts[1].seed
    assert right.config_hash == wrong.config_hash != ""
    assert outside.problems == {"g0": "of-g0", "g1": "of-g1"}
    assert running.process is not None
    status = running.process.status()
    # 2 groups of 2 rollouts of 3 tokens each.
    assert status["num_tokens"] == 12
    assert status["num_groups_done"] == 2
    assert status["groups_by_fate"] == {"accepted": 2}
    assert status["version"] == [0, 7]
    assert status["probe_gap"] == {"mean": 0.0, "max": 0.0, "num_tokens": 2}
    assert status["busy_s"] > 0
    assert status["first_busy_at"] == pytest.approx(time.time(), abs=10)


def test_it_asks_for_what_fits_the_free_slots_and_two_groups_ahead(outside: Outside, tmp_path: Path) -> None:
    publish(tmp_path / "weights", 0)
    outside.blocks = [[ticket("g0"), ticket("g1")]]
    engine = Slow(num_slots=8)
    long = {"max_new_tokens": 200}
    Running(outside, tmp_path, engine, sampler=long).until(lambda: len(outside.asked) >= 2)
    # 8 slots hold 4 groups of 2; with 2 groups running 2 are left.
    assert [asked["num_wanted"] for asked in outside.asked[:2]] == [4 + 2, 2 + 2]


def test_at_age_0_the_whole_block_is_added_in_order_before_the_first_step(outside: Outside, tmp_path: Path) -> None:
    # 30 groups of 2 are more than the 8 slots hold.
    names = [f"g{i:02d}" for i in range(30)]
    outside.blocks = [[ticket(name) for name in reversed(names)], [ticket("h0")]]
    publish(tmp_path / "weights", 0)
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine, stream={"max_policy_age": 0})
    running.until(lambda: len(outside.groups) == 31)
    assert [event[1] for event in engine.events[1:61]] == [f"{name}/{i}" for name in names for i in (0, 1)]
    assert engine.events[61] == ("step", 60)
    # The next block is asked for when the first has ended.
    adds = [i for i, event in enumerate(engine.events) if event[0] == "add" and str(event[1]).startswith("h0")]
    steps_before = [event for event in engine.events[: adds[0]] if event[0] == "step"]
    assert steps_before == [("step", 60)] * 3


def test_at_age_0_problems_are_named_while_the_block_runs(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0"), ticket("g1")], [ticket("h0")]]
    publish(tmp_path / "weights", 5)
    stream, long = {"max_policy_age": 0}, {"max_new_tokens": 240}
    running = Running(outside, tmp_path, Slow(num_slots=8), stream=stream, sampler=long)
    named: list[bool] = []
    running.until(lambda: len(outside.problems) == 2 and not named.append(not outside.groups))
    assert named[0]
    assert [(asked["num_wanted"] > 0, asked["version"]) for asked in outside.asked[:2]] == [
        (True, [0, 5]), (False, [0, 5])
    ]  # fmt: skip
    assert outside.asked[1]["problems"] == {"g0": "of-g0", "g1": "of-g1"}


def test_a_buffer_that_holds_a_group_is_waited_for_by_name(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.holds_inserts = [[ticket("g0")]], True
    publish(tmp_path / "weights", 0)
    with pytest.raises(StallError, match=r"s0 waited .* for the buffer to answer"):
        Running(outside, tmp_path, FakeEngine(num_slots=8), stream={"stall_timeout_s": 0.3, "max_policy_age": 0}).until(
            lambda: False
        )


def test_new_weights_come_between_two_steps_and_label_the_tokens_after_them(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 1)
    engine = Slow(num_slots=8)
    running = Running(outside, tmp_path, engine, sampler={"max_new_tokens": 240})
    while engine.events.count(("step", 2)) < 20:
        time.sleep(0.001)
    publish(running.weights, 2, value=1.0)
    running.until(lambda: len(outside.groups) == 1)
    rollout = outside.groups[0].rollouts[0]
    steps = rollout.version_step[rollout.loss_mask].tolist()
    num_old = engine.events[: engine.events.index(("weights", PolicyVersion(0, 2)))].count(("step", 2))
    assert steps == [1] * num_old + [2] * (240 - num_old)
    assert num_old >= 20


def test_a_group_past_its_deadline_goes_with_what_it_has_and_without_a_reward(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0", deadline_s=time.time() + 0.3)]]
    publish(tmp_path / "weights", 0)
    engine = FakeEngine(num_slots=8)
    running = Running(
        outside,
        tmp_path,
        engine,
        model={"path": "m", "max_length_tokens": 1 << 30},
        sampler={"max_new_tokens": 1 << 29},
        stream={"sample_deadline_s": 1.0},
    )
    running.until(lambda: len(outside.groups) == 1)
    for rollout in outside.groups[0].rollouts:
        assert rollout.end_reason is EndReason.ABORT
        assert rollout.reward.reward is None
        assert 0 < rollout.num_sampled_tokens < 1 << 29
    assert running.process is not None
    assert running.process.status()["num_groups_expired"] == 1


def test_a_problem_that_cannot_be_sampled_gives_its_ticket_back(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.answers = [[ticket("g0")]], {"g0": "too long"}
    publish(tmp_path / "weights", 0)
    running = Running(outside, tmp_path, FakeEngine(num_slots=8))
    running.until(lambda: len(outside.groups) == 1)
    assert [r.reward.evidence for r in outside.groups[0].rollouts] == ["too long"] * 2
    assert outside.groups[0].num_sampled_tokens == 0


def test_a_ticket_that_is_issued_again_replaces_the_group_under_way(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")], [ticket("g0", epoch=1)]]
    publish(tmp_path / "weights", 0)
    engine = Slow(num_slots=8)
    running = Running(outside, tmp_path, engine, sampler={"max_new_tokens": 240})
    running.until(lambda: len(outside.groups) == 1)
    assert outside.groups[0].owner_epoch == 1
    assert [event for event in engine.events if event[0] == "abort"] == [("abort", "g0/0"), ("abort", "g0/1")]


def test_weights_that_fail_the_probe_end_the_sampler(outside: Outside, tmp_path: Path) -> None:
    publish(tmp_path / "weights", 0)
    engine = FakeEngine(num_slots=8)
    engine.probe_error = 0.5
    with pytest.raises(ProbeError, match=r"weights 0\.0"):
        Running(outside, tmp_path, engine).until(lambda: False)
    assert outside.asked == []


def test_a_wait_names_whom_it_waited_for(outside: Outside, tmp_path: Path) -> None:
    with pytest.raises(StallError, match=r"s0 waited .* for the learner to publish weights"):
        Running(outside, tmp_path, FakeEngine(), stream={"stall_timeout_s": 0.05}).until(lambda: False)
