"""How many tokens a rollout of each problem costs, from the groups it had. Pure numpy. P: problems, D: domains."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ExpectedTokens:
    """Tokens of a rollout, as a sliding mean of each problem; of its domain, or of all, before it has one.

    A fold over groups. The domain's mean slides too, and begins with its first group.
    """

    folded = ("_own_P", "_domain_D", "_mean")

    def __init__(self, domain_P: NDArray[np.int64], *, step: float = 0.3, domain_step: float = 0.05) -> None:
        self._step, self._domain_step = step, domain_step
        self._domain_P = domain_P
        self._own_P = np.zeros(len(domain_P), np.float32)
        self._domain_D = np.zeros(int(domain_P.max(initial=-1)) + 1, np.float64)
        self._mean = 0.0

    def observe(self, index: int, num_tokens: float) -> None:
        """Learn what the rollouts of a group cost on average; one without tokens says nothing."""
        if num_tokens <= 0:
            return
        domain = self._domain_P[index]
        self._own_P[index] = _slide(float(self._own_P[index]), num_tokens, self._step)
        self._domain_D[domain] = _slide(float(self._domain_D[domain]), num_tokens, self._domain_step)
        self._mean = _slide(self._mean, num_tokens, self._domain_step)

    def predict(self, index_P: NDArray[np.int64]) -> NDArray[np.float64]:
        """Expected tokens of a rollout of some problems; 1 before there was any group."""
        domain_D = np.where(self._domain_D > 0, self._domain_D, self._mean or 1.0)
        own_P = self._own_P[index_P]
        return np.where(own_P > 0, own_P, domain_D[self._domain_P[index_P]])


def _slide(mean: float, value: float, step: float) -> float:
    return mean + step * (value - mean) if mean > 0 else value
