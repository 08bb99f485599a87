"""The sampler's loop against a buffer and a curator on the real wire, with a fake engine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from stream_grpo.errors import ProbeError, StallError
from stream_grpo.registry.names import unknown
from stream_grpo.types import EndReason, PolicyVersion
from tests.fakes import FakeEngine
from tests.sampler.loop import Outside, Running, Slow, publish, ticket


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
    engine = FakeEngine(num_slots=8)
    running = Running(outside, tmp_path, engine)
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
    # 4 prompts of 3 tokens each, of which the prefix cache had one token of each.
    assert (status["num_prompt_tokens"], status["num_cached_tokens"]) == (12, 4)
    assert status["num_groups_done"] == 2
    assert status["groups_by_fate"] == {"accepted": 2}
    assert status["version"] == [0, 7]
    assert status["probe_gap"] == {"mean": 0.0, "max": 0.0, "num_tokens": 2}
    assert status["busy_s"] > 0
    assert status["first_busy_at"] == pytest.approx(time.time(), abs=10)
    assert status["num_engine_steps"] == sum(event[0] == "step" for event in engine.events)
    assert status["num_groups_scored"] == 2
    assert 0 < status["score_wait_s"] < status["busy_s"] + sum(status["idle_s"].values()) + 10
    # Before the tickets came, and after the last group, there was nothing to sample.
    assert status["idle_s"].keys() == {"policy", "buffer", "curator", "rewards"}
    assert status["idle_s"]["buffer"] > 0
    assert status["tokens_paused"] == pytest.approx(12 / status["busy_s"] * status["apply_s"])
    assert unknown({"event": "status", "part": "sampler-0", **status}) == []


SIZES = {"curator": {"group_sizes": [2, 3, 5]}}


def test_a_group_has_as_many_rollouts_as_its_pick_says(outside: Outside, tmp_path: Path) -> None:
    outside.blocks = [[ticket(name) for name in ("g0", "g1", "g2", "g3")]]
    # 4 is no size of the configuration whose hash the group would carry, and of g3 nothing is said.
    outside.group_sizes = {"g0": 5, "g1": 3, "g2": 4}
    outside.answers = {"g1": "too long"}
    publish(tmp_path / "weights", 0)
    Running(outside, tmp_path, FakeEngine(num_slots=8), **SIZES).until(
        lambda: len(outside.groups) == 4 and len(outside.problems) == 4
    )
    assert {group.group_id: len(group.rollouts) for group in outside.groups} == {"g0": 5, "g1": 3, "g2": 2, "g3": 2}
    assert outside.noted_sizes == {"g0": 5, "g1": 3, "g2": 2, "g3": 2}
    seeds = [rollout.seed for group in outside.groups if group.group_id == "g0" for rollout in group.rollouts]
    assert len(set(seeds)) == 5


def test_a_ticket_that_is_issued_again_has_the_size_that_was_chosen_for_it(outside: Outside, tmp_path: Path) -> None:
    again = {"problem_id": "of-g0", "group_size": 3}
    outside.blocks = [[replace(ticket("g0", epoch=1), **again), replace(ticket("g1", epoch=1), problem_id="of-g1")]]
    publish(tmp_path / "weights", 0)
    Running(outside, tmp_path, FakeEngine(num_slots=8), **SIZES).until(lambda: len(outside.groups) == 2)
    assert outside.picked == []
    assert {group.group_id: len(group.rollouts) for group in outside.groups} == {"g0": 3, "g1": 2}


def test_tickets_are_asked_for_as_if_all_groups_were_of_the_largest_size(outside: Outside, tmp_path: Path) -> None:
    publish(tmp_path / "weights", 0)
    outside.blocks, outside.group_sizes = [[ticket("g0"), ticket("g1")]], {"g0": 5, "g1": 2}
    long = {"max_new_tokens": 200, "max_num_seqs": 20}
    Running(outside, tmp_path, Slow(num_slots=20), sampler=long, **SIZES).until(lambda: len(outside.asked) >= 2)
    # 20 slots hold 4 groups of 5; with 7 of them taken 2 groups of 5 are left.
    assert [asked["num_wanted"] for asked in outside.asked[:2]] == [4 + 2, 2 + 2]


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
    running.wait(lambda: engine.events.count(("step", 2)) >= 20)
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
        rewards={"time_limit_s": 0.4},
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
