"""A model small enough to follow by hand: the logits of the next token depend on the token alone."""

from __future__ import annotations

import torch
from torch import Tensor

from stream_grpo.learner.forward import Distribution, Entropy, Targets


class TableModel:
    """Row i of [V, V] are the logits after token i. `Model` of the learner, trained by plain gradient descent."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, *, dtype: torch.dtype = torch.float64, temperature: float = 0.7) -> None:
        drawn = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.weights = drawn.to(dtype).requires_grad_()
        self.reference = self.weights.detach() + 0.1
        self.reference[:, 0] -= 0.3
        self.distribution = Distribution(temperature=temperature)
        self.gradients: list[Tensor] = []
        """Of every update so far."""
        self.learning_rates: list[float] = []
        self.num_backward = 0
        self.ended_steps: list[int] = []

    def logprobs(self, targets: Targets, *, entropy: Entropy = "none") -> tuple[Tensor, Tensor]:
        ids = targets.token_ids_BT[:, -targets.num_last :]
        logits = self.weights[ids]
        logprobs = self.distribution.logprobs(logits, ids)
        if entropy == "none":
            return logprobs, torch.zeros_like(logprobs)
        return logprobs, self.distribution.entropy(logits, ids, with_gradient=entropy == "gradient")

    def reference_logprobs(self, targets: Targets) -> Tensor:
        ids = targets.token_ids_BT[:, -targets.num_last :]
        return self.distribution.logprobs(self.reference[ids], ids)

    def backward(self, loss: Tensor) -> None:
        self.num_backward += 1
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float) -> float:
        assert self.weights.grad is not None
        self.gradients.append(self.weights.grad.clone())
        self.learning_rates.append(learning_rate)
        with torch.no_grad():
            self.weights -= learning_rate * self.weights.grad
        self.weights.grad = None
        return float(self.gradients[-1].norm())

    def end_step(self, step: int) -> None:
        self.ended_steps.append(step)
