"""The advantages of a train batch by a recipe, and the running baseline that some recipes keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_grpo.algo.advantage import group_advantage, running_mean, running_quantile
from stream_grpo.algo.grouped import group_sum, groups_of
from stream_grpo.algo.length import length_deviation
from stream_grpo.algo.recipe import Recipe, given
from stream_grpo.algo.robust import clip_rewards, winsorize
from stream_grpo.learner.batching import Scored, Steps
from stream_grpo.learner.step_rewards import by_position, differs, has_steps, with_steps


class AdvantageMaker:
    """Rewards in, advantages out; one call per train batch."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.baseline: float | None = None
        """The running baseline after the batches so far; None before the first, and where the recipe keeps none."""
        self.num_flattened = 0
        """Groups of the last batch whose rewards or step scores differ, and what is made of them does not: clipped, cut
        at their tails, or cancelled."""

    def __call__(
        self,
        rewards_B: NDArray[np.float64],
        valid_B: NDArray[np.bool_],
        group_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        steps_B: Sequence[Steps] = (),
    ) -> Scored:
        """As `batching.make_train_batch` asks for them; the batch is what is passed.

        A running baseline is that of the batches before; the first batch is measured against its own mean.
        """
        recipe = self._recipe
        rewards, valid, group = (torch.from_numpy(array) for array in (rewards_B, valid_B, group_B))
        groups = groups_of(group, valid)
        stepped_B = has_steps(steps_B, groups) if recipe.reads_steps else torch.zeros_like(valid)
        differs_P = differs(rewards, steps_B, groups, stepped_B, tolerance=recipe.signal_tolerance)
        rewards = self._robust(with_steps(recipe, rewards, steps_B, stepped_B), valid, group)
        prior = self.baseline
        if prior is None:
            prior = float(rewards[valid].mean()) if bool(valid.any()) else 0.0
        result = group_advantage(
            rewards,
            valid,
            group,
            baseline=recipe.baseline,
            scale=recipe.scale,
            signal_tolerance=recipe.signal_tolerance,
            scale_floor=recipe.scale_floor or 1.0,
            std=recipe.std or "population",
            prior=prior,
        )
        self._move_baseline(prior, rewards, valid)
        advantage_B, has_signal_B = result.advantage_B, result.has_signal_B
        by_token = by_position(recipe, steps_B, group, stepped_B)
        if by_token is not None:
            outcome_weight = given(recipe.outcome_weight)
            advantage_B = torch.where(stepped_B, outcome_weight * advantage_B, advantage_B)
            if outcome_weight == 0:
                has_signal_B = has_signal_B & ~stepped_B
            has_signal_B = has_signal_B | by_token.has_signal_B
        self.num_flattened = int((differs_P & (group_sum(has_signal_B.double(), groups) == 0)).sum())
        if recipe.length_deviation:
            acts_B = torch.ones_like(valid) if recipe.length_without_signal else has_signal_B
            lengths = torch.from_numpy(lengths_B).to(advantage_B.dtype)
            advantage_B = advantage_B - length_deviation(
                lengths, valid, group, weight=recipe.length_deviation, acts_B=acts_B
            )
        by_token_BR = None if by_token is None else by_token.advantage_BT.numpy()
        return Scored(advantage_B.numpy(), has_signal_B.numpy(), by_token_BR)

    def _robust(self, rewards: Tensor, valid: Tensor, group: Tensor) -> Tensor:
        recipe = self._recipe
        if recipe.robust == "clip":
            return clip_rewards(rewards, low=given(recipe.robust_low), high=given(recipe.robust_high))
        if recipe.robust == "winsorize":
            return winsorize(rewards, valid, group, share=given(recipe.robust_share))
        return rewards

    def _move_baseline(self, prior: float, rewards: Tensor, valid: Tensor) -> None:
        recipe = self._recipe
        if recipe.baseline == "running_mean":
            self.baseline = running_mean(prior, rewards, valid, decay=given(recipe.baseline_decay))
        elif recipe.baseline == "running_quantile":
            quantile, step = given(recipe.baseline_quantile), given(recipe.baseline_step)
            self.baseline = running_quantile(prior, rewards, valid, quantile=quantile, step=step)
