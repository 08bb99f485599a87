"""The reference policy: weights that the KL term holds the policy near. Fixed, refreshed, or a moving average."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stream_grpo.algo.kl import ema_update
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.forward import Distribution, LanguageModel, Support, Targets

FILE = "reference.safetensors"


class Reference:
    """A copy of the model with weights of its own, which no optimizer knows."""

    def __init__(
        self,
        model: torch.nn.Module,
        kind: Literal["fixed", "refreshed", "ema"],
        *,
        refresh_interval: int | None = None,
        ema_decay: float | None = None,
    ) -> None:
        """Starts as a copy of `model`. A moving average is kept in float32."""
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        if kind == "ema":
            self._model = self._model.float()
        self._kind, self._refresh_interval, self._ema_decay = kind, refresh_interval, ema_decay
        self.max_positions: int | None = None
        """Positions whose logits may exist at once, see `LanguageModel`."""

    def to(self, device: torch.device) -> None:
        """Move the weights to where the policy is."""
        self._model.to(device)

    @torch.no_grad()
    def logprobs(self, distribution: Distribution, targets: Targets, support: Support | None = None) -> Tensor:
        """Of the targets, [B, K]; those that are not wanted may be 0."""
        model = LanguageModel(
            call=self._model,
            module=self._model,
            dtype=next(self._model.parameters()).dtype,
            max_positions=self.max_positions,
        )
        found_BK, _ = model.logprobs(distribution, targets, support)
        return found_BK

    def follow(self, model: torch.nn.Module, step: int) -> None:
        """Take up the weights of learner step `step`, as its kind has it."""
        if self._kind == "refreshed" and self._refresh_interval is not None and step % self._refresh_interval == 0:
            ema_update(self._model.parameters(), model.parameters(), decay=0.0)
        elif self._kind == "ema" and self._ema_decay is not None:
            ema_update(self._model.parameters(), model.parameters(), decay=self._ema_decay)

    def save(self, directory: Path) -> None:
        """Write the weights, unless they are those that the run started from."""
        if self._kind != "fixed":
            named = {name: weight.detach().cpu().contiguous() for name, weight in self._model.named_parameters()}
            save_file(named, directory / FILE)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError where it wrote nothing."""
        if self._kind != "fixed":
            if not (directory / FILE).exists():
                raise CheckpointError(
                    f"{directory}: holds no reference weights: kl_reference = {self._kind} can only be set when a run "
                    f"begins; leave it as it was"
                )
            saved = load_file(directory / FILE)
            with torch.no_grad():
                for name, weight in self._model.named_parameters():
                    weight.copy_(saved[name])
