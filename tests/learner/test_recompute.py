"""Layers that are computed again in the backward pass: the same gradients, to the last bit, and less that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from stream_grpo.errors import ConfigError
from stream_grpo.learner.critic import ValueNet
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Distribution, LanguageModel
from stream_grpo.learner.recompute import recompute_activations
from tests.learner.test_packing import CPU, MIXED, groups_of, the_microbatch

VOCAB = 11


def gpt2() -> Any:
    """With dropout as it comes."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=4, n_positions=64))


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def opt() -> Any:
    """Its layers drop out themselves, and not by a module of their own."""
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, dropout=0.5, word_embed_proj_dim=16,
    )  # fmt: skip
    return OPTForCausalLM(config)


@contextmanager
def kept() -> Iterator[list[int]]:
    """Numbers that a forward pass keeps for the backward pass, outside of what is computed again."""
    found = [0]

    def note(tensor: Tensor) -> Tensor:
        found[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize(("make", "shares"), [(gpt2, False), (gpt2, True), (llama, False), (llama, True), (opt, False)])
def test_gradients_are_the_same_bit_for_bit(make: Callable[[], Any], shares: bool) -> None:
    """`shares`: with prompts shared and rows packed, which OPT's positions, made of its own mask, do not bear."""
    tensors = tensors_of(the_microbatch(groups_of(MIXED), share_prompts=shares, packing=shares), CPU)
    results = []
    for recomputes in (False, True):
        torch.manual_seed(1)
        model = make().eval()
        if recomputes:
            recompute_activations(model)
        calls: list[int] = []
        layer = next(m for m in model.modules() if type(m).__name__ in ("GPT2MLP", "LlamaMLP", "OPTAttention"))
        # Called, not done: recomputing ends at the last number that was missing.
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        asked = LanguageModel(call=model, module=model, dtype=torch.float32, max_positions=None)
        with kept() as numbers:
            logprobs, entropy = asked.logprobs(Distribution(temperature=0.7), tensors.targets, entropy="gradient")
        torch.autograd.backward(torch.where(tensors.mask_BK, logprobs - 0.1 * entropy, 0.0).sum())
        # The first layer runs once more.
        assert len(calls) == (2 if recomputes else 1)
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        results.append((logprobs.detach(), gradients, numbers[0]))
    plain, again = results
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in plain[1].items())
    assert again[2] < 0.5 * plain[2]


def test_a_critics_body_is_computed_again_too() -> None:
    ids, values, gradients = torch.arange(20).reshape(2, 10) % VOCAB, [], []
    for recomputes in (False, True):
        torch.manual_seed(1)
        net = ValueNet(llama().eval())
        with torch.no_grad():
            net.head.weight.normal_()
        if recomputes:
            recompute_activations(net.body)
        value = net(num_last=10, input_ids=ids)
        value.square().sum().backward()
        values.append(value.detach())
        gradients.append([weight.grad for weight in net.parameters()])
    assert torch.equal(values[0], values[1])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_model_whose_layers_do_not_know_how_is_refused() -> None:
    class Bare(torch.nn.Module):
        """No layers of transformers."""

        supports_gradient_checkpointing = True

    with pytest.raises(ConfigError, match="activation_checkpointing = true: the layers of Bare cannot be computed"):
        recompute_activations(Bare())
