"""What a run needs of memory, on paper: weights, gradients, optimizer, activations, KV cache. Pure but for headers.

P parameters, R ranks, L layers, h hidden size, T tokens of a microbatch, V vocabulary. Bytes of a rank after the ZeRO
paper (Rajbhandari et al., 2020, section 3), activations after Korthikanti et al. (2022, sections 4 and 5) without
attention scores, which fused attention does not keep. An estimate: allocators, buffers and the libraries come on top.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_grpo.config import Config
from stream_grpo.config_lora import Lora, layer_of
from stream_grpo.model_folder import model_config, vocab_size

BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 12
"""Of a parameter under ZeRO: fp32 weights, and the two means of Adam."""
PLAIN_ADAM_BYTES = 8
"""The same without ZeRO in fp32, whose weights are their own master."""
LAYER_HALFWORDS = 17
"""Numbers kept for the backward pass by a layer for one token, in units of h: 34 bytes at two bytes each."""
LOGIT_COPIES = 3
"""Of [T, V] in fp32 at once, as far as these exist: logits, their softmax, their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model, as its folder says."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int


def shape_of(folder: Path) -> Shape | None:
    """Of a Hugging Face folder, by config.json and headers; None where they do not say. Raises ConfigError."""
    plain = model_config(folder)
    text: Mapping[str, Any] = plain["text_config"] if isinstance(plain.get("text_config"), Mapping) else plain
    try:
        layers, hidden, heads = (
            int(text[name]) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        parameters = sum(_num_parameters(path) for path in sorted(folder.glob("*.safetensors")))
    except (KeyError, TypeError, ValueError, OSError, struct.error):
        return None
    return Shape(
        num_parameters=parameters,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_size=int(text.get("head_dim") or hidden // heads),
        vocab_size=vocab_size(plain) or 0,
    )


def _num_parameters(path: Path) -> int:
    return sum(math.prod(shape) for shape in _shapes(path).values())


def _shapes(path: Path) -> dict[str, list[int]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: entry["shape"] for name, entry in header.items()}


def adapter_parameters(folder: Path, lora: Lora) -> int:
    """Of an adapter: rank x (in + out) of every matrix that gets one; 0 without."""
    if not lora.rank:
        return 0
    shapes = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _shapes(path).items()}
    sides = 0
    for name, shape in shapes.items():
        layer = layer_of(name, shape)
        if layer is not None and (layer in lora.target_modules or not lora.target_modules):
            sides += sum(shape)
    return lora.rank * sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Bytes of one rank of the learner."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    reference: int
    critic: int
    """With its gradients and optimizer."""

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.reference + self.critic


def rank_bytes(
    shape: Shape,
    *,
    dtype_bytes: int,
    num_ranks: int,
    zero_stage: int,
    num_tokens: int,
    has_reference: bool,
    has_critic: bool = False,
    logits_bytes: int | None = None,
    recomputes: bool = False,
    num_adapted: int = 0,
) -> Rank:
    """What a rank holds in a step with microbatches of `num_tokens`. A critic is of one rank, and as large as P.

    `logits_bytes`: of the logits that exist at once; None: all. `recomputes`: of each layer the input alone is kept,
    and one layer at a time is computed again. With `num_adapted` parameters of an adapter these alone have gradients
    and an optimizer, and the reference is there.
    """
    parameters = shape.num_parameters + num_adapted
    trained = num_adapted or parameters

    def cut(number: int, from_stage: int) -> int:
        return math.ceil(number / num_ranks) if zero_stage >= from_stage else number

    master = PLAIN_ADAM_BYTES if zero_stage == 0 and dtype_bytes == 4 else MASTER_BYTES
    token = shape.hidden_size * dtype_bytes
    layers = token * (shape.num_layers + LAYER_HALFWORDS if recomputes else shape.num_layers * LAYER_HALFWORDS)
    logits = num_tokens * 4 * shape.vocab_size
    return Rank(
        weights=cut(dtype_bytes * parameters, 3),
        gradients=cut(dtype_bytes * trained, 2),
        optimizer=cut(master * trained, 1),
        activations=num_tokens * layers
        + LOGIT_COPIES * (logits if logits_bytes is None else min(logits, max(logits_bytes, 4 * shape.vocab_size))),
        reference=dtype_bytes * parameters if has_reference and not num_adapted else 0,
        critic=(2 * dtype_bytes + master) * parameters if has_critic else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSize:
    """Bytes of one sampler; of one of its workers where it has several."""

    weights: int
    cache: int | None
    """For KV; None on a GPU whose memory is not known."""
    token: int
    """Of the KV cache, for one token."""

    @property
    def num_tokens(self) -> int | None:
        """That the cache holds."""
        return None if self.cache is None else max(0, self.cache) // self.token


def sampler_size(config: Config, shape: Shape) -> SamplerSize:
    """What one worker of a sampler holds."""
    workers, size = config.sampler.tensor_parallel_size, BYTES[config.model.dtype]
    weights = math.ceil(size * shape.num_parameters / workers)
    cache: int | None = config.sampler.kv_cache_bytes
    if config.sampler.num_gpus:
        memory = config.cluster.gpu_memory_bytes
        cache = None if memory is None else int(config.sampler.gpu_memory_utilization * memory) - weights
    kv_heads = math.ceil(shape.num_kv_heads / workers)
    return SamplerSize(weights=weights, cache=cache, token=2 * shape.num_layers * kv_heads * shape.head_size * size)


def learner_rank(config: Config, shape: Shape) -> Rank:
    """What one rank of this run's learner holds."""
    learner = config.learner
    return rank_bytes(
        shape,
        dtype_bytes=BYTES[config.model.dtype],
        num_ranks=learner.num_ranks,
        zero_stage=learner.zero_stage,
        num_tokens=max(learner.microbatch_tokens, config.model.max_length_tokens),
        has_reference=config.algo.kl_reference in ("fixed", "refreshed", "ema"),
        has_critic=config.algo.has_critic,
        logits_bytes=learner.logits_bytes,
        recomputes=learner.activation_checkpointing,
        num_adapted=adapter_parameters(config.model.path, learner.lora),
    )


def impossible(config: Config, shape: Shape) -> Iterator[str]:
    """What cannot fit, whatever the run does: the setting, the sizes, what would be right."""
    sampler, size, rank = config.sampler, sampler_size(config, shape), learner_rank(config, shape)
    longest, workers = config.model.max_length_tokens, sampler.tensor_parallel_size
    if shape.num_heads % workers:
        yield (
            f"sampler.tensor_parallel_size = {workers}: does not divide the {shape.num_heads} attention heads of the "
            f"model; use a divisor"
        )
    memory = config.cluster.gpu_memory_bytes
    if size.num_tokens is not None and size.num_tokens < longest:
        name = "cluster.gpu_memory_bytes" if sampler.num_gpus else "sampler.kv_cache_bytes"
        value = memory if sampler.num_gpus else sampler.kv_cache_bytes
        yield (
            f"{name} = {value}: a sampler's weights of {mib(size.weights)} leave a KV cache of "
            f"{mib(max(0, size.cache or 0))}, one sequence of model.max_length_tokens = {longest} needs "
            f"{mib(longest * size.token)}; use more workers or memory, or shorter sequences"
        )
    share = 1.0 if not config.cluster.colocate else 1 - sampler.gpu_memory_utilization
    if config.learner.num_gpus and memory is not None and rank.total > share * memory:
        yield (
            f"cluster.gpu_memory_bytes = {memory}: a rank of the learner needs about {mib(rank.total)} ({_named(rank)})"
            f", {mib(int(share * memory))} are its own; lower learner.microbatch_tokens = "
            f"{config.learner.microbatch_tokens}, set learner.activation_checkpointing, or use a smaller model"
        )
    yield from _machine_complaints(config, size, rank)


def _machine_complaints(config: Config, size: SamplerSize, rank: Rank) -> Iterator[str]:
    """On one machine without GPUs all of it is this machine's memory; activations may be less than their bound."""
    if config.cluster.address is not None or config.sampler.num_gpus or config.learner.num_gpus:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    each, ranks = size.weights + (size.cache or 0), config.learner.num_ranks * (rank.total - rank.activations)
    if config.sampler.num_samplers * each + ranks > memory:
        yield (
            f"sampler.num_samplers = {config.sampler.num_samplers}: with weights of {mib(size.weights)} and "
            f"sampler.kv_cache_bytes = {mib(size.cache or 0)} they need {mib(config.sampler.num_samplers * each)}, "
            f"beside {mib(ranks)} of learner.num_ranks = {config.learner.num_ranks}; this machine has "
            f"{memory >> 20} MiB; use num_samplers = {max(1, (memory - ranks) // each)} or less, or smaller caches"
        )


def sentences(config: Config, shape: Shape) -> Iterator[str]:
    """The estimate by device, a line a role."""
    size, rank = sampler_size(config, shape), learner_rank(config, shape)
    device = "GPU" if config.sampler.num_gpus else "process"
    cache = "what is left of the GPU" if size.cache is None else mib(size.cache)
    holds = "" if size.num_tokens is None else f", {size.num_tokens} tokens"
    yield f"model: {shape.num_parameters / 1e6:.4g} million parameters, {config.model.dtype}"
    if num_adapted := adapter_parameters(config.model.path, config.learner.lora):
        size_of = mib(BYTES[config.model.dtype] * num_adapted)
        yield f"adapter: {num_adapted / 1e6:.4g} million parameters, {size_of} a publish"
    yield f"a sampler's {device}: weights {mib(size.weights)}, KV {cache} ({size.token} bytes a token{holds})"
    yield f"a learner's {'GPU' if config.learner.num_gpus else 'process'}: {mib(rank.total)} = {_named(rank)}"


def _named(rank: Rank) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "reference", "critic")
    return " + ".join(f"{name} {mib(getattr(rank, name))}" for name in names if getattr(rank, name))


def mib(number: int) -> str:
    """Bytes for people."""
    return f"{number / 2**30:.1f} GiB" if number >= 10 * 2**30 else f"{number / 2**20:.1f} MiB"
