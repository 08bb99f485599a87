"""The critic: a copy of the policy's body with one number a token on top, under an optimizer of its own.

B sequences, T tokens, K of them at the end; where prompts are shared R rows of L tokens. Of one rank.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.forward import Targets, shared_inputs

FOLDER = "critic"
"""Within a checkpoint."""
_TAG = "state"


class ValueNet(torch.nn.Module):
    """What every prefix is worth: 0 at first, since the head begins at 0."""

    def __init__(self, policy: Any) -> None:
        """Copies the body of a Hugging Face model, with its weights, dtype and mode."""
        super().__init__()
        self.body = copy.deepcopy(policy.base_model)
        weight = next(self.body.parameters())
        self.head = _Head(policy.config.get_text_config().hidden_size, 1, device=weight.device, dtype=weight.dtype)
        self.train(policy.training)

    def forward(self, num_last: int, **inputs: Tensor) -> Tensor:
        """[B, num_last] in float32: what the sequence up to and with each token is worth."""
        hidden = self.body(**inputs, use_cache=False).last_hidden_state[:, -num_last:]
        value: Tensor = self.head(hidden).squeeze(-1)
        return value


class _Head(torch.nn.Linear):
    """Multiplies in float32, whatever its dtype: a value in bfloat16 would have three digits."""

    def reset_parameters(self) -> None:
        """All 0, without a draw."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden.float(), self.weight.float(), self.bias.float())


class Critic:
    """A `ValueNet` and its optimizer, as `critic_step` asks for them."""

    def __init__(self, engine: Any) -> None:
        """`engine` is DeepSpeed's, around the net."""
        self._engine = engine
        self._weights: list[torch.nn.Parameter] = list(engine.module.parameters())
        self._dtype = engine.module.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = self._engine.device
        return device

    def values(self, targets: Targets) -> Tensor:
        """[B, K] what stands before each target is worth; 0 for the first of a sequence."""
        if (shared := targets.shared) is None:
            return pad(self._engine(num_last=targets.num_last, input_ids=targets.token_ids_BT)[:, :-1], (1, 0))
        num_columns = shared.token_ids_RL.shape[1] - shared.first
        value_RL = self._engine(num_last=num_columns, **shared_inputs(shared, self._dtype))
        return pad(value_RL[shared.row_B.unsqueeze(1), shared.at_BJ], (1, 0))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part of its loss."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self, learning_rate: float) -> float:
        """Clip, change the weights, clear. Returns the norm before clipping."""
        for parameter_group in self._engine.optimizer.param_groups:
            parameter_group["lr"] = learning_rate
        own_norm: Tensor | None = None
        if self._engine.zero_optimization_stage() == 0:
            # There DeepSpeed keeps no norm in fp32, and the gradients are the parameters' own.
            own_norm = torch.nn.utils.get_total_norm([w.grad for w in self._weights if w.grad is not None])
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = own_norm if norm is None else norm
        return float("nan") if norm is None else float(norm)

    @property
    def num_bytes(self) -> int:
        """Of its weights, their gradients, and what the optimizer keeps of them by now."""
        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        kept = [weight for group in optimizer.param_groups for weight in group["params"]]
        kept += [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*self._weights, *(tensor for tensor in kept if isinstance(tensor, Tensor))]
        storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
        return sum(storages.values()) + sum(weight.nbytes for weight in self._weights)

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint."""
        self._engine.save_checkpoint(str(directory / FOLDER), tag=_TAG)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError where it wrote nothing."""
        if not any((directory / FOLDER / _TAG).glob("*.pt")):
            raise CheckpointError(
                f"{directory}: holds no critic: advantage = gae can only be set when a run begins; leave it as it was"
            )
        path, _ = self._engine.load_checkpoint(str(directory / FOLDER), tag=_TAG)
        if path is None:
            raise CheckpointError(f"{directory / FOLDER}: DeepSpeed found no critic to load")

    def close(self) -> None:
        """Let go of DeepSpeed's hooks."""
        self._engine.destroy()
