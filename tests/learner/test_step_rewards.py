"""Step scores in rewards and advantages, by hand, and what is left of a group's spread."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from stream_grpo.algo.aggregate import BatchCounts, denominator
from stream_grpo.algo.loss import LossInputs
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Scored, Steps, make_train_batch
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import Rollout, RolloutGroup, StepScore
from tests.algo import oracle
from tests.learner.conftest import make_group, make_rollout
from tests.learner.table_model import TableModel

PLAIN: dict[str, Any] = {"ratio_to": "behavior", "weight": "plain", "baseline": "group_mean"}
VOCAB = 12


def steps(*pairs: tuple[int, float]) -> Steps:
    return tuple(StepScore(*pair) for pair in pairs)


def scored(maker: AdvantageMaker, rewards: list[float], of: list[Steps], groups: list[int] | None = None) -> Scored:
    rewards_B = np.array(rewards, dtype=np.float64)
    group_B = np.array(groups or [0] * len(rewards), dtype=np.int64)
    return maker(rewards_B, np.isfinite(rewards_B), group_B, np.full(len(rewards), 4, np.int64), of)


def recipe(**choices: Any) -> Recipe:
    return Recipe(**{"step_weight": 1.0, "outcome_weight": 1.0, **PLAIN, **choices})


TWO = [steps((1, 0.5), (4, 1.0)), steps((3, 0.25), (4, 0.5))]


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("min", [0.5, 0.25]),
        ("product", [0.5, 0.125]),
        ("last", [1.0, 0.5]),
        ("mean", [0.75, 0.375]),
        ("weighted", [(0.5 + 3 * 1.0) / 4, (3 * 0.25 + 0.5) / 4]),  # by tokens: 1 and 3, 3 and 1
    ],
)
def test_steps_made_into_one_number_are_added_to_the_reward(method: str, numbers: list[float]) -> None:
    got = scored(AdvantageMaker(recipe(step_rewards=method, step_weight=2.0, outcome_weight=0.5)), [1.0, 0.0], TWO)
    # 0.5 r + 2 s, minus its mean.
    combined = [0.5 + 2 * numbers[0], 2 * numbers[1]]
    half = (combined[0] - combined[1]) / 2
    assert got.advantages_B.tolist() == pytest.approx([half, -half])
    assert got.token_advantages_BR is None


def test_steps_give_signal_where_rewards_do_not_differ() -> None:
    maker = AdvantageMaker(recipe(step_rewards="mean"))
    got = scored(maker, [1.0, 1.0], TWO)
    assert got.has_signal_B.tolist() == [True, True]
    assert maker.num_flattened == 0
    # Nothing reads them: no signal, and none was there to lose.
    maker = AdvantageMaker(Recipe(**PLAIN))
    assert scored(maker, [1.0, 1.0], TWO).has_signal_B.tolist() == [False, False]
    assert maker.num_flattened == 0


def test_a_group_where_one_has_no_steps_is_taken_by_its_rewards() -> None:
    got = scored(
        AdvantageMaker(recipe(step_rewards="last", outcome_weight=0.0)), [1.0, 0.0, 1.0, 0.0], [TWO[0], (), *TWO],
        [0, 0, 1, 1],
    )  # fmt: skip
    # Group 0: rewards 1 and 0. Group 1: last steps 1 and 0.5, rewards count nothing.
    assert got.advantages_B.tolist() == pytest.approx([0.5, -0.5, 0.25, -0.25])


def test_an_unscored_rollout_needs_no_steps() -> None:
    got = scored(AdvantageMaker(recipe(step_rewards="last")), [1.0, 0.0, math.nan], [*TWO, ()])
    # 2 and 0.5: mean 1.25.
    assert got.advantages_B.tolist() == pytest.approx([0.75, -0.75, 0.0])


def test_position_advantages_come_on_top_of_the_outcome() -> None:
    # Steps 1, 0 | 0, 1: mean 1/2, so 1/2, -1/2 | -1/2, 1/2. First: tokens 0, 1: 0; 2, 3: -1/2. Second: token 0: 0;
    # tokens 1, 2: 1/2. Times 2.
    of = [steps((2, 1.0), (4, 0.0)), steps((1, 0.0), (3, 1.0))]
    got = scored(AdvantageMaker(recipe(step_rewards="position", step_weight=2.0, outcome_weight=0.5)), [1.0, 0.0], of)
    assert got.advantages_B.tolist() == [0.25, -0.25]
    assert got.token_advantages_BR is not None
    assert got.token_advantages_BR.tolist() == [[0.0, 0.0, -1.0, -1.0], [0.0, 1.0, 1.0, 0.0]]
    alone = scored(AdvantageMaker(recipe(step_rewards="position", outcome_weight=0.0)), [1.0, 1.0], of)
    assert (alone.advantages_B.tolist(), alone.has_signal_B.tolist()) == ([0.0, 0.0], [True, True])


def test_steps_without_spread_are_no_signal_where_they_alone_count() -> None:
    maker = AdvantageMaker(recipe(step_rewards="position", outcome_weight=0.0))
    got = scored(maker, [1.0, 0.0], [steps((2, 0.5)), steps((4, 0.5))])
    assert got.has_signal_B.tolist() == [False, False]
    # The buffer saw rewards that differ.
    assert maker.num_flattened == 1


@pytest.mark.parametrize(
    ("choices", "num_flattened"),
    [
        ({}, 0),
        ({"robust": "clip", "robust_low": -1.0, "robust_high": 0.0}, 1),
        ({"robust": "clip", "robust_low": 0.0, "robust_high": 0.5}, 0),
        # Of 0, 0, 0, 0, 1 both quartiles are 0.
        ({"robust": "winsorize", "robust_share": 0.25}, 1),
        # A group baseline is not needed for a group to lose its spread.
        ({"robust": "winsorize", "robust_share": 0.25, "baseline": "batch_mean"}, 1),
    ],
)
def test_a_group_that_robust_rewards_flatten_is_counted(choices: dict[str, Any], num_flattened: int) -> None:
    maker = AdvantageMaker(Recipe(**(PLAIN | choices)))
    got = scored(maker, [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [], [0] * 5 + [1] * 2)
    assert maker.num_flattened == num_flattened
    assert bool(got.has_signal_B[0]) is (num_flattened == 0)


def stepped_group() -> RolloutGroup:
    """Answers of 4 and 3 tokens whose behavior logprobs are those of a flat distribution."""
    flat = -math.log(VOCAB)
    first, second = make_rollout([1, 2], [3, 4, 5, 6], 1.0, [flat] * 4), make_rollout([1], [7, 8, 9], 0.0, [flat] * 3)
    of = [steps((2, 1.0), (4, 0.0)), steps((1, 0.0), (3, 1.0))]
    return make_group("g0", [with_steps(first, of[0]), with_steps(second, of[1])])


def with_steps(rollout: Rollout, of: Steps) -> Rollout:
    return dataclasses.replace(rollout, reward=dataclasses.replace(rollout.reward, steps=of))


def test_the_gradient_of_position_advantages_equals_the_oracle() -> None:
    chosen, model = recipe(step_rewards="position", step_weight=2.0, outcome_weight=0.5), TableModel(VOCAB)
    group = stepped_group()
    batch = make_train_batch([group], AdvantageMaker(chosen), vocab_size=VOCAB, microbatch_tokens=1000)
    metrics = TrainStep(model, chosen, Learner(learning_rate=0.0), max_new_tokens=8).run(batch)
    # As in the test above: outcome 0.25 and -0.25, tokens on top.
    advantages = [[0.25, 0.25, -0.75, -0.75], [-0.25, 0.75, 0.75]]
    value, gradient = slow_gradient(chosen, group, advantages)
    assert metrics["loss"] == pytest.approx(value, rel=1e-12)
    assert torch.allclose(model.gradients[0], gradient, rtol=1e-9, atol=1e-15)


def slow_gradient(
    of: Recipe, group: RolloutGroup, advantages: list[list[float]], **loss: Any
) -> tuple[float, torch.Tensor]:
    """Value and gradient by the table of logits, from the oracle's derivative of every logprob."""
    model = TableModel(VOCAB)
    width = max(map(len, advantages))
    pairs = [(r.token_ids[r.num_prompt_tokens - 1 : -1], r.token_ids[r.num_prompt_tokens :]) for r in group.rollouts]
    table = (model.weights / 0.7).log_softmax(-1)
    rows = [table[torch.tensor(before), torch.tensor(after)] for before, after in pairs]
    padded = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    tokens = mask.sum(dim=1)

    def grid(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([row + [0.0] * (width - len(row)) for row in values], dtype=torch.float64)

    inputs = LossInputs(
        policy_logprobs_BT=padded,
        behavior_logprobs_BT=grid([r.behavior_logprobs[r.num_prompt_tokens :].tolist() for r in group.rollouts]),
        advantage_BT=grid(advantages),
        mask_BT=mask,
        tokens_B=tokens,
        problem_tokens_B=torch.full_like(tokens, int(tokens.sum())),
        age_BT=torch.zeros_like(mask, dtype=torch.int64),
        regularized_B=torch.ones(len(rows), dtype=torch.bool),
    )
    counts = BatchCounts(int(tokens.sum()), len(rows), 1, 1)
    expected = oracle.loss(of, inputs, denominator=denominator(of.aggregation, counts), **loss)
    (gradient,) = torch.autograd.grad((padded * grid(expected.gradient)).sum(), model.weights)
    return expected.value, gradient
