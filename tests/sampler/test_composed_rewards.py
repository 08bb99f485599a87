"""A composed, shaped and watched reward on its way through the sampler's loop: what stands in the record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_rewards import Rewards
from stream_grpo.rewards.composed import ComposedScoring
from stream_grpo.rewards.scoring import scoring_version
from stream_grpo.sampler.rollout import config_hash
from stream_grpo.types import Decision, RewardResult, RolloutGroup
from tests.fakes import FakeEngine
from tests.rewards.test_scoring import FakePool
from tests.sampler.loop import Outside, Running, publish, ticket

# Every response is "so #### 42", of 3 tokens, which is the limit.
FORM = {"verifier": "exact", "role": "gate", "gold": "form", "columns": {"answer_prefix": "so"}}


def rewards(form: str, hidden: dict[str, Any] | None = None) -> dict[str, Any]:
    gate = FORM | {"columns": {"answer_prefix": "so", "form": form}}
    careful = {
        "components": {"form": gate, "answer": {"verifier": "exact"}},
        "costs": {"tokens": {"weight": 0.25, "free": 1, "per": 4}},
        "bounds": [-1.0, 1.0],
        "gate_reward": -2.0,
        "replaces": ["exact"],
    }
    shaping = {"overlong_tokens": 2, "overlong_weight": 0.5}
    return {"compose": {"careful": careful}, "shaping": shaping} | ({"hidden": hidden} if hidden else {})


class Failing(FakePool):
    """Where the hidden verifier would run: it fails whatever it is given, at once."""

    def submit(self, task_id: str, verifier: str, text: str, problem: Any, *, is_cut: bool = False) -> None:
        super().submit(task_id, verifier, text, problem, is_cut=is_cut)
        said = RewardResult(decision=Decision.FAIL, reward=0.0, verifier=verifier, verifier_version="1")
        self.finished.append((task_id, said))


def make_scoring(config: Config) -> ComposedScoring:
    def pool(_: Rewards, names: Sequence[str]) -> FakePool:
        return Failing(names)

    return ComposedScoring(config.rewards, ["exact"], make_pool=pool)


def run(outside: Outside, tmp_path: Path, settings: dict[str, Any], num_groups: int = 1) -> tuple[Running, Config]:
    outside.blocks = [[ticket(f"g{i}") for i in range(num_groups)]]
    publish(tmp_path / "weights", 0)
    seen: list[Config] = []

    def scoring(config: Config) -> ComposedScoring:
        seen.append(config)
        return make_scoring(config)

    running = Running(outside, tmp_path, FakeEngine(num_slots=8), make_scoring=scoring, rewards=settings)
    running.until(lambda: len(outside.groups) == num_groups)
    return running, seen[0]


def test_a_composed_reward_comes_to_the_record_whole(outside: Outside, tmp_path: Path) -> None:
    _, config = run(outside, tmp_path, rewards("#### 42"))
    (group,) = outside.groups
    for rollout in group.rollouts:
        result = rollout.reward
        assert (result.decision, result.verifier) == (Decision.PASS, "compose:careful")
        # Answer 1, cost 0.25 x (3 - 1) / 4, and 0.5 x -(3 - 1) / 2 for a length at its limit.
        assert result.reward == pytest.approx(1.0 - 0.125 - 0.5)
        assert result.components == pytest.approx(
            {"form": 1.0, "answer": 1.0, "cost.tokens": -0.125, "score": 0.875, "shaping.overlong": -0.5}
        )
        assert result.evidence == (
            "form pass: answer '#### 42', expected '#### 42'; answer pass: answer '42', expected '42'"
        )
    assert group.config_hash == config_hash(config, "tokenizer", scoring_version(config.rewards))


def test_a_failed_gate_is_all_that_counts(outside: Outside, tmp_path: Path) -> None:
    run(outside, tmp_path, rewards("#### 41"))
    result = outside.groups[0].rollouts[0].reward
    assert (result.decision, result.reward) == (Decision.FAIL, -2.5)
    assert result.components == {"form": 0.0, "answer": 1.0, "shaping.overlong": -0.5}


def rewards_in(groups: Sequence[RolloutGroup]) -> dict[str, list[RewardResult]]:
    return {group.group_id: [rollout.reward for rollout in group.rollouts] for group in groups}


def test_the_hidden_verifier_is_heard_and_is_in_no_record(outside: Outside, tmp_path: Path) -> None:
    hidden = {"verifier": "math", "share": 1.0, "window": 16}
    watched, _ = run(outside, tmp_path, rewards("#### 42", hidden), num_groups=9)
    assert watched.process is not None
    gap = watched.process.status()["rewards"]["hidden"]
    # All pass, and the hidden verifier fails them; the last ones may not have been heard when the sampler stopped.
    assert gap["num_pairs"] >= 16
    assert (gap["disagreement"], gap["overrated"], gap["mean_difference"]) == (1.0, 1.0, pytest.approx(0.875))
    (warning,) = watched.warnings
    assert "100% are decided otherwise" in warning
    assert "math" not in repr(outside.groups)
    unwatched = Outside()
    try:
        (tmp_path / "unwatched").mkdir()
        run(unwatched, tmp_path / "unwatched", rewards("#### 42"), num_groups=9)
    finally:
        unwatched.close()
    assert rewards_in(unwatched.groups) == rewards_in(outside.groups)
    # It is no rule of the scoring: the groups carry the same hash.
    assert {group.config_hash for group in (*unwatched.groups, *outside.groups)} == {outside.groups[0].config_hash}
