"""The learner's engine: a Hugging Face model under DeepSpeed.

B sequences, T tokens, V vocabulary. One process is one rank; where a world of several has been joined (`crew`), all of
them make the same calls. Forward, backward and update are what `train_step` asks for; the rest gives the weights out:
to samplers (`weights_out`), to a probe, to checkpoints, to a plain model folder. DeepSpeed itself is in `zero`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from stream_grpo.algo.recipe import Recipe
from stream_grpo.config_learner import Learner
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.adapter_note import check_note, write_note
from stream_grpo.learner.critic import Critic, ValueNet
from stream_grpo.learner.forward import PLAIN, Distribution, Entropy, LanguageModel, Support, Targets, logits
from stream_grpo.learner.head import with_fp32_head
from stream_grpo.learner.layout import STATE, UNIVERSAL, Layout, needs_conversion, write_layout
from stream_grpo.learner.recompute import recompute_activations
from stream_grpo.learner.reference import Reference
from stream_grpo.learner.rows import pack
from stream_grpo.learner.trials import attention_cost, max_positions
from stream_grpo.learner.weights_out import WeightsOut
from stream_grpo.learner.zero import deepspeed_engine, join_process_group
from stream_grpo.weights.fingerprint import Recorder, decoder_modules, starts
from stream_grpo.weights.manifest import Adapter, Fingerprint, TensorSpec

if TYPE_CHECKING:  # load what only a run with an adapter or a grammar needs
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.learner.lora import BaseReference, LoraModel


class LearnerEngine:
    """A model and its optimizer."""

    def __init__(
        self,
        model_dir: Path,
        *,
        learner: Learner,
        recipe: Recipe,
        dtype: Literal["float32", "bfloat16"],
        distribution: Distribution,
        seed: int,
        grammar: Grammar | None = None,
    ) -> None:
        """Load a Hugging Face folder in `dtype` and give it an AdamW. Distribution and grammar are the sampler's."""
        self._learner, self._distribution = learner, distribution
        self.grammar = grammar
        """What actions keep to; None where they are free."""
        self._support_of: tuple[Tensor | None, Support | None] = (None, None)
        """The actions that were asked about last, and what their tokens were drawn from."""
        torch.manual_seed(seed)
        torch.set_num_threads(learner.num_threads)
        self._owns_process_group = join_process_group(learner.collective_timeout_s)
        self._rank, self._num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._layout = Layout(self._num_ranks, learner.zero_stage)
        self._module = _load_model(model_dir, dtype)
        self._lora = _lora(self._module, learner, model_dir)
        reference = None if self._lora else _reference(self._module, recipe)  # while every parameter is whole
        value_net = ValueNet(self._module) if recipe.has_critic else None  # likewise
        if learner.activation_checkpointing:
            for body in (self._module, *([] if value_net is None else [value_net.body])):
                recompute_activations(body)
        self._engine = deepspeed_engine(self._module, learner, dtype)
        self._reduces_itself = learner.zero_stage == 0 and dtype == "float32"
        if self._reduces_itself:
            self._engine.enable_backward_allreduce = False
        self.critic = None if value_net is None else Critic(deepspeed_engine(value_net, learner, dtype))
        """What is trained beside the policy, where the recipe has one."""
        model_config: Any = self._module.config
        self.vocab_size = int(model_config.get_text_config().vocab_size)
        """Width of the logits: token ids are below it."""
        self._policy = LanguageModel(
            call=self._engine, module=self._module, dtype=getattr(torch, dtype), max_positions=None
        )
        self._policy = replace(
            self._policy, max_positions=max_positions(self._policy, learner.logits_bytes, self.vocab_size, self.device)
        )
        self._reference: Reference | BaseReference | None = reference
        if self._lora is not None and recipe.kl_reference == "fixed":
            self._reference = self._lora.reference(self._policy)
        if reference is not None:
            reference.to(self.device)
            reference.max_positions = self._policy.max_positions
        self.attention_cost: float | None = None
        """Of the model, see `shared_prompts.cost`; None where every sequence is a row of its own."""
        if learner.share_prompts or learner.packing:
            self.attention_cost = attention_cost(
                self._policy, distribution, self.vocab_size, self.device, packing=learner.packing
            )
        self._weights_out = WeightsOut(
            self._module, self._lora, learner=learner, model_dir=model_dir, dtype=dtype, is_first=self._rank == 0
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self._engine.device
        return device

    def logprobs(self, targets: Targets, *, entropy: Entropy = "none") -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of the targets under the sampler's distribution, [B, K] each."""
        return self._policy.logprobs(self._distribution, targets, self._support(targets), entropy=entropy)

    def reference_logprobs(self, targets: Targets) -> Tensor:
        """Logprobs of the reference policy, without a gradient. Only with a recipe that has one."""
        assert self._reference is not None, "the recipe has no reference weights"
        return self._reference.logprobs(self._distribution, targets, self._support(targets))

    def _support(self, targets: Targets) -> Support | None:
        """What the targets were drawn from; None: from all tokens."""
        if self.grammar is None or targets.turns_BT is None:
            return None
        # Policy and reference are asked about one microbatch after the other.
        if targets.turns_BT is not self._support_of[0]:
            self._support_of = targets.turns_BT, self.grammar.support(targets.token_ids_BT, targets.turns_BT)
        _, support = self._support_of
        return None if support is None else support.of_last(targets.num_last)

    @property
    def is_partitioned(self) -> bool:
        """Whether every rank has only a part of each weight, so that a forward pass takes all of them."""
        return self._num_ranks > 1 and self._learner.zero_stage == 3

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part of the loss."""
        # DeepSpeed takes the mean over ranks; the parts of a loss add up.
        self._engine.backward(loss * self._num_ranks, scale_wrt_gas=False)

    def update(self, learning_rate: float) -> float:
        """Clip, change the weights, clear. Returns the norm before clipping."""
        for parameter_group in self._engine.optimizer.param_groups:
            parameter_group["lr"] = learning_rate
        own_norm: Tensor | None = None
        if self._reduces_itself:
            # DeepSpeed clips at stage 0 in fp32 but keeps no norm, which is that of the reduced gradient.
            self._engine.buffered_allreduce_fallback()
            own_norm = torch.nn.utils.get_total_norm([p.grad for p in self._module.parameters() if p.grad is not None])
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = own_norm if norm is None else norm
        return float("nan") if norm is None else float(norm)

    def end_step(self, step: int) -> None:
        """Learner step `step` is made: the reference follows, where it does."""
        if self._reference is not None:
            self._reference.follow(self._module, step)

    @torch.no_grad()
    def probe_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprob at temperature 1 of every token after the first, by sequence. Raises ValueError for an empty one."""
        if not all(sequences):
            raise ValueError(f"probe sequence {[bool(s) for s in sequences].index(False)} is empty")
        result: list[list[float]] = [[] for _ in sequences]
        for indices in pack([len(sequence) for sequence in sequences], self._learner.microbatch_tokens):
            longest = len(sequences[indices[0]])
            rows = [list(sequences[i]) + [0] * (longest - len(sequences[i])) for i in indices]
            ids_BT = torch.tensor(rows, device=self._engine.device)
            logprobs_BT = self._policy.logprobs(PLAIN, Targets(ids_BT, longest))[0].cpu()
            for row, index in enumerate(indices):
                result[index] = logprobs_BT[row, 1 : len(sequences[index])].tolist()
        return result

    @torch.no_grad()
    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[Fingerprint, ...]:
        """What the modules give out on the starts of probe sequences; empty where the model has others than known."""
        modules, rows = decoder_modules(self._module), starts(sequences)
        if not modules:
            return ()
        lengths = [len(row) for row in rows]
        padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
        with Recorder(modules) as recorder:
            logits(self._engine, torch.tensor(padded, device=self._engine.device), max(lengths))
        return recorder.take(lengths)

    def save(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Write weights, optimizer, reference, critic and `state` into a folder; `checkpoint` makes it durable.

        Every rank writes its own part.
        """
        self._engine.save_checkpoint(
            str(directory),
            tag=STATE,
            client_state={"learner": dict(state)},
            exclude_frozen_parameters=self._lora is not None,
        )
        if self._rank == 0:
            write_note(directory, self._learner.lora)
            write_layout(directory, self._layout)
            if self._reference is not None:
                self._reference.save(directory)
        if self.critic is not None:
            self.critic.save(directory)

    def load(self, directory: Path) -> Mapping[str, Any]:
        """Restore what `save` wrote and return its state. The files are pickles: verify their hashes first.

        Raises CheckpointError if the folder holds no such state, or one that is cut for other ranks (see `universal`).
        """
        is_universal = (directory / UNIVERSAL).exists()
        tag = UNIVERSAL if is_universal else STATE
        if not any((directory / tag).glob("*.pt")):
            raise CheckpointError(f"{directory}: holds no state of the learner's engine")
        if not is_universal and needs_conversion(directory, self._layout):
            raise CheckpointError(f"{directory}: cut for other ranks than {self._layout}, and not converted")
        check_note(directory, self._learner.lora)
        # Only while it loads: what is saved is never universal.
        self._engine._config.load_universal_checkpoint = is_universal
        # Beside an adapter the frozen weights are not in it.
        path, client_state = self._engine.load_checkpoint(
            str(directory), tag=tag, load_module_strict=self._lora is None
        )
        self._engine._config.load_universal_checkpoint = False
        if path is None:
            raise CheckpointError(f"{directory}: DeepSpeed found no state to load")
        if self._reference is not None:
            self._reference.load(directory)
        if self.critic is not None:
            self.critic.load(directory)
        state: Mapping[str, Any] = client_state["learner"]
        return state

    @property
    def adapter(self) -> Adapter | None:
        """Of the weights given out, where these are an adapter. The first rank's: it reads all of the model folder."""
        return self._weights_out.adapter

    def weight_specs(self) -> dict[str, TensorSpec]:
        """What `named_weights` gives out, in its order; costs nothing, and no rank needs another for it."""
        return self._weights_out.specs()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name as in the Hugging Face file, a contiguous copy on CPU) of every weight, see `weights_out`."""
        return self._weights_out.named()

    def export(self, directory: Path) -> None:
        """Write a plain Hugging Face folder, see `weights_out`."""
        self._weights_out.export(directory)

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and of the process group, if this engine made it."""
        if self.critic is not None:
            self.critic.close()
        self._engine.destroy()
        if self._owns_process_group:
            torch.distributed.destroy_process_group()


def _load_model(model_dir: Path, dtype: str) -> torch.nn.Module:
    transformers_logging.disable_progress_bar()
    # Eager attention agrees with vLLM to 1e-5 in fp32.
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    )
    if dtype != "float32":
        with_fp32_head(model)
    # Ratios compare two distributions: dropout would be noise in one of them.
    return model.eval()


def _lora(model: torch.nn.Module, learner: Learner, model_dir: Path) -> LoraModel | None:
    if not learner.lora.rank:
        return None
    from stream_grpo.learner.lora import LoraModel  # peft is not loaded where it is not used

    return LoraModel(model, learner.lora, model_dir)


def _reference(model: torch.nn.Module, recipe: Recipe) -> Reference | None:
    kind = recipe.kl_reference
    if kind is None or kind == "behavior":
        return None
    return Reference(model, kind, refresh_interval=recipe.kl_refresh_interval, ema_decay=recipe.kl_ema_decay)
