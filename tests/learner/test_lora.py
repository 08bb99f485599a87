"""An adapter under DeepSpeed against peft and plain torch, on a two-layer random Llama."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.config_lora import Lora
from stream_grpo.errors import CheckpointError, ConfigError
from stream_grpo.learner.batching import make_train_batch
from stream_grpo.learner.crew import Crew
from stream_grpo.learner.forward import Targets
from stream_grpo.learner.lora import LoraModel
from stream_grpo.learner.shares import shares
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.adapter import Base
from stream_grpo.weights.manifest import Probe, TensorSpec, model_tensors
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.learner.conftest import learner_engine, make_random_groups
from tests.learner.test_learner_engine import SETTINGS, VOCAB, Groups, digest, plain_loss
from tests.learner.world import run_world

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine

LORA = Lora(rank=3, alpha=6.0)
LEARNER = Learner(
    learning_rate=1e-2, max_grad_norm=0.5, microbatch_tokens=60, weight_decay=0.1, num_threads=1, lora=LORA
)
RLOO = PRESETS["rloo"].recipe
HELD = Recipe.model_validate(
    RLOO.model_dump()
    | {
        "kl": "k3",
        "kl_place": "loss",
        "kl_weight": 0.5,
        "kl_reference": "fixed",
        "regularize_without_signal": True,
    }
)
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [8, 9, 7, 9, 3]]
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_model(path: Path) -> Path:
    torch.manual_seed(9)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def engine(model_dir: Path, process_group: None) -> Iterator[LearnerEngine]:
    engine = learner_engine(model_dir, learner=LEARNER, recipe=HELD, **SETTINGS)
    yield engine
    engine.close()


def step_of(engine: LearnerEngine, recipe: Recipe = HELD, **settings: Any) -> TrainStep:
    return TrainStep(engine, recipe, LEARNER, max_new_tokens=8, **settings)


def trained(engine: LearnerEngine, seeds: tuple[int, ...], recipe: Recipe = HELD) -> list[dict[str, Any]]:
    step = step_of(engine, recipe)
    return [
        step.run(make_train_batch(make_random_groups(3, 4, VOCAB, seed), step.advantages, vocab_size=VOCAB,
                                  microbatch_tokens=60))
        for seed in seeds
    ]  # fmt: skip


def plain(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logprobs_of(model: Any) -> list[list[float]]:
    rows = [model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1) for ids in SEQUENCES]
    return [[float(row[t - 1, ids[t]]) for t in range(1, len(ids))] for row, ids in zip(rows, SEQUENCES, strict=True)]


def largest_gap(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def copies(engine: LearnerEngine) -> dict[str, Tensor]:
    return dict(engine.named_weights())


def test_what_is_given_out_is_the_adapter_under_peft_s_names_and_at_first_it_changes_nothing(
    model_dir: Path, engine: LearnerEngine
) -> None:
    fresh = learner_engine(model_dir, learner=LEARNER, recipe=RLOO, **SETTINGS)
    given = copies(fresh)
    # Of 2 layers the projections q, k, v, o, gate, up and down, each with an A and a B; embedding and norms have none.
    assert len(given) == 2 * 7 * 2
    assert {name: TensorSpec(tuple(t.shape), "float32") for name, t in given.items()} == fresh.weight_specs()
    assert list(given) == list(fresh.weight_specs())
    up = "base_model.model.model.layers.1.mlp.up_proj"
    assert given[f"{up}.lora_A.weight"].shape == (3, 16)
    assert torch.equal(given[f"{up}.lora_B.weight"], torch.zeros(32, 3))
    assert largest_gap(fresh.probe_logprobs(SEQUENCES), logprobs_of(plain(model_dir))) < 1e-5
    assert fresh.adapter is not None
    assert (fresh.adapter.rank, fresh.adapter.scaling) == (3, 2.0)
    assert fresh.adapter.base_sha256 == Base(model_dir, "float32").sha256


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_train_steps_equal_plain_adamw_on_the_adapter_alone(
    engine: LearnerEngine, model_dir: Path, random_groups: Groups, zero_stage: Any
) -> None:
    # `engine` is there for its process group.
    learner = LEARNER.model_copy(update={"zero_stage": zero_stage})
    other = learner_engine(model_dir, learner=learner, recipe=RLOO, **SETTINGS)
    model = plain(model_dir)
    lora = LoraModel(model, LORA, model_dir)
    start = copies(other)
    with torch.no_grad():
        for name, parameter in lora.parameters().items():
            parameter.copy_(start[name])
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(
        lora.parameters().values(), lr=1e-2, betas=LEARNER.adam_betas, weight_decay=LEARNER.weight_decay
    )
    for seed, metrics in zip((0, 1, 2), trained(other, (0, 1, 2), RLOO), strict=True):
        optimizer.zero_grad()
        loss = plain_loss(model, random_groups(3, 4, VOCAB, seed))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(lora.parameters().values(), LEARNER.max_grad_norm)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    got = copies(other)
    assert max(float((got[n] - p.detach()).abs().max()) for n, p in lora.parameters().items()) < 1e-4
    assert max(float((got[n] - start[n]).abs().max()) for n in got) > 1e-3
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(frozen[name], weight) for name, weight in base.items())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_reference_is_the_base_bit_for_bit_and_training_goes_on_after_it(
    engine: LearnerEngine, model_dir: Path, zero_stage: Any
) -> None:
    learner = LEARNER.model_copy(update={"zero_stage": zero_stage})
    held = learner_engine(model_dir, learner=learner, recipe=HELD, **SETTINGS)
    whole = Targets(torch.tensor([SEQUENCES[0]]), len(SEQUENCES[0]))
    before, _ = held.logprobs(whole)
    assert torch.equal(held.reference_logprobs(whole), before.detach())
    metrics = trained(held, (0, 1, 2))
    assert torch.equal(held.reference_logprobs(whole), before.detach())
    after, _ = held.logprobs(whole)
    assert float((after - before).detach().abs().max()) > 1e-3
    assert after.requires_grad
    assert metrics[0]["k3_reference"] == pytest.approx(0.0, abs=1e-9)
    assert metrics[2]["k3_reference"] > 1e-6
    # The same steps as with a copy of the whole model beside the policy.
    apart = learner_engine(model_dir, learner=learner, recipe=RLOO, **SETTINGS)
    apart._reference = cast(Any, _Apart(plain(model_dir)))
    trained(apart, (0, 1, 2))
    mine, theirs = copies(held), copies(apart)
    assert max(float((mine[n] - theirs[n]).abs().max()) for n in mine) < 1e-5


class _Apart:
    """A reference that is a model of its own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, distribution: Any, targets: Targets, support: Any = None) -> Tensor:
        assert targets.shared is None
        assert support is None
        ids_BT, num_last = targets.token_ids_BT, targets.num_last
        found: Tensor = distribution.logprobs(
            self._model(input_ids=ids_BT, logits_to_keep=num_last).logits, ids_BT[:, -num_last:]
        )
        return found

    def follow(self, model: Any, step: int) -> None: ...


