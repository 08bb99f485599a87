"""What benchmarks of one learner step share: their arguments, the real engine, a batch of made-up groups, a pass."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.config_learner import Learner
from stream_grpo.learner.batching import Minibatch, Scored
from stream_grpo.learner.engine import LearnerEngine
from stream_grpo.learner.first_pass import tensors_of
from stream_grpo.learner.forward import Distribution
from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup


def parser_of(
    description: str | None, *, prompt_tokens: int, response_tokens: int, rounds: int
) -> argparse.ArgumentParser:
    """Arguments of the model, the groups and the rounds, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; by default random weights of SmolLM2-135M's size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens)
    parser.add_argument("--response-tokens", type=int, default=response_tokens)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1)
    return parser


@contextmanager
def engine_of(arguments: argparse.Namespace, **learner: Any) -> Iterator[LearnerEngine]:
    """The learner's engine on the model of the arguments; `learner`: further settings."""
    with tempfile.TemporaryDirectory() as name:
        engine = LearnerEngine(
            arguments.model or random_model(Path(name)),
            learner=Learner(
                num_threads=arguments.threads, microbatch_tokens=arguments.microbatch_tokens, zero_stage=0, **learner
            ),
            recipe=PRESETS[DEFAULT].recipe,
            dtype=arguments.dtype,
            distribution=Distribution(temperature=1.0),
            seed=0,
        )
        yield engine
        engine.close()


def random_model(directory: Path) -> Path:
    """SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def passed(engine: LearnerEngine, minibatch: Minibatch) -> None:
    """Forward and backward of all microbatches, added to the gradients that are there."""
    for microbatch in minibatch.microbatches:
        tensors = tensors_of(microbatch, engine.device)
        logprobs_BK, _ = engine.logprobs(tensors.targets)
        engine.backward(torch.where(tensors.mask_BK, logprobs_BK, 0.0).sum() / minibatch.num_tokens)


def by_reward(rewards_B: np.ndarray, valid_B: np.ndarray, *_: object) -> Scored:
    """Any advantages: they are not looked at."""
    return Scored(np.nan_to_num(rewards_B), valid_B)


def made_groups(arguments: argparse.Namespace, vocab_size: int) -> list[RolloutGroup]:
    """As many as the arguments say."""
    return [make_group(number, arguments, vocab_size) for number in range(arguments.groups)]


def make_group(number: int, arguments: argparse.Namespace, vocab_size: int) -> RolloutGroup:
    """Responses of 1/2 to 3/2 of the wanted length."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(1, vocab_size, arguments.prompt_tokens)
    shortest = max(1, arguments.response_tokens // 2)
    rollouts = []
    for index in range(arguments.group_size):
        response = rng.integers(1, vocab_size, rng.integers(shortest, 3 * shortest + 1))
        ids = np.concatenate([prompt, response]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        versions = np.where(mask, 0, -1).astype(np.int32)
        reward = RewardResult(decision=Decision.PASS, reward=float(index), verifier="exact", verifier_version="1")
        rollouts.append(
            Rollout(
                token_ids=ids, num_prompt_tokens=len(prompt), loss_mask=mask,
                behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32), version_branch=versions,
                version_step=versions, turn=np.zeros(len(ids), np.int16), end_reason=EndReason.EOS, seed=index,
                reward=reward,
            )
        )  # fmt: skip
    return RolloutGroup(
        group_id=f"g{number}", owner_epoch=0, problem_id=f"p{number}", domain="d", sampler_id="s", ticket_step=0,
        config_hash="c", dispatched_at_s=0.0, finished_at_s=1.0, rollouts=tuple(rollouts),
    )  # fmt: skip
