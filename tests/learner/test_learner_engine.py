"""The engine under DeepSpeed against plain torch, on a two-layer random Llama made here."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.batching import TrainBatch, make_train_batch
from stream_grpo.learner.forward import Distribution
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import RolloutGroup
from stream_grpo.weights.fingerprint import NUM_TOKENS, Recorder, decoder_modules, relative_gaps
from tests.learner.conftest import learner_engine

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine

VOCAB, TEMPERATURE = 32, 0.8
SETTINGS: dict[str, Any] = {"dtype": "float32", "distribution": Distribution(temperature=TEMPERATURE), "seed": 0}
ON_BEHAVIOR = PRESETS["rloo"].recipe
LEARNER = Learner(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05, microbatch_tokens=60, warmup_steps=2)
pytestmark = pytest.mark.engine

Groups = Callable[[int, int, int, int], list[RolloutGroup]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def engine(model_dir: Path, process_group: None) -> Iterator[LearnerEngine]:
    engine = learner_engine(model_dir, learner=LEARNER, recipe=ON_BEHAVIOR, **SETTINGS)
    yield engine
    engine.close()


def step_of(engine: LearnerEngine, recipe: Recipe = ON_BEHAVIOR, learner: Learner = LEARNER) -> TrainStep:
    return TrainStep(engine, recipe, learner, max_new_tokens=8)


def batch_of(step: TrainStep, groups: list[RolloutGroup], **settings: Any) -> TrainBatch:
    return make_train_batch(groups, step.advantages, vocab_size=VOCAB, **({"microbatch_tokens": 60} | settings))


def digest(engine: LearnerEngine) -> str:
    weights = hashlib.sha256()
    for name, weight in engine.named_weights():
        weights.update(name.encode() + weight.numpy().tobytes())
    return weights.hexdigest()


def plain_loss(model: torch.nn.Module, groups: list[RolloutGroup]) -> torch.Tensor:
    """Token mean of the clipped surrogate with leave-one-out advantages, rollout by rollout, nothing padded."""
    total, num_tokens = torch.zeros(()), 0
    for group in groups:
        rewards = [float(r.reward.reward or 0.0) for r in group.rollouts]
        for i, rollout in enumerate(group.rollouts):
            a = rewards[i] - (sum(rewards) - rewards[i]) / (len(rewards) - 1)
            ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
            log_p = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            for t in range(rollout.num_prompt_tokens, len(ids)):
                ratio = (log_p[t - 1, ids[t]] - float(rollout.behavior_logprobs[t])).exp()
                total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
                num_tokens += 1
    return total / num_tokens


def test_train_steps_equal_plain_adamw(engine: LearnerEngine, model_dir: Path, random_groups: Groups) -> None:
    assert gap_to_plain_adamw(engine, model_dir, random_groups) < 1e-5


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_train_steps_of_every_zero_stage_equal_plain_adamw(
    engine: LearnerEngine, model_dir: Path, random_groups: Groups, zero_stage: int
) -> None:
    # `engine` is there for its process group. Stage 3 sums in another order, and Adam makes that a little larger.
    other = learner_engine(
        model_dir, learner=LEARNER.model_copy(update={"zero_stage": zero_stage}), recipe=ON_BEHAVIOR, **SETTINGS
    )
    assert gap_to_plain_adamw(other, model_dir, random_groups) < 1e-4


def test_train_steps_with_shared_prompts_equal_plain_adamw(
    engine: LearnerEngine, model_dir: Path, random_groups: Groups
) -> None:
    other = learner_engine(model_dir, learner=LEARNER, recipe=ON_BEHAVIOR, **SETTINGS)
    assert other.attention_cost is not None
    assert gap_to_plain_adamw(other, model_dir, random_groups, attention_cost=0.0) < 1e-5


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_train_steps_that_save_memory_equal_plain_adamw(
    engine: LearnerEngine, model_dir: Path, random_groups: Groups, zero_stage: int
) -> None:
    # Logits of 16 positions at a time, layers computed again, rows of several groups.
    saving = {"logits_bytes": 16 * 4 * VOCAB, "activation_checkpointing": True, "packing": True}
    learner = LEARNER.model_copy(update=saving | {"zero_stage": zero_stage})
    other = learner_engine(model_dir, learner=learner, recipe=ON_BEHAVIOR, **SETTINGS)
    assert gap_to_plain_adamw(other, model_dir, random_groups, attention_cost=0.0, packing=True) < 1e-4


def gap_to_plain_adamw(
    engine: LearnerEngine,
    model_dir: Path,
    random_groups: Groups,
    attention_cost: float | None = None,
    packing: bool = False,
) -> float:
    """Largest difference of a weight after three steps, each compared on the way."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    train_step = step_of(engine)
    optimizer = torch.optim.AdamW(model.parameters(), betas=LEARNER.adam_betas, weight_decay=0.1)
    # Warmup over two steps: half the learning rate, then all of it.
    for step, learning_rate in enumerate((0.5e-2, 1e-2, 1e-2)):
        groups = random_groups(3, 4, VOCAB, step)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.zero_grad()
        loss = plain_loss(model, groups)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LEARNER.max_grad_norm)
        optimizer.step()
        # So many that a whole group fits a row, where prompts are shared.
        microbatch_tokens = 60 if attention_cost is None else 110
        batch = batch_of(
            train_step, groups, attention_cost=attention_cost, microbatch_tokens=microbatch_tokens, packing=packing
        )
        assert len(batch.minibatches[0].microbatches) > 1
        assert all((m.row_B is None) == (attention_cost is None) for m in batch.minibatches[0].microbatches)
        metrics = train_step.run(batch)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert float(norm) > LEARNER.max_grad_norm
        assert metrics["learning_rate"] == learning_rate
        assert metrics["num_tokens"] == sum(group.num_sampled_tokens for group in groups)
        assert 0 < metrics["entropy"] < math.log(VOCAB)
    assert train_step.step == 3
    expected = dict(model.named_parameters())
    got = dict(engine.named_weights())
    assert got.keys() == expected.keys()
    return max(float((got[n] - expected[n].detach()).abs().max()) for n in got)


