"""Fingerprints: small, the same for both engines' ways of giving out hidden states, and naming what departs first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stream_grpo.weights.fingerprint import (
    NUM_SEQUENCES,
    NUM_TOKENS,
    Recorder,
    decoder_modules,
    explain,
    relative_gaps,
    starts,
)
from stream_grpo.weights.manifest import Fingerprint

VOCAB, HIDDEN, NUM_LAYERS = 11, 8, 3
IDS = [[1, 5, 2, 7], [3, 3, 9]]


class Layer(nn.Module):
    """x + W x; with `fused` the addition is left to the next module, which does it in place, as vLLM's layers do."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.linear, self._fused = nn.Linear(HIDDEN, HIDDEN), fused

    def forward(self, states: Tensor, residual: Tensor | None = None) -> Any:
        if not self._fused:
            return states + self.linear(states)
        residual = states if residual is None else residual.add_(states)
        return self.linear(residual), residual


class Norm(nn.Module):
    """The last addition, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, states: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return states * self.weight
        residual.add_(states)
        return residual * self.weight, residual


class Processor(nn.Module):
    """vLLM's head is an argument."""

    def forward(self, head: nn.Linear, states: Tensor) -> Tensor:
        return nn.functional.linear(states, head.weight)


class Decoder(nn.Module):
    """A decoder with the usual names, in the way of Hugging Face, or `fused` and flat in the way of vLLM."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.model.layers = nn.ModuleList(Layer(fused) for _ in range(NUM_LAYERS))
        self.model.norm = Norm()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if fused:
            self.logits_processor = Processor()
        self._fused = fused

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = (self.model.embed_tokens(ids),)
        for layer in self.model.layers:  # type: ignore[union-attr]
            output = layer(*parts)
            parts = output if self._fused else (output,)
        states = self.model.norm(*parts)
        if not self._fused:
            return self.lm_head(states)
        # vLLM has no logits for the last token of a prompt.
        return self.logits_processor(self.lm_head, states[0][:-1])


@pytest.fixture
def learner() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def like(learner: Decoder, fused: bool = True) -> Decoder:
    model = Decoder(fused)
    model.load_state_dict(learner.state_dict())
    return model


def of_learner(model: Decoder) -> tuple[Fingerprint, ...]:
    """All sequences in one padded batch."""
    padded = torch.tensor([ids + [0] * (4 - len(ids)) for ids in IDS])
    with Recorder(decoder_modules(model)) as recorder:
        model(padded)
    return recorder.take([len(ids) for ids in IDS])


def of_sampler(model: Decoder) -> tuple[Fingerprint, ...]:
    """One sequence after the other, without an axis of sequences."""
    found: list[Fingerprint] = []
    with Recorder(decoder_modules(model)) as recorder:
        for ids in IDS:
            model(torch.tensor(ids))
            found += recorder.take([len(ids)])
    return tuple(found)


def test_both_ways_of_the_same_weights_agree_in_every_module(learner: Decoder) -> None:
    gaps = relative_gaps(of_sampler(like(learner)), of_learner(learner))
    assert list(gaps) == ["embedding", "layer 0", "layer 1", "layer 2", "final norm", "head"]
    assert max(gaps.values()) < 1e-6


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("model.embed_tokens", "embedding"),
        ("model.layers.0.linear", "layer 0"),
        ("model.layers.2.linear", "layer 2"),
        ("model.norm", "final norm"),
        ("lm_head", "head"),
    ],
)
def test_the_first_module_with_other_weights_is_named(learner: Decoder, module: str, name: str) -> None:
    model = like(learner)
    with torch.no_grad():
        model.get_submodule(module).weight[1:4] += 0.3  # type: ignore[operator, union-attr]
    sentence = explain(of_sampler(model), of_learner(learner), "float32")
    assert sentence.startswith(f"the first module that departs is the {name}, by 0.")
    gaps = relative_gaps(of_sampler(model), of_learner(learner))
    before = list(gaps)[: list(gaps).index(name)]
    assert all(gaps[earlier] < 1e-6 for earlier in before)


def test_the_gap_estimates_that_of_the_whole_output() -> None:
    # |x - x'| / |x| of 400 tokens is 0.05 by construction; the root mean square of the estimates is near it.
    rng = np.random.default_rng(0)
    x_TH = torch.from_numpy(rng.normal(size=(400, 64)).astype(np.float32))
    noise_TH = torch.from_numpy(rng.normal(size=(400, 64)).astype(np.float32))
    other_TH = x_TH + 0.05 * noise_TH * x_TH.norm(dim=-1, keepdim=True) / noise_TH.norm(dim=-1, keepdim=True)
    identity = nn.Identity()
    with Recorder({"embedding": identity}) as recorder:
        single = []
        for states in (x_TH, other_TH):
            identity(states)
            (fingerprint,) = recorder.take([400])
            single.append(np.frombuffer(fingerprint["embedding"], np.float32).reshape(400, 4))
    assert single[0][:, 0] == pytest.approx(x_TH.norm(dim=-1).numpy(), rel=1e-5)
    estimates_T = np.sqrt(np.mean(np.square(single[0][:, 1:] - single[1][:, 1:]), axis=-1)) / single[0][:, 0]
    # E p^2 = |x|^2; the mean of 1200 squares has a relative standard error of sqrt(2 / 1200) = 4 %.
    assert np.sqrt(np.mean(np.square(estimates_T))) == pytest.approx(0.05, rel=0.1)


def test_a_number_that_is_not_finite_departs(learner: Decoder) -> None:
    model = like(learner)
    with torch.no_grad():
        model.model.layers[1].linear.bias[0] = torch.nan  # type: ignore[index, union-attr]
    assert "is the layer 1, by inf" in explain(of_sampler(model), of_learner(learner), "float32")


def test_small_gaps_alone_name_the_largest(learner: Decoder) -> None:
    model = like(learner)
    with torch.no_grad():
        model.model.norm.weight *= 1 + 3e-5  # type: ignore[union-attr]
    sentence = explain(of_sampler(model), of_learner(learner), "float32")
    assert sentence.startswith("no module departs by more than 0.0001 of its output; most does the ")
    # The embedding and the layers agree to 1e-6, the norm and the head behind it are 3e-5 off.
    assert "final norm" in sentence or "head" in sentence


def test_a_model_with_other_names_has_none_and_that_is_said(learner: Decoder) -> None:
    assert decoder_modules(nn.Linear(2, 2)) == {}
    found = of_learner(learner)
    assert "the sampler has no embed_tokens" in explain((), found, "float32")
    assert "the sampler has no embed_tokens" in explain(({}, {}), found, "float32")
    assert "the learner has no embed_tokens" in explain(found, (), "float32")


def test_a_module_that_did_not_run_leaves_no_fingerprint(learner: Decoder) -> None:
    with Recorder(decoder_modules(learner)) as recorder:
        learner.model.embed_tokens(torch.tensor([1]))  # type: ignore[operator, union-attr]
    assert recorder.take([1]) == ({},)


def test_a_closed_recorder_has_left_the_model_alone(learner: Decoder) -> None:
    with Recorder(decoder_modules(learner)):
        pass
    assert all(not module._forward_hooks for module in learner.modules())


def test_a_publish_grows_by_kilobytes(learner: Decoder) -> None:
    rows = starts([[1] * 500] * 9)
    assert [len(row) for row in rows] == [NUM_TOKENS] * NUM_SEQUENCES
    with Recorder(decoder_modules(learner)) as recorder:
        learner(torch.tensor(rows))
    found = recorder.take([NUM_TOKENS] * NUM_SEQUENCES)
    # 4 sequences x 32 tokens x (norm + 3 projections) x 4 bytes = 2 KiB a module, whatever its width.
    assert [sum(len(modules[name]) for modules in found) for name in found[0]] == [2048] * (NUM_LAYERS + 3)
