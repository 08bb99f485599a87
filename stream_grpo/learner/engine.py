"""The learner's engine: a Hugging Face model under DeepSpeed. The one file that imports deepspeed.

B sequences, T tokens, V vocabulary. One process, one rank. `train_step` turns a train batch into optimizer updates;
the rest gives the weights out: to samplers, to a probe, to checkpoints, to a plain model folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

# DeepSpeed looks for its accelerator while it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.utils import logger as deepspeed_logger

from stream_grpo.algo.advantage import advantage
from stream_grpo.algo.aggregate import denominator
from stream_grpo.algo.policy_loss import PolicyStats, policy_loss
from stream_grpo.config import Algo, Learner
from stream_grpo.errors import CheckpointError
from stream_grpo.learner.batching import Microbatch, Minibatch, TrainBatch, pack
from stream_grpo.learner.logprobs import token_entropy, token_logprobs

COLLECTIVE_TIMEOUT_S = 600.0
_TAG = "state"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")


class _Tensors(NamedTuple):
    """A microbatch on the device. All but the ids start at the token before the first target: K of T tokens."""

    token_ids_BT: Tensor
    target_ids_BK: Tensor
    mask_BK: Tensor
    behavior_logprobs_BK: Tensor
    advantages_B: Tensor


class _Update(NamedTuple):
    """What one optimizer update says of itself."""

    loss: float
    grad_norm: float
    entropy: float
    stats: PolicyStats


class LearnerEngine:
    """A model, its optimizer and how many learner steps they have made."""

    def __init__(
        self,
        model_dir: Path,
        *,
        learner: Learner,
        algo: Algo,
        dtype: Literal["float32", "bfloat16"],
        temperature: float,
        max_new_tokens: int,
        group_size: int,
        seed: int,
    ) -> None:
        """Load a Hugging Face folder in `dtype` and give it an AdamW. Temperature is the sampler's."""
        self._model_dir = model_dir
        self._learner = learner
        self._algo = algo
        self._dtype = dtype
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._group_size = group_size
        self.step = 0
        """Learner steps made."""
        torch.manual_seed(seed)
        torch.set_num_threads(learner.num_threads)
        self._owns_process_group = _join_process_group()
        self._module = _load_model(model_dir, dtype)
        self._engine = _deepspeed_engine(self._module, learner, dtype)
        model_config: Any = self._module.config
        self.vocab_size = int(model_config.get_text_config().vocab_size)
        """Width of the logits: token ids are below it."""

    def advantages(self, rewards_G: NDArray[np.float64], valid_G: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The configured advantage of one group, as `batching.make_train_batch` asks for it."""
        advantages_G = advantage(
            self._algo.advantage,
            torch.from_numpy(rewards_G),
            torch.from_numpy(valid_G),
            signal_tolerance=self._algo.signal_tolerance,
        )
        return advantages_G.numpy()

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One learner step: num_epochs passes, one optimizer update per minibatch. Returns its metrics.

        Shares and ratios are over all trained tokens of all passes. Raises FloatingPointError before the update when
        a loss is not finite.
        """
        started_s = time.perf_counter()
        learning_rate = self._learning_rate()
        for parameter_group in self._engine.optimizer.param_groups:
            parameter_group["lr"] = learning_rate
        proximal = self._proximal_logprobs(batch)
        updates = [
            self._update(minibatch, proximal)
            for _ in range(self._learner.num_epochs)
            for minibatch in batch.minibatches
            if minibatch.num_tokens > 0
        ]
        self.step += 1
        metrics = {
            "learning_rate": learning_rate,
            "num_updates": float(len(updates)),
            "num_tokens": float(batch.num_tokens),
            "num_sequences": float(batch.num_sequences),
            "num_left_out": float(batch.num_left_out),
        }
        if updates:
            for name in ("loss", "grad_norm", "entropy"):
                metrics[name] = sum(getattr(update, name) for update in updates) / len(updates)
            stats = updates[0].stats
            for update in updates[1:]:
                stats += update.stats
            metrics |= stats.metrics()
        return metrics | {"seconds": time.perf_counter() - started_s}

    def _learning_rate(self) -> float:
        """Linear over `warmup_steps` learner steps, then constant."""
        warmup = self._learner.warmup_steps
        return self._learner.learning_rate * min(1.0, (self.step + 1) / warmup if warmup else 1.0)

    @torch.no_grad()
    def _proximal_logprobs(self, batch: TrainBatch) -> dict[int, Tensor]:
        """Logprobs at the start of the step, by the identity of their microbatch; none without a correction."""
        if self._algo.correction == "none":
            return {}
        microbatches = [m for minibatch in batch.minibatches for m in minibatch.microbatches]
        return {id(m): self._logprobs(self._tensors(m))[0] for m in microbatches}

    def _update(self, minibatch: Minibatch, proximal: Mapping[int, Tensor]) -> _Update:
        """Forward and backward of every microbatch, then one change of the weights."""
        algo = self._algo
        divisor = denominator(
            algo.aggregation,
            num_tokens=minibatch.num_tokens,
            num_sequences=minibatch.num_sequences,
            num_groups=minibatch.num_groups,
            group_size=self._group_size,
            max_new_tokens=self._max_new_tokens,
        )
        losses: list[float] = []
        stats: PolicyStats | None = None
        entropy_sum = 0.0
        for microbatch in minibatch.microbatches:
            tensors = self._tensors(microbatch)
            logprobs_BK, entropy_BK = self._logprobs(tensors)
            loss, part = policy_loss(
                logprobs_BK,
                proximal.get(id(microbatch)),
                tensors.behavior_logprobs_BK,
                tensors.advantages_B,
                tensors.mask_BK,
                clip_low=algo.clip_low,
                clip_high=algo.clip_high,
                dual_clip=algo.dual_clip,
                correction=algo.correction,
                correction_low=algo.correction_low,
                correction_high=algo.correction_high,
                aggregation=algo.aggregation,
                denominator=divisor,
            )
            losses.append(loss.item())
            if not np.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"loss {losses[-1]} in learner step {self.step + 1}; restart from a checkpoint"
                )
            stats = part if stats is None else stats + part
            entropy_sum += float(torch.where(tensors.mask_BK, entropy_BK, 0.0).sum())
            self._engine.backward(loss, scale_wrt_gas=False)
        assert stats is not None, "a minibatch with target tokens has microbatches"
        return _Update(sum(losses), self._apply_gradients(), entropy_sum / minibatch.num_tokens, stats)

    def _apply_gradients(self) -> float:
        """Clip, update, clear. Returns the norm before clipping."""
        own_norm: Tensor | None = None
        if self._learner.zero_stage == 0:
            # DeepSpeed clips at stage 0 in fp32 but keeps no norm.
            own_norm = torch.nn.utils.get_total_norm([p.grad for p in self._module.parameters() if p.grad is not None])
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = own_norm if norm is None else norm
        return float("nan") if norm is None else float(norm)

    def _tensors(self, microbatch: Microbatch) -> _Tensors:
        first = max(int(microbatch.mask_BT.any(axis=0).argmax()) - 1, 0)
        device = self._engine.device
        ids_BT = torch.from_numpy(microbatch.token_ids_BT).to(device)
        return _Tensors(
            token_ids_BT=ids_BT,
            target_ids_BK=ids_BT[:, first:],
            mask_BK=torch.from_numpy(microbatch.mask_BT[:, first:]).to(device),
            behavior_logprobs_BK=torch.from_numpy(microbatch.behavior_logprobs_BT[:, first:]).to(device),
            advantages_B=torch.from_numpy(microbatch.advantages_B).to(device, torch.float32),
        )

    def _logprobs(self, tensors: _Tensors) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of the last K tokens at the sampler's temperature, [B, K] each."""
        ids_BK = tensors.target_ids_BK
        logits_BKV = self._logits(tensors.token_ids_BT, ids_BK.shape[1])
        return (
            token_logprobs(logits_BKV, ids_BK, self._temperature),
            token_entropy(logits_BKV, ids_BK, self._temperature),
        )

    def _logits(self, token_ids_BT: Tensor, num_last: int) -> Tensor:
        """Logits at the last `num_last` positions. Padding is on the right: causal attention never looks at it."""
        output = self._engine(input_ids=token_ids_BT, use_cache=False, logits_to_keep=num_last)
        logits: Tensor = output.logits
        return logits

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
            logprobs_BT = token_logprobs(self._logits(ids_BT, longest), ids_BT, 1.0).cpu()
            for row, index in enumerate(indices):
                result[index] = logprobs_BT[row, 1 : len(sequences[index])].tolist()
        return result

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name as in the Hugging Face file, a contiguous copy on CPU) of every weight; tied ones once."""
        partitioned = self._learner.zero_stage == 3
        for name, parameter in self._module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
                weight = parameter.detach().to("cpu", copy=True).contiguous()
            yield name, weight
        persistent = self._module.state_dict().keys()
        for name, buffer in self._module.named_buffers():
            if name in persistent:
                yield name, buffer.detach().to("cpu", copy=True).contiguous()

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and step into a folder; see `checkpoint` for making it durable."""
        self._engine.save_checkpoint(str(directory), tag=_TAG, client_state={"learner_step": self.step})

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. The files are pickles: verify their hashes first.

        Raises CheckpointError if the folder holds no such state.
        """
        if not any((directory / _TAG).glob("*.pt")):
            raise CheckpointError(f"{directory}: holds no state of the learner's engine")
        path, state = self._engine.load_checkpoint(str(directory), tag=_TAG)
        if path is None:
            raise CheckpointError(f"{directory}: DeepSpeed found no state to load")
        self.step = int(state["learner_step"])

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
        self._engine.destroy()
        if self._owns_process_group:
            torch.distributed.destroy_process_group()


def _join_process_group() -> bool:
    """Make the process group of one rank that DeepSpeed insists on; True if it was made here."""
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
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
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
    # Ratios compare two distributions: dropout would be noise in one of them.
    return model.eval()


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
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine
