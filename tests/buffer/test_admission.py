"""What an inserted group is, and what its record says of it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stream_grpo.buffer.admission import Admission, admit
from stream_grpo.buffer.facts import GroupFacts, batch_of_record, facts_of
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.outcomes import outcome_of
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.transport.codec import encode_group
from stream_grpo.types import EndReason, Fate, PolicyVersion, RolloutGroup
from tests.fakes import make_group, make_rollout


def facts(group: RolloutGroup) -> GroupFacts:
    return facts_of(batch_of_record(encode_group(group)))


def judge(
    group: RolloutGroup, *, learner: int = 0, max_policy_age: int = 2, config_hash: str | None = None
) -> Admission:
    lineage = Lineage()
    lineage.apply(Transition(kind=Kind.STARTED, time_s=0, branch=0, step=learner, reason="{}"))
    return admit(facts(group), lineage, max_policy_age=max_policy_age, signal_tolerance=1e-6, config_hash=config_hash)


def test_a_group_with_spread_is_accepted() -> None:
    assert judge(make_group(rewards=[1.0, 0.0])) == (Fate.ACCEPTED, "")


@pytest.mark.parametrize(
    ("rewards", "cause"), [([1.0, 1.0], "all_right"), ([0.0, 0.0], "all_wrong"), ([0.0, 1e-7], "coarse")]
)
def test_no_spread_is_no_signal_and_says_why(rewards: list[float], cause: str) -> None:
    assert judge(make_group(rewards=rewards)) == (Fate.NO_SIGNAL, cause)


def test_a_spread_just_above_the_tolerance_is_signal() -> None:
    assert judge(make_group(rewards=[0.5, 0.5 + 2e-6])).fate is Fate.ACCEPTED


def test_fewer_than_two_valid_rollouts_are_invalid() -> None:
    # Valid is 1 of 3: one is unscored, one was aborted.
    group = make_group(rewards=[1.0, None])
    aborted = make_rollout(0.0, end_reason=EndReason.ABORT)
    group = replace(group, rollouts=(*group.rollouts, aborted))
    assert judge(group) == (Fate.INVALID, "rollouts: 1 valid, a group needs 2")


def test_a_missing_reward_is_not_a_zero() -> None:
    # Valid rewards are 1 and 1: no spread, though the third rollout has no reward.
    assert judge(make_group(rewards=[1.0, 1.0, None])) == (Fate.NO_SIGNAL, "all_right")


def test_another_configuration_is_invalid() -> None:
    assert judge(make_group(), config_hash="c1").reason == "config changed: the group has c0, the run c1"
    assert judge(make_group(), config_hash="c0").fate is Fate.ACCEPTED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_and_logprobs_that_are_not_finite_are_invalid(bad: float) -> None:
    assert judge(make_group(rewards=[bad, 0.0])).reason.startswith("rewards: not finite")
    assert judge(make_group(logprob=bad)).reason == "logprobs: a behavior logprob is not finite"


def test_one_old_token_makes_the_group_stale() -> None:
    # The learner is at 5 and the oldest token of version 2: 3 steps, above 2. Of version 3 it is 2 steps.
    newer = [PolicyVersion(0, 5)] * 3
    assert judge(make_group(version=[PolicyVersion(0, 2), *newer]), learner=5).fate is Fate.STALE
    assert judge(make_group(version=[PolicyVersion(0, 3), *newer]), learner=5).fate is Fate.ACCEPTED


def test_tokens_of_an_unknown_branch_are_invalid() -> None:
    assert judge(make_group(version=PolicyVersion(3, 0))).reason.startswith("version: branch 3")


def test_facts_are_those_of_the_group() -> None:
    versions = [PolicyVersion(0, 3), PolicyVersion(0, 3), PolicyVersion(0, 3), PolicyVersion(1, 5)]
    group = make_group("g1", [1.0, 0.0, None], version=versions, end_reason=EndReason.LENGTH)
    found = facts(group)
    assert found.versions == group.versions()
    assert found.num_tokens == group.num_sampled_tokens == 12
    assert found.rewards == (1.0, 0.0)
    assert (found.num_passed, found.num_failed, found.num_unscored, found.num_truncated) == (1, 1, 1, 3)
    assert found.mean_step == 3.5  # (3 + 3 + 3 + 5) / 4 in each rollout
    assert found.seconds == 1.5


def test_a_rollout_without_tokens_is_not_valid() -> None:
    found = facts(make_group(rewards=[1.0, 0.0], num_response=0))
    assert found.rewards == ()
    assert found.num_tokens == 0
    # 0 and 3 sampled tokens: offsets into flat columns must not mix up neighbours.
    mixed = replace(make_group(), rollouts=(make_rollout(1.0, num_response=0), make_rollout(0.25, num_response=3)))
    assert facts(mixed).rewards == (0.25,)
    assert facts(mixed).num_tokens == 3


def test_an_outcome_holds_what_the_curator_asks_for() -> None:
    versions = [PolicyVersion(0, 3), PolicyVersion(0, 3), PolicyVersion(1, 4), PolicyVersion(1, 4)]
    outcome = outcome_of(7, facts(make_group("g1", [1.0, 0.0, 0.0], version=versions)), "accepted")
    assert (outcome.sequence, outcome.group_id, outcome.problem_id, outcome.fate) == (
        7,
        "g1",
        "problem-of-g1",
        "accepted",
    )
    assert (outcome.num_passed, outcome.num_failed, outcome.num_unscored) == (1, 2, 0)
    assert outcome.mean_reward == pytest.approx(1 / 3)
    assert outcome.reward_spread == 1.0
    assert (outcome.branch, outcome.min_step, outcome.max_step, outcome.mean_step) == (1, 3, 4, 3.5)
    assert outcome.num_tokens == 12


def test_an_outcome_without_scores_has_no_mean() -> None:
    outcome = outcome_of(0, facts(make_group("g1", [None, None])), "invalid")
    assert np.isnan(outcome.mean_reward)
    assert outcome.reward_spread == 0.0
