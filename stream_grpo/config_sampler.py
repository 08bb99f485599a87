"""The settings of samplers: vLLM, and what it is asked for. Loads no torch. Part of the tree of `config`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from stream_grpo.config_section import Section


class Sampler(Section):
    """vLLM and what it is asked for."""

    num_samplers: int = Field(1, ge=1, le=4096)
    """Sampler processes."""
    group_size: int = Field(8)
    """Rollouts per problem."""
    max_new_tokens: int = Field(64, ge=1)
    """Response limit; a rollout that reaches it ends as `length`."""
    temperature: float = Field(1.0, gt=0)
    """The learner divides its logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 only with learner.filter_logits: the learner must filter its logits alike."""
    top_k: int = Field(-1, ge=-1)
    """Above 0 only with learner.filter_logits."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Above 0 only with learner.filter_logits."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that run at once in one sampler."""
    kv_cache_bytes: int = Field(256 << 20, ge=1 << 20)
    """KV cache of one sampler on CPU."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory for one sampler."""
    num_threads: int = Field(1, ge=1)
    """Compute threads of one sampler on CPU. Two on busy cores are several times slower than one."""
    num_gpus: float = Field(0, ge=0)
    """GPUs of one sampler, as Ray counts them."""
    engine: Literal["in_process", "async"] = "in_process"
    """`in_process`: vLLM in the sampler's process; `async`: in processes of its own, where it has several workers."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Workers that share the layers of one engine (`async`)."""
    kv_after_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of running sequences when weights change (weights.on_update = keep)."""
    prefix_cache: bool = False
    """Whether requests compute tokens that they begin with alike only once, until weights change: worth it where
    prompts are long. Which sequence computes them changes the last bits of logprobs, so that runs are no longer equal
    bit for bit, also at stream.max_policy_age = 0."""
    max_restarts: int = Field(10, ge=0)
    """How often a dead sampler is started again before the run ends."""


def worker_complaints(sampler: Sampler, *, shares_gpu: bool) -> Iterable[str]:
    """What cannot work together: the setting, its value, the reason, and what would be right."""
    num_workers = sampler.tensor_parallel_size
    if num_workers > 1 and sampler.engine == "in_process":
        yield (
            f"sampler.tensor_parallel_size = {num_workers}: sampler.engine = 'in_process' is one process, which is one "
            f"worker; use sampler.engine = 'async', or tensor_parallel_size = 1"
        )
    if 0 < sampler.num_gpus < num_workers and not (shares_gpu and num_workers == 1):
        yield (
            f"sampler.num_gpus = {sampler.num_gpus:g}: each of sampler.tensor_parallel_size = {num_workers} workers "
            f"needs a GPU of its own; use num_gpus = {num_workers}"
        )
