"""A model that cannot do what `[learner]` asks is refused by its config.json alone, in the words of the engine."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
)

from stream_grpo.config_learner import Learner
from stream_grpo.config_lora import Lora
from stream_grpo.errors import ConfigError
from stream_grpo.learner.fit import check_fit
from stream_grpo.learner.lora import LoraModel
from stream_grpo.learner.recompute import recompute_activations

LLAMA = LlamaConfig(
    vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, architectures=["LlamaForCausalLM"],
)  # fmt: skip
# Its projections are of a class of its own, Conv1D, whose weights have two dimensions as those of a Linear.
GPT2 = GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=4, architectures=["GPT2LMHeadModel"])
# Its layers know of no computing again.
GPT1 = OpenAIGPTConfig(vocab_size=11, n_embd=16, n_layer=2, n_head=4, architectures=["OpenAIGPTLMHeadModel"])


def lora(*targets: str) -> Learner:
    return Learner(lora=Lora(rank=2, target_modules=targets))


RECOMPUTED = Learner(activation_checkpointing=True)


@pytest.mark.parametrize(
    ("config", "learner"),
    [
        (LLAMA, lora()),
        (LLAMA, lora("q_proj", "down_proj")),
        (LLAMA, RECOMPUTED),
        (GPT2, RECOMPUTED),
        (LLAMA, Learner(lora=Lora(rank=2), activation_checkpointing=True)),
    ],
)
def test_a_model_that_can_is_taken_without_its_weights(
    tmp_path: Path, config: PretrainedConfig, learner: Learner
) -> None:
    config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    check_fit(tmp_path, learner)


@pytest.mark.parametrize(
    ("config", "learner", "reason"),
    [
        (GPT1, RECOMPUTED, "activation_checkpointing = true: the layers of OpenAIGPTLMHeadModel cannot be computed"),
        (GPT2, lora("c_attn"), "target_modules: transformer.h.0.attn.c_attn is a Conv1D, the head or no linear layer"),
        (GPT2, lora(), "is a Conv1D, the head or no linear layer"),
        (LLAMA, lora("zproj"), "learner.lora.target_modules = ['zproj']: Target modules"),
        (LLAMA, lora("embed_tokens"), "target_modules: model.embed_tokens is a Embedding"),
    ],
)
def test_a_model_that_cannot_is_refused_as_the_engine_would(
    tmp_path: Path, config: PretrainedConfig, learner: Learner, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        check_fit(tmp_path, learner)
    # What the engine does to a model that has its weights.
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    does = (
        partial(LoraModel, model, learner.lora, tmp_path)
        if learner.lora.rank
        else partial(recompute_activations, model)
    )
    with pytest.raises(ConfigError) as expected:
        does()
    assert str(refused.value) == str(expected.value)


def test_a_folder_of_no_language_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    with pytest.raises(ConfigError, match=r"transformers makes no causal language model of its config\.json: ValueErr"):
        check_fit(tmp_path, RECOMPUTED)