def test_a_restored_engine_continues_bit_for_bit(
    engine: LearnerEngine, model_dir: Path, random_groups: Groups, tmp_path: Path
) -> None:
    train_step = step_of(engine)
    batches = [batch_of(train_step, random_groups(2, 4, VOCAB, seed)) for seed in (10, 11)]
    train_step.run(batches[0])
    engine.save(tmp_path, train_step.state())
    before = digest(engine)
    losses = [train_step.run(b)["loss"] for b in batches]
    after = digest(engine)
    assert before != after
    fresh = learner_engine(model_dir, learner=LEARNER, recipe=ON_BEHAVIOR, **(SETTINGS | {"seed": 1}))
    for restored in (engine, fresh):
        again = step_of(restored)
        again.restore(restored.load(tmp_path))
        assert (again.step, digest(restored)) == (1, before)
        assert [again.run(b)["loss"] for b in batches] == losses
        assert digest(restored) == after


def test_an_empty_folder_is_no_checkpoint(engine: LearnerEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no state"):
        engine.load(tmp_path)


def test_probe_logprobs_are_those_of_each_sequence_alone(engine: LearnerEngine, tmp_path: Path) -> None:
    sequences = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 3], [8, 9, 7, 9, 3]]
    got = engine.probe_logprobs(sequences)
    engine.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.dtype == torch.float32
    for sequence, logprobs in zip(sequences, got, strict=True):
        log_p = model(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
        expected = [float(log_p[t - 1, sequence[t]]) for t in range(1, len(sequence))]
        assert logprobs == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="probe sequence 1 is empty"):
        engine.probe_logprobs([[1], []])


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_fingerprints_are_those_of_each_sequence_alone_and_of_its_start(
    engine: LearnerEngine, model_dir: Path, zero_stage: Any
) -> None:
    # `engine` is there for its process group.
    other = learner_engine(model_dir, learner=Learner(zero_stage=zero_stage), recipe=ON_BEHAVIOR, **SETTINGS)
    sequences = [[3, 1, 4, 1, 5], [5, 3], list(range(32)) + [9] * 8]
    got = other.fingerprints(sequences)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    for ids, fingerprint in zip(sequences, got, strict=True):
        ids = ids[:NUM_TOKENS]
        with Recorder(decoder_modules(model)) as recorder:
            model(torch.tensor([ids]))
        gaps = relative_gaps([fingerprint], recorder.take([len(ids)]))
        assert list(gaps) == ["embedding", "layer 0", "layer 1", "final norm", "head"]
        assert max(gaps.values()) < 1e-5
        # Norm and 3 projections of every token, in float32.
        assert {len(values) for values in fingerprint.values()} == {16 * len(ids)}


