"""The guard: it stops a run whose corrections cannot act, calls out what looks so, and leaves sound ones alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.algo.statistics import Statistics
from stream_grpo.config_learner import Learner
from stream_grpo.errors import CorrectionError
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Sampled, TrainBatch, make_train_batch
from stream_grpo.learner.forward import Targets
from stream_grpo.learner.guard import MIN_TOKENS, NUM_BATCHES, Guard
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import PolicyVersion, RolloutGroup
from tests.learner.table_model import TableModel

VOCAB = 12
V0, V1, V2 = (PolicyVersion(0, step) for step in range(3))
DECOUPLED = PRESETS["decoupled"].recipe
Groups = Callable[[int, int, int, int], list[RolloutGroup]]


def table() -> TableModel:
    """In float32, as a learner's: its own logprobs come back bit for bit."""
    return TableModel(VOCAB, dtype=torch.float32)


def sampled_from(model: TableModel, groups: list[RolloutGroup], noise: float = 0.0) -> list[RolloutGroup]:
    """The groups with the logprobs of this model as their behavior logprobs, and some engine mismatch."""
    rng = np.random.default_rng(0)
    result = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            ids = torch.from_numpy(rollout.token_ids.astype(np.int64))[None]
            logprobs = model.logprobs(Targets(ids, ids.shape[1]))[0].detach()[0].numpy()
            logprobs = np.minimum(logprobs + noise * rng.normal(0, 1, len(logprobs)), 0).astype(np.float32)
            rollouts.append(
                dataclasses.replace(
                    rollout, behavior_logprobs=np.where(rollout.loss_mask, logprobs, 0).astype(np.float32)
                )
            )
        result.append(dataclasses.replace(group, rollouts=tuple(rollouts)))
    return result


def run(
    guard: Guard, model: TableModel, groups: list[RolloutGroup], recipe: Recipe = DECOUPLED, rate: float = 1.0
) -> None:
    """A learner step as the learner's loop makes it; all rollouts are of version 0, the learner is one step on."""
    batch: TrainBatch = make_train_batch(
        groups, AdvantageMaker(recipe), vocab_size=VOCAB, microbatch_tokens=100,
        sampled_by=lambda version: Sampled(1, guard.differs(version)),
    )  # fmt: skip
    guard.check_logprobs(batch)
    learner = Learner(learning_rate=rate, warmup_steps=0)
    TrainStep(model, recipe, learner, max_new_tokens=8).run(batch, watch=guard.check_ratios)


def published(*checksums: str) -> Guard:
    """A guard that has seen versions 0, 1, ... with these checksums."""
    guard = Guard()
    for step, checksum in enumerate(checksums):
        guard.published(PolicyVersion(0, step), checksum, None)
    return guard


def statistics(*, watched: float = 0, distance: float = 0.0, fresh: float = 0, mismatch: float = 0.0) -> Statistics:
    """Sums by age and length: `watched` tokens of other weights, `fresh` ones of the learner's own."""
    sums = {
        name: torch.zeros(8, 6, dtype=torch.float64) for name in ("tokens", "abs_log", "watched", "watched_abs_log")
    }
    sums["watched"][1, 0], sums["watched_abs_log"][1, 0] = watched, watched * distance
    sums["tokens"][0, 0], sums["abs_log"][0, 0] = fresh, fresh * mismatch
    zero = torch.zeros((), dtype=torch.float64)
    return Statistics(sums, torch.zeros(1600, dtype=torch.float64), zero, zero)


def test_recomputed_behavior_logprobs_stop_the_run_before_the_update(random_groups: Groups) -> None:
    model = table()
    groups = sampled_from(model, random_groups(8, 4, VOCAB, 1))
    before = model.weights.detach().clone()
    with pytest.raises(CorrectionError, match=r"exactly 0 on all \d+ tokens that older weights sampled"):
        run(published("a", "b"), model, groups)
    assert torch.equal(model.weights.detach(), before)
    assert model.gradients == []


def test_a_learning_rate_of_0_is_no_fault(random_groups: Groups) -> None:
    # The weights never change, so that older versions have the checksum of the newest: ratios of 1 are right.
    model = table()
    groups = sampled_from(model, random_groups(8, 4, VOCAB, 1))
    run(published("a", "a"), model, groups, rate=0.0)
    assert len(model.gradients) == 1


def test_a_step_between_two_publishes_is_no_fault(random_groups: Groups) -> None:
    # The newest published weights are those that sampled: they do not differ, whatever their number.
    model = table()
    run(published("a"), model, sampled_from(model, random_groups(8, 4, VOCAB, 1)))
    assert len(model.gradients) == 1


def test_the_first_update_of_decoupled_is_no_fault(random_groups: Groups) -> None:
    # policy / proximal is exactly 1 there; the guard looks at policy / behavior, which is not.
    older, model = table(), table()
    groups = sampled_from(older, random_groups(8, 4, VOCAB, 1))
    with torch.no_grad():
        model.weights[:, 0] += 0.1
    run(published("a", "b"), model, groups)
    assert len(model.gradients) == 1


