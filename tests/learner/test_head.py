"""Logprobs, entropy and gradients from logits of a few positions at a time are those of all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from stream_grpo.learner.batching import Scored, make_train_batch
from stream_grpo.learner.first_pass import Tensors, tensors_of
from stream_grpo.learner.forward import PLAIN, Distribution, LanguageModel, Targets
from stream_grpo.learner.head import can_be_asked, with_fp32_head
from stream_grpo.learner.reference import Reference
from stream_grpo.learner.trials import gives_out_unchanged
from tests.learner.conftest import make_group, make_rollout

VOCAB, PIECE = 37, 8
CPU = torch.device("cpu")


def gpt2(*, tied: bool) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=2, n_head=2, n_positions=64, tie_word_embeddings=tied)
    )


def llama(*, tied: bool) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_bias(*, tied: bool) -> Any:
    """A head with a bias, which has a gradient of its own."""
    model = llama(tied=tied)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    return model


def seeded(make: Callable[..., Any], *, tied: bool) -> Any:
    torch.manual_seed(1)
    model = make(tied=tied).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # of a fresh model all logprobs are about the same
    return model


def asked_of(max_positions: int | None, model: Any) -> LanguageModel:
    return LanguageModel(call=model, module=model, dtype=torch.float64, max_positions=max_positions)


def drawn(*, attention_cost: float | None) -> Tensors:
    """Two groups: 6 sequences, 41 tokens to train on, more padding than one piece."""
    rng = np.random.default_rng(0)
    groups = [
        make_group(
            name,
            [make_rollout(prompt, rng.integers(1, VOCAB, n).tolist(), float(i)) for i, n in enumerate(lengths)],
        )
        for name, prompt, lengths in (("a", [3, 1, 4, 1, 5], (7, 2, 9)), ("b", [9, 2], (12, 8, 3)))
    ]
    (microbatch,) = (
        make_train_batch(
            groups, lambda r, v, *_: Scored(np.nan_to_num(r), v), vocab_size=VOCAB, microbatch_tokens=1000,
            attention_cost=attention_cost,
        )
        .minibatches[0]
        .microbatches
    )  # fmt: skip
    tensors = tensors_of(microbatch, CPU)
    assert (tensors.shared is None) == (attention_cost is None)
    assert int(tensors.mask_BK.sum()) == 41
    return tensors


def figures_of(
    model: LanguageModel,
    distribution: Distribution,
    tensors: Tensors,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logprobs and entropy of the wanted tokens, and the gradient of a mean of them that weighs each differently."""
    entropy: Any = "gradient" if entropy_gradient else "value"
    logprobs_BK, entropy_BK = model.logprobs(distribution, tensors.targets, entropy=entropy)
    assert entropy_BK.requires_grad == entropy_gradient
    logprobs, entropies = logprobs_BK[tensors.mask_BK], entropy_BK[tensors.mask_BK]
    # Outside the support of a filter a logprob is -inf, and learns nothing.
    finite = torch.where(logprobs.isfinite(), logprobs, 0.0)
    weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
    model.module.zero_grad(set_to_none=True)
    torch.autograd.backward((finite * weights + entropies * weights**2).sum())
    gradients = {name: weight.grad.clone() for name, weight in model.module.named_parameters()}
    return logprobs.detach(), entropies.detach(), gradients


