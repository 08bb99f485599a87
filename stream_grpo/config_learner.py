"""The settings of the learner, and of how its weights reach samplers. Loads no torch. Part of the tree of `config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stream_grpo.config_lora import Lora
from stream_grpo.config_section import Section

AdamBeta = Annotated[float, Field(ge=0, lt=1)]


class Learner(Section):
    """DeepSpeed and the optimizer."""

    learning_rate: float = Field(3e-4, ge=0)
    """Of AdamW, after warmup."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps of linear warmup."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    adam_betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.99)
    """Decay of AdamW's two running means: of gradients, and of their squares."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: what ranks cut up. 1: the optimizer's state; 2: gradients too; 3: weights too; 0: nothing."""
    num_ranks: int = Field(1, ge=1, le=1024)
    """Learner processes, `num_threads` each, among which every train batch is split."""
    lora: Lora = Lora()
    """A low-rank adapter in place of all weights, `[learner.lora]`."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """A rank that keeps the others waiting for so long in one call ends them all; the error names it."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens of one forward and backward at most (one rollout always fits)."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its rollouts, in batches where that is cheaper."""
    packing: bool = False
    """Put several prompts into one row, which do not see each other, in batches where that is cheaper than padding."""
    logits_bytes: int = Field(256 << 20, ge=1)
    """Logits of more positions than fit in here, in float32, are made a part at a time, in the backward pass again."""
    activation_checkpointing: bool = False
    """Keep the input of each layer alone for the backward pass, and compute the rest of the layer again there."""
    num_epochs: int = Field(1, ge=1)
    """Passes over a train batch."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates per pass; divides groups_per_step."""
    filter_logits: bool = False
    """Apply the sampler's top_p, top_k and min_p to the learner's logits, so that both have the same support."""
    num_threads: int = Field(1, ge=1)
    """Compute threads on CPU."""
    num_gpus: float = Field(0, ge=0)
    """GPUs of each rank, as Ray counts them; 0 or 1 with several ranks."""
    checkpoint_interval: int = Field(50, ge=1)
    """Learner steps between two checkpoints; the last step always makes one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older ones are removed."""
    max_restarts: int = Field(3, ge=0)
    """How often a dead learner is started again, from its newest checkpoint."""


class Weights(Section):
    """How new weights reach samplers, and how they are proved."""

    transfer: Literal["files", "nccl"] = "files"
    """How tensors come to samplers: as files, or from GPU to GPU through vLLM's weight transfer."""
    keep_versions: int = Field(3, ge=2)
    """Published versions that stay on disk."""
    publish: Literal["full", "changed"] = "full"
    """`changed`: a version holds the tensors that differ from the version before, and names where the others are."""
    poll_interval_s: float = Field(0.01, gt=0)
    """How often a sampler looks for new weights."""
    on_update: Literal["keep", "finish", "restart"] = "keep"
    """`keep`: running requests go on with new weights; `finish`: new weights wait until they have ended, and no request
    begins meanwhile; `restart`: groups that are not sampled to the end begin anew from their prompt."""
    num_probe_sequences: int = Field(4, ge=1)
    """Sequences whose logprobs the learner sends along."""
    probe_mean_tolerance: float = Field(1e-4, gt=0)
    """Largest mean gap of probe logprobs, fp32."""
    probe_max_tolerance: float = Field(1e-3, gt=0)
    """Largest single gap of probe logprobs, fp32."""
