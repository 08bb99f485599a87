"""A tiny random model in two sets of weights, and the questions that every form of the engine must answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.sampler.environment import environment

VOCAB, END, TEMPERATURE = 61, 1, 0.7


@dataclass
class Setup:
    config: Config
    engine: Any
    models: list[Any]
    """Two transformers models of the same shape; the engine starts with the first."""
    folder: Path

    def tensors(self, index: int) -> Mapping[str, Any]:
        return {name: p.detach().clone() for name, p in self.models[index].named_parameters()}

    def apply(self, index: int, version: Any, recompute_kv: bool = False) -> float:
        seconds: float = self.engine.apply_weights(self.tensors(index), version, recompute_kv=recompute_kv)
        return seconds

    def logprobs(self, index: int, ids: list[int], temperature: float) -> Any:
        """[T - 1] of transformers, of every token after the first."""
        import torch

        with torch.no_grad():
            logits = self.models[index](torch.tensor([ids])).logits[0] / temperature
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].float().numpy()


PROBE_SEQUENCES = [[0, *range(2 + i, 42 + i)] for i in range(4)]


def fingerprints(model: Any) -> tuple[Any, ...]:
    """What the modules of a transformers model give out on the starts of the probe."""
    import torch

    from stream_grpo.weights.fingerprint import Recorder, decoder_modules, starts

    rows = starts(PROBE_SEQUENCES)
    with Recorder(decoder_modules(model)) as recorder, torch.no_grad():
        model(torch.tensor(rows))
    return recorder.take([len(row) for row in rows])


def published(setup: Setup, index: int, step: int) -> Any:
    """The weights of model `index` as the learner publishes them."""
    from stream_grpo.weights.manifest import Manifest, Probe
    from stream_grpo.weights.subscriber import Published

    logprobs = tuple(tuple(setup.logprobs(index, ids, 1.0).tolist()) for ids in PROBE_SEQUENCES)
    probe = Probe(tuple(map(tuple, PROBE_SEQUENCES)), logprobs, fingerprints(setup.models[index]))
    manifest = Manifest(version=version(step), forks={}, tensors={}, sha256="", probe=probe, created_at_s=0.0)
    return Published(manifest, setup.tensors(index))


def tiny_models(folder: Path, **sampler: Any) -> tuple[Config, list[Any]]:
    """Two transformers models of one shape, the first of them in `folder`, and a run on that folder."""
    tree = {
        "model": {"path": str(folder), "max_length_tokens": 128},
        "sampler": {
            "temperature": TEMPERATURE,
            "max_num_seqs": 16,
            "group_size": 2,
            "max_new_tokens": 40,
            "kv_cache_bytes": 32 << 20,
            **sampler,
        },
    }
    config = parse(tree, source="test")
    os.environ.update(environment(config))
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=END,
        # Peaked logits: errors of a stale layer are large, and temperature matters.
        initializer_range=0.3,
        attn_implementation="eager",
    )
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(shape).eval())
    models[0].save_pretrained(folder)
    vocab = {"<s>": 0, "</s>": END} | {f"t{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(WordLevel(vocab, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return config, models


@contextmanager
def engine_on(config: Config, models: list[Any], folder: Path) -> Iterator[Setup]:
    """The engine of a run on what `tiny_models` has made."""
    from stream_grpo.sampler.engines import make_engine

    engine = make_engine(config)
    try:
        yield Setup(config, engine, models, folder)
    finally:
        engine.close()


@contextmanager
def tiny_engine(folder: Path, **sampler: Any) -> Iterator[Setup]:
    """Both at once."""
    config, models = tiny_models(folder, **sampler)
    with engine_on(config, models, folder) as made:
        yield made


def request(name: str, seed: int = 0, prompt: tuple[int, ...] = (0, 5, 9, 11), num_tokens: int = 40) -> Any:
    from stream_grpo.types import GenerationRequest

    return GenerationRequest(request_id=name, prompt_ids=prompt, seed=seed, max_new_tokens=num_tokens)


def version(step: int) -> Any:
    from stream_grpo.types import PolicyVersion

    return PolicyVersion(0, step)


def run(setup: Setup, *requests: Any) -> dict[str, Any]:
    from stream_grpo.sampler.generation import generate

    return {g.request_id: g for g in generate(setup.engine, requests)}


def assert_logprobs(setup: Setup, index: int, prompt: tuple[int, ...], generation: Any, start: int, stop: int) -> None:
    """Tokens [start, stop) of a response have the logprobs that model `index` gives them, at the temperature."""
    expected = setup.logprobs(index, [*prompt, *generation.token_ids.tolist()], TEMPERATURE)[len(prompt) - 1 :]
    assert generation.logprobs[start:stop] == pytest.approx(expected[start:stop], abs=1e-4)


def seeds_that_run_long(setup: Setup, num: int) -> list[int]:
    """Seeds whose responses reach the length limit under the first model."""
    setup.apply(0, version(0))
    done = run(setup, *(request(f"s/{seed}", seed=seed) for seed in range(60)))
    seeds = [seed for seed in range(60) if len(done[f"s/{seed}"].token_ids) == 40]
    assert len(seeds) >= num
    return seeds[:num]


def probe_gap(setup: Setup, index: int) -> float:
    mine = setup.engine.prompt_logprobs(PROBE_SEQUENCES)
    learners = [setup.logprobs(index, ids, 1.0) for ids in PROBE_SEQUENCES]
    return max(abs(a - b) for m, x in zip(mine, learners, strict=True) for a, b in zip(m, x, strict=True))


def adapter_of(setup: Setup) -> tuple[dict[str, Any], Setup]:
    """An adapter of rank 2, times 1.5, in two layers of the model folder, and what the first model is with it."""
    import copy

    import torch

    torch.manual_seed(3)
    model = copy.deepcopy(setup.models[0])
    adapter: dict[str, Any] = {}
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = model.get_submodule(layer).weight
        a, b = 0.3 * torch.randn(2, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], 2)
        adapter |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        with torch.no_grad():
            weight += 1.5 * b @ a
    return adapter, Setup(setup.config, setup.engine, [model], setup.folder)
