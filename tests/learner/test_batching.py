"""From groups to microbatches: nothing reshaped, nothing shifted, nothing wrong let through."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stream_grpo.learner.batching import Sampled, Scored, make_train_batch, trainable, with_shuffled_rewards
from stream_grpo.learner.rows import pack
from stream_grpo.types import EndReason, Rollout, RolloutGroup
from tests.fakes import make_group

MakeRollout = Callable[..., Rollout]
MakeGroup = Callable[..., RolloutGroup]


def minus_mean(
    rewards_B: NDArray[np.float64], valid_B: NDArray[np.bool_], group_B: NDArray[np.int64], *_: Any
) -> Scored:
    means = [rewards_B[valid_B & (group_B == g)].mean() for g in range(group_B.max() + 1)]
    return Scored(np.where(valid_B, rewards_B - np.array(means)[group_B], 0.0), valid_B)


def test_each_group_has_its_own_baseline(rollout: MakeRollout, group: MakeGroup) -> None:
    # A lost one of four rollouts to a cut: mean of 1, 0, 0 is 1/3. B: mean of 1, 1, 0, 0 is 1/2.
    cut = dataclasses.replace(rollout([1], [2], 0.0), end_reason=EndReason.ABORT)
    a = group("A", [rollout([1], [2], 1.0), cut, rollout([1], [2], 0.0), rollout([1], [2], 0.0)])
    b = group("B", [rollout([1], [2], r) for r in (1.0, 1.0, 0.0, 0.0)])
    assert [row.advantage for row in trainable([a], minus_mean, 10)[0]] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert [row.advantage for row in trainable([b], minus_mean, 10)[0]] == [0.5, 0.5, -0.5, -0.5]
    batch = make_train_batch([a, b], minus_mean, vocab_size=10, microbatch_tokens=100)
    assert (batch.num_groups, batch.num_sequences, batch.num_left_out) == (2, 7, 1)


def test_a_missing_reward_is_left_out_and_counted(rollout: MakeRollout, group: MakeGroup) -> None:
    # Baseline of 1, 0, 0: 1/3. As a zero the missing one would make it 1/4.
    g = group("g", [rollout([1], [2], r) for r in (1.0, None, 0.0, 0.0)])
    assert [row.advantage for row in trainable([g], minus_mean, 10)[0]] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert make_train_batch([g], minus_mean, vocab_size=10, microbatch_tokens=100).num_left_out == 1


def test_arrays_are_indexed_by_token_and_padding_is_no_target(rollout: MakeRollout, group: MakeGroup) -> None:
    g = group("g", [rollout([5], [6], 0.0, [-0.5]), rollout([7, 8], [9, 4], 1.0, [-0.25, -2.0])])
    (minibatch,) = make_train_batch([g], minus_mean, vocab_size=10, microbatch_tokens=100).minibatches
    (micro,) = minibatch.microbatches
    assert micro.token_ids_BT.tolist() == [[7, 8, 9, 4], [5, 6, 0, 0]]
    assert micro.mask_BT.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert micro.behavior_logprobs_BT.tolist() == [[0, 0, -0.25, -2.0], [0, -0.5, 0, 0]]
    assert micro.advantages_B.tolist() == [0.5, -0.5]
    assert micro.lengths_B.tolist() == [4, 2]
    assert (minibatch.num_groups, minibatch.num_sequences, minibatch.num_tokens) == (1, 2, 3)


def test_tokens_know_their_problem_and_the_weights_that_sampled_them(rollout: MakeRollout, group: MakeGroup) -> None:
    a = group("A", [rollout([5], [6], 0.0), rollout([7, 8], [9, 4], 1.0)])
    b = group("B", [rollout([1], [2, 3, 4], 1.0), rollout([1], [2], 0.0)])
    (minibatch,) = make_train_batch(
        [a, b], minus_mean, vocab_size=10, microbatch_tokens=100, sampled_by=lambda version: Sampled(3, differs=True)
    ).minibatches
    (micro,) = minibatch.microbatches
    # Longest first: two of four tokens, then two of two. A has 1 + 2 target tokens, B 3 + 1.
    assert micro.tokens_B.tolist() == [2, 3, 1, 1]
    assert micro.problem_tokens_B.tolist() == [3, 4, 3, 4]
    assert micro.ages_BT.tolist() == [[0, 0, 3, 3], [0, 3, 3, 3], [0, 3, 0, 0], [0, 3, 0, 0]]
    assert (micro.differs_BT == micro.mask_BT).all()
    assert (minibatch.num_problems, minibatch.num_groups) == (2, 2)


def test_a_nan_under_the_mask_is_replaced(rollout: MakeRollout, group: MakeGroup) -> None:
    dirty = rollout([1, 2], [3], 1.0)
    dirty.behavior_logprobs[0] = np.nan
    g = group("g", [dirty, rollout([1, 2], [3], 0.0)])
    (minibatch,) = make_train_batch([g], minus_mean, vocab_size=10, microbatch_tokens=100).minibatches
    assert np.isfinite(minibatch.microbatches[0].behavior_logprobs_BT).all()


def test_minibatches_take_whole_groups_in_turn(rollout: MakeRollout, group: MakeGroup) -> None:
    groups = [group(f"g{i}", [rollout([1], [i, i], 1.0), rollout([1], [i], 0.0)]) for i in range(5)]
    batch = make_train_batch(groups, minus_mean, vocab_size=10, microbatch_tokens=4, num_minibatches=2)
    seen = [
        sorted({int(m.token_ids_BT[r, 1]) for m in mb.microbatches for r in range(len(m.lengths_B))})
        for mb in batch.minibatches
    ]
    assert seen == [[0, 2, 4], [1, 3]]
    # Two sequences and 2 + 1 target tokens in every group.
    assert [(mb.num_groups, mb.num_sequences, mb.num_tokens) for mb in batch.minibatches] == [(3, 6, 9), (2, 4, 6)]
    assert (batch.num_sequences, batch.num_tokens) == (10, 15)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_packs_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    packs = pack(lengths, budget)
    assert sorted(i for p in packs for i in p) == list(range(len(lengths)))
    for p in packs:
        assert len(p) == 1 or len(p) * max(lengths[i] for i in p) <= budget
    assert packs == pack(lengths, budget)


def test_packing_is_longest_first_and_keeps_the_order_of_equals() -> None:
    # Budget 8: two of length 4; then 3 and 2 (2 x 3 = 6; a third would make 9); then 2 and 1.
    assert pack([2, 4, 3, 4, 2, 1], 8) == [[1, 3], [2, 0], [4, 5]]
    assert pack([100], 8) == [[0]]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_prompt_tokens": 4}, "4 prompt tokens of 4"),
        ({"num_prompt_tokens": 0}, "0 prompt tokens of 4"),
        ({"behavior_logprobs": np.zeros(3, dtype=np.float32)}, "3 behavior logprobs"),
        ({"loss_mask": np.array([False, True, True, True])}, "set on prompt token 1"),
        ({"version_step": np.array([-1, -1, -1, 0], dtype=np.int32)}, "token 2, which no policy version sampled"),
        ({"behavior_logprobs": np.array([0, 0, np.nan, 0], dtype=np.float32)}, "behavior logprob nan"),
        ({"behavior_logprobs": np.array([0, 0, 0.1, 0], dtype=np.float32)}, "behavior logprob 0.1"),
        ({"behavior_logprobs": np.array([0, 0, -np.inf, 0], dtype=np.float32)}, "behavior logprob -inf"),
        ({"token_ids": np.array([1, 2, 3, 10], dtype=np.int32)}, "outside the vocabulary of 10"),
        ({"token_ids": np.array([-1, 2, 3, 4], dtype=np.int32)}, "token ids -1 to 4"),
    ],
)
def test_a_wrong_rollout_is_named(
    rollout: MakeRollout, group: MakeGroup, changes: dict[str, Any], complaint: str
) -> None:
    bad = dataclasses.replace(rollout([1, 2], [3, 4], 1.0), **changes)
    g = group("g7", [rollout([1, 2], [3], 0.0), bad])
    with pytest.raises(ValueError, match="group g7, rollout 1: ") as error:
        make_train_batch([g], minus_mean, vocab_size=10, microbatch_tokens=100)
    assert complaint in str(error.value)


def test_rewards_and_advantages_must_fit_the_group(rollout: MakeRollout, group: MakeGroup) -> None:
    g = group("g7", [rollout([1], [2], 1.0), rollout([1], [2], float("nan"))])
    with pytest.raises(ValueError, match="group g7, rollout 1: reward nan"):
        trainable([g], minus_mean, 10)
    g = group("g7", [rollout([1], [2], 1.0), rollout([1], [2], 0.0)])
    with pytest.raises(ValueError, match=r"advantages \[1.0\] for rewards"):
        trainable([g], lambda rewards_B, *_: Scored(rewards_B[:1], rewards_B[:1] > 0), 10)
    with pytest.raises(ValueError, match="1 groups for 2 minibatches"):
        make_train_batch([g], minus_mean, vocab_size=10, microbatch_tokens=100, num_minibatches=2)


def test_batching_loads_no_torch() -> None:
    code = "import sys, stream_grpo.learner.batching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_shuffled_rewards_stay_in_their_group_and_leave_everything_else() -> None:
    group = make_group(rewards=[1.0, 0.0, 0.25, None, 0.5, 0.75])
    shuffled = with_shuffled_rewards(group, seed=3)
    rewards = [r.reward.reward for r in shuffled.rollouts]
    assert rewards[3] is None  # a missing reward stays where it is
    assert sorted(r for r in rewards if r is not None) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert rewards != [r.reward.reward for r in group.rollouts]
    assert [r.seed for r in shuffled.rollouts] == [r.seed for r in group.rollouts]
    assert [r.reward.reward for r in with_shuffled_rewards(group, seed=3).rollouts] == rewards


def test_what_is_in_the_baseline_alone_moves_the_others_and_is_no_target(
    rollout: MakeRollout, group: MakeGroup
) -> None:
    # Baseline of 1, 0, 0: 1/3. Without the first it would be 0, and nothing to learn.
    g = group("g", [rollout([1], [2, 3], 1.0), rollout([1], [2], 0.0), rollout([1], [4, 5, 6], 0.0)])
    batch = make_train_batch(
        [g], minus_mean, vocab_size=10, microbatch_tokens=100, is_trained=lambda r: r.reward.reward == 0.0
    )
    (minibatch,) = batch.minibatches
    (micro,) = minibatch.microbatches
    assert micro.advantages_B == pytest.approx([-1 / 3, -1 / 3])
    assert micro.tokens_B.tolist() == [3, 1]
    # The problem's tokens are those that are trained: 1 + 3.
    assert micro.problem_tokens_B.tolist() == [4, 4]
    assert (minibatch.num_sequences, minibatch.num_tokens) == (2, 4)
    assert (batch.num_baseline_only, batch.num_left_out) == (1, 0)
