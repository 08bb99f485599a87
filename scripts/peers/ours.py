"""Our maths on a batch: a recipe's policy loss and the advantages, as training has them."""

from __future__ import annotations

from typing import Literal

import torch

from peers.batch import GROUP_SIZE, MAX_NEW_TOKENS, Batch, Result
from stream_grpo.algo.advantage import Baseline, Scale, group_advantage
from stream_grpo.algo.aggregate import BatchCounts, denominator
from stream_grpo.algo.loss import LossInputs, policy_loss
from stream_grpo.algo.recipe import Recipe

Constant = Literal["rollout_tokens", "rollouts", "one"]
"""What aggregation `constant` divides by: rollouts x max_new_tokens, rollouts, or 1."""


def recipe(**choices: object) -> Recipe:
    """A recipe on policy / proximal with the learner's own proximal logprobs, and what differs from that."""
    base: dict[str, object] = {"ratio_to": "proximal", "proximal": "recomputed", "baseline": "none"}
    if choices.get("weight", "ppo") == "ppo":
        base |= {"clip_low": 0.2, "clip_high": 0.2}
    if choices.get("ratio_to") == "behavior" and "correction" not in choices:
        base["proximal"] = "behavior"  # nothing reads another one
    return Recipe.model_validate(base | choices)


def constant_of(constant: Constant, num_rollouts: int) -> int:
    """The number behind the name."""
    return {"rollout_tokens": num_rollouts * MAX_NEW_TOKENS, "rollouts": num_rollouts, "one": 1}[constant]


def loss(choices: Recipe, batch: Batch, *, constant: Constant = "rollout_tokens") -> Result:
    """`policy_loss` of the batch as one microbatch."""
    mask_BT = batch.mask_BT
    tokens_B = mask_BT.sum(dim=1)
    problem_tokens_B = tokens_B.view(-1, GROUP_SIZE).sum(dim=1).repeat_interleave(GROUP_SIZE)
    counts = BatchCounts(
        num_tokens=int(tokens_B.sum()),
        num_sequences=int((tokens_B > 0).sum()),
        num_problems=int((problem_tokens_B[::GROUP_SIZE] > 0).sum()),
        num_constant=constant_of(constant, len(tokens_B)),
    )
    policy_BT = batch.policy_BT.clone().requires_grad_()
    inputs = LossInputs(
        policy_logprobs_BT=policy_BT,
        behavior_logprobs_BT=batch.behavior_BT,
        advantage_BT=batch.advantage_B[:, None].expand_as(policy_BT),
        mask_BT=mask_BT,
        tokens_B=tokens_B,
        problem_tokens_B=problem_tokens_B,
        age_BT=torch.ones_like(mask_BT, dtype=torch.long),
        regularized_B=torch.zeros_like(tokens_B, dtype=torch.bool),
        start_logprobs_BT=batch.proximal_BT if choices.proximal == "recomputed" else None,
    )
    value, _ = policy_loss(choices, inputs, denominator=denominator(choices.aggregation, counts))
    (gradient_BT,) = torch.autograd.grad(value, policy_BT)
    return Result(value.item(), gradient_BT)


def advantage(
    batch: Batch, *, baseline: Baseline, scale: Scale = "none", group: str = "drawn", only_valid: bool
) -> Result:
    """The advantages of the batch's rewards; `group` is `drawn`, of any sizes, or `equal`, of 4."""
    index_B = batch.group_B if group == "drawn" else torch.arange(len(batch.group_B)) // GROUP_SIZE
    found = group_advantage(
        torch.where(batch.valid_B, batch.rewards_B, torch.nan) if only_valid else batch.rewards_B,
        batch.valid_B if only_valid else torch.ones_like(batch.valid_B),
        index_B,
        baseline=baseline,
        scale=scale,
        signal_tolerance=0.0,
        scale_floor=1e-12,
        std="sample",
    )
    return Result(0.0, found.advantage_B)
