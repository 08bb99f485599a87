"""Weights in bfloat16 with masters in float32: updates too small for bfloat16 add up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stream_grpo.algo.presets import PRESETS
from stream_grpo.config_learner import Learner
from stream_grpo.learner.forward import Distribution, Targets
from tests.learner.conftest import learner_engine

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine

pytestmark = pytest.mark.engine
RATE = 2.0**-12
"""Adam's first steps are as long as the learning rate. bfloat16 has a number every 2^-8 below 1 and every 2^-7 above,
so that a step from 1 is rounded away, and 12 of them are 0.75 of the smaller gap."""
STEPS = 12
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def engine_of(model_dir: Path, zero_stage: Any) -> LearnerEngine:
    learner = Learner(learning_rate=RATE, zero_stage=zero_stage, max_grad_norm=1e9)
    return learner_engine(
        model_dir, learner=learner, recipe=PRESETS["rloo"].recipe, dtype="bfloat16",
        distribution=Distribution(temperature=1.0), seed=0,
    )  # fmt: skip


def stepped(engine: LearnerEngine) -> None:
    """One update towards more likely tokens, always the same: every weight keeps its direction for a while."""
    ids = torch.arange(40).reshape(4, 10) % 32
    logprobs, _ = engine.logprobs(Targets(ids, 10))
    engine.backward(-logprobs.sum() / 36)
    engine.update(RATE)


def published(engine: LearnerEngine) -> Tensor:
    weight = dict(engine.named_weights())[NORM]
    assert weight.dtype == torch.bfloat16
    return weight.float()


def master(engine: LearnerEngine, zero_stage: int) -> Tensor:
    names = [name for name, _ in engine._module.named_parameters()]
    if zero_stage == 0:  # there DeepSpeed has a list of them, in the order of the parameters
        (masters,) = engine._engine.optimizer.fp32_groups
        found: Tensor = masters[names.index(NORM)].detach()
    else:
        from deepspeed.utils import safe_get_full_fp32_param

        found = safe_get_full_fp32_param(dict(engine._module.named_parameters())[NORM])
    assert found.dtype == torch.float32
    return found.clone()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_small_updates_add_up_in_the_master(model_dir: Path, process_group: None, zero_stage: Any) -> None:
    engine = engine_of(model_dir, zero_stage)
    assert torch.equal(published(engine), torch.ones(16))
    stepped(engine)
    # The weight is where it was; its master has moved by the learning rate.
    assert torch.equal(published(engine), torch.ones(16))
    # At stage 0 DeepSpeed has made a step without a gradient before, so that Adam takes this one for its second:
    # (0.1 / 0.19) / sqrt(0.01 / 0.0199) = 0.742 of the rate.
    length = RATE * (0.7425 if zero_stage == 0 else 1.0)
    assert torch.allclose((master(engine, zero_stage) - 1).abs(), torch.full((16,), length), rtol=0.01)
    for _ in range(STEPS - 1):
        stepped(engine)
    down = master(engine, zero_stage) < 1 - 2**-9
    assert int(down.sum()) >= 3
    # Beyond half of the gap they are rounded to the next number, and all published weights are the masters, rounded.
    assert torch.equal(published(engine)[down], torch.full((int(down.sum()),), 1 - 2**-8))
    assert torch.equal(published(engine), master(engine, zero_stage).bfloat16().float())


def test_without_a_master_they_would_be_lost(model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    ids = torch.arange(40).reshape(4, 10) % 32
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert torch.equal(dict(model.named_parameters())[NORM].detach().float(), torch.ones(16))