def test_the_merged_model_the_adapter_in_peft_and_the_engine_have_one_policy(
    engine: LearnerEngine, model_dir: Path, tmp_path: Path
) -> None:
    trained(engine, (3, 4))
    engine.export(tmp_path / "model")
    mine = engine.probe_logprobs(SEQUENCES)
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert merged_model.dtype == torch.float32
    in_peft = PeftModel.from_pretrained(plain(model_dir), str(tmp_path / "model-adapter")).eval()
    assert largest_gap(mine, logprobs_of(merged_model)) < 1e-5
    assert largest_gap(mine, logprobs_of(in_peft)) < 1e-5
    assert largest_gap(mine, logprobs_of(plain(model_dir))) > 1e-2
    # A plain folder, with the names of the one trained from; the adapter's as peft itself would write them.
    source, exported = load_file(model_dir / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in source.items()}
    assert torch.equal(exported["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    in_peft.save_pretrained(str(tmp_path / "by-peft"))
    by_peft, by_us = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("by-peft", "model-adapter"))
    assert by_peft.keys() == by_us.keys()
    assert all(torch.equal(by_peft[name], tensor) for name, tensor in by_us.items())
    config = json.loads((tmp_path / "model-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6.0, 0.0)
    assert config["base_model_name_or_path"] == str(model_dir)


def test_what_a_sampler_reads_is_what_is_exported(engine: LearnerEngine, model_dir: Path, tmp_path: Path) -> None:
    trained(engine, (5,))
    probe = Probe(tuple(map(tuple, SEQUENCES)), tuple(map(tuple, engine.probe_logprobs(SEQUENCES))))
    version = PolicyVersion(0, 1)
    manifest = Publisher(tmp_path / "weights", 2).publish(
        version, {}, engine.named_weights(), probe, specs=engine.weight_specs(), adapter=engine.adapter
    )
    # q 16 -> 16, k and v 16 -> 8, o 16 -> 16, gate and up 16 -> 32, down 32 -> 16; 2 layers, 4 bytes, rank 3.
    num_bytes = 2 * 4 * 3 * (32 + 24 + 24 + 32 + 48 + 48 + 48)
    size = (tmp_path / "weights" / "0.00000001" / "model.safetensors").stat().st_size
    assert num_bytes < size < num_bytes + 8192
    assert sum(4 * spec.shape[0] * spec.shape[1] for spec in manifest.tensors.values()) == num_bytes
    published = Subscriber(tmp_path / "weights", Base(model_dir, "float32")).read(
        version, model_tensors(model_dir, "float32")
    )
    engine.export(tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert published.tensors.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in published.tensors.items())


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(
    engine: LearnerEngine, model_dir: Path, tmp_path: Path, zero_stage: Any
) -> None:
    learner = LEARNER.model_copy(update={"zero_stage": zero_stage})
    first = learner_engine(model_dir, learner=learner, recipe=HELD, **SETTINGS)
    trained(first, (0, 1))
    folder = tmp_path / "checkpoint-0.2" / "engine"
    first.save(folder, {"step": 2})
    (states,) = (folder / "state").glob("*model_states.pt")
    saved = torch.load(states, weights_only=False)["module"]
    assert len(saved) == 28
    assert all(".lora_" in name for name in saved)
    before = digest(first)
    losses = [metrics["loss"] for metrics in trained(first, (2, 3))]
    after = digest(first)
    again = learner_engine(model_dir, learner=learner, recipe=HELD, **(SETTINGS | {"seed": 5}))
    assert digest(again) != before
    assert again.load(folder) == {"step": 2}
    assert digest(again) == before
    assert largest_gap(_reference_of(again), logprobs_of(plain(model_dir))) < 1e-5
    assert [metrics["loss"] for metrics in trained(again, (2, 3))] == losses
    assert digest(again) == after
    for lora in (Lora(), Lora(rank=4, alpha=6.0)):
        other = learner_engine(model_dir, learner=learner.model_copy(update={"lora": lora}), recipe=HELD, **SETTINGS)
        with pytest.raises(CheckpointError, match=r"holds an adapter of learner\.lora\.rank = 3"):
            other.load(folder)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_an_adapter_that_saves_memory_trains_as_one_that_does_not(
    engine: LearnerEngine, model_dir: Path, zero_stage: Any
) -> None:
    saving = {"logits_bytes": 16 * 4 * VOCAB, "activation_checkpointing": True, "packing": True}
    found = []
    for settings in ({}, saving):
        learner = LEARNER.model_copy(update={"zero_stage": zero_stage, "microbatch_tokens": 110, **settings})
        other = learner_engine(model_dir, learner=learner, recipe=HELD, **SETTINGS)
        step, losses = TrainStep(other, HELD, learner, max_new_tokens=8), []
        for seed in range(3):
            batch = make_train_batch(
                make_random_groups(6, 4, VOCAB, seed), step.advantages, vocab_size=VOCAB, microbatch_tokens=110,
                attention_cost=0.0 if settings else None, packing=bool(settings),
            )  # fmt: skip
            if settings:
                microbatches = batch.minibatches[0].microbatches
                assert any(m.block_B is not None for m in microbatches)
                # 16 positions at once, of rows of many more.
                assert max(m.token_ids_BT.size for m in microbatches) > 16
            losses.append(step.run(batch)["loss"])
        found.append((losses, copies(other)))
    (losses, plain_weights), (losses_saving, weights) = found
    assert losses_saving == pytest.approx(losses, abs=1e-5)
    assert any(bool(weight.any()) for name, weight in weights.items() if ".lora_B." in name)
    # Adam carries rounding of gradients near 0 to steps as long as the learning rate, which is 0.01.
    assert max(float((weights[name] - weight).abs().max()) for name, weight in plain_weights.items()) < 1e-3


def _reference_of(engine: LearnerEngine) -> list[list[float]]:
    """At temperature 1, with the adapter off."""
    assert engine._lora is not None
    with engine._lora.disabled():
        return engine.probe_logprobs(SEQUENCES)


def test_only_named_layers_get_an_adapter_and_others_are_refused(engine: LearnerEngine, model_dir: Path) -> None:
    named = LORA.model_copy(update={"target_modules": ("q_proj", "v_proj")})
    some = learner_engine(model_dir, learner=LEARNER.model_copy(update={"lora": named}), recipe=RLOO, **SETTINGS)
    assert {name.split(".")[-3] for name in copies(some)} == {"q_proj", "v_proj"}
    for target, complaint in [("zproj", "zproj"), ("embed_tokens", "embed_tokens is a Embedding"), ("norm", "norm")]:
        wrong = LORA.model_copy(update={"target_modules": (target,)})
        with pytest.raises(ConfigError, match=rf"learner.lora.target_modules.*{complaint}"):
            learner_engine(model_dir, learner=LEARNER.model_copy(update={"lora": wrong}), recipe=RLOO, **SETTINGS)


def test_in_bfloat16_the_exported_model_is_the_policy_up_to_rounding(
    engine: LearnerEngine, model_dir: Path, tmp_path: Path
) -> None:
    low = learner_engine(model_dir, learner=LEARNER, recipe=HELD, **(SETTINGS | {"dtype": "bfloat16"}))
    trained(low, (0, 1, 2))
    assert {spec.dtype for spec in low.weight_specs().values()} == {"bfloat16"}
    low.export(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert exported.dtype == torch.bfloat16
    # What is proved of samplers in bfloat16: `probe.tolerance`.
    assert largest_gap(low.probe_logprobs(SEQUENCES), logprobs_of(exported.float())) < 0.2


def adapter_of_world(crew: Crew, model_dir: Path, folder: Path, zero_stage: Any) -> dict[str, Any]:
    """Two steps on this rank's share, a checkpoint, and what rank 0 publishes and exports; the others take part."""
    learner = LEARNER.model_copy(update={"zero_stage": zero_stage, "num_ranks": crew.num_ranks})
    engine = learner_engine(model_dir, learner=learner, recipe=HELD, **SETTINGS)
    step = TrainStep(engine, HELD, learner, max_new_tokens=8, ranks=crew)
    losses = []
    for seed in (0, 1):
        batch = make_train_batch(
            make_random_groups(3, 4, VOCAB, seed), step.advantages, vocab_size=VOCAB, microbatch_tokens=60,
            num_ranks=crew.num_ranks,
        )  # fmt: skip
        losses.append(step.run(shares(batch, crew.num_ranks)[crew.rank])["loss"])
    engine.save(folder / "checkpoint-0.2" / "engine", {})
    crew.meet()
    engine.load(folder / "checkpoint-0.2" / "engine")
    crew.meet()
    weights = dict(engine.named_weights())
    if crew.rank == 0:
        engine.export(folder / "model")
    elif zero_stage == 3:
        list(engine.named_weights())
    crew.meet()
    return {"losses": losses, "weights": weights}


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero_stage", [pytest.param(0, marks=pytest.mark.nightly), 1, pytest.param(2, marks=pytest.mark.nightly), 3]
)
def test_two_ranks_train_the_same_adapter_as_one(
    engine: LearnerEngine, model_dir: Path, tmp_path: Path, zero_stage: Any
) -> None:
    alone = learner_engine(model_dir, learner=LEARNER, recipe=HELD, **SETTINGS)
    losses = [metrics["loss"] for metrics in trained(alone, (0, 1))]
    expected = copies(alone)
    function = partial(adapter_of_world, model_dir=model_dir, folder=tmp_path, zero_stage=zero_stage)
    (tmp_path / "world").mkdir()
    first, second = run_world(2, function, tmp_path / "world")
    assert not isinstance(first, Exception), first
    assert not isinstance(second, Exception), second
    assert first["losses"] == pytest.approx(losses, abs=1e-5)
    assert second["losses"] == first["losses"]
    assert first["weights"].keys() == expected.keys()
    assert second["weights"] == {}
    assert max(float((first["weights"][n] - expected[n]).abs().max()) for n in expected) < 1e-4
    exported = load_file(tmp_path / "model" / "model.safetensors")
    whole = Base(model_dir, "float32").merged(first["weights"], 2.0)
    assert all(torch.equal(whole[name], tensor) for name, tensor in exported.items())
