"""What an inserted group is, and what its record says of it."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from stream_grpo.buffer.admission import Admission, admit
from stream_grpo.buffer.facts import GroupFacts, batch_of_record, facts_of
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.outcomes import outcome_of
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.learner.batching import Scored, trainable
from stream_grpo.transport.codec import encode_group, group_to_batch
from stream_grpo.types import EndReason, Fate, PolicyVersion, RolloutGroup, StepScore
from tests.fakes import make_group, make_rollout


def facts(group: RolloutGroup) -> GroupFacts:
    return facts_of(batch_of_record(encode_group(group)))


def judge(
    group: RolloutGroup,
    *,
    learner: int = 0,
    max_policy_age: int = 2,
    config_hash: str | None = None,
    vocab_size: int | None = None,
    counts_steps: bool = False,
) -> Admission:
    lineage = Lineage()
    lineage.apply(Transition(kind=Kind.STARTED, time_s=0, branch=0, step=learner, reason="{}"))
    found = facts_of(batch_of_record(encode_group(group)), vocab_size)
    return admit(
        found, lineage, max_policy_age=max_policy_age, signal_tolerance=1e-6, config_hash=config_hash,
        counts_steps=counts_steps,
    )  # fmt: skip


def test_a_group_with_spread_is_accepted() -> None:
    assert judge(make_group(rewards=[1.0, 0.0])) == (Fate.ACCEPTED, "")


@pytest.mark.parametrize(
    ("rewards", "cause"), [([1.0, 1.0], "all_right"), ([0.0, 0.0], "all_wrong"), ([0.0, 1e-7], "same_reward")]
)
def test_no_spread_is_no_signal_and_says_why(rewards: list[float], cause: str) -> None:
    assert judge(make_group(rewards=rewards)) == (Fate.NO_SIGNAL, cause)


def test_a_spread_just_above_the_tolerance_is_signal() -> None:
    assert judge(make_group(rewards=[0.5, 0.5 + 2e-6])).fate is Fate.ACCEPTED


def test_steps_that_differ_are_signal_where_they_count() -> None:
    def group(*scores: tuple[float, ...]) -> RolloutGroup:
        made = make_group(rewards=[1.0] * len(scores))
        steps = [tuple(StepScore(at + 1, score) for at, score in enumerate(of_one)) for of_one in scores]
        rewarded = [replace(r, reward=replace(r.reward, steps=s)) for r, s in zip(made.rollouts, steps, strict=True)]
        return replace(made, rollouts=tuple(rewarded))

    differ = group((0.5, 1.0), (0.5,))
    assert judge(differ).fate is Fate.NO_SIGNAL
    assert judge(differ, counts_steps=True).fate is Fate.ACCEPTED
    assert judge(group((0.5, 0.5), (0.5,)), counts_steps=True).fate is Fate.NO_SIGNAL
    # A rollout without steps: the learner goes by the rewards alone.
    assert judge(group((0.5, 1.0), ()), counts_steps=True).fate is Fate.NO_SIGNAL


def test_where_versions_must_be_uniform_a_group_of_two_is_invalid_and_names_them() -> None:
    versions = [PolicyVersion(0, 3), PolicyVersion(0, 3), PolicyVersion(0, 4), PolicyVersion(0, 4)]
    mixed, uniform = make_group(version=versions), make_group(version=PolicyVersion(0, 4))
    lineage = Lineage()
    lineage.apply(Transition(kind=Kind.STARTED, time_s=0, branch=0, step=4, reason="{}"))
    rules = {"max_policy_age": 2, "signal_tolerance": 1e-6, "config_hash": None}
    assert admit(facts(mixed), lineage, **rules).fate is Fate.ACCEPTED
    assert admit(facts(uniform), lineage, uniform_group_version=True, **rules).fate is Fate.ACCEPTED
    assert admit(facts(mixed), lineage, uniform_group_version=True, **rules) == (
        Fate.INVALID, "versions: 0.3, 0.4, stream.uniform_group_version allows one"
    )  # fmt: skip


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
    assert judge(make_group(logprob=bad)).reason == (
        f"logprobs: token 3 of rollout 0 is {bad}, expected finite and at most 0"
    )


def spoiled(index: int, **changes: object) -> RolloutGroup:
    """A group of 3 rollouts of 3 + 4 tokens, of which one is changed."""
    group = make_group(rewards=[1.0, 0.0, 0.5])
    rollouts = list(group.rollouts)
    rollouts[index] = replace(rollouts[index], **changes)  # type: ignore[arg-type]
    return replace(group, rollouts=tuple(rollouts))


def at(name: str, position: int, value: float) -> dict[str, object]:
    array = getattr(make_rollout(), name).copy()
    array[position] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_prompt_tokens": 0}, "tokens: rollout 1 has 0 prompt tokens of 7, a prompt and a response are needed"),
        ({"num_prompt_tokens": 7}, "tokens: rollout 1 has 7 prompt tokens of 7, a prompt and a response are needed"),
        ({"num_prompt_tokens": 4}, "loss mask: token 3 of rollout 1 is of the prompt and set"),
        (at("version_step", 5, -1), "versions: token 5 of rollout 1 is sampled and of no policy version"),
        (at("behavior_logprobs", 6, 0.5), "logprobs: token 6 of rollout 1 is 0.5, expected finite and at most 0"),
        (
            at("behavior_logprobs", 4, -math.inf),
            "logprobs: token 4 of rollout 1 is -inf, expected finite and at most 0",
        ),
        (at("token_ids", 0, -1), "token ids: token 0 of rollout 1 is -1, outside the vocabulary of any size"),
    ],
)
def test_what_the_learner_would_refuse_is_invalid_with_the_reason(changes: dict[str, object], reason: str) -> None:
    group = spoiled(1, **changes)
    assert judge(group) == (Fate.INVALID, reason)
    with pytest.raises(ValueError, match="rollout 1"):
        trainable([group], lambda rewards, valid, *_: Scored(rewards, valid), vocab_size=100)
    # A rollout that is not valid is no reason: the learner leaves it out.
    left_out = spoiled(1, **changes, reward=make_rollout(None).reward)
    assert judge(left_out).fate in (Fate.ACCEPTED, Fate.INVALID)
    assert trainable(
        [left_out], lambda rewards, valid, *_: Scored(np.where(valid, rewards, 0.0), valid), vocab_size=100
    )
    assert judge(left_out).fate is (Fate.INVALID if "version_step" in changes else Fate.ACCEPTED)


def test_token_ids_are_below_the_vocabulary_where_it_is_known() -> None:
    group = make_group()  # ids 5 to 11
    assert judge(group).fate is judge(group, vocab_size=12).fate is Fate.ACCEPTED
    reason = "token ids: token 6 of rollout 0 is 11, outside the vocabulary of 11"
    assert judge(group, vocab_size=11) == (Fate.INVALID, reason)


def test_a_logprob_a_rounding_above_0_is_none_the_worse() -> None:
    assert judge(make_group(logprob=9e-7)).fate is Fate.ACCEPTED


def test_a_null_in_a_token_column_is_no_group() -> None:
    batch = group_to_batch(make_group())
    ids = batch.column("token_ids").to_pylist()
    ids[1][2] = None
    columns = [pa.array(ids, type=field.type) if field.name == "token_ids" else batch.column(field.name)
               for field in batch.schema]  # fmt: skip
    with pytest.raises(ValueError, match="column token_ids: 1 tokens are null"):
        facts_of(pa.RecordBatch.from_arrays(columns, schema=batch.schema))


def test_tokens_in_mixed_context_are_counted_from_where_they_begin() -> None:
    assert facts(make_group()).mixed_context_tokens == 0
    # Prompts of 3, responses of 4: from token 5 on 2 of the first rollout; all 4 of the second; none of the third.
    group = make_group(rewards=[1.0, 0.0, 0.5])
    rollouts = [replace(r, mixed_context_from=n) for r, n in zip(group.rollouts, (5, 0, None), strict=True)]
    assert facts(replace(group, rollouts=tuple(rollouts))).mixed_context_tokens == 6


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


def branching(owner_end: EndReason = EndReason.EOS) -> RolloutGroup:
    """Three rollouts of 4 response tokens, the first two of the trunk, which the first sampled with older weights."""
    first, *others = make_group(rewards=[1.0, 0.0, 0.5], version=PolicyVersion(0, 3)).rollouts
    mask = np.arange(7) >= 5
    nobody = np.where(mask, 3, -1).astype(np.int32), np.where(mask, 0, -1).astype(np.int32)
    older = np.array([-1, -1, -1, 2, 2, 3, 3], np.int32)
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    return replace(
        make_group(),
        rollouts=(
            replace(first, loss_mask=mask, version_step=older, end_reason=owner_end),
            *(
                replace(r, loss_mask=mask, version_step=nobody[0], version_branch=nobody[1], behavior_logprobs=logprobs)
                for r in others
            ),
        ),
    )


def test_the_trunk_of_a_branching_group_is_sampled_once_and_trained_by_none() -> None:
    group = branching()
    found = facts(group)
    # 2 of the trunk and 3 x 2 of what each went on with.
    assert found.num_tokens == group.num_sampled_tokens == 8
    assert found.num_valid_tokens == 6
    assert [rollout.num_tokens for rollout in found.rollouts] == [2, 2, 2]
    # The trunk bounds the age of the rollout that sampled it.
    assert [rollout.versions for rollout in found.rollouts] == [
        {PolicyVersion(0, 2), PolicyVersion(0, 3)},
        {PolicyVersion(0, 3)},
        {PolicyVersion(0, 3)},
    ]
    assert found.versions == group.versions()
    assert found.mean_step == (2 * 2 + 6 * 3) / 8
    assert found.fault == ""
    assert judge(group, learner=4).fate is Fate.ACCEPTED
    assert judge(group, learner=5).fate is Fate.STALE  # three steps from version 2
    # Its owner may be left out; the trunk is then among the tokens of no valid rollout, as before.
    left_out = facts(branching(EndReason.ENV_ERROR))
    assert (left_out.num_tokens, left_out.num_valid_tokens, left_out.rewards) == (8, 4, (0.0, 0.5))


def test_a_rollout_of_a_trunk_alone_is_not_valid() -> None:
    group = branching()
    first = group.rollouts[0]
    cut = replace(
        first,
        **{
            name: getattr(first, name)[:5]
            for name in ("token_ids", "loss_mask", "behavior_logprobs", "version_branch", "version_step", "turn")
        },
    )
    assert not cut.valid
    found = facts(replace(group, rollouts=(cut, *group.rollouts[1:])))
    assert (found.rewards, found.num_tokens, found.num_valid_tokens) == ((0.0, 0.5), 6, 4)


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
