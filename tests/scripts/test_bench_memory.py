"""The peak of scripts/bench_memory is that of what it looks at, and is lower where logits are made in pieces."""

from __future__ import annotations

import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.config_learner import Learner
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.forward import Distribution

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MIB = 2**20


def test_a_peak_is_of_what_came_since_it_was_reset() -> None:
    from bench_memory import reset_peak, status

    before = reset_peak()
    block = torch.ones(64 * MIB // 4)
    assert block.numel() == 16 * MIB
    del block
    assert 60 * MIB < status("VmHWM") - before < 80 * MIB
    before = reset_peak()
    assert status("VmHWM") - before < 8 * MIB


def measured_on(model_dir: Path) -> dict[str, dict[str, float]]:
    """All ways on a small model with many words, which is made there."""
    from bench_memory import measured

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32768, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(model_dir)
    learner = Learner(num_threads=1, microbatch_tokens=4096, zero_stage=0, logits_bytes=4 * MIB)
    engine = LearnerEngine(
        model_dir, learner=learner, recipe=PRESETS[DEFAULT].recipe, dtype="float32",
        distribution=Distribution(temperature=1.0), seed=0,
    )  # fmt: skip
    sizes = {"groups": 1, "group_size": 8, "prompt_tokens": 8, "response_tokens": 64, "microbatch_tokens": 4096}
    found = measured(engine, Namespace(**sizes, rounds=1))
    engine.close()
    return found


def test_logits_in_pieces_have_a_lower_peak_and_the_same_gradient(tmp_path: Path) -> None:
    # In a process of its own: in one that has grown before, memory that is free again hides a peak.
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        found = executor.submit(measured_on, tmp_path).result()
    whole, in_pieces = found["all logits"], found["in pieces"]
    # At least 8 sequences of 32 tokens: their logits alone are 256 x 32768 x 4 bytes = 32 MiB, of which pieces have 4.
    assert whole["peak_mib"] > 32
    assert in_pieces["memory"] < 0.6
    assert in_pieces["gradient_gap"] < 1e-5
    assert found["in pieces, layers again"]["gradient_gap"] < 1e-5
