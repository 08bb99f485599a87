"""What a run needs of memory, on paper, and what is refused because it cannot fit."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.config_lora import Lora
from stream_grpo.sizes import (
    Shape,
    adapter_parameters,
    impossible,
    learner_rank,
    rank_bytes,
    sampler_size,
    sentences,
    shape_of,
)

# 7.5e9 parameters are the example of the ZeRO paper.
LARGE = Shape(
    num_parameters=7_500_000_000,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=128_000,
)


def config(**sections: dict[str, Any]) -> Config:
    tree = {"model": {"path": "m", "dtype": "bfloat16", "max_length_tokens": 4096}, **sections}
    return parse(tree, "test")


# Figure 1 of the ZeRO paper: 120, 31.4, 16.6 and 1.9 GB a device for 7.5e9 parameters on 64 devices.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_a_rank_holds_what_the_zero_paper_says(stage: int, gigabytes: float) -> None:
    rank = rank_bytes(LARGE, dtype_bytes=2, num_ranks=64, zero_stage=stage, num_tokens=0, has_reference=False)
    assert rank.total / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert rank.activations == 0


def test_activations_are_those_of_korthikanti_and_the_logits() -> None:
    rank = rank_bytes(LARGE, dtype_bytes=2, num_ranks=1, zero_stage=0, num_tokens=10, has_reference=True)
    # 34 bytes x hidden size a layer, and three copies of the logits in fp32, for each of 10 tokens.
    assert rank.activations == 10 * (34 * 4096 * 32 + 3 * 4 * 128_000)
    assert rank.reference == 2 * 7_500_000_000


def test_logits_are_no_more_than_exist_at_once() -> None:
    def activations(**settings: Any) -> int:
        shape = {"dtype_bytes": 2, "num_ranks": 1, "zero_stage": 0, "num_tokens": 1000, "has_reference": False}
        return rank_bytes(LARGE, **(shape | settings)).activations

    layers = 1000 * 34 * 4096 * 32
    # 1,000 positions of 4 x 128,000 bytes are 512 MB; 1 MiB holds two; a bound below one position is one.
    assert activations(logits_bytes=600_000_000) == layers + 3 * 512_000_000 == activations()
    assert activations(logits_bytes=1 << 20) == layers + 3 * (1 << 20)
    assert activations(logits_bytes=1) == layers + 3 * 512_000
    # The input of 32 layers, 2 x 4096 bytes a token, and one layer whole, 34 x 4096.
    assert activations(logits_bytes=1, recomputes=True) == 1000 * 4096 * (2 * 32 + 34) + 3 * 512_000


def test_settings_of_memory_count() -> None:
    learner = {"microbatch_tokens": 8192, "logits_bytes": 1 << 20}
    whole, cut, again = (
        learner_rank(config(learner=settings), LARGE).activations
        for settings in (learner | {"logits_bytes": 1 << 40}, learner, learner | {"activation_checkpointing": True})
    )
    assert whole - cut == 3 * (8192 * 4 * 128_000 - (1 << 20))
    assert cut - again == 8192 * 4096 * 2 * (17 * 32 - 32 - 17)


def test_without_zero_in_fp32_the_weights_are_their_own_master() -> None:
    rank = rank_bytes(LARGE, dtype_bytes=4, num_ranks=1, zero_stage=0, num_tokens=0, has_reference=False)
    assert rank.total == (4 + 4 + 8) * 7_500_000_000


def test_a_critic_is_a_second_model_with_gradients_and_optimizer() -> None:
    with_critic, without = (learner_rank(config(algo={"preset": name}), LARGE) for name in ("ppo", "grpo"))
    # Stage 1 on one rank in bfloat16: 2 bytes of weights, 2 of gradients, 12 of master and Adam, a parameter.
    assert with_critic.critic == (2 + 2 + 12) * 7_500_000_000
    assert without.critic == 0
    assert with_critic.total - with_critic.critic == without.total - without.reference + with_critic.reference
    assert "critic 111.8 GiB" in "\n".join(sentences(config(algo={"preset": "ppo"}), LARGE))


def test_an_adapter_alone_has_gradients_and_an_optimizer_and_no_second_model_beside_it(tmp_path: Path) -> None:
    write_header(tmp_path, {"a.q_proj.weight": [4, 6], "a.norm.weight": [6], "embed_tokens.weight": [9, 6]})
    lora = Lora(rank=3)
    # The one matrix that is neither embedding nor head: 3 x (4 + 6).
    assert adapter_parameters(tmp_path, lora) == 30
    assert adapter_parameters(tmp_path, Lora(rank=3, target_modules=("k_proj",))) == 0
    assert adapter_parameters(tmp_path, Lora()) == 0
    settings: dict[str, Any] = {
        "dtype_bytes": 2, "num_ranks": 1, "zero_stage": 1, "num_tokens": 0, "has_reference": True, "num_adapted": 30
    }  # fmt: skip
    small = replace(LARGE, num_parameters=1000)
    rank = rank_bytes(small, **settings)
    # 1,030 weights of 2 bytes; of 30, gradients of 2 bytes, and 12 of master and Adam.
    assert (rank.weights, rank.gradients, rank.optimizer, rank.reference) == (2060, 60, 360, 0)
    of_run = config(model={"path": str(tmp_path), "max_length_tokens": 4096}, learner={"lora": lora.model_dump()})
    assert "adapter: 3e-05 million parameters, 0.0 MiB a publish" in list(sentences(of_run, small))


def write_header(folder: Path, shapes: dict[str, list[int]]) -> None:
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def test_a_token_of_the_cache_is_a_key_and_a_value_in_every_layer() -> None:
    on_gpus = {"num_gpus": 4, "tensor_parallel_size": 4, "engine": "async", "gpu_memory_utilization": 0.5}
    size = sampler_size(config(sampler=on_gpus, cluster={"gpu_memory_bytes": 80 << 30}), LARGE)
    # Each of 4 workers has 2 of 8 heads of 128 numbers of 2 bytes, in 32 layers, twice.
    assert size.token == 2 * 32 * 2 * 128 * 2
    assert size.weights == 2 * 7_500_000_000 // 4
    assert size.cache == (40 << 30) - size.weights
    assert size.num_tokens == size.cache // size.token
    unknown = sampler_size(config(sampler=on_gpus), LARGE)
    assert (unknown.cache, unknown.num_tokens) == (None, None)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {"sampler": {"tensor_parallel_size": 3, "engine": "async"}},
            "tensor_parallel_size = 3: does not divide the 32 attention heads",
        ),
        # One token is 2 x 32 x 8 x 128 x 2 bytes = 128 KiB, 4,096 of them are 512 MiB.
        (
            {"sampler": {"kv_cache_bytes": 256 << 20}},
            r"one sequence of model\.max_length_tokens = 4096 needs 512\.0 MiB",
        ),
        (
            {"sampler": {"num_gpus": 1}, "cluster": {"gpu_memory_bytes": 16 << 30}},
            r"cluster\.gpu_memory_bytes = 17179869184: a sampler's weights of 14\.0 GiB leave a KV cache of 0\.0 MiB",
        ),
        (
            {"learner": {"num_gpus": 1}, "sampler": {"num_gpus": 1}, "cluster": {"gpu_memory_bytes": 80 << 30}},
            r"a rank of the learner needs about \d+\.\d GiB \(weights 14\.0 GiB \+ gradients 14\.0 GiB \+ optimizer 83",
        ),
        (
            {"sampler": {"num_samplers": 4096}},
            r"num_samplers = 4096: with weights of 14.0 GiB .*this machine has \d+ MiB; use",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_true_reason(sections: dict[str, Any], reason: str) -> None:
    found = list(impossible(config(**sections), LARGE))
    assert found
    with pytest.raises(ValueError, match=reason):
        raise ValueError("\n".join(found))


def test_the_shape_is_read_from_the_folder(tmp_path: Path) -> None:
    plain = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 12}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, "__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(60))
    shape = shape_of(tmp_path)
    assert shape == Shape(
        num_parameters=15, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_size=16, vocab_size=12
    )
    small = config(model={"path": "m", "max_length_tokens": 128}, learner={"zero_stage": 0, "microbatch_tokens": 256})
    assert list(impossible(small, shape)) == []
    # 15 parameters: 60 bytes of weights, 60 of gradients, 120 of Adam.
    rank = learner_rank(small, shape)
    assert (rank.weights, rank.gradients, rank.optimizer) == (60, 60, 120)
    assert len(list(sentences(small, shape))) == 3
    (tmp_path / "config.json").write_text("{}")
    assert shape_of(tmp_path) is None
