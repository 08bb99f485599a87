"""What saves memory, on two ranks: logits in pieces, layers computed again and packed rows under ZeRO 2 and 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.crew import Crew
from stream_grpo.learner.ranks import ALONE, Ranks
from stream_grpo.learner.shares import shares
from tests.learner.conftest import make_random_groups
from tests.learner.world import run_world

VOCAB = 64
pytestmark = [pytest.mark.engine, pytest.mark.slow]
SAVING = {"logits_bytes": 16 * 4 * VOCAB, "activation_checkpointing": True, "packing": True}
# Entropy with a gradient, and a reference, whose logits are made in pieces too.
RECIPE = Recipe.model_validate(
    PRESETS["grpo"].recipe.model_dump()
    | {"entropy_weight": 0.01, "kl": "k3", "kl_place": "loss", "kl_weight": 0.1, "kl_reference": "fixed"}
    | {"regularize_without_signal": True}
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trained(ranks: Ranks, rank: int, model_dir: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and the weights after them, which rank 0 has."""
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.forward import Distribution
    from stream_grpo.learner.train_step import TrainStep

    learner = Learner(learning_rate=1e-3, microbatch_tokens=110, num_ranks=ranks.num_ranks, **settings)
    engine = LearnerEngine(
        Path(model_dir), learner=learner, recipe=RECIPE, dtype="float32",
        distribution=Distribution(temperature=0.8), seed=0,
    )  # fmt: skip
    step = TrainStep(engine, RECIPE, learner, max_new_tokens=8, ranks=ranks)
    losses = []
    for seed in range(3):
        batch = make_train_batch(
            make_random_groups(6, 4, VOCAB, seed), step.advantages, vocab_size=VOCAB, microbatch_tokens=110,
            num_ranks=ranks.num_ranks, attention_cost=0.0 if learner.packing else None, packing=learner.packing,
        )  # fmt: skip
        share = shares(batch, ranks.num_ranks)[rank]
        if learner.packing:
            assert any(m.block_B is not None for m in share.minibatches[0].microbatches)
        losses.append(step.run(share)["loss"])
    weights = dict(engine.named_weights())
    engine.close()
    return losses, weights


def in_world(crew: Crew, model_dir: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    with crew.call("train"):
        return trained(crew, crew.rank, model_dir, settings)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_that_save_memory_train_as_one_that_does_not(
    model_dir: Path, tmp_path: Path, process_group: None, zero_stage: int
) -> None:
    expected, weights = trained(ALONE, 0, str(model_dir), {})
    found = run_world(2, in_world, tmp_path, str(model_dir), {"zero_stage": zero_stage} | SAVING)
    for result in found:
        assert isinstance(result, tuple), result
        assert result[0] == pytest.approx(expected, abs=1e-5)
    assert found[0][1].keys() == weights.keys()
    # Adam carries rounding of gradients near 0 to steps as long as the learning rate.
    assert max(float((found[0][1][name] - weight).abs().max()) for name, weight in weights.items()) < 1e-4
