"""TRL's own code on a batch: its GRPOTrainer's methods, on a trainer that has only what they read."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from peers.batch import MAX_NEW_TOKENS, Batch, Result


def trainer(loss_type: str, **settings: Any) -> GRPOTrainer:
    """A trainer without model, data or tokenizer. `settings` replace attributes, those of `args` by `args_NAME`."""
    self = object.__new__(GRPOTrainer)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "gradient_checkpointing_kwargs": None,
    }
    args |= {name.removeprefix("args_"): value for name, value in settings.items() if name.startswith("args_")}
    attributes: dict[str, Any] = {
        "accelerator": accelerator,
        "args": SimpleNamespace(**args),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "max_completion_length": MAX_NEW_TOKENS,
        "current_gradient_accumulation_steps": args["gradient_accumulation_steps"],
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        # What the scoring of completions reads besides.
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "num_generations": 4,
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1, dtype=torch.float64),
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "none",
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
    }
    attributes |= {name: value for name, value in settings.items() if not name.startswith("args_")}
    self.__dict__.update(attributes)
    return self


def loss(self: GRPOTrainer, batch: Batch, *, is_on_policy: bool = False) -> Result:
    """`_compute_loss` over the accumulation steps of one optimizer step, behind `scored` where vLLM is used.

    On-policy, TRL takes the policy's own logprobs as the old ones.
    """
    policy_BT = batch.policy_BT.clone().requires_grad_()
    inputs = scored(self, batch) if self.use_vllm else _inputs(batch)
    if not is_on_policy:
        inputs["old_per_token_logps"] = batch.proximal_BT
    inputs["advantages"] = batch.advantage_B
    num_windows = self.args.steps_per_generation // self.current_gradient_accumulation_steps
    num_rows = len(policy_BT) // num_windows // self.current_gradient_accumulation_steps
    total = policy_BT.sum() * 0
    for step in range(self.current_gradient_accumulation_steps):
        rows = slice(step * num_rows, (step + 1) * num_rows)
        part = {name: x[rows] if x.ndim else x for name, x in inputs.items()}
        logprobs = policy_BT[rows]
        self._metrics = {"train": defaultdict(list)}
        self._get_per_token_logps_and_entropies = lambda *_, _logprobs=logprobs, **__: (
            _logprobs,
            torch.zeros_like(_logprobs),
            None,
        )
        total = total + GRPOTrainer._compute_loss(self, None, part)
    (gradient_BT,) = torch.autograd.grad(total, policy_BT)
    return Result(total.item(), gradient_BT)


def scored(self: GRPOTrainer, batch: Batch) -> dict[str, Tensor]:
    """`_generate_and_score_completions`: advantages and importance ratios of completions that are handed to it."""
    lengths = batch.length_B.tolist()
    reward_B1 = torch.where(batch.valid_B, batch.rewards_B, torch.nan)[:, None]
    self._metrics = {"train": defaultdict(list)}
    self._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    self._get_per_token_logps_and_entropies = lambda *_, **__: (batch.proximal_BT, None, None)
    self._calculate_rewards = lambda *_: reward_B1
    self._generate = lambda _: (
        [[1]] * len(lengths),
        [[1] * n for n in lengths],
        [row[:n].tolist() for row, n in zip(batch.mask_BT.long(), lengths, strict=True)],
        [""] * len(lengths),
        [row[:n].tolist() for row, n in zip(batch.behavior_BT, lengths, strict=True)],
        {},
        None,
        None,
    )
    with torch.no_grad():
        return GRPOTrainer._generate_and_score_completions(self, [{"prompt": ""} for _ in lengths])


def _inputs(batch: Batch) -> dict[str, Tensor]:
    B, T = batch.mask_BT.shape
    return {
        "prompt_ids": torch.ones(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "completion_mask": (torch.arange(T) < batch.length_B[:, None]).long(),
        "tool_mask": batch.mask_BT.long(),
        "sampling_per_token_logps": batch.behavior_BT,
        "num_items_in_batch": batch.mask_BT.sum(),
    }