def test_an_export_has_the_names_and_files_of_its_source(
    engine: LearnerEngine, model_dir: Path, tmp_path: Path
) -> None:
    engine.export(tmp_path)
    source, exported = (load_file(path / "model.safetensors") for path in (model_dir, tmp_path))
    assert {n: w.shape for n, w in exported.items()} == {n: w.shape for n, w in source.items()}
    assert "lm_head.weight" not in exported
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert all(torch.equal(weight, exported[name]) for name, weight in engine.named_weights())


def test_weights_handed_out_do_not_change_with_training(engine: LearnerEngine, random_groups: Groups) -> None:
    name, weight = next(engine.named_weights())
    kept = weight.clone()
    train_step = step_of(engine)
    train_step.run(batch_of(train_step, random_groups(2, 4, VOCAB, 20)))
    assert torch.equal(weight, kept)
    assert not torch.equal(dict(engine.named_weights())[name], kept)


def test_a_batch_with_nothing_to_train_makes_no_update(engine: LearnerEngine, random_groups: Groups) -> None:
    train_step = step_of(engine)
    batch = batch_of(train_step, random_groups(1, 1, VOCAB, 0))
    empty = TrainBatch(minibatches=(), num_groups=1, num_left_out=4)
    before = digest(engine)
    metrics = train_step.run(empty)
    assert (metrics["num_updates"], metrics["num_left_out"]) == (0, 4)
    assert digest(engine) == before
    assert train_step.step == 1
    # A group of one has no signal: its advantage is 0 and its loss too.
    assert batch.minibatches[0].microbatches[0].advantages_B.tolist() == [0.0]


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_learning_rate_zero_leaves_the_weights_bit_for_bit(
    engine: LearnerEngine, model_dir: Path, random_groups: Groups, zero_stage: Any
) -> None:
    # Two passes of two updates with a recomputed proximal policy: all of it at once, under the other ZeRO stages.
    learner = Learner(learning_rate=0, weight_decay=0.1, zero_stage=zero_stage, num_epochs=2, num_minibatches=2)
    recipe = PRESETS["tis"].recipe
    still = learner_engine(model_dir, learner=learner, recipe=recipe, **SETTINGS)
    train_step = step_of(still, recipe, learner)
    before = digest(still)
    groups = random_groups(4, 4, VOCAB, 1)
    metrics = train_step.run(batch_of(train_step, groups, microbatch_tokens=40, num_minibatches=2))
    assert digest(still) == before
    assert metrics["num_updates"] == 4
    assert math.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
    # The weights never move, so policy and proximal stay equal, bit for bit.
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["clip_share_high"]) == (1.0, 1.0, 0.0)
    assert 0 < metrics["ess"] < 1
    assert {n: w.dtype for n, w in still.named_weights()} == dict.fromkeys(dict(engine.named_weights()), torch.float32)


def test_a_loss_that_is_not_finite_stops_before_the_update(
    model_dir: Path, engine: LearnerEngine, random_groups: Groups
) -> None:
    broken = learner_engine(model_dir, learner=LEARNER, recipe=ON_BEHAVIOR, **SETTINGS)
    train_step = step_of(broken)
    batch = batch_of(train_step, random_groups(1, 4, VOCAB, 1))
    batch.minibatches[0].microbatches[0].advantages_B[0] = np.nan
    before = digest(broken)
    with pytest.raises(FloatingPointError, match="learner step 1"):
        train_step.run(batch)
    assert digest(broken) == before
