"""Evaluation during training: when it is due, that it is of one version, and what it leaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from curator.wire import Client, Server
from stream_grpo.buffer.process import BufferProcess, credits_for
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.config_stream import Buffer, Stream
from stream_grpo.errors import EvaluationError
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.sampler.heldout import HeldoutEvaluation
from stream_grpo.transport.channels import LearnerChannel, read_ledger
from stream_grpo.types import Decision, EndReason, Forks, Generation, PolicyVersion, RewardResult
from stream_grpo.weights.publisher import Publisher
from tests.fakes import FakeEngine
from tests.sampler.loop import PROBE, Outside, Running, Slow, heldout_evaluation, publish, ticket

EVERY_10 = {"interval": 10, "interval_samples": 2}
FOREIGN = ("g0/0@0", RewardResult(decision=Decision.PASS, reward=1.0, verifier="exact", verifier_version="1"))
NUM_REQUESTS = 4  # two problems, two samples each


def events(directory: Path, event: str) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == event]


class FakeChannel:
    """The buffer's side of an evaluation: what was reported, and whether it is acknowledged."""

    def __init__(self) -> None:
        self.reported: list[tuple[PolicyVersion, int]] = []
        self.has_credit, self.waits_for_evaluation = True, False

    def report_evaluation(self, version: PolicyVersion, num_tokens: int) -> None:
        self.reported.append((version, num_tokens))
        self.waits_for_evaluation = True


class Evaluating:
    """An evaluation on a fake engine, driven step by step."""

    def __init__(self, directory: Path, evaluated: Sequence[PolicyVersion] = (), **stream: int) -> None:
        self.directory, self.engine, self.channel = directory, FakeEngine(), FakeChannel()
        config = configuration(**stream)
        self.scoring = Scoring(config.rewards)
        self.heldout: HeldoutEvaluation = heldout_evaluation(
            config, self.engine, self.channel, directory, evaluated, self.scoring
        )

    def applied(self, step: int, branch: int = 0, forks: Forks | None = None) -> bool:
        """Whether weights that are applied begin an evaluation."""
        self.engine.version = PolicyVersion(branch, step)
        self.heldout.applied(self.engine.version, forks or {})
        return self.heldout.is_running

    def finish(self) -> None:
        """Sample it to the end, and let the buffer acknowledge it."""
        while self.engine.num_unfinished:
            assert self.heldout.take(self.engine.step()) == []
        assert self.heldout.take_scores([*self.scoring.poll(), FOREIGN]) == [FOREIGN]
        self.heldout.turn()
        assert self.heldout.is_running  # until its tokens are in the account
        self.channel.waits_for_evaluation = False
        self.heldout.turn()
        assert not self.heldout.is_running

    def steps_evaluated(self, steps: Sequence[int]) -> list[int]:
        """Of weights that come one after the other, those that are evaluated."""
        found = []
        for step in steps:
            if self.applied(step):
                self.finish()
                found.append(step)
        assert [line["step"] for line in events(self.directory, "evaluation")] == found
        return found


def configuration(**stream: int) -> Config:
    tree = {"model": {"path": "m"}, "run": {"num_steps": 40}, "sampler": {"max_new_tokens": 3}, "stream": stream}
    return parse({**tree, "evaluation": EVERY_10}, source="test")


def test_weights_that_reach_the_next_multiple_are_evaluated(tmp_path: Path) -> None:
    # 0 is the evaluation before, 40 the one after. 12 is the first applied from 10 on, 31 the first from 30 on.
    steps = [0, 1, 9, 12, 13, 19, 20, 20, 21, 31, 39, 40]
    assert Evaluating(tmp_path).steps_evaluated(steps) == [12, 20, 31]


def test_a_sampler_that_begins_anew_goes_on_where_it_was(tmp_path: Path) -> None:
    # The evaluation of step 20 did not come to its end: it is made up for with the next weights.
    assert Evaluating(tmp_path, evaluated=[PolicyVersion(0, 10)]).steps_evaluated([19, 22, 23]) == [22]


def test_after_a_restore_the_steps_of_the_branch_that_was_left_do_not_count(tmp_path: Path) -> None:
    forks = {1: PolicyVersion(0, 15)}
    evaluating = Evaluating(tmp_path, evaluated=[PolicyVersion(0, 10), PolicyVersion(0, 20)])
    assert not evaluating.applied(15, branch=1, forks=forks)
    assert evaluating.applied(20, branch=1, forks=forks)
    evaluating.finish()
    assert [line["version"] for line in events(tmp_path, "evaluation")] == [[1, 20]]
    assert not evaluating.applied(21, branch=1, forks=forks)


def test_every_evaluation_has_the_same_prompts_and_seeds(tmp_path: Path) -> None:
    class Keeping(FakeEngine):
        def add(self, request: Any) -> None:
            seen.append(asdict(request))
            super().add(request)

    seen: list[dict[str, Any]] = []
    evaluating = Evaluating(tmp_path)
    evaluating.heldout._engine = evaluating.engine = Keeping()
    assert evaluating.steps_evaluated([10, 20]) == [10, 20]
    assert seen[:NUM_REQUESTS] == seen[NUM_REQUESTS:]
    assert len({request["seed"] for request in seen}) == NUM_REQUESTS


