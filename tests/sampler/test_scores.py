"""Rewards in the sampler's loop: they come late, out of order, or not at all, and hold nothing up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stream_grpo.config import Config
from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import RewardError
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.types import Decision, EndReason, Generation, RewardResult
from tests.fakes import FakeEngine
from tests.rewards.http_server import JudgeServer, Reply, says
from tests.sampler.loop import Outside, Running, publish, ticket


class LateScoring(Scoring):
    """Holds back the scores whose task id `holds` names, until it no longer does."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        super().__init__(Rewards())
        self.holds, self.held = holds, list[tuple[str, RewardResult]]()

    def __call__(self, config: Config) -> LateScoring:
        return self

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        results = self.held + super().poll(timeout_s)
        self.held = [item for item in results if self.holds(item[0])]
        return [item for item in results if item not in self.held]

    @property
    def num_open(self) -> int:
        return super().num_open + len(self.held)


class Cut(FakeEngine):
    """Every response reaches the length limit."""

    def _end(self, name: str, reason: EndReason) -> Generation:
        return replace(super()._end(name, reason), end_reason=EndReason.LENGTH)


def test_a_slow_score_holds_up_no_other_group(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")], [ticket("g1"), ticket("g2")], [ticket("g3")]]
    publish(tmp_path / "weights", 0)
    scoring = LateScoring(lambda task_id: task_id == "g0/1@0")
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring)
    seen: list[str] = []

    def is_done() -> bool:
        names = [group.group_id for group in outside.groups]
        if len(names) == 3 and not seen:
            seen.extend(names)
            scoring.holds = lambda task_id: False
        return len(names) == 4

    running.until(is_done)
    assert sorted(seen) == ["g1", "g2", "g3"]
    last = outside.groups[-1]
    assert (last.group_id, [r.reward.reward for r in last.rollouts]) == ("g0", [1.0, 1.0])


def test_a_sampler_with_nothing_but_scores_under_way_waits_for_rewards(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    scoring = LateScoring(lambda task_id: True)
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring)
    running.wait(lambda: len(scoring.held) == 2)
    process = running.process
    assert process is not None
    before = process.status()["idle_s"]
    running.wait(lambda: process.status()["idle_s"]["rewards"] > before["rewards"] + 0.02)
    after = process.status()["idle_s"]
    scoring.holds = lambda task_id: False
    running.until(lambda: len(outside.groups) == 1)
    assert after["rewards"] > before["rewards"] + 0.02
    assert after["buffer"] == before["buffer"]


def test_at_age_0_the_next_block_waits_for_the_scores_of_this_one(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0"), ticket("g1")], [ticket("h0")]]
    publish(tmp_path / "weights", 0)
    scoring = LateScoring(lambda task_id: task_id == "g0/0@0")
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine, make_scoring=scoring, stream={"max_policy_age": 0})
    running.wait(lambda: bool(outside.groups))
    time.sleep(0.05)  # many turns of the loop
    assert ("add", "h0/0") not in engine.events
    scoring.holds = lambda task_id: False
    running.until(lambda: len(outside.groups) == 3)
    assert [group.group_id for group in outside.groups] == ["g1", "g0", "h0"]


def test_a_score_that_comes_after_the_deadline_is_an_error_and_no_reward(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0", deadline_s=time.time() + 0.3)]]
    publish(tmp_path / "weights", 0)
    scoring = LateScoring(lambda task_id: task_id == "g0/1@0")
    settings = {"stream": {"sample_deadline_s": 1.0}, "rewards": {"time_limit_s": 0.4}}
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring, **settings)

    def is_done() -> bool:
        if outside.groups:
            scoring.holds = lambda task_id: False  # it comes now, for a group that has ended
        return bool(outside.groups) and not scoring.num_open

    running.until(is_done)
    first, second = (rollout.reward for rollout in outside.groups[0].rollouts)
    assert first.reward == 1.0
    assert (second.decision, second.reward) == (Decision.ENV_ERROR, None)
    assert second.evidence == "not scored by the deadline of its group"
    assert running.process is not None
    assert running.process.status()["num_groups_expired"] == 1


