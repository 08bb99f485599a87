"""The critic under DeepSpeed against plain torch, on a two-layer random Llama."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.critic import FOLDER, ValueNet
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Targets
from stream_grpo.learner.train_step import TrainStep
from tests.learner.conftest import learner_engine
from tests.learner.test_learner_engine import SETTINGS, VOCAB, Groups, digest

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine

LEARNER = Learner(learning_rate=1e-2, max_grad_norm=0.5, microbatch_tokens=60, weight_decay=0.1)
PPO = Recipe.model_validate(PRESETS["ppo"].recipe.model_dump() | {"critic_rate": 0.5})
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(8)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(model_dir: Path, process_group: None) -> Iterator[LearnerEngine]:
    engine = learner_engine(model_dir, learner=LEARNER, recipe=PPO, **SETTINGS)
    yield engine
    engine.close()


def step_of(engine: LearnerEngine, learner: Learner = LEARNER) -> TrainStep:
    return TrainStep(engine, PPO, learner, max_new_tokens=8, critic=engine.critic)


def values_of(engine: LearnerEngine, ids: torch.Tensor) -> torch.Tensor:
    assert engine.critic is not None
    return engine.critic.values(Targets(ids, ids.shape[1])).detach()


@pytest.mark.parametrize(("zero_stage", "recomputes"), [(0, False), (1, False), (2, False), (1, True)])
def test_the_critics_steps_equal_plain_adamw(
    engine: LearnerEngine,
    model_dir: Path,
    random_groups: Groups,
    zero_stage: Any,
    recomputes: bool,
) -> None:
    learner = LEARNER.model_copy(update={"zero_stage": zero_stage, "activation_checkpointing": recomputes})
    other = learner_engine(model_dir, learner=learner, recipe=PPO, **SETTINGS)
    net = ValueNet(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5e-2, betas=LEARNER.adam_betas, weight_decay=0.1)
    step = step_of(other, learner)
    for seed in range(3):
        groups = random_groups(3, 4, VOCAB, seed)
        optimizer.zero_grad()
        loss, num_tokens = torch.zeros(()), 0
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
            # gamma = lambda = 1: what stands before each sampled token is to be worth the reward.
            before = net(len(ids), input_ids=ids[None])[0, rollout.num_prompt_tokens - 1 : -1]
            loss = loss + (before - float(rollout.reward.reward or 0.0)).square().sum() / 2
            num_tokens += len(before)
        (loss / num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), LEARNER.max_grad_norm)
        optimizer.step()
        metrics = step.run(make_train_batch(groups, step.advantages, vocab_size=VOCAB, microbatch_tokens=60))
        assert metrics["value_loss"] == pytest.approx(float(loss.detach()) / num_tokens, rel=1e-4)
        assert metrics["value_grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    ids = torch.arange(24).reshape(2, 12)
    expected = net(12, input_ids=ids).detach()[:, :-1]
    assert float(expected.abs().max()) > 0.05
    assert torch.allclose(values_of(other, ids)[:, 1:], expected, atol=1e-4)
    num_weights = sum(weight.numel() for weight in net.parameters())
    # Weights, gradients and two means of 4 bytes each; the other stages keep a flat copy besides.
    assert 4 * 4 * num_weights <= metrics["critic_bytes"] <= 1.1 * 5 * 4 * num_weights


def test_the_critic_starts_at_0_and_leaves_the_policys_weights_alone(
    engine: LearnerEngine,
    model_dir: Path,
    random_groups: Groups,
) -> None:
    fresh = learner_engine(model_dir, learner=LEARNER, recipe=PPO, **SETTINGS)
    assert not values_of(fresh, torch.arange(12)[None]).any()
    assert fresh.critic is not None
    before = digest(fresh)
    loss = fresh.critic.values(Targets(torch.arange(12)[None], 12)).sub(1.0).square().mean()
    fresh.critic.backward(loss)
    assert fresh.critic.update(1e-2) > 0
    assert digest(fresh) == before


@pytest.mark.parametrize("packing", [False, True])
def test_values_of_rows_of_several_are_those_of_the_sequences_alone(
    engine: LearnerEngine, random_groups: Groups, packing: bool
) -> None:
    step, groups = step_of(engine), random_groups(2, 4, VOCAB, 9)
    step.run(make_train_batch(groups, step.advantages, vocab_size=VOCAB, microbatch_tokens=60))  # a head other than 0
    batch = make_train_batch(
        groups, step.advantages, vocab_size=VOCAB, microbatch_tokens=200, attention_cost=0.0, packing=packing
    )
    for microbatch in batch.minibatches[0].microbatches:
        assert microbatch.row_B is not None
        tensors = tensors_of(microbatch, engine.device)
        assert engine.critic is not None
        together = engine.critic.values(tensors.targets).detach()
        alone = engine.critic.values(replace(tensors.targets, shared=None)).detach()
        assert float(alone.abs().max()) > 1e-3
        assert torch.allclose(together[tensors.mask_BK], alone[tensors.mask_BK], atol=1e-5)


def test_a_restored_critic_continues_bit_for_bit(
    engine: LearnerEngine,
    model_dir: Path,
    random_groups: Groups,
    tmp_path: Path,
) -> None:
    step = step_of(engine)
    batches = [
        make_train_batch(random_groups(2, 4, VOCAB, seed), step.advantages, vocab_size=VOCAB, microbatch_tokens=60)
        for seed in (10, 11)
    ]
    step.run(batches[0])
    engine.save(tmp_path, step.state())
    losses = [step.run(batch)["value_loss"] for batch in batches]
    ids = torch.arange(20).reshape(2, 10)
    after = values_of(engine, ids)
    fresh = learner_engine(model_dir, learner=LEARNER, recipe=PPO, **(SETTINGS | {"seed": 1}))
    again = step_of(fresh)
    again.restore(fresh.load(tmp_path))
    assert [again.run(batch)["value_loss"] for batch in batches] == losses
    assert torch.equal(values_of(fresh, ids), after)
    shutil.rmtree(tmp_path / FOLDER)
    with pytest.raises(CheckpointError, match="holds no critic: advantage = gae can only be set when a run begins"):
        fresh.load(tmp_path)
