"""The learner's engine: a Hugging Face model under DeepSpeed. The one file that imports deepspeed.

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
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
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
from stream_grpo.learner.batching import pack
from stream_grpo.learner.critic import Critic, ValueNet
from stream_grpo.learner.forward import (
    PLAIN,
    Distribution,
    Shared,
    Support,
    has_windows,
    logits,
    on_device,
    shared_logits,
    with_fp32_head,
)
from stream_grpo.learner.layout import Layout, check_layout, write_layout
from stream_grpo.learner.reference import Reference
from stream_grpo.learner.shared_prompts import shared_prompts
from stream_grpo.weights.fingerprint import Recorder, decoder_modules, starts
from stream_grpo.weights.manifest import Fingerprint

if TYPE_CHECKING:  # loads what only a run with a grammar needs
    from stream_grpo.learner.grammar import Grammar

_TAG = "state"
# Far above rounding, far below what another prompt in sight would do.
_SHARED_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
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
        self._learner, self._distribution, self._grammar = learner, distribution, grammar
        torch.manual_seed(seed)
        torch.set_num_threads(learner.num_threads)
        self._owns_process_group = _join_process_group(learner.collective_timeout_s)
        self._rank, self._num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._layout = Layout(self._num_ranks, learner.zero_stage)
        self._module = _load_model(model_dir, dtype)
        self._reference = _reference(self._module, recipe)  # while every parameter is whole
        value_net = ValueNet(self._module) if recipe.has_critic else None  # likewise
        self._engine = _deepspeed_engine(self._module, learner, dtype)
        self._reduces_itself = learner.zero_stage == 0 and dtype == "float32"
        if self._reduces_itself:
            self._engine.enable_backward_allreduce = False
        if self._reference is not None:
            self._reference.to(self.device)
        self.critic = None if value_net is None else Critic(_deepspeed_engine(value_net, learner, dtype))
        """What is trained beside the policy, where the recipe has one."""
        model_config: Any = self._module.config
        self.vocab_size = int(model_config.get_text_config().vocab_size)
        """Width of the logits: token ids are below it."""
        self.attention_cost = self._attention_cost() if learner.share_prompts else None
        """Of the model, see `shared_prompts.cost`; None where prompts are not shared."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self._engine.device
        return device

    def _attention_cost(self) -> float | None:
        """By the multiplications of a forward pass; None for a model whose attention does not take our mask."""
        config: Any = self._module.config
        text, weight = config.get_text_config(), self._module.get_input_embeddings().weight  # type: ignore[operator]
        if has_windows(text):
            return None
        num_looked_up = 0 if text.tie_word_embeddings else getattr(weight, "ds_numel", weight.numel())
        num_weights = sum(getattr(p, "ds_numel", p.numel()) for p in self._module.parameters()) - num_looked_up
        if (gap := self._gap_of_shared_prompts()) > _SHARED_TOLERANCE[self._dtype]:
            _log.warning(
                "learner.share_prompts has no effect: logprobs of this model move by %.1e where rollouts share their "
                "prompt, so that its attention does not keep them apart",
                gap,
            )
            return None
        # Of a token: 2 multiplications a weight. Of a pair: query times key and weight times value in every layer.
        return 2 * float(text.hidden_size * text.num_hidden_layers) / num_weights

    @torch.no_grad()
    def _gap_of_shared_prompts(self) -> float:
        """Largest gap between the logprobs of a few sequences computed apart and with their prompt once."""
        lengths_B, num_prompt_B = np.array([9, 7, 8]), np.array([4, 4, 4])
        ids_BT = np.arange(27).reshape(3, 9) % self.vocab_size
        ids_BT[:, :4] = ids_BT[0, :4]
        shared = on_device(
            shared_prompts(ids_BT, lengths_B, num_prompt_B, np.zeros(3, np.int64)), lengths_B, 3, self.device
        )
        ids = torch.from_numpy(ids_BT).to(self.device)
        apart, _ = self.logprobs(ids, ids.shape[1] - shared.first)
        together, _ = self.logprobs(ids, ids.shape[1] - shared.first, shared)
        is_token = (
            torch.arange(shared.first, 9, device=self.device) < torch.from_numpy(lengths_B).to(self.device)[:, None]
        )
        # A token outside the support of a filter has -inf both ways; anything else that is not finite is no logprob.
        gap_BK = torch.where(apart == together, 0.0, (apart - together).abs()).nan_to_num(nan=torch.inf)
        return float(torch.where(is_token, gap_BK, 0.0).max())

    def logprobs(
        self,
        token_ids_BT: Tensor,
        num_last: int,
        shared: Shared | None = None,
        turns_BT: Tensor | None = None,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of the last tokens under the sampler's distribution, [B, num_last] each."""
        support = self._support(token_ids_BT, num_last, turns_BT)
        if shared is not None:
            logits_RLV = shared_logits(self._engine, shared, getattr(torch, self._dtype))
            return (
                self._distribution.logprobs_at(logits_RLV, shared, token_ids_BT, support),
                self._distribution.entropy_at(logits_RLV, shared, support, with_gradient=entropy_gradient),
            )
        logits_BKV, ids_BK = logits(self._engine, token_ids_BT, num_last), token_ids_BT[:, -num_last:]
        return (
            self._distribution.logprobs(logits_BKV, ids_BK, support),
            self._distribution.entropy(logits_BKV, ids_BK, support, with_gradient=entropy_gradient),
        )

    def reference_logprobs(
        self, token_ids_BT: Tensor, num_last: int, shared: Shared | None = None, turns_BT: Tensor | None = None
    ) -> Tensor:
        """Logprobs of the reference policy, without a gradient. Only with a recipe that has one."""
        assert self._reference is not None, "the recipe has no reference weights"
        support = self._support(token_ids_BT, num_last, turns_BT)
        return self._reference.logprobs(self._distribution, token_ids_BT, num_last, shared, support)

    def _support(self, token_ids_BT: Tensor, num_last: int, turns_BT: Tensor | None) -> Support | None:
        """What the last tokens were drawn from; None: from all tokens."""
        if self._grammar is None or turns_BT is None:
            return None
        return self._grammar.support(token_ids_BT, turns_BT).of_last(num_last)

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
            logprobs_BT = PLAIN.logprobs(logits(self._engine, ids_BT, longest), ids_BT).cpu()
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

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name as in the Hugging Face file, a contiguous copy on CPU) of every weight; tied ones once.

        Under ZeRO 3 one parameter is whole at a time, on all ranks, and rank 0 alone is given the copies.
        """
        partitioned = self._learner.zero_stage == 3
        for name, parameter in self._module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
                weight = parameter.detach().to("cpu", copy=True).contiguous() if self._rank == 0 else None
            if weight is not None:
                yield name, weight
        if self._rank:
            return
        persistent = self._module.state_dict().keys()
        for name, buffer in self._module.named_buffers():
            if name in persistent:
                yield name, buffer.detach().to("cpu", copy=True).contiguous()

    def save(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Write weights, optimizer, reference, critic and `state` into a folder; `checkpoint` makes it durable.

        Every rank writes its own part.
        """
        self._engine.save_checkpoint(str(directory), tag=_TAG, client_state={"learner": dict(state)})
        if self._rank == 0:
            write_layout(directory, self._layout)
            if self._reference is not None:
                self._reference.save(directory)
        if self.critic is not None:
            self.critic.save(directory)

    def load(self, directory: Path) -> Mapping[str, Any]:
        """Restore what `save` wrote and return its state. The files are pickles: verify their hashes first.

        Raises CheckpointError if the folder holds no such state, or one that is cut for other ranks.
        """
        if not any((directory / _TAG).glob("*.pt")):
            raise CheckpointError(f"{directory}: holds no state of the learner's engine")
        check_layout(directory, self._layout)
        path, client_state = self._engine.load_checkpoint(str(directory), tag=_TAG)
        if path is None:
            raise CheckpointError(f"{directory}: DeepSpeed found no state to load")
        if self._reference is not None:
            self._reference.load(directory)
        if self.critic is not None:
            self.critic.load(directory)
        state: Mapping[str, Any] = client_state["learner"]
        return state

    def export(self, directory: Path) -> None:
        """Write a plain Hugging Face folder: current weights, everything else as in the folder trained from."""
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copytree(
            self._model_dir, directory, ignore=shutil.ignore_patterns(*_WEIGHT_FILES, ".*"), dirs_exist_ok=True
        )
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config | {"dtype": self._dtype}, indent=2), encoding="utf-8")
        save_file(dict(self.named_weights()), directory / "model.safetensors", metadata={"format": "pt"})

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


def _reference(model: torch.nn.Module, recipe: Recipe) -> Reference | None:
    kind = recipe.kl_reference
    if kind is None or kind == "behavior":
        return None
    return Reference(model, kind, refresh_interval=recipe.kl_refresh_interval, ema_decay=recipe.kl_ema_decay)


def _deepspeed_engine(model: torch.nn.Module, learner: Learner, dtype: str) -> Any:
    optimizer = torch.optim.AdamW(
        model.parameters(),
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
