"""DeepSpeed as the learner uses it: the process group that it insists on, and a model with its optimizer under ZeRO."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

# DeepSpeed looks for its accelerator while it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.utils import logger as deepspeed_logger

from stream_grpo.config_learner import Learner


def join_process_group(timeout_s: float) -> bool:
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


def deepspeed_engine(model: torch.nn.Module, learner: Learner, dtype: str) -> Any:
    """The model, whose parameters ZeRO may cut up, with an AdamW of those that have a gradient."""
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


def whole(weight: Tensor, *, is_cut: bool) -> AbstractContextManager[Any]:
    """Meanwhile a parameter that ZeRO 3 has cut up is whole, on all ranks."""
    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        [weight] if is_cut else [], enabled=is_cut
    )
    return gathered
