"""The learner's engine: a Hugging Face model under DeepSpeed.

B sequences, T tokens, V vocabulary. One process is one rank; where a world of several has been joined (`crew`), all of
them make the same calls. Forward, backward and update are what `train_step` asks for; the rest gives the weights out:
to samplers, to a probe, to checkpoints, to a plain model folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

# DeepSpeed looks for its accelerator while it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.utils import logger as deepspeed_logger

from stream_grpo.algo.recipe import Recipe
from stream_grpo.config import Learner
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.adapter_note import check_note, write_note
from stream_grpo.learner.critic import Critic, ValueNet
from stream_grpo.learner.forward import (
    PLAIN,
    Distribution,
    Entropy,
    LanguageModel,
    Shared,
    Support,
    has_windows,
    logits,
)
from stream_grpo.learner.head import can_be_asked, with_fp32_head
from stream_grpo.learner.layout import STATE, UNIVERSAL, Layout, needs_conversion, write_layout
from stream_grpo.learner.recompute import recompute_activations
from stream_grpo.learner.reference import Reference
from stream_grpo.learner.rows import pack
from stream_grpo.learner.trials import TOLERANCE, gap_of_rows, gives_out_unchanged
from stream_grpo.weights.adapter import Base
from stream_grpo.weights.fingerprint import Recorder, decoder_modules, starts
from stream_grpo.weights.manifest import Adapter, Fingerprint, TensorSpec
from stream_grpo.weights.tensors_file import in_file_order, spec_of, write_tensors

if TYPE_CHECKING:  # load what only a run with an adapter or a grammar needs
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.learner.lora import BaseReference, LoraModel

_LOGIT_BYTES = 4  # in float32
_log = logging.getLogger(__name__)
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


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
        self._model_dir, self._dtype = model_dir, dtype
        self._learner, self._distribution = learner, distribution
        self.grammar = grammar
        """What actions keep to; None where they are free."""
        self._support_of: tuple[Tensor | None, Support | None] = (None, None)
        """The actions that were asked about last, and what their tokens were drawn from."""
        torch.manual_seed(seed)
        torch.set_num_threads(learner.num_threads)
        self._owns_process_group = _join_process_group(learner.collective_timeout_s)
        self._rank, self._num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._layout = Layout(self._num_ranks, learner.zero_stage)
        self._module = _load_model(model_dir, dtype)
        self._lora = _lora(self._module, learner, model_dir)
        self._base = Base(model_dir, dtype)
        reference = None if self._lora else _reference(self._module, recipe)  # while every parameter is whole
        value_net = ValueNet(self._module) if recipe.has_critic else None  # likewise
        if learner.activation_checkpointing:
            for body in (self._module, *([] if value_net is None else [value_net.body])):
                recompute_activations(body)
        self._engine = _deepspeed_engine(self._module, learner, dtype)
        self._reduces_itself = learner.zero_stage == 0 and dtype == "float32"
        if self._reduces_itself:
            self._engine.enable_backward_allreduce = False
        self.critic = None if value_net is None else Critic(_deepspeed_engine(value_net, learner, dtype))
        """What is trained beside the policy, where the recipe has one."""
        model_config: Any = self._module.config
        self.vocab_size = int(model_config.get_text_config().vocab_size)
        """Width of the logits: token ids are below it."""
        self._policy = LanguageModel(
            call=self._engine, module=self._module, dtype=getattr(torch, dtype), max_positions=None
        )
        self._policy = replace(self._policy, max_positions=self._max_positions())
        self._reference: Reference | BaseReference | None = reference
        if self._lora is not None and recipe.kl_reference == "fixed":
            self._reference = self._lora.reference(self._policy)
        if reference is not None:
            reference.to(self.device)
            reference.max_positions = self._policy.max_positions
        self.attention_cost = self._attention_cost() if learner.share_prompts or learner.packing else None
        """Of the model, see `shared_prompts.cost`; None where every sequence is a row of its own."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self._engine.device
        return device

    def _max_positions(self) -> int | None:
        """How many positions' logits may exist at once; None for a model whose head cannot be asked for some."""
        if not can_be_asked(self._module):
            reason = f"its output head is a {type(self._module.get_output_embeddings()).__name__}"  # type: ignore[operator]
        elif not gives_out_unchanged(self._policy, self.device):
            reason = "it changes its logits behind the output head"
        else:
            return max(1, self._learner.logits_bytes // (_LOGIT_BYTES * self.vocab_size))
        _log.warning("learner.logits_bytes has no effect on this model: %s", reason)
        return None

    def _attention_cost(self) -> float | None:
        """By the multiplications of a forward pass; None for a model whose attention does not take our mask."""
        config: Any = self._module.config
        text, weight = config.get_text_config(), self._module.get_input_embeddings().weight  # type: ignore[operator]
        if has_windows(text):
            if self._learner.packing:
                _log.warning(
                    "learner.packing has no effect: layers of this model see a window, for which they take masks"
                )
            return None
        num_looked_up = 0 if text.tie_word_embeddings else getattr(weight, "ds_numel", weight.numel())
        num_weights = sum(getattr(p, "ds_numel", p.numel()) for p in self._module.parameters()) - num_looked_up
        packing = self._learner.packing
        gap = gap_of_rows(self._policy, self._distribution, self.vocab_size, self.device, packing=packing)
        if gap > TOLERANCE[self._policy.dtype]:
            _log.warning(
                "learner.share_prompts and learner.packing have no effect: logprobs of this model move by %.1e where "
                "sequences share a row, so that its attention does not keep them apart",
                gap,
            )
            return None
        # Of a token: 2 multiplications a weight. Of a pair: query times key and weight times value in every layer.
        return 2 * float(text.hidden_size * text.num_hidden_layers) / num_weights

    def logprobs(
        self,
        token_ids_BT: Tensor,
        num_last: int,
        shared: Shared | None = None,
        turns_BT: Tensor | None = None,
        *,
        wanted_BK: Tensor | None = None,
        entropy: Entropy = "none",
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of the last tokens under the sampler's distribution, [B, num_last] each."""
        support = self._support(token_ids_BT, num_last, turns_BT)
        asked = (self._distribution, token_ids_BT, num_last, shared, support)
        return self._policy.logprobs(*asked, wanted_BK=wanted_BK, entropy=entropy)

    def reference_logprobs(
        self,
        token_ids_BT: Tensor,
        num_last: int,
        shared: Shared | None = None,
        turns_BT: Tensor | None = None,
        *,
        wanted_BK: Tensor | None = None,
    ) -> Tensor:
        """Logprobs of the reference policy, without a gradient. Only with a recipe that has one."""
        assert self._reference is not None, "the recipe has no reference weights"
        support = self._support(token_ids_BT, num_last, turns_BT)
        asked = (self._distribution, token_ids_BT, num_last, shared, support)
        return self._reference.logprobs(*asked, wanted_BK=wanted_BK)

    def _support(self, token_ids_BT: Tensor, num_last: int, turns_BT: Tensor | None) -> Support | None:
        """What the last tokens were drawn from; None: from all tokens."""
        if self.grammar is None or turns_BT is None:
            return None
        # Policy and reference are asked about one microbatch after the other.
        if turns_BT is not self._support_of[0]:
            self._support_of = turns_BT, self.grammar.support(token_ids_BT, turns_BT)
        _, support = self._support_of
        return None if support is None else support.of_last(num_last)

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
            logprobs_BT = self._policy.logprobs(PLAIN, ids_BT, longest)[0].cpu()
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

    @property
    def adapter(self) -> Adapter | None:
        """Of the weights given out, where these are an adapter. The first rank's: it reads all of the model folder."""
        lora = self._learner.lora
        return Adapter(base_sha256=self._base.sha256, rank=lora.rank, alpha=lora.alpha) if lora.rank else None

    def weight_specs(self) -> dict[str, TensorSpec]:
        """What `named_weights` gives out, in its order; costs nothing, and no rank needs another for it."""
        return {name: spec for name, (_, spec) in self._weights().items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name as in the Hugging Face file, a contiguous copy on CPU) of every weight; tied ones once.

        With `learner.lora` the adapter's alone, under peft's names. Under ZeRO 3 one parameter is whole at a time, on
        all ranks, and rank 0 alone is given the copies, of which it holds on to none.
        """
        partitioned = self._learner.zero_stage == 3
        for name, (weight, _) in self._weights().items():
            is_cut = partitioned and isinstance(weight, torch.nn.Parameter)
            with deepspeed.zero.GatheredParameters([weight] if is_cut else [], enabled=is_cut):
                copied = [weight.detach().to("cpu", copy=True).contiguous()] if self._rank == 0 else []
            if copied:
                yield name, copied.pop()

    def _weights(self) -> dict[str, tuple[Tensor, TensorSpec]]:
        """What is given out, by its name, in the order of a file. Shapes are those of whole parameters."""
        if self._lora is not None:
            found: dict[str, Tensor] = {**self._lora.parameters()}
        else:
            persistent = self._module.state_dict().keys()
            buffers = {name: buffer for name, buffer in self._module.named_buffers() if name in persistent}
            found = {**dict(self._module.named_parameters()), **buffers}
        whole = {n: spec_of(w)._replace(shape=tuple(getattr(w, "ds_shape", w.shape))) for n, w in found.items()}
        return {name: (found[name], spec) for name, spec in in_file_order(whole).items()}

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

    def export(self, directory: Path) -> None:
        """Write a plain Hugging Face folder: current weights, everything else as in the folder trained from.

        An adapter is merged into it, and stands beside it in `<name>-adapter`, in peft's own format.
        """
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copytree(
            self._model_dir, directory, ignore=shutil.ignore_patterns(*_WEIGHT_FILES, ".*"), dirs_exist_ok=True
        )
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config | {"dtype": self._dtype}, indent=2), encoding="utf-8")
        weights, specs = self.named_weights(), self.weight_specs()
        if self._lora is not None and (adapter := self.adapter) is not None:
            tensors = dict(weights)
            self._lora.write(directory.with_name(f"{directory.name}-adapter"), specs, tensors)
            whole = self._base.merged(tensors, adapter.scaling)
            specs = in_file_order(self._base.specs)
            weights = ((name, whole[name]) for name in specs)
        write_tensors(directory / "model.safetensors", specs, weights)

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and of the process group, if this engine made it."""
        if self.critic is not None:
            self.critic.close()
        self._engine.destroy()
        if self._owns_process_group:
            torch.distributed.destroy_process_group()


def _join_process_group(timeout_s: float) -> bool:
    """Use the process group that is there, or make the one of one rank that DeepSpeed insists on; True if made here."""
    deepspeed_logger.setLevel(logging.WARNING)
    # Raised by DeepSpeed's own calls of torch, once per collective.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # An extension for shared memory between ranks: compiled on first use, and a process killed meanwhile leaves a lock
    # on which every later one waits for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    owns = not torch.distributed.is_initialized()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if owns:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=timeout_s),
        )
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return owns


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


def _deepspeed_engine(model: torch.nn.Module, learner: Learner, dtype: str) -> Any:
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=learner.learning_rate,
        betas=learner.adam_betas,
        weight_decay=learner.weight_decay,
        fused=True,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Microbatches differ in number and size: every step() ends an accumulation.
        "managed_gradient_accumulation": False,
        "gradient_clipping": learner.max_grad_norm,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": learner.zero_stage, "overlap_comm": False},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    groups = set(_process_groups())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for group in set(_process_groups()) - groups:
        # Those that DeepSpeed makes would wait for half an hour.
        _set_pg_timeout(timedelta(seconds=learner.collective_timeout_s), group)
    return engine


def _process_groups() -> list[torch.distributed.ProcessGroup]:
    return list(torch.distributed.distributed_c10d._world.pg_map)
