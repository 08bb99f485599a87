"""Trajectories through the sampler's loop: groups handed over, deadlines, tickets that come again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from curator.schema import Problem
from stream_grpo.algo.presets import PRESETS
from stream_grpo.config_environment import Environment
from stream_grpo.config_file import parse
from stream_grpo.environments.instance import Call
from stream_grpo.evaluation import EvaluationRun, evaluate
from stream_grpo.learner.process import tokens_by_fate
from stream_grpo.registry.names import unknown
from stream_grpo.rewards.scoring import Scoring
from stream_grpo.sampler.branching import num_trunk_actions
from stream_grpo.sampler.generation import generate
from stream_grpo.sampler.trajectories import TrajectoryEngine
from stream_grpo.transport.channels import LearnerChannel
from stream_grpo.types import Decision, EndReason, Generation, GenerationRequest, PolicyVersion, Rollout
from tests.learner.test_train_step import batch_of
from tests.sampler.acting import Acting, Encoder, Inside, around, decode
from tests.sampler.loop import Outside, Running, publish, ticket
from tests.sampler.test_branching import Choosing, small_ids
from tests.sampler.test_progress import OFTEN, Alone

SECTIONS: dict[str, Any] = {
    "model": {"path": "m", "max_length_tokens": 400},
    "environment": {"name": "calculator", "max_steps": 3},
    "sampler": {"max_new_tokens": 60},
}


def twice(history: str) -> str:
    return "end" if "1 of seed" in history else "go"


@pytest.fixture
def outside() -> Iterator[Outside]:
    found = Outside()
    yield found
    found.close()


def run(outside: Outside, tmp_path: Path, environments: Inside, until: Any, **sections: Any) -> Running:
    publish(tmp_path / "weights", 0)
    engine = around(Acting(twice), environments, max_steps=3)
    running = Running(outside, tmp_path, engine, **{**SECTIONS, **sections})  # type: ignore[arg-type]
    running.until(until)
    return running


def ends(rollouts: tuple[Rollout, ...]) -> list[EndReason]:
    return [rollout.end_reason for rollout in rollouts]


def test_a_group_of_trajectories_is_handed_over_with_its_rewards(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.verifiers = [[ticket("g0")]], {"g0": "environment"}
    running = run(outside, tmp_path, Inside(), lambda: outside.groups)
    (group,) = outside.groups
    assert ends(group.rollouts) == [EndReason.SUCCESS] * 2
    for rollout in group.rollouts:
        assert (rollout.reward.decision, rollout.reward.reward) == (Decision.PASS, 1.0)
        assert rollout.reward.components == {
            "environment.steps": 2.0,
            "environment.errors": 0.0,
            "environment.calls.go": 1.0,
            "environment.milestone.counted": 2.0,
        }
        assert set(rollout.turn[rollout.loss_mask].tolist()) == {0, 1}
        assert rollout.num_sampled_tokens == 7
    # Both began in one state, by one chance.
    assert len({rollout.environment_snapshot for rollout in group.rollouts}) == 1
    assert running.process is not None
    status = running.process.status()
    assert status["environment"]["success_share"] == 1.0
    assert unknown({"event": "status", "part": "sampler-0", **status}) == []
    assert (status["num_tokens"], status["num_partials"]) == (14, 0)


def three_turns(history: str) -> str:
    return "end" if "2 of seed" in history else "go"


def test_groups_branch_in_the_loop(outside: Outside, tmp_path: Path) -> None:
    outside.blocks, outside.verifiers = [[ticket("g0")]], {"g0": "environment"}
    publish(tmp_path / "weights", 0)
    sections = {**SECTIONS, "environment": {"name": "calculator", "max_steps": 3, "branch_share": 1.0}}
    environments = Inside()
    running = Running(outside, tmp_path, around(Acting(three_turns), environments, max_steps=3), **sections)  # type: ignore[arg-type]
    running.until(lambda: bool(outside.groups))
    (group,) = outside.groups
    num_trunk = num_trunk_actions(3, Environment(name="calculator", max_steps=3, branch_share=1.0))
    assert num_trunk in (1, 2)
    # "go", "go", "end", each with its end: 3 + 3 + 4 tokens, of which the trunk's are sampled once.
    assert group.num_trunk_tokens == 3 * num_trunk
    assert [r.num_target_tokens for r in group.rollouts] == [10 - 3 * num_trunk] * 2
    assert [r.num_sampled_tokens for r in group.rollouts] == [10, 10 - 3 * num_trunk]
    assert ends(group.rollouts) == [EndReason.SUCCESS] * 2
    assert [r.reward.components["environment.steps"] for r in group.rollouts] == [3.0, 3.0]
    assert sum(not call.actions for call in environments.calls) == 1
    assert running.process is not None
    status = running.process.status()
    assert status["num_tokens"] == 20 - 3 * num_trunk
    assert status["environment"]["branching_share"] == 1.0
    assert status["environment"]["decision_turn_mean"] == num_trunk + 1
    assert unknown({"event": "status", "part": "sampler-0", **status}) == []


def test_a_rollout_without_an_answer_by_its_deadline_is_left_out(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0", deadline_s=time.time() + 3.0)]]
    outside.verifiers = {"g0": "environment"}
    stuck = Inside(holds=lambda call: call.trajectory.startswith("g0/1") and bool(call.actions))
    run(outside, tmp_path, stuck, lambda: outside.groups, stream={"sample_deadline_s": 30.0})
    (group,) = outside.groups
    assert ends(group.rollouts) == [EndReason.SUCCESS, EndReason.ENV_ERROR]
    assert [rollout.valid for rollout in group.rollouts] == [True, False]
    assert group.rollouts[1].reward.decision is Decision.ENV_ERROR


def test_a_ticket_that_comes_again_begins_its_trajectories_anew(outside: Outside, tmp_path: Path) -> None:
    class FirstStuck(Inside):
        """Never answers the first two trajectories."""

        def submit(self, call: Call) -> None:
            if call.trajectory.endswith(("#1", "#2")) and call.actions:
                self.calls.append(call)
                return
            super().submit(call)

    outside.blocks = [[ticket("g0")], [ticket("g0", epoch=1)]]
    outside.verifiers = {"g0": "environment"}
    stuck = FirstStuck()
    run(outside, tmp_path, stuck, lambda: outside.groups, sampler={"max_new_tokens": 60, "max_num_seqs": 16})
    (group,) = outside.groups
    assert group.owner_epoch == 1
    assert ends(group.rollouts) == [EndReason.SUCCESS] * 2
    assert {"g0/0#1", "g0/1#2"} <= set(stuck.forgotten)


def test_an_evaluation_samples_trajectories_too() -> None:
    problem = Problem(problem_id="p", prompt="?", answer="", verifier="environment", domain="d")
    engine = around(Acting(twice), max_steps=3)
    scoring = Scoring(parse({"model": {"path": "m"}}, "test").rewards)
    run_of = EvaluationRun(
        [problem],
        lambda problem: (1, 2, 3),
        decode,
        scoring,
        num_samples=3,
        seed=0,
        max_new_tokens=60,
        has_environment=True,
    )
    (score,) = evaluate(run_of, lambda requests: generate(engine, requests))
    assert (score.num_scored, score.num_passed, score.num_tokens) == (3, 3, 21)


class Killed(TrajectoryEngine):
    """Its sampler dies in the middle of a third turn, without a word to anybody."""

    def step(self) -> list[Generation]:
        third = [u for u in self._underway.values() if u.num_steps == 2 and u.request.request_id in self._running]
        if third and self._engine.num_sampled([u.request.request_id for u in third]) > 0:
            raise KeyboardInterrupt("killed")
        return super().step()


class EveryRow(dict[str, str]):
    """The same verifier, whatever the row."""

    def get(self, key: str, default: object = None) -> str:  # type: ignore[override]
        return "environment"


def test_a_sampler_killed_in_a_third_turn_loses_its_trajectories_and_the_account_closes(tmp_path: Path) -> None:
    outside = Outside(plays_buffer=False, verifiers=EveryRow())
    buffer = Alone(outside, tmp_path)
    publish(tmp_path / "weights", 0)
    settings: dict[str, Any] = {**SECTIONS, "stream": {"groups_per_step": 1, "max_policy_age": 2, **OFTEN}}
    named = Environment(name="calculator", max_steps=3)
    try:
        killed = Killed(Acting(three_turns, num_slots=16), Inside(), Encoder(), decode, named)
        first = Running(outside, tmp_path, killed, **settings)  # type: ignore[arg-type]
        first.wait(lambda: False)
        assert isinstance(first.error, KeyboardInterrupt)
        # No partial was handed over: none could be gone on from.
        assert buffer.ledger()["tokens"]["generated"] == 0
        second = Running(outside, tmp_path, around(Acting(three_turns, num_slots=16), max_steps=3), **settings)
        second.until(lambda: buffer.process.status()["ledger"]["groups"]["no_signal"] >= 3)
        account = buffer.ledger()
        assert account["closes"]
        # "go", "go" and "end", each with its end: 3 + 3 + 4 tokens of each of two rollouts.
        assert account["tokens"]["no_signal"] == account["groups"]["no_signal"] * 2 * 10
        assert account["tokens"]["generated"] == account["tokens"]["no_signal"]
        assert second.process is not None
        assert second.process.status()["num_groups_continued"] == 0
    finally:
        buffer.close()
        outside.close()


@pytest.mark.parametrize("kills", [False, True])
def test_the_account_of_branching_groups_closes_also_where_a_sampler_dies(tmp_path: Path, kills: bool) -> None:
    outside = Outside(plays_buffer=False, verifiers=EveryRow())
    buffer = Alone(outside, tmp_path)
    publish(tmp_path / "weights", 0)
    settings: dict[str, Any] = {
        **SECTIONS,
        "environment": {"name": "calculator", "max_steps": 3, "branch_share": 1.0, "branch_turns": 2},
        "stream": {"groups_per_step": 1, "max_policy_age": 2, **OFTEN},
    }
    named = Environment(name="calculator", max_steps=3)
    try:
        if kills:
            killed = Killed(Acting(three_turns, num_slots=16), Inside(), Encoder(), decode, named)
            first = Running(outside, tmp_path, killed, **settings)  # type: ignore[arg-type]
            first.wait(lambda: False)
            assert isinstance(first.error, KeyboardInterrupt)
        second = Running(outside, tmp_path, around(Acting(three_turns, num_slots=16), max_steps=3), **settings)
        second.until(lambda: buffer.process.status()["ledger"]["groups"]["no_signal"] >= 3)
        account = buffer.ledger()
        assert account["closes"]
        # A trunk of 3 tokens once, then 3 + 4 of each of two rollouts.
        assert account["tokens"]["no_signal"] == account["groups"]["no_signal"] * (3 + 2 * 7)
        assert account["tokens"]["generated"] == account["tokens"]["no_signal"]
    finally:
        buffer.close()
        outside.close()


def test_a_branching_group_that_is_trained_has_its_trunk_among_the_masked_tokens(tmp_path: Path) -> None:
    def choose(request: GenerationRequest, history: str) -> str:
        # The first succeeds by its third action, the second uses up its actions.
        return "end" if request.request_id.endswith("/0") and "2 of seed" in history else "go"

    outside = Outside(plays_buffer=False, verifiers=EveryRow())
    buffer = Alone(outside, tmp_path)
    publish(tmp_path / "weights", 0)
    settings: dict[str, Any] = {
        **SECTIONS,
        "environment": {"name": "calculator", "max_steps": 3, "branch_share": 1.0, "branch_turns": 2},
        "stream": {"groups_per_step": 1, "max_policy_age": 2, **OFTEN},
    }
    learner = LearnerChannel(buffer._client)
    try:
        running = Running(outside, tmp_path, around(Choosing(choose, num_slots=16), max_steps=3), **settings)
        running.until(lambda: buffer.ledger()["groups"]["accepted"] >= 1)
        (group,) = learner.lease(PolicyVersion(0, 0), 1).groups
        assert [rollout.reward.reward for rollout in group.rollouts] == [1.0, 0.0]
        assert batch_of(PRESETS["rloo"].recipe, [small_ids(group)]).num_tokens == 7 + 6
        # A trunk of 3 tokens, then 3 + 4 of the one and 3 + 3 of the other: an end token each.
        tokens = tokens_by_fate(group, lambda rollout: True)
        assert tokens == {"trained": 7 + 6, "baseline_only": 0, "masked": 3}
        learner.trained(PolicyVersion(0, 1), [group.group_id], {group.group_id: tokens})
        account = buffer.ledger()
        assert account["closes"]
        assert (account["tokens"]["trained"], account["tokens"]["masked"]) == (13, 3)
    finally:
        buffer.close()
        outside.close()