def test_weights_of_an_unknown_checksum_are_never_judged(random_groups: Groups) -> None:
    model = table()
    guard = Guard()
    guard.published(V1, "b", None)
    assert not guard.differs(V0)
    run(guard, model, sampled_from(model, random_groups(8, 4, VOCAB, 1)))
    assert len(model.gradients) == 1


def test_weights_are_told_apart_by_checksum() -> None:
    guard = published("a", "b", "a")
    assert [guard.differs(version) for version in (V0, V1, V2)] == [False, True, False]
    assert not Guard().differs(V0)


def test_engine_mismatch_and_staleness_are_kept_apart() -> None:
    guard = Guard()
    assert guard.gaps is None
    guard.published(V1, "b", 0.25)
    guard.check_ratios(statistics(watched=80, distance=0.5, fresh=10, mismatch=1e-3))
    # Mean over 10 fresh tokens, and over 80 of other weights; the total is never their mean.
    assert guard.gaps == (pytest.approx(1e-3), 10, pytest.approx(0.5), 0.25)
    guard.check_ratios(statistics(watched=1, distance=0.5))
    assert guard.gaps == (None, 0, pytest.approx(0.5), 0.25)
    guard.check_ratios(statistics())
    assert guard.gaps.staleness is None


def test_a_step_without_a_trained_token_has_no_gaps_and_not_those_of_the_last_step(random_groups: Groups) -> None:
    guard, model = published("a"), table()
    groups = sampled_from(model, random_groups(8, 4, VOCAB, 1))
    run(guard, model, groups)
    assert guard.gaps is not None
    empty = TrainBatch(minibatches=(), num_groups=8, num_left_out=32)
    guard.check_logprobs(empty)
    TrainStep(model, DECOUPLED, Learner(), max_new_tokens=8).run(empty, watch=guard.check_ratios)
    assert guard.gaps is None


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_constant_logprobs_stop_the_run(value: float, random_groups: Groups) -> None:
    # Missing ones are filled with some constant; all-zero ones are the case seen most.
    groups = [
        dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(r, behavior_logprobs=np.full(len(r.token_ids), value, np.float32))
                for r in group.rollouts
            ),
        )
        for group in random_groups(8, 4, VOCAB, 1)
    ]
    model = table()
    with pytest.raises(CorrectionError, match=f"behavior logprobs of a batch are {value:g}"):
        run(published("a"), model, groups)
    assert model.gradients == []


def test_few_tokens_are_no_evidence(random_groups: Groups) -> None:
    model = table()
    groups = sampled_from(model, random_groups(1, 4, VOCAB, 1))
    assert sum(group.num_sampled_tokens for group in groups) < MIN_TOKENS
    run(published("a", "b"), model, groups)
    guard = Guard()
    guard.check_ratios(statistics(watched=MIN_TOKENS - 1))
    with pytest.raises(CorrectionError):
        guard.check_ratios(statistics(watched=MIN_TOKENS))


def guarded(num_batches: int, *, distance: float, mismatch: float = 1e-3, movement: float | None = 0.1) -> str | None:
    """The alarm after so many batches; `movement` is that of the probe's logprobs at a publish."""
    guard = Guard()
    guard.published(V0, "a", None)
    guard.published(V1, "b", movement)
    for _ in range(num_batches):
        guard.check_ratios(statistics(watched=100, distance=distance, fresh=100, mismatch=mismatch))
    return guard.alarm


def test_five_batches_below_the_floor_are_an_alarm_and_four_are_not() -> None:
    # Mismatch 1e-3, so that below 1.5e-3 old weights look like new ones; a publish moves logprobs by 0.1.
    assert guarded(NUM_BATCHES - 1, distance=1.4e-3) is None
    alarm = guarded(NUM_BATCHES, distance=1.4e-3)
    assert alarm is not None
    assert "1.40e-03" in alarm
    assert "1.50e-03" in alarm


@pytest.mark.parametrize(
    ("distance", "mismatch", "movement"),
    [
        (1.6e-3, 1e-3, 0.1),  # ratios are above the floor: the correction acts
        (1.4e-3, 1e-3, 1e-3),  # weights that hardly move: small ratios are right
        (1.4e-3, 1e-3, None),  # no two publishes yet
    ],
)
def test_no_alarm_without_a_reason(distance: float, mismatch: float, movement: float | None) -> None:
    assert guarded(2 * NUM_BATCHES, distance=distance, mismatch=mismatch, movement=movement) is None


def test_one_good_batch_ends_the_count() -> None:
    guard = Guard()
    guard.published(V0, "a", None)
    guard.published(V1, "b", 0.1)
    for distance in (1e-3, 1e-3, 1e-3, 0.5, 1e-3, 1e-3, 1e-3, 1e-3):
        guard.check_ratios(statistics(watched=100, distance=distance, fresh=100, mismatch=1e-3))
        assert guard.alarm is None
    guard.check_ratios(statistics(watched=100, distance=1e-3, fresh=100, mismatch=1e-3))
    assert guard.alarm is not None


def test_without_tokens_of_the_learners_own_version_there_is_no_floor() -> None:
    guard = Guard()
    guard.published(V1, "b", 0.1)
    for _ in range(NUM_BATCHES):
        guard.check_ratios(statistics(watched=100, distance=1e-6))
    assert guard.alarm is None