def test_a_score_of_an_earlier_ticket_does_not_serve_the_group_issued_again(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    scoring = LateScoring(lambda task_id: True)
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring)
    running.wait(lambda: len(scoring.held) == 2)
    outside.blocks.append([ticket("g0", epoch=1)])
    running.wait(lambda: len(scoring.held) == 4)  # both generations of both tickets
    scoring.held = [(task_id, replace(result, reward=0.25)) for task_id, result in scoring.held if "@0" in task_id] + [
        item for item in scoring.held if "@1" in item[0]
    ]
    scoring.holds = lambda task_id: False
    running.until(lambda: len(outside.groups) == 1)
    (group,) = outside.groups
    assert (group.owner_epoch, [r.reward.reward for r in group.rollouts]) == (1, [1.0, 1.0])


def test_what_is_generated_when_the_sampler_stops_is_scored_and_handed_over(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 0)
    scoring = LateScoring(lambda task_id: not is_stopping)
    is_stopping: list[bool] = []
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring)
    running.wait(lambda: len(scoring.held) == 2)
    threading.Timer(0.2, lambda: is_stopping.append(True)).start()
    running.until(lambda: True)  # it is told to stop while both scores are out
    assert [r.reward.reward for r in outside.groups[0].rollouts] == [1.0, 1.0]


def test_c40_a_response_that_cannot_be_scored_is_left_out_and_too_many_end_the_run(
    outside: Outside, tmp_path: Path
) -> None:
    # An empty gold is an error of the verifier `exact`.
    outside.blocks, outside.answers = [[ticket("g0")], [ticket("g1")], [ticket("g2")]], {"g0": "", "g2": ""}
    publish(tmp_path / "weights", 0)
    running = Running(outside, tmp_path, FakeEngine(num_slots=8), rewards={"max_errors_in_row": 3})
    running.until(lambda: len(outside.groups) == 3)
    rewards = {group.group_id: [r.reward.reward for r in group.rollouts] for group in outside.groups}
    assert rewards == {"g0": [None, None], "g1": [1.0, 1.0], "g2": [None, None]}
    outside.blocks = [[ticket("g0"), ticket("g2")]]
    with pytest.raises(RewardError, match=r"3 responses in a row .*\n.*has an empty answer"):
        Running(outside, tmp_path, FakeEngine(num_slots=8), rewards={"max_errors_in_row": 3}).until(lambda: False)


def test_c41_the_sampler_says_that_all_responses_are_cut(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket(f"g{i:02d}") for i in range(32)]]
    publish(tmp_path / "weights", 0)
    sampler = {"max_new_tokens": 16, "max_num_seqs": 64}
    running = Running(outside, tmp_path, Cut(num_slots=64), sampler=sampler)
    running.until(lambda: len(outside.groups) == 32)
    # Cut is a state of its own beside the reward.
    rollouts = [rollout for group in outside.groups for rollout in group.rollouts]
    assert {(rollout.end_reason, rollout.reward.reward) for rollout in rollouts} == {(EndReason.LENGTH, 0.0)}
    (warning,) = running.warnings
    assert "(100%) were cut off at sampler.max_new_tokens = 16" in warning


def test_a_judge_of_groups_is_told_which_responses_belong_together(outside: Outside, tmp_path: Path) -> None:
    outside.verifiers = dict.fromkeys(("g0", "g1", "g2"), "http:pair")
    outside.blocks = [[ticket("g0"), ticket("g1")], [ticket("g2")]]
    publish(tmp_path / "weights", 0)
    with JudgeServer(lambda body: says("[[A]]")) as server:
        judge = {"kind": "pairwise", "url": server.url, "model": "m", "prompt": "{first}|{second}"}
        running = Running(outside, tmp_path, FakeEngine(), rewards={"http": {"pair": judge}})
        running.until(lambda: len(outside.groups) == 3)
    # Two responses a group, compared in both orders, by a judge that prefers the first place.
    assert len(server.bodies) == 6
    assert [[r.reward.reward for r in group.rollouts] for group in outside.groups] == [[0.5, 0.5]] * 3


def test_a_judge_that_hangs_holds_up_no_other_group(outside: Outside, tmp_path: Path) -> None:
    outside.verifiers = {"g0": "http:slow"}
    outside.blocks = [[ticket("g0")], [ticket("g1"), ticket("g2")]]
    publish(tmp_path / "weights", 0)
    with JudgeServer(lambda body: Reply({"score": 1.0}, after_s=60.0)) as server:
        judge = {"kind": "score", "url": server.url}
        running = Running(outside, tmp_path, FakeEngine(), rewards={"http": {"slow": judge}})
        running.until(lambda: len(outside.groups) == 2)
        assert len(server.bodies) == 2
    assert sorted(group.group_id for group in outside.groups) == ["g1", "g2"]
