"""What was observed is context: it is read, and nothing of it is learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import PLAIN, Targets, logits, shared_logits
from stream_grpo.learner.process import tokens_by_fate
from stream_grpo.make_model import new_model
from stream_grpo.types import Rollout, RolloutGroup, StepScore
from tests.learner.conftest import make_group, make_rollout
from tests.learner.table_model import TableModel
from tests.learner.test_train_step import VOCAB, batch_of, step_of

PROMPT, CALL, OBSERVATION, ANSWER = [1], [2, 3], [4, 5, 6], [7]
"""The observation contains the answer, 5."""


def trajectory(reward: float, observation: list[int], *, answer: list[int] = ANSWER) -> Rollout:
    """A call, what it gave, and an answer; every id stands once."""
    rollout = make_rollout(PROMPT, [*CALL, *observation, *answer], reward)
    mask = rollout.loss_mask.copy()
    mask[3 : 3 + len(observation)] = False
    zero = np.where(mask, rollout.behavior_logprobs, 0.0).astype(np.float32)
    version = np.where(mask, 0, -1).astype(np.int32)
    return replace(rollout, loss_mask=mask, behavior_logprobs=zero, version_branch=version, version_step=version)


def _sampled_from(model: TableModel, rollout: Rollout) -> Rollout:
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).unsqueeze(0)
    with torch.no_grad():
        logprobs, _ = model.logprobs(Targets(ids, ids.shape[1]))
    behavior = np.where(rollout.loss_mask, logprobs[0].numpy(), 0.0).astype(np.float32)
    return replace(rollout, behavior_logprobs=behavior)


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if not preset.recipe.has_critic])
def test_no_gradient_reaches_an_observation(preset: str) -> None:
    recipe = Recipe.model_validate(PRESETS[preset].recipe.model_dump())
    model = TableModel(VOCAB)
    # Sampled from the model itself: no mask for staleness takes anything out.
    rollouts = [trajectory(1.0, OBSERVATION), trajectory(0.0, OBSERVATION, answer=[8])]
    group = make_group("g", [_sampled_from(model, rollout) for rollout in rollouts])
    step_of(model, recipe).run(batch_of(recipe, [group]))
    gradient = model.gradients[0]
    # Row i holds the logits after token i: rows 3, 4 and 5 stand before what was observed, and nowhere else.
    assert (gradient[3:6] == 0.0).all()
    # Rows 1 and 2 stand before the call, 6 before the answers, whose advantages differ.
    assert (gradient[6] != 0.0).any()


def branching(answers: list[list[int]], rewards: list[float]) -> list[Rollout]:
    """Call and observation are the trunk, which the first has sampled."""
    rollouts = [trajectory(reward, OBSERVATION, answer=answer) for answer, reward in zip(answers, rewards, strict=True)]
    first, *others = (replace(r, loss_mask=r.loss_mask & (np.arange(len(r.token_ids)) >= 6)) for r in rollouts)
    nobody = np.where(others[0].loss_mask, 0, -1).astype(np.int32)
    others = [
        replace(
            r,
            behavior_logprobs=np.where(r.loss_mask, r.behavior_logprobs, 0.0).astype(np.float32),
            version_branch=nobody,
            version_step=nobody,
        )
        for r in others
    ]
    return [first, *others]


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if not preset.recipe.has_critic])
def test_no_gradient_reaches_the_trunk_of_a_branching_group(preset: str) -> None:
    recipe = Recipe.model_validate(PRESETS[preset].recipe.model_dump())
    model = TableModel(VOCAB)
    rollouts = branching([[7], [8]], [1.0, 0.0])
    sampled = [
        replace(made, behavior_logprobs=np.where(r.is_sampled, made.behavior_logprobs, 0.0).astype(np.float32))
        for r in rollouts
        for made in [_sampled_from(model, replace(r, loss_mask=r.is_sampled))]
    ]
    group = make_group("g", [replace(s, loss_mask=r.loss_mask) for s, r in zip(sampled, rollouts, strict=True)])
    # The first has logprobs of what it sampled for all.
    assert (group.rollouts[0].behavior_logprobs[1:3] < 0).all()
    step_of(model, recipe).run(batch_of(recipe, [group]))
    gradient = model.gradients[0]
    # Rows 1 to 5 stand before call and observation, row 6 before the answers, which are compared.
    assert (gradient[1:6] == 0.0).all()
    assert (gradient[6] != 0.0).any()


def test_the_trunk_is_masked_in_the_account_and_counts_in_no_denominator() -> None:
    group = make_group("g", branching([[7], [8, 9]], [1.0, 0.0]))
    # A call of 2 tokens, an answer of 1 and one of 2.
    assert (group.num_sampled_tokens, group.num_trunk_tokens) == (5, 2)
    assert tokens_by_fate(group, lambda rollout: True) == {"trained": 3, "baseline_only": 0, "masked": 2}
    only_first = tokens_by_fate(group, lambda rollout: rollout is group.rollouts[0])
    assert only_first == {"trained": 1, "baseline_only": 2, "masked": 2}
    batch = batch_of(PRESETS["grpo"].recipe, [group])
    assert batch.num_tokens == 3
    (micro,) = batch.minibatches[0].microbatches
    assert sorted(micro.tokens_B.tolist()) == [1, 2]
    assert (micro.behavior_logprobs_BT[~micro.mask_BT] == 0.0).all()


def test_only_what_was_sampled_counts_as_a_trained_token() -> None:
    recipe = PRESETS["grpo"].recipe
    batch = batch_of(recipe, [make_group("g", [trajectory(1.0, OBSERVATION), trajectory(0.0, OBSERVATION)])])
    assert batch.num_tokens == 2 * (len(CALL) + len(ANSWER))
    (micro,) = batch.minibatches[0].microbatches
    assert micro.mask_BT.sum() == batch.num_tokens
    assert (micro.behavior_logprobs_BT[~micro.mask_BT] == 0.0).all()


def test_scores_of_single_actions_are_advantages_of_their_turns() -> None:
    recipe = Recipe.model_validate(
        PRESETS["dr_grpo"].recipe.model_dump() | {"step_rewards": "position", "step_weight": 1.0, "outcome_weight": 0.0}
    )
    good, bad = trajectory(1.0, OBSERVATION), trajectory(0.0, OBSERVATION)
    scores = {id(good): (1.0, 0.0), id(bad): (0.0, 0.0)}
    rollouts = [
        replace(r, reward=replace(r.reward, steps=tuple(map(StepScore, (len(CALL), 6), scores[id(r)]))))
        for r in (good, bad)
    ]
    batch = batch_of(recipe, [make_group("g", rollouts)])
    (micro,) = batch.minibatches[0].microbatches
    extra = micro.token_advantages_BT
    assert extra is not None
    row = int(np.flatnonzero(extra[:, 1])[0])
    # All four scores have the mean 1/4. A token has the sum of what its own step and later ones are above it: the
    # call of the good one 3/4 - 1/4, its answer -1/4, and so both of the bad one, whose sum is -1/2.
    assert sorted(extra[:, 1].tolist()) == [-0.5, 0.5]
    assert extra[row, 6] == -0.25


def _groups(vocab_size: int) -> list[RolloutGroup]:
    rng = np.random.default_rng(2)
    prompt = rng.integers(4, vocab_size, 5).tolist()
    rollouts = []
    for number in range(4):
        parts = [rng.integers(4, vocab_size, int(rng.integers(2, 7))).tolist() for _ in range(5)]
        rollout = make_rollout(prompt, [token for part in parts for token in part], float(number % 2))
        observed = np.repeat([False, False, True, False, True, False], [5, *map(len, parts)])
        mask = rollout.loss_mask & ~observed
        rollouts.append(
            replace(
                rollout,
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                version_step=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return [make_group("g", rollouts)]


@pytest.mark.parametrize("attention_cost", [None, 0.0], ids=["rows of their own", "shared prompts"])
def test_logprobs_of_actions_are_those_of_a_fresh_pass_over_the_history(attention_cost: float | None) -> None:
    torch.manual_seed(0)
    model = new_model().eval()
    groups = _groups(model.config.vocab_size)
    batch = make_train_batch(
        groups,
        AdvantageMaker(PRESETS["grpo"].recipe),
        vocab_size=model.config.vocab_size,
        microbatch_tokens=10**6,
        attention_cost=attention_cost,
    )
    (micro,) = batch.minibatches[0].microbatches
    given = tensors_of(micro, torch.device("cpu"))
    num_compared = 0
    with torch.no_grad():
        if given.shared is None:
            found_BK = PLAIN.logprobs(
                logits(model, given.token_ids_BT, given.num_last), given.token_ids_BT[:, -given.num_last :]
            )
        else:
            found = shared_logits(model, given.shared, torch.float32)
            found_BK = PLAIN.logprobs_at(found, given.shared, given.token_ids_BT)
        first = given.token_ids_BT.shape[1] - given.num_last
        for row, column in zip(*np.nonzero(micro.mask_BT), strict=True):
            # As a sampler sees it: the whole history up to here, in a pass of its own.
            history = given.token_ids_BT[row : row + 1, :column]
            fresh = torch.log_softmax(model(input_ids=history, use_cache=False).logits[0, -1].double(), dim=-1)
            expected = float(fresh[given.token_ids_BT[row, column]])
            assert float(found_BK[row, column - first]) == pytest.approx(expected, abs=1e-5)
            num_compared += 1
    assert num_compared == batch.num_tokens > 30