def test_an_evaluation_leaves_its_scores_and_its_tokens(tmp_path: Path) -> None:
    evaluating = Evaluating(tmp_path)
    evaluating.applied(10)
    evaluating.finish()
    (line,) = events(tmp_path, "evaluation")
    assert (line["version"], line["branch"], line["step"], line["pinned_s"]) == ([0, 10], 0, 10, 0.0)
    assert line["num_tokens"] == NUM_REQUESTS * 3
    assert evaluating.channel.reported == [(PolicyVersion(0, 10), NUM_REQUESTS * 3)]
    # Every response is 42, which is the answer of one of the two problems.
    rates = {name: row["pass_at_1"] for name, row in line["heldout"].items()}
    assert rates == {"is-42": 1.0, "is-43": 0.0, "all": 0.5, "headline": 0.5}
    assert line["source"] == "s0"


@pytest.mark.parametrize(("newest", "warnings"), [(12, 0), (13, 1)])
def test_newer_weights_wait_and_too_many_of_them_are_a_warning(tmp_path: Path, newest: int, warnings: int) -> None:
    evaluating = Evaluating(tmp_path, max_policy_age=4)  # half of it is 2
    evaluating.applied(10)
    evaluating.heldout.published(PolicyVersion(0, 10))
    evaluating.heldout.published(PolicyVersion(0, newest))
    evaluating.finish()
    (line,) = events(tmp_path, "evaluation")
    assert line["pinned_s"] > 0
    found = [line["message"] for line in events(tmp_path, "warning")]
    assert len(found) == warnings
    assert all("step 10 took 3 learner steps, more than half of stream.max_policy_age = 4" in text for text in found)


def test_a_sample_of_other_weights_is_an_error(tmp_path: Path) -> None:
    evaluating = Evaluating(tmp_path)
    evaluating.applied(10)
    evaluating.engine.version = PolicyVersion(0, 11)
    with pytest.raises(EvaluationError, match=r"of one policy version; .* saw 0\.10, 0\.11"):
        evaluating.finish()


def test_scores_that_come_late_free_the_weights_and_are_written_when_they_come(tmp_path: Path) -> None:
    evaluating = Evaluating(tmp_path)
    evaluating.applied(10)
    while evaluating.engine.num_unfinished:
        evaluating.heldout.take(evaluating.engine.step())
    evaluating.heldout.turn()
    evaluating.channel.waits_for_evaluation = False
    evaluating.heldout.turn()
    assert not evaluating.heldout.is_running
    assert not evaluating.heldout.is_due(PolicyVersion(0, 11), {})
    assert events(tmp_path, "evaluation") == []
    # The next evaluation has the same requests: its scores are its own.
    assert evaluating.applied(20)
    evaluating.heldout.take_scores(evaluating.scoring.poll())
    evaluating.heldout.turn()
    assert [line["step"] for line in events(tmp_path, "evaluation")] == [10]


def test_an_evaluation_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    evaluating = Evaluating(tmp_path)
    evaluating.applied(10)
    evaluating.heldout.take(evaluating.engine.step())
    evaluating.heldout.stop()
    evaluating.heldout.turn()
    assert (evaluating.engine.num_unfinished, evaluating.channel.reported) == (0, [])
    assert events(tmp_path, "evaluation") == []


def test_newer_weights_wait_while_groups_go_on(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 9)
    engine = Slow(num_slots=64)
    running = Running(outside, tmp_path, engine, sampler={"max_new_tokens": 240}, evaluation=EVERY_10)
    running.wait(lambda: engine.events.count(("step", 2)) >= 5)  # g0 runs
    publish(running.weights, 10, value=1.0)
    running.wait(lambda: ("add", "eval/1/1") in engine.events)
    publish(running.weights, 11, value=2.0)
    running.wait(lambda: engine.events.count(("step", 2 + NUM_REQUESTS)) >= 60)  # g1 begins and ends after it
    outside.blocks.append([ticket("g1")])
    running.until(lambda: len(outside.groups) == 2)

    groups = {group.group_id: group for group in outside.groups}
    order = [event for event in engine.events if event[0] in ("weights", "add")]
    assert order == [
        ("weights", PolicyVersion(0, 9)),
        *(("add", f"g0/{i}") for i in range(2)),
        ("weights", PolicyVersion(0, 10)),
        *(("add", f"eval/{i}/{j}") for i in range(2) for j in range(2)),
        *(("add", f"g1/{i}") for i in range(2)),  # sampling did not wait
        ("weights", PolicyVersion(0, 11)),
    ]
    # g1 began on the pinned weights, and none of 11 came before it had ended.
    assert groups["g1"].versions() == {PolicyVersion(0, 10), PolicyVersion(0, 11)}
    assert groups["g0"].versions() == {PolicyVersion(0, 9), PolicyVersion(0, 10)}
    assert outside.evaluated == [{"sampler_id": "s0", "version": [0, 10], "num_tokens": NUM_REQUESTS * 240}]
    (line,) = events(tmp_path, "evaluation")
    assert (line["version"], line["num_tokens"]) == ([0, 10], NUM_REQUESTS * 240)
    assert line["pinned_s"] > 0
    assert running.process is not None
    # Tokens of groups alone.
    assert running.process.status()["num_tokens"] == 2 * 2 * 240


