"""A learner step: advantages of a train batch, then optimizer updates by the recipe. Knows nothing of DeepSpeed.

B sequences, T tokens, K of them from the token before the first target on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.aggregate import BatchCounts, denominator
from stream_grpo.algo.kl import steer_weight
from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.recipe import Recipe, given
from stream_grpo.algo.statistics import Statistics
from stream_grpo.algo.step_scale import learning_rate_scale
from stream_grpo.config_learner import Learner
from stream_grpo.learner.advantages import AdvantageMaker
from stream_grpo.learner.batching import Microbatch, Minibatch, TrainBatch
from stream_grpo.learner.critic_step import CriticStep, ValueModel
from stream_grpo.learner.first_pass import FirstPass, Model, first_pass, tensors_of
from stream_grpo.learner.forward import Entropy
from stream_grpo.learner.kl_rewards import kl_terms, with_kl_in_rewards
from stream_grpo.learner.ranks import ALONE, Ranks, summed_numbers, summed_statistics
from stream_grpo.types import RolloutGroup


class _Update(NamedTuple):
    """What one optimizer update says of itself."""

    loss: float
    grad_norm: float
    entropy: float
    statistics: Statistics


class TrainStep:
    """One recipe applied to one batch after the other.

    With several ranks each has a step of its own and is given its share of every batch: the counts in it are those of
    the whole, and what is summed over a batch here is summed over ranks, so that all have the same numbers.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        learner: Learner,
        *,
        max_new_tokens: int,
        ranks: Ranks = ALONE,
        critic: ValueModel | None = None,
    ) -> None:
        """Raises ValueError where the recipe has a critic and none is given, or the other way round."""
        if recipe.has_critic != (critic is not None):
            raise ValueError(f"advantage = {recipe.advantage}: {'a' if recipe.has_critic else 'no'} critic is expected")
        self._model, self._recipe, self._learner, self._ranks = model, recipe, learner, ranks
        self._max_new_tokens = max_new_tokens
        self._critic = None if critic is None else CriticStep(critic, recipe)
        self.advantages = AdvantageMaker(recipe)
        """What makes the advantages of a batch."""
        self.step = 0
        """Learner steps made."""
        self._kl_weight = recipe.kl_weight or 0.0
        self.rate_scale = 1.0
        """Taken times the learning rate; set by whoever steers it."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides weights and optimizer; plain values."""
        baseline = {"kind": self._recipe.baseline, "value": self.advantages.baseline}
        return {"step": self.step, "baseline": baseline, "kl_weight": self._kl_weight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        A baseline of another kind is begun anew; a coefficient that is not steered is the recipe's.
        """
        self.step = int(state["step"])
        if state["baseline"]["kind"] == self._recipe.baseline:
            self.advantages.baseline = state["baseline"]["value"]
        if self._recipe.kl_target is not None and state["kl_weight"] > 0:
            self._kl_weight = float(state["kl_weight"])

    def rewarded(
        self,
        groups: Sequence[RolloutGroup],
        *,
        vocab_size: int,
        microbatch_tokens: int,
        share_of: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
    ) -> Sequence[RolloutGroup]:
        """The groups of a step with all that the recipe puts into their rewards; to be batched then.

        With the KL there, a forward pass of policy and reference over all of them. `share_of` keeps this rank's share
        and sees to it that the others call `kl_terms` with theirs. Raises ValueError as batching does.
        """
        if self._recipe.kl_place != "reward":
            return groups
        return with_kl_in_rewards(
            self._model, self._recipe, groups, weight=self._kl_weight, vocab_size=vocab_size,
            microbatch_tokens=microbatch_tokens, ranks=self._ranks, share_of=share_of,
        )  # fmt: skip

    def kl_terms(self, share: TrainBatch, num_rollouts: int) -> None:
        """This rank's part in `rewarded` of the first one."""
        kl_terms(self._model, share, weight=self._kl_weight, num_rollouts=num_rollouts, ranks=self._ranks)

    def run(self, batch: TrainBatch, watch: Callable[[Statistics], None] = lambda first: None) -> dict[str, Any]:
        """num_epochs passes, one optimizer update per minibatch. Returns the step's metrics.

        Shares and ratios are over all trained tokens of all passes. `watch` is shown the statistics of the first
        update before any weight has changed, and may raise. Raises FloatingPointError before an update whose loss is
        not finite.
        """
        started_s = time.perf_counter()
        if self._critic is not None:
            batch = self._critic.judged(batch)
        minibatches = [minibatch for minibatch in batch.minibatches if minibatch.num_tokens > 0]
        num_updates = self._learner.num_epochs * len(minibatches)
        facts = first_pass(
            self._model,
            self._recipe,
            batch,
            num_updates=num_updates,
            kl_weight=self._kl_weight,
            ranks=self._ranks,
        )
        learning_rate = self._learning_rate(facts.effective_share)
        updates: list[_Update] = []
        for _ in range(self._learner.num_epochs):
            for minibatch in minibatches:
                loss, entropy, statistics = self._gradient(minibatch, facts)
                if not updates:
                    watch(statistics)
                if self._critic is not None:
                    # Before the policy moves: where the critic's loss is not finite, nothing does.
                    self._critic.learn(minibatch, self._critic_rate)
                updates.append(_Update(loss, self._model.update(learning_rate), entropy, statistics))
        self.step += 1
        self._model.end_step(self.step)
        metrics: dict[str, Any] = {
            "learning_rate": learning_rate,
            "num_updates": float(num_updates),
            "num_tokens": float(batch.num_tokens),
            "num_sequences": float(batch.num_sequences),
            "num_left_out": float(batch.num_left_out),
            "groups_flattened": float(self.advantages.num_flattened),
        }
        if self._critic is not None:
            metrics |= self._critic.metrics()
        if not updates:
            return metrics | {"seconds": time.perf_counter() - started_s}
        whole = sum((update.statistics for update in updates[1:]), updates[0].statistics)
        metrics |= whole.metrics() | {"by_age": whole.by_age(), "by_length": whole.by_length()}
        metrics["entropy_by_position"] = whole.entropy_by_position()
        for name in ("loss", "grad_norm", "entropy"):
            metrics[name] = sum(getattr(update, name) for update in updates) / num_updates
        metrics |= self._carry_over(whole, batch.num_sequences, facts)
        return metrics | {"seconds": time.perf_counter() - started_s}

    def _learning_rate(self, effective_share: float | None) -> float:
        """Linear over `warmup_steps` learner steps, then constant; by effective sample size where the recipe says."""
        rate = self.rate_scale * self._learner.learning_rate * self._warmth
        if effective_share is None:
            return rate
        return rate * learning_rate_scale(effective_share, base=given(self._recipe.ess_base))

    @property
    def _warmth(self) -> float:
        """Share of the learning rate that the warmup gives by now."""
        warmup = self._learner.warmup_steps
        return min(1.0, (self.step + 1) / warmup if warmup else 1.0)

    @property
    def _critic_rate(self) -> float:
        """Learning rate of the critic: warmed up, and not scaled by what concerns the policy alone."""
        return given(self._recipe.critic_rate) * self._learner.learning_rate * self._warmth

    def _carry_over(self, statistics: Statistics, num_sequences: int, facts: FirstPass) -> dict[str, float]:
        """Steer the KL coefficient, and say what goes from step to step."""
        recipe, baseline = self._recipe, self.advantages.baseline
        metrics = {"kl_weight": self._kl_weight} if recipe.kl != "none" else {}
        if recipe.kl_target is not None:
            observed = statistics.mean("k3" if recipe.kl_reference == "behavior" else "k3_reference")
            horizon = given(recipe.kl_horizon)
            self._kl_weight = steer_weight(
                self._kl_weight, observed, recipe.kl_target, horizon=horizon, num_sequences=num_sequences
            )
        optional = {
            "baseline": baseline,
            "second_moment_bound": facts.second_moment_bound,
            "effective_share": facts.effective_share,
        }
        return metrics | {name: value for name, value in optional.items() if value is not None}

    def _gradient(self, minibatch: Minibatch, facts: FirstPass) -> tuple[float, float, Statistics]:
        """Forward and backward of every microbatch: (loss, mean entropy, statistics) of the whole minibatch."""
        num_constant = minibatch.num_rollouts * self._max_new_tokens
        counts = BatchCounts(minibatch.num_tokens, minibatch.num_sequences, minibatch.num_problems, num_constant)
        divisor = denominator(self._recipe.aggregation, counts)
        loss_sum, entropy_sum, num_impossible = 0.0, 0.0, 0
        parts: list[Statistics] = []
        for microbatch in minibatch.microbatches:
            inputs, entropy_BK = self._inputs(microbatch, facts)
            loss, statistics = policy_loss(
                self._recipe,
                inputs,
                denominator=divisor,
                kl_weight=self._kl_weight,
                second_moment_bound=facts.second_moment_bound,
            )
            loss_sum += loss.item()
            parts.append(statistics)
            entropy_sum += float(torch.where(inputs.mask_BT, entropy_BK.detach(), 0.0).sum())
            num_impossible += int((inputs.mask_BT & (inputs.policy_logprobs_BT == -math.inf)).sum())
            self._model.backward(loss)
        # Of the whole minibatch, so that all ranks stop where one of them finds it.
        loss_sum, entropy_sum, impossible = summed_numbers(self._ranks, loss_sum, entropy_sum, num_impossible)
        if not math.isfinite(loss_sum):
            cause = (
                f"the learner gives {impossible:g} of {minibatch.num_tokens} trained tokens no probability at all: "
                "sampler and learner differ in top_p, top_k or min_p"
                if impossible
                else "restart from a checkpoint"
            )
            raise FloatingPointError(f"loss {loss_sum} in learner step {self.step + 1}; {cause}")
        whole = summed_statistics(self._ranks, sum(parts[1:], parts[0]))
        return loss_sum, entropy_sum / minibatch.num_tokens, whole

    def _inputs(self, microbatch: Microbatch, facts: FirstPass) -> tuple[LossInputs, Tensor]:
        """A microbatch as the maths sees it, with a fresh forward pass, and the entropy."""
        recipe, tensors = self._recipe, tensors_of(microbatch, self._model.device)
        entropy: Entropy = "gradient" if recipe.entropy_weight > 0 else "value"
        logprobs_BK, entropy_BK = self._model.logprobs(tensors.targets, entropy=entropy)
        advantage_BK = tensors.advantage_BK.to(logprobs_BK.dtype)
        if (term_BK := facts.advantage_terms.get(id(microbatch))) is not None:
            advantage_BK = advantage_BK + term_BK
        reference_BK = None
        if recipe.needs_reference:
            reference_BK = self._model.reference_logprobs(tensors.targets)
        inputs = LossInputs(
            policy_logprobs_BT=logprobs_BK,
            behavior_logprobs_BT=tensors.behavior_BK,
            advantage_BT=advantage_BK,
            mask_BT=tensors.mask_BK,
            tokens_B=tensors.tokens_B,
            problem_tokens_B=tensors.problem_tokens_B,
            age_BT=tensors.age_BK,
            regularized_B=tensors.regularized_B(recipe),
            start_logprobs_BT=facts.start_logprobs.get(id(microbatch)),
            reference_logprobs_BT=reference_BK,
            entropy_BT=entropy_BK,
            differs_BT=tensors.differs_BK,
        )
        return inputs, entropy_BK
