"""Logprobs under the distribution that the sampler draws from."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stream_grpo.learner.forward import PLAIN, Distribution, logits
from stream_grpo.learner.head import with_fp32_head

IDS = torch.tensor([[1, 0]])


def rows(*first: float) -> torch.Tensor:
    """[1, 2, V]: the logits that give token 1 its distribution; what follows token 1 does not matter."""
    return torch.tensor([[list(first), [0.0] * len(first)]], dtype=torch.float64)


def test_logits_are_divided_by_the_temperature() -> None:
    # Report C13: logits 2, 0 at T = 0.5 are 4, 0: -log(1 + e^-4) = -0.01815; not -0.12693, not -0.25386.
    got = Distribution(temperature=0.5).logprobs(rows(2, 0), IDS)
    assert got[0].tolist() == pytest.approx([0, -0.01815], abs=1e-5)
    assert PLAIN.logprobs(rows(2, 0), IDS)[0, 1].item() == pytest.approx(-0.12693, abs=1e-5)


def test_a_filter_is_that_of_the_sampler() -> None:
    # Report C14: probabilities .6, .3, .1 and top-p .9: the sampler draws from 2/3, 1/3, and so the ratio is 1.
    filtered = Distribution(temperature=1.0, top_p=0.9)
    given = rows(*(math.log(p) for p in (0.6, 0.3, 0.1)))
    assert not filtered.has_full_support
    sampler = math.log(2 / 3)
    assert filtered.logprobs(given, IDS)[0, 1].item() == pytest.approx(sampler, abs=1e-6)
    # Without the filter it is .6 / (2/3) = .9.
    unfiltered = PLAIN.logprobs(given, IDS)[0, 1].item()
    assert math.exp(unfiltered - sampler) == pytest.approx(0.9)
    # A token outside the support cannot be drawn.
    assert filtered.logprobs(given, torch.tensor([[1, 2]]))[0, 1].item() == -math.inf


def test_a_filter_comes_after_the_temperature() -> None:
    # Logits log .6, log .3, log .1 at T = 0.5 are .36, .09, .01 over .46: .783, .196, .022; top-p .9 keeps two.
    given = rows(*(math.log(p) for p in (0.6, 0.3, 0.1)))
    got = Distribution(temperature=0.5, top_p=0.9).logprobs(given, IDS)
    assert got[0, 1].item() == pytest.approx(math.log(0.36 / 0.45), abs=1e-6)
    top = Distribution(temperature=0.5, top_k=1).logprobs(given, IDS)
    assert top[0, 1].item() == 0
    likely = Distribution(temperature=1.0, min_p=0.4).logprobs(given, IDS)  # .3 is half of .6, .1 is a sixth
    assert likely[0, 1].item() == pytest.approx(math.log(2 / 3), abs=1e-6)


@pytest.mark.parametrize(
    ("distribution", "full"),
    [
        (Distribution(temperature=0.3), True),
        (Distribution(temperature=1.0, top_k=0), True),
        (Distribution(temperature=1.0, top_k=5), False),
        (Distribution(temperature=1.0, top_p=0.99), False),
        (Distribution(temperature=1.0, min_p=0.01), False),
    ],
)
def test_full_support(distribution: Distribution, full: bool) -> None:
    assert distribution.has_full_support == full


@pytest.mark.parametrize("distribution", [Distribution(temperature=0.7), Distribution(temperature=0.7, top_k=2)])
def test_entropy_has_a_gradient_where_it_is_asked_for(distribution: Distribution) -> None:
    given = rows(1.0, 0.5, -2.0).requires_grad_()
    assert not distribution.entropy(given, IDS, with_gradient=False).requires_grad
    entropy = distribution.entropy(given, IDS, with_gradient=True)
    (gradient,) = torch.autograd.grad(entropy[0, 1], given)
    # d H / d logit_i = -p_i (log p_i + H) / T; 0 for a logit that the filter takes.
    kept = given.detach()[0, 0, : 3 if distribution.has_full_support else 2]
    p = (kept / 0.7).softmax(-1)
    expected = -p * (p.log() + -(p * p.log()).sum()) / 0.7
    assert entropy[0, 1].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    assert gradient[0, 0].tolist() == pytest.approx([*expected.tolist(), 0.0][:3], abs=1e-6)


def test_a_head_in_float32_is_nearer_to_a_model_in_float32() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=0, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    # No layers: what is left of the rounding is that of the head. Logits as large as those of a real model.
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 4
    rounded = model.bfloat16()
    exact, raised = copy.deepcopy(rounded).float(), copy.deepcopy(rounded)
    with_fp32_head(raised)
    ids = torch.randint(0, 64, (4, 16))
    with torch.no_grad():
        wanted, plain, better = (PLAIN.logprobs(logits(m, ids, 16), ids) for m in (exact, rounded, raised))
    assert logits(raised, ids, 3).shape == (4, 3, 64)
    assert logits(raised, ids, 3).dtype == torch.float32
    gaps = [float((got - wanted).abs().mean()) for got in (plain, better)]
    assert 0 < gaps[1] < 0.8 * gaps[0]
