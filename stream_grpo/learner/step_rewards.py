"""What the step scores of a train batch do to rewards and advantages, by a recipe.

B rollouts of P groups. Steps end at tokens of the response. A group counts by its steps only where each of its valid
rollouts has some: the number of one that has none would be of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stream_grpo.algo.choices import StepAggregation
from stream_grpo.algo.grouped import Groups, group_spread, group_sum
from stream_grpo.algo.process_rewards import PositionAdvantages, aggregate_steps, position_advantages
from stream_grpo.algo.recipe import Recipe, given
from stream_grpo.learner.batching import Steps


def has_steps(steps_B: Sequence[Steps], groups: Groups) -> Tensor:
    """[B] bool: a valid rollout of a group in which every valid one has steps."""
    without_B = torch.tensor([not steps for steps in steps_B], dtype=torch.float64)
    return groups.valid_B & (group_sum(without_B, groups) == 0)[groups.index_B]


def differs(
    rewards_B: Tensor, steps_B: Sequence[Steps], groups: Groups, stepped_B: Tensor, *, tolerance: float
) -> Tensor:
    """[P] bool: the rewards of a group, or all its step scores that are read, lie further apart than the tolerance.

    What the buffer's admission asks of a group.
    """
    differs_P = group_spread(rewards_B, groups) > tolerance
    rows = torch.nonzero(stepped_B).flatten().tolist()
    if not rows:
        return differs_P
    index_S = torch.repeat_interleave(groups.index_B[stepped_B], torch.tensor([len(steps_B[row]) for row in rows]))
    scores_S = torch.tensor([step.score for row in rows for step in steps_B[row]], dtype=torch.float64)
    steps = Groups(index_S, torch.ones_like(index_S, dtype=torch.bool), groups.num_valid_P)
    return differs_P | (group_spread(scores_S, steps) > tolerance)


def with_steps(recipe: Recipe, rewards_B: Tensor, steps_B: Sequence[Steps], stepped_B: Tensor) -> Tensor:
    """outcome_weight r + step_weight (the scores made into one number), [B]; r itself where `stepped_B` is False."""
    method = recipe.step_rewards
    if method == "none" or method == "position":
        return rewards_B
    outcome, step = given(recipe.outcome_weight), given(recipe.step_weight)
    made_B = rewards_B.clone()
    for row in torch.nonzero(stepped_B).flatten().tolist():
        made_B[row] = outcome * rewards_B[row] + step * _one_number(steps_B[row], method)
    return made_B


def by_position(
    recipe: Recipe, steps_B: Sequence[Steps], group_B: Tensor, stepped_B: Tensor
) -> PositionAdvantages | None:
    """What the steps add to the advantage of each token of the response, [B, R]; None where they add nothing."""
    if recipe.step_rewards != "position" or not bool(stepped_B.any()):
        return None
    kept = [steps if is_stepped else () for steps, is_stepped in zip(steps_B, stepped_B.tolist(), strict=True)]
    found = position_advantages(
        [_scores(steps) for steps in kept],
        [torch.tensor([step.end for step in steps], dtype=torch.int64) for steps in kept],
        stepped_B,
        group_B,
        num_tokens=max(steps[-1].end for steps in kept if steps),
        signal_tolerance=recipe.signal_tolerance,
        scale="group_std" if recipe.scale == "group_std" else "none",
        scale_floor=recipe.scale_floor or 1.0,
        std=recipe.std or "population",
    )
    return PositionAdvantages(given(recipe.step_weight) * found.advantage_BT, found.has_signal_B)


def _one_number(steps: Steps, method: StepAggregation) -> float:
    """The scores of a rollout's steps as one; weighted: by the tokens of each step."""
    scores = _scores(steps)
    if method != "weighted":
        return float(aggregate_steps(scores, method=method))
    ends = torch.tensor([0, *(step.end for step in steps)], dtype=torch.float64)
    return float(aggregate_steps(scores, method=method, weights=ends.diff()))


def _scores(steps: Steps) -> Tensor:
    return torch.tensor([step.score for step in steps], dtype=torch.float64)
