"""Shape checks that are run, so that the shapes in the docstrings cannot rot.

Letters: G rollouts of one group, B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def require_rank(rank: int, **tensors: Tensor) -> None:
    """Raise ValueError unless every tensor has this many axes."""
    for name, tensor in tensors.items():
        if tensor.ndim != rank:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {rank} axes")


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes differ: {shapes}")