def test_at_age_0_an_evaluation_runs_before_the_block(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0"), ticket("g1")]]
    publish(tmp_path / "weights", 10)
    engine = FakeEngine(num_slots=64)
    running = Running(outside, tmp_path, engine, stream={"max_policy_age": 0}, evaluation=EVERY_10)
    running.until(lambda: len(outside.groups) == 2)
    sampled = [event for event in engine.events if event[0] == "step"]
    assert sampled == [("step", NUM_REQUESTS)] * 3 + [("step", 4)] * 3
    assert len(events(tmp_path, "evaluation")) == 1


class Differing(FakeEngine):
    """The second rollout of every group is wrong."""

    def _end(self, name: str, reason: EndReason) -> Generation:
        ended = super()._end(name, reason)
        wrong = name.startswith("g") and name.endswith("/1")
        return replace(ended, token_ids=ended.token_ids + 1) if wrong else ended


class Learning:
    """The buffer as it is, and a learner that trains on what it leases: 2 groups a step, age at most 2."""

    STREAM: ClassVar[dict[str, Any]] = {"groups_per_step": 2, "max_policy_age": 2}

    def __init__(self, outside: Outside, directory: Path) -> None:
        self._directory, self._stop = directory, threading.Event()
        outside.buffer.close()
        stream = Stream(**self.STREAM)
        outside.buffer = Server(credits=credits_for(stream))
        self.buffer = BufferProcess(
            outside.buffer, None, directory=directory / "journal", stream=stream, buffer=Buffer(), seed=0
        )
        self._thread = threading.Thread(target=self.buffer.run, args=(self._stop,))
        self._thread.start()
        self._client = Client(outside.buffer.address, name="learner", peer="buffer")

    def train(self, version: PolicyVersion, forks: Forks, last_step: int) -> None:
        """Publish and train from `version` to the step `last_step` of its branch."""
        learner, publisher = LearnerChannel(self._client), Publisher(self._directory / "weights", 3)
        learner.start(version, forks)
        while True:
            publisher.publish(version, forks, {"w": torch.full((2,), float(version.step))}, PROBE)
            if version.step == last_step:
                return
            while not (lease := learner.lease(version, 2)).groups:
                assert lease.cause
            assert max(lease.ages) <= 2
            version = PolicyVersion(version.branch, version.step + 1)
            tokens = {group.group_id: {"trained": group.num_sampled_tokens} for group in lease.groups}
            assert learner.trained(version, list(tokens), tokens)["closes"]

    def close(self) -> dict[str, Any]:
        """Stop the buffer; how it is doing in the end."""
        self._ledger = read_ledger(self._client)
        self._stop.set()
        self._thread.join()
        self._client.close()
        return {**self._ledger, "outcomes": self.buffer._book.outbox.num_outcomes}


def test_the_whole_loop_with_a_restart_and_a_restore(tmp_path: Path) -> None:
    outside = Outside(plays_buffer=False)
    settings = {"stream": Learning.STREAM, "evaluation": {"interval": 3, "interval_samples": 2}}

    def run(version: PolicyVersion, forks: Forks, last_step: int, multiples: list[int]) -> None:
        """Buffer, sampler and learner from weights of `version`, until these multiples of 3 are evaluated."""

        def evaluated() -> list[dict[str, Any]]:
            return events(tmp_path, "evaluation")

        def on_the_way() -> list[int]:
            own = [line for line in evaluated() if line["branch"] == version.branch or line["step"] <= version.step]
            return [line["step"] // 3 for line in own]

        learning = Learning(outside, tmp_path)
        sampler = Running(outside, tmp_path, Differing(num_slots=16), **settings)
        learning.train(version, forks, last_step)
        sampler.until(lambda: on_the_way() == multiples)
        account = learning.close()
        tokens, groups = account["tokens"], account["groups"]
        # 2 problems x 2 samples x 3 tokens; every version once.
        assert {line["num_tokens"] for line in evaluated()} == {12}
        assert tokens["evaluation"] == 12 * len(evaluated())
        assert account["closes"]
        assert tokens.pop("generated") == sum(tokens.values())
        # Outcomes are of groups alone.
        assert account["outcomes"] == sum(groups.values()) - groups["ticketed"] - groups["refused"]

    try:
        run(PolicyVersion(0, 0), {}, 8, [1, 2])
        run(PolicyVersion(1, 6), {1: PolicyVersion(0, 6)}, 10, [1, 2, 3])
    finally:
        outside.close()
