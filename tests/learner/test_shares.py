"""How a train batch is dealt to ranks: balanced, whole, and padded with microbatches that weigh nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.presets import PRESETS
from stream_grpo.config_learner import Learner
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Microbatch, TrainBatch, make_train_batch
from stream_grpo.learner.rows import deal
from stream_grpo.learner.shares import empty_microbatch, from_bytes, shares, to_bytes
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import RolloutGroup
from tests.learner.table_model import TableModel

VOCAB = 12
Groups = Callable[[int, int, int, int], list[RolloutGroup]]


def batch_of(groups: list[RolloutGroup], num_ranks: int, microbatch_tokens: int = 30) -> TrainBatch:
    return make_train_batch(
        groups, AdvantageMaker(PRESETS["rloo"].recipe), vocab_size=VOCAB, microbatch_tokens=microbatch_tokens,
        num_minibatches=2, num_ranks=num_ranks,
    )  # fmt: skip


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_every_sequence_goes_to_one_rank_and_tokens_are_balanced(lengths: list[int], num_ranks: int) -> None:
    ranks = deal(lengths, num_ranks)
    assert sorted(i for rank in ranks for i in rank) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in rank) for rank in ranks]
    longest = max(lengths, default=0)
    # The last one dealt to the fullest rank went to what was then the emptiest.
    assert max(tokens) - min(tokens) <= longest
    assert max(tokens) <= sum(lengths) / num_ranks + longest * (1 - 1 / num_ranks) + 1e-9


def test_the_longest_goes_first_to_the_rank_with_fewest_tokens() -> None:
    # 9 -> a, 7 -> b, 6 -> b (13), 5 -> a (14), 1 -> b (14): lengths of 28 in 14 and 14, in the order given.
    assert deal([5, 9, 6, 1, 7], 2) == [[0, 1], [2, 3, 4]]


def test_one_rank_has_all_in_order() -> None:
    assert deal([3, 1, 2], 1) == [[0, 1, 2]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_shares_are_the_batch_with_the_counts_of_the_whole(random_groups: Groups, num_ranks: int) -> None:
    groups = random_groups(6, 4, VOCAB, 3)
    whole, batch = batch_of(groups, 1), batch_of(groups, num_ranks)
    for rank, share in enumerate(shares(batch, num_ranks)):
        assert (share.num_groups, share.num_tokens, share.num_sequences) == (6, whole.num_tokens, whole.num_sequences)
        for ours, theirs, all_of_it in zip(share.minibatches, batch.minibatches, whole.minibatches, strict=True):
            counts = [(m.num_groups, m.num_problems, m.num_sequences, m.num_tokens) for m in (ours, theirs, all_of_it)]
            assert counts[0] == counts[1] == counts[2]
            assert {microbatch.rank for microbatch in ours.microbatches} <= {rank}
    for i, minibatch in enumerate(whole.minibatches):
        of_ranks = [share.minibatches[i].microbatches for share in shares(batch, num_ranks)]
        # As many on every rank, and every trained token on one of them.
        assert len({len(microbatches) for microbatches in of_ranks}) == 1
        assert sum(int(m.mask_BT.sum()) for microbatches in of_ranks for m in microbatches) == minibatch.num_tokens


def test_more_ranks_than_sequences_leave_some_with_nothing_but_padding(random_groups: Groups) -> None:
    batch = batch_of(random_groups(2, 2, VOCAB, 1), 3)  # two sequences a minibatch
    masks = [share.minibatches[0].microbatches[0].mask_BT.sum() for share in shares(batch, 3)]
    assert [bool(mask) for mask in masks] == [True, True, False]


def test_a_minibatch_without_a_trained_sequence_has_no_microbatch_on_any_rank(random_groups: Groups) -> None:
    batch = make_train_batch(
        random_groups(1, 2, VOCAB, 1), AdvantageMaker(PRESETS["rloo"].recipe), vocab_size=VOCAB, microbatch_tokens=30,
        num_ranks=2, is_trained=lambda rollout: False,
    )  # fmt: skip
    assert [share.minibatches[0].microbatches for share in shares(batch, 2)] == [(), ()]


@pytest.mark.parametrize("preset", ["grpo", "decoupled", "m2po", "vcpo", "scalerl"])
def test_an_empty_microbatch_changes_neither_gradient_nor_metrics(random_groups: Groups, preset: str) -> None:
    recipe, results = PRESETS[preset].recipe, []
    batch = batch_of(random_groups(4, 4, VOCAB, 2), 1)
    padded = shares(batch_padded(batch), 1)[0]
    for given_batch in (batch, padded):
        model = TableModel(VOCAB)
        step = TrainStep(model, recipe, Learner(learning_rate=0.1, num_epochs=2), max_new_tokens=9)
        metrics = step.run(given_batch)
        results.append((metrics | {"seconds": 0}, model.gradients, model.num_backward))
    (metrics, gradients, num_backward), (others, other_gradients, other_num) = results
    assert other_num == num_backward + 2 * 2
    assert others == metrics
    assert all((a == b).all() for a, b in zip(gradients, other_gradients, strict=True))


def batch_padded(batch: TrainBatch) -> TrainBatch:
    """The same with an empty microbatch at the end of each minibatch."""
    return TrainBatch(
        minibatches=tuple(
            type(m)(
                microbatches=(*m.microbatches, empty_microbatch(0)), num_groups=m.num_groups,
                num_rollouts=m.num_rollouts, num_problems=m.num_problems, num_sequences=m.num_sequences,
                num_tokens=m.num_tokens,
            )
            for m in batch.minibatches
        ),
        num_groups=batch.num_groups,
        num_left_out=batch.num_left_out,
    )  # fmt: skip


def test_a_share_comes_out_of_its_bytes_as_it_went_in(random_groups: Groups) -> None:
    share = shares(batch_of(random_groups(5, 3, VOCAB, 4), 2), 2)[1]
    read = from_bytes(to_bytes(share))
    assert (read.num_groups, read.num_left_out, read.num_baseline_only) == (5, 0, 0)
    for ours, theirs in zip(read.minibatches, share.minibatches, strict=True):
        assert ours.num_tokens == theirs.num_tokens
        for got, sent in zip(ours.microbatches, theirs.microbatches, strict=True):
            for field in fields(Microbatch):
                mine, other = getattr(got, field.name), getattr(sent, field.name)
                if isinstance(other, np.ndarray):
                    assert mine.dtype == other.dtype
                    np.testing.assert_array_equal(mine, other)
                else:
                    assert mine == other
