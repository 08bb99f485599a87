"""A learner step against the same step in plain torch, and against the multiplications that it is made of."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stages.flops import flops, matmul_rate
from stream_grpo.config import Config
from stream_grpo.learner.batching import Microbatch, TrainBatch, make_train_batch
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.ranks import ALONE
from stream_grpo.learner.train_step import TrainStep
from stream_grpo.parts import learner_engine, learner_step
from stream_grpo.transport.codec import decode_group
from stream_grpo.types import RolloutGroup

_CPU = torch.device("cpu")


def measured(config: Config, *, groups: Sequence[bytes], num_rounds: int) -> dict[str, Any]:
    """Seconds of both in turns, medians, and FLOP/s. Raises ValueError where too few groups have signal for a step."""
    num_groups = config.stream.groups_per_step
    if len(groups) < num_groups:
        raise ValueError(f"{len(groups)} of the sampled groups have signal, a step takes {num_groups}")
    decoded = [decode_group(data) for data in groups[:num_groups]]
    engine = learner_engine(config)
    step = learner_step(config, engine, ALONE)
    plain = Plain(config)
    batch = batch_of(config, engine, step, decoded)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(num_rounds):
        begun = time.perf_counter()
        step.run(batch_of(config, engine, step, decoded))
        between = time.perf_counter()
        plain.step(batch)
        seconds["ours"].append(between - begun)
        seconds["plain"].append(time.perf_counter() - between)
    engine.close()
    step_s = median(seconds["ours"])
    microbatches = [m for minibatch in batch.minibatches for m in minibatch.microbatches]
    return {
        "step_s": step_s,
        "plain_s": median(seconds["plain"]),
        "num_tokens": sum(int(m.lengths_B.sum()) for m in microbatches),
        "flops_per_s": config.learner.num_epochs * sum(map(plain.flops, microbatches)) / step_s,
        "matmul_flops_per_s": matmul_rate(plain.products(), max(m.token_ids_BT.size for m in microbatches)),
    }


def batch_of(config: Config, engine: LearnerEngine, step: TrainStep, groups: Sequence[RolloutGroup]) -> TrainBatch:
    """As the learner cuts it."""
    return make_train_batch(
        groups,
        step.advantages,
        vocab_size=engine.vocab_size,
        microbatch_tokens=config.learner.microbatch_tokens,
        num_minibatches=config.learner.num_minibatches,
        attention_cost=engine.attention_cost,
        share_prompts=config.learner.share_prompts,
        packing=config.learner.packing,
    )


class Plain:
    """Transformers and torch alone: a forward and backward of every microbatch, clipping, AdamW."""

    def __init__(self, config: Config) -> None:
        self._learner, self._temperature = config.learner, config.sampler.temperature
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation="eager",
            local_files_only=True,
        ).eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.learner.learning_rate,
            betas=config.learner.adam_betas,
            weight_decay=config.learner.weight_decay,
            fused=True,
        )

    def step(self, batch: TrainBatch) -> None:
        """The clipped policy gradient on the same microbatches, each sequence with a prompt of its own."""
        for _ in range(self._learner.num_epochs):
            for minibatch in batch.minibatches:
                for microbatch in minibatch.microbatches:
                    torch.autograd.backward(self._loss(microbatch) / minibatch.num_tokens)
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._learner.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad()

    def _loss(self, microbatch: Microbatch) -> Tensor:
        t = tensors_of(microbatch, _CPU)
        # [B, K]: the logits of a position are of the token after it.
        logits = self._model(t.token_ids_BT, use_cache=False, logits_to_keep=t.num_last).logits[:, :-1]
        ids = t.token_ids_BT[:, 1 - t.num_last :, None]
        logprobs = (logits.float() / self._temperature).log_softmax(-1).gather(-1, ids)[..., 0]
        ratio = (logprobs - t.behavior_BK[:, 1:]).exp()
        advantage = t.advantage_B[:, None].float()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -torch.where(t.mask_BK[:, 1:], gain, 0.0).sum()

    def products(self) -> Counter[tuple[int, int]]:
        """How often a token is multiplied by a matrix of [inputs, outputs]; the head not among them."""
        head = self._model.get_output_embeddings()
        layers = (m for m in self._model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
        return Counter((layer.in_features, layer.out_features) for layer in layers)

    def flops(self, microbatch: Microbatch) -> float:
        """Of a forward and a backward over the padded microbatch."""
        config: Any = self._model.config
        num_sequences, length = microbatch.token_ids_BT.shape
        return flops(
            self.products(),
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            num_sequences=num_sequences,
            num_tokens=length,
            num_logits=tensors_of(microbatch, _CPU).num_last,
        )
