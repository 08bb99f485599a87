"""verl's own code on a batch: its registered policy losses, rollout corrections and advantage estimators."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from peers.batch import GROUP_SIZE, Batch, Result


def config(*, bypass: dict[str, Any] | None = None, **settings: Any) -> ActorConfig:
    """An actor's configuration; `bypass` is that of the rollout correction inside the loss."""
    policy_loss = PolicyLossConfig(rollout_correction=RolloutCorrectionConfig(**(bypass or {})))
    defaults = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_c": 1e30}
    return ActorConfig(**(defaults | settings), policy_loss=policy_loss)


def loss(
    name: str,
    actor: ActorConfig,
    batch: Batch,
    *,
    ratio_to: str = "proximal",
    correction: dict[str, Any] | None = None,
    num_microbatches: int = 1,
) -> Result:
    """The named policy loss after the rollout correction, its denominators counted as verl's trainer counts them.

    The trainer counts tokens of the mask that rejection sampling left, and all rollouts of the mini-batch
    (verl/workers/engine/fsdp/transformer_impl.py, verl/trainer/ppo/v1/trainer_base.py).
    """
    policy_BT = batch.policy_BT.clone().requires_grad_()
    old_BT = batch.proximal_BT if ratio_to == "proximal" else batch.behavior_BT
    mask_BT, weights_BT = batch.mask_BT, None
    if correction is not None:
        weights, left_BT, _ = compute_rollout_correction_and_rejection_mask(
            batch.proximal_BT, batch.behavior_BT, batch.mask_BT.long(), **correction
        )
        mask_BT = left_BT.bool()
        weights_BT = None if weights is None else weights.batch["rollout_is_weights"]
    actor.global_batch_info.update(
        dp_size=1,
        # Where everything is rejected verl would divide 0 by 0.
        batch_num_tokens=max(int(mask_BT.sum()), 1),
        global_batch_size=len(mask_BT),
        loss_scale_factor=actor.loss_scale_factor,
    )
    num_rows = len(mask_BT) // num_microbatches
    total = policy_BT.sum() * 0
    for start in range(0, len(mask_BT), num_rows):
        rows = slice(start, start + num_rows)
        part, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=old_BT[rows],
            log_prob=policy_BT[rows],
            advantages=batch.advantage_B[rows, None].expand_as(mask_BT[rows]),
            response_mask=mask_BT[rows],
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
            rollout_is_weights=None if weights_BT is None else weights_BT[rows],
        )
        total = total + part
    (gradient_BT,) = torch.autograd.grad(total, policy_BT)
    return Result(total.item(), gradient_BT)


def advantage(name: str, batch: Batch, *, group: str = "drawn", **settings: Any) -> Result:
    """The named estimator on the batch's rewards, all of them valid; the advantage of every rollout's first token."""
    rewards_BT = torch.zeros_like(batch.policy_BT)
    rewards_BT[:, 0] = batch.rewards_B
    # A rollout is advised as a whole, whichever of its tokens are trained.
    mask_BT = (torch.arange(rewards_BT.shape[1]) < batch.length_B[:, None]).double()
    index_B = batch.group_B if group == "drawn" else torch.arange(len(batch.group_B)) // GROUP_SIZE
    advantage_BT, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards_BT, response_mask=mask_BT, index=index_B.numpy(), **settings
    )
    return Result(0.0, advantage_BT[:, 0])