def gap(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest, as a share of the largest gradient."""
    assert one.keys() == other.keys()
    largest = max(float(gradient.abs().max()) for gradient in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


@pytest.mark.parametrize("make", [gpt2, llama, with_bias])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention_cost", [None, 0.0], ids=["rows of their own", "shared prompts"])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_pieces_give_what_the_whole_gives(
    make: Callable[..., Any], tied: bool, attention_cost: float | None, entropy_gradient: bool
) -> None:
    model, tensors = seeded(make, tied=tied), drawn(attention_cost=attention_cost)
    for distribution in (
        Distribution(temperature=0.7),
        Distribution(temperature=1.0, top_p=0.8),
        Distribution(temperature=1.3, top_k=9),
        Distribution(temperature=1.0, min_p=0.05),
    ):
        whole = figures_of(asked_of(None, model), distribution, tensors, entropy_gradient=entropy_gradient)
        # 41 tokens in six pieces; in one that autograd keeps.
        for max_positions in (PIECE, 41):
            pieces = figures_of(
                asked_of(max_positions, model), distribution, tensors, entropy_gradient=entropy_gradient
            )
            assert torch.equal(pieces[0].isfinite(), whole[0].isfinite())
            finite = whole[0].isfinite()
            assert int(finite.sum()) > 3
            assert float((pieces[0] - whole[0])[finite].abs().max()) < 1e-12
            assert float((pieces[1] - whole[1]).abs().max()) < 1e-12
            assert gap(whole[2], pieces[2]) < 1e-12


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of how many positions the largest tensor is that has logits of each."""

    positions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCAB:
                self.positions = max(self.positions, tensor.numel() // VOCAB)
        return result


@pytest.mark.parametrize("distribution", [Distribution(temperature=0.7), Distribution(temperature=1.0, top_p=0.8)])
@pytest.mark.parametrize("attention_cost", [None, 0.0], ids=["rows of their own", "shared prompts"])
def test_no_tensor_ever_has_logits_of_more_positions(distribution: Distribution, attention_cost: float | None) -> None:
    # The head's weight, transposed for a product, has 8 rows of V as well: as many as a piece.
    model, tensors = seeded(llama, tied=True), drawn(attention_cost=attention_cost)
    seen = []
    for max_positions in (None, PIECE):
        # On this thread the backward pass runs too: on CPU autograd has no thread of its own.
        largest = Largest()  # type: ignore[no-untyped-call]
        with largest, torch.autograd.set_multithreading_enabled(False):
            figures_of(asked_of(max_positions, model), distribution, tensors, entropy_gradient=True)
        seen.append(largest.positions)
    assert seen[0] > 41
    assert seen[1] == PIECE


def test_a_microbatch_with_few_positions_is_computed_as_a_whole() -> None:
    model, tensors = seeded(gpt2, tied=True), drawn(attention_cost=None)
    num_positions = tensors.token_ids_BT.shape[0] * tensors.num_last
    whole, _ = asked_of(None, model).logprobs(PLAIN, tensors.targets)
    fits, _ = asked_of(num_positions, model).logprobs(PLAIN, tensors.targets)
    pieces, _ = asked_of(num_positions - 1, model).logprobs(PLAIN, tensors.targets)
    # Bit for bit, and also where nobody looks: there pieces have 0.
    assert torch.equal(whole, fits)
    assert bool((pieces[~tensors.mask_BK] == 0).all())
    assert not bool((whole[~tensors.mask_BK] == 0).all())


def test_without_a_mask_every_token_after_the_first_is_asked_for() -> None:
    model, ids = seeded(llama, tied=False), torch.arange(30).reshape(2, 15)
    whole, _ = asked_of(None, model).logprobs(PLAIN, Targets(ids, 15))
    pieces, entropy = asked_of(4, model).logprobs(PLAIN, Targets(ids, 15))
    assert float((whole - pieces).detach().abs().max()) < 1e-12
    assert not entropy.any()
    # Of sequences of one token there is nothing to tell.
    assert asked_of(1, model).logprobs(PLAIN, Targets(ids[:, :1], 1))[0].tolist() == [[0.0], [0.0]]


def test_a_mask_without_a_token_still_has_a_gradient() -> None:
    # With ZeRO 3 the other ranks wait for every backward pass.
    model, ids = seeded(llama, tied=False), torch.arange(30).reshape(2, 15)
    nobody = torch.zeros(2, 15, dtype=torch.bool)
    logprobs, _ = asked_of(4, model).logprobs(PLAIN, Targets(ids, 15, wanted_BK=nobody))
    torch.where(nobody, logprobs, 0.0).sum().backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


def test_a_head_in_float32_stays_one_in_pieces() -> None:
    torch.manual_seed(3)
    model = llama(tied=False).bfloat16().eval()
    with_fp32_head(model)
    tensors = drawn(attention_cost=None)
    found = {}
    for max_positions in (None, PIECE):
        asked = LanguageModel(call=model, module=model, dtype=torch.bfloat16, max_positions=max_positions)
        found[max_positions] = figures_of(asked, Distribution(temperature=0.7), tensors, entropy_gradient=True)
    whole, pieces = found.values()
    assert pieces[0].dtype == torch.float32
    # Products of float32 in another order; gradients are rounded to bfloat16 once, at the end.
    assert float((pieces[0] - whole[0]).abs().max()) < 1e-5
    head = "lm_head.weight"
    assert gap({head: whole[2][head]}, {head: pieces[2][head]}) < 2**-7
    # Asked or not, the head is as before.
    assert model.lm_head(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_reference_is_asked_in_pieces_too() -> None:
    model, tensors = seeded(llama, tied=True), drawn(attention_cost=None)
    reference = Reference(model, "fixed")
    whole = reference.logprobs(PLAIN, tensors.targets)
    reference.max_positions = PIECE
    with Largest() as largest:  # type: ignore[no-untyped-call]
        pieces = reference.logprobs(PLAIN, tensors.targets)
    assert largest.positions == PIECE
    assert float((whole - pieces)[tensors.mask_BK].abs().max()) < 1e-12


@contextmanager
def called(module: torch.nn.Module) -> Iterator[list[int]]:
    """Positions of each call of a module."""
    found: list[int] = []
    hook = module.register_forward_hook(lambda _, given, __: found.append(given[0][..., 0].numel()))
    yield found
    hook.remove()


def test_the_head_is_called_once_whatever_the_number_of_pieces() -> None:
    # ZeRO 3 gathers its weight at every call.
    model, tensors = seeded(llama, tied=False), drawn(attention_cost=None)
    with called(model.lm_head) as calls:
        figures_of(asked_of(PIECE, model), PLAIN, tensors, entropy_gradient=False)
    assert calls == [tensors.token_ids_BT.shape[0] * tensors.num_last]


def gemma2() -> Any:
    """Bounds its logits by a tangent behind the head."""
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=64, final_logit_softcapping=30.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize(("make", "unchanged"), [(llama, True), (gpt2, True), (gemma2, False)])
def test_a_model_that_changes_its_logits_is_found_out(make: Callable[..., Any], unchanged: bool) -> None:
    settings: dict[str, bool] = {} if make is gemma2 else {"tied": True}
    model = make(**settings).eval()
    assert can_be_asked(model)
    asked = LanguageModel(call=model, module=model, dtype=torch.float32, max_positions=4)
    assert gives_out_unchanged(asked, CPU) == unchanged


def test_a_head_that_is_more_than_a_matrix_cannot_be_asked() -> None:
    class Adapted(torch.nn.Linear):
        """As an adapter would make it: its weight is not all of it."""

    model = llama(tied=False)
    model.lm_head = Adapted(8, VOCAB, bias=False)
    assert not can_be_asked(model)
