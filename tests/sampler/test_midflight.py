"""New weights while requests run: `weights.on_update`, with a fake engine on the real wire."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from stream_grpo.types import GenerationRequest, PolicyVersion
from tests.fakes import FakeEngine
from tests.sampler.loop import Outside, Running, Slow, publish, ticket
from tests.sampler.test_scores import LateScoring

LONG = {"max_new_tokens": 240}
V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


class Uneven(Slow):
    """The first rollout of every group ends after 5 tokens."""

    def add(self, request: GenerationRequest) -> None:
        super().add(replace(request, max_new_tokens=5) if request.request_id.endswith("/0") else request)


def changes(engine: FakeEngine) -> list[tuple[object, ...]]:
    return [event for event in engine.events if event[0] in ("weights", "add", "abort")]


def test_finish_lets_running_requests_end_and_begins_none_until_the_weights_are_new(
    outside: Outside, tmp_path: Path
) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 1)
    engine = Slow(num_slots=8)
    engine.pauses_at = 20
    running = Running(outside, tmp_path, engine, sampler=LONG, weights={"on_update": "finish"})
    running.wait(lambda: engine.events.count(("step", 2)) >= 20)
    # One group waits for its problem and another for its ticket when the weights come.
    outside.holds_picks = True
    outside.blocks.append([ticket("g1")])
    running.wait(lambda: not outside.blocks)
    publish(running.weights, 2, value=1.0)
    running.wait(lambda: running.process is not None and running.process._mid_flight.is_finishing)
    outside.holds_picks = False
    outside.blocks.append([ticket("g2")])
    engine.pauses_at = None
    running.until(lambda: len(outside.groups) == 3)
    assert changes(engine) == [
        ("weights", V1),
        *(("add", f"g0/{i}") for i in (0, 1)),
        ("weights", V2),
        *(("add", f"{name}/{i}") for name in ("g1", "g2") for i in (0, 1)),
    ]
    assert {group.group_id: group.versions() for group in outside.groups} == {"g0": {V1}, "g1": {V2}, "g2": {V2}}


def test_restart_begins_every_group_that_is_not_sampled_to_the_end_anew(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0"), ticket("g1")]]
    publish(tmp_path / "weights", 1)
    engine = Uneven(num_slots=8)
    engine.pauses_at = 25
    running = Running(outside, tmp_path, engine, sampler=LONG, weights={"on_update": "restart"})
    running.wait(lambda: engine.events.count(("step", 2)) >= 20)
    publish(running.weights, 2, value=1.0)
    running.wait(lambda: ("weights", V2) in engine.events)
    engine.pauses_at = None
    running.until(lambda: len(outside.groups) == 2)
    groups = [(f"g{i}/0", f"g{i}/1") for i in (0, 1)]
    assert changes(engine) == [
        ("weights", V1),
        *(("add", name) for names in groups for name in names),
        *(("abort", long) for _, long in groups),
        ("weights", V2),
        *(("add", name) for names in groups for name in names),
    ]
    # Also the rollouts that had ended are of the new weights: a group is of one version.
    assert [[r.num_sampled_tokens for r in group.rollouts] for group in outside.groups] == [[5, 240]] * 2
    assert [group.versions() for group in outside.groups] == [{V2}, {V2}]
    assert running.process is not None
    # Of both groups the 5 tokens of the first rollout, and those of the second until the abort.
    before = engine.events[: engine.events.index(("weights", V2))]
    num_steps = sum(event[0] == "step" for event in before)
    assert running.process.status()["num_tokens_restarted"] == 2 * (5 + num_steps)


def test_after_a_restart_no_score_of_before_is_taken(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 1)
    engine, scoring = Uneven(num_slots=8), LateScoring(lambda task_id: task_id == "g0/0@0")
    engine.pauses_at = 30
    running = Running(outside, tmp_path, engine, make_scoring=scoring, sampler=LONG, weights={"on_update": "restart"})
    running.wait(lambda: len(scoring.held) == 1)
    publish(running.weights, 2, value=1.0)
    running.wait(lambda: engine.events.count(("add", "g0/0")) == 2)
    engine.pauses_at = None
    ((task_id, late),) = scoring.held
    scoring.held = [(task_id, replace(late, reward=0.25))]
    scoring.holds = lambda task_id: False
    running.until(lambda: len(outside.groups) == 1)
    assert [r.reward.reward for r in outside.groups[0].rollouts] == [1.0, 1.0]


def test_restart_leaves_a_group_that_waits_for_scores_alone(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket("g0")]]
    publish(tmp_path / "weights", 1)
    scoring = LateScoring(lambda task_id: True)
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine, make_scoring=scoring, weights={"on_update": "restart"})
    running.wait(lambda: len(scoring.held) == 2)
    publish(running.weights, 2, value=1.0)
    running.wait(lambda: ("weights", V2) in engine.events)
    scoring.holds = lambda task_id: False
    running.until(lambda: len(outside.groups) == 1)
    assert outside.groups[0].versions() == {V1}
    assert engine.events.count(("add", "g0/0")) == 1


@pytest.mark.parametrize("on_update", ["finish", "restart"])
def test_weights_that_come_all_the_time_do_not_stop_the_groups(
    outside: Outside, tmp_path: Path, on_update: str
) -> None:
    outside.blocks = [[ticket(f"g{i}")] for i in range(6)]
    publish(tmp_path / "weights", 1)
    running = Running(
        outside, tmp_path, Slow(num_slots=4), sampler={"max_new_tokens": 20}, weights={"on_update": on_update}
    )
    for step in range(2, 6):
        publish(running.weights, step, value=float(step))
        time.sleep(0.05)
    running.until(lambda: len(outside.groups) == 6)
    assert all(len(group.versions()) == 1 for group in outside.groups)
