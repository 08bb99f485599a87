"""Logprobs of the right tokens under the right distribution, and a loss that no cut changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.learner.logprobs import token_entropy, token_logprobs


def table(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A model whose next-token logits depend on the current token alone: row i of [V, V]."""
    return weights[ids]


def test_temperature_divides_the_logits() -> None:
    # T = 0.5, logits [2, 0] -> [4, 0]: log p(0) = -log(1 + e^-4) = -0.01815. Without T it is -0.12693.
    logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])
    got = token_logprobs(logits, torch.tensor([[1, 0]]), 0.5)
    assert got[0].tolist() == pytest.approx([0.0, -0.01815], abs=1e-5)


def test_the_logprob_of_a_token_comes_from_the_logits_before_it() -> None:
    # Tokens 10, 11, 12, 13; the row of logits at token 11 alone prefers 12: log p = 5 - log(e^5 + 13).
    weights = torch.zeros(14, 14)
    weights[11, 12] = 5.0
    ids = torch.tensor([[10, 11, 12, 13]])
    got = token_logprobs(table(weights, ids), ids, 1.0)
    flat = -math.log(14)
    assert got[0].tolist() == pytest.approx([0.0, flat, 5 - math.log(math.exp(5) + 13), flat])


def test_a_mask_on_one_token_trains_that_token_given_those_before_it() -> None:
    # Mask [0, 0, 1, 0] over 10, 11, 12, 13: only log p(12 | 10, 11), so only the row of token 11 has a gradient.
    weights = torch.zeros(14, 14, requires_grad=True)
    ids, mask = torch.tensor([[10, 11, 12, 13]]), torch.tensor([[False, False, True, False]])
    logprobs = token_logprobs(table(weights, ids), ids, 1.0)
    torch.where(mask, logprobs, 0.0).sum().backward()
    assert weights.grad is not None
    assert weights.grad.abs().sum(dim=1).nonzero().flatten().tolist() == [11]
    # d log p(12) / d logit 12 = 1 - 1/14.
    assert float(weights.grad[11, 12]) == pytest.approx(13 / 14)


@given(st.integers(0, 10**6), st.floats(0.1, 3.0))
@settings(max_examples=20)
def test_logprobs_and_entropy_equal_their_slow_loop(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(0, 5, (2, 4), generator=generator)
    got, entropy = token_logprobs(logits, ids, temperature), token_entropy(logits, ids, temperature)
    assert got.dtype == torch.float64
    for b in range(2):
        for t in range(1, 4):
            scaled = [x / temperature for x in logits[b, t - 1].tolist()]
            log_sum = math.log(math.fsum(math.exp(x) for x in scaled))
            log_p = [x - log_sum for x in scaled]
            assert float(got[b, t]) == pytest.approx(log_p[int(ids[b, t])], rel=1e-10, abs=1e-12)
            assert float(entropy[b, t]) == pytest.approx(-math.fsum(math.exp(x) * x for x in log_p), abs=1e-10)


def test_half_precision_is_computed_in_fp32_and_a_token_ruled_out_costs_no_entropy() -> None:
    logits = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    ids = torch.tensor([[0, 0]])
    assert token_logprobs(logits, ids, 1.0).dtype == torch.float32
    logits[0, 0, 1] = -math.inf
    assert token_entropy(logits, ids, 1.0).tolist() == [[0.0, 0.0]]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit token ids"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.long), 1.0)
    with pytest.raises(ValueError, match="expected above 0"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), 0.0)
