"""Multiplications of a learner step, and how fast this machine makes them alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch


def flops(
    products: Mapping[tuple[int, int], int],
    *,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    num_sequences: int,
    num_tokens: int,
    num_logits: int,
) -> float:
    """Of a forward and a backward, which takes twice as much, over B sequences of T tokens with K logits each.

    3 B [T (sum of 2 inputs outputs over all matrices + 4 T hidden layers) + 2 K hidden vocabulary]; attention computes
    the whole square of T x T, and no token's place in the embedding costs anything.
    """
    matrices = sum(2 * inputs * outputs * num for (inputs, outputs), num in products.items())
    attention = 4 * num_tokens * hidden_size * num_layers
    head = 2 * num_logits * hidden_size * vocab_size
    return 3.0 * num_sequences * (num_tokens * (matrices + attention) + head)


def matmul_rate(products: Mapping[tuple[int, int], int], num_tokens: int, num_tries: int = 7) -> float:
    """FLOP/s of the matrix products of a forward and a backward alone, [N, in] x [in, out] and its two gradients."""
    flops = seconds = 0.0
    for (inputs, outputs), num in products.items():
        x, w, y = torch.randn(num_tokens, inputs), torch.randn(outputs, inputs), torch.randn(num_tokens, outputs)
        for left, right in ((x, w.T), (y, w), (y.T, x)):
            times = []
            for _ in range(num_tries):
                begun = time.perf_counter()
                torch.mm(left, right)
                times.append(time.perf_counter() - begun)
            seconds += num * median(times)
        flops += num * 6.0 * num_tokens * inputs * outputs
    return flops / seconds
