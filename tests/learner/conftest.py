"""Rollouts and groups to order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from stream_grpo.types import Decision, EndReason, RewardResult, Rollout, RolloutGroup

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine


def make_rollout(
    prompt: Sequence[int], response: Sequence[int], reward: float | None, logprobs: Sequence[float] | None = None
) -> Rollout:
    num_tokens, num_prompt = len(prompt) + len(response), len(prompt)
    sampled = np.arange(num_tokens) >= num_prompt
    behavior = np.zeros(num_tokens, dtype=np.float32)
    behavior[num_prompt:] = -1.0 if logprobs is None else logprobs
    version = np.where(sampled, 0, -1).astype(np.int32)
    decision = Decision.UNKNOWN if reward is None else Decision.PASS if reward > 0 else Decision.FAIL
    return Rollout(
        token_ids=np.array([*prompt, *response], dtype=np.int32),
        num_prompt_tokens=num_prompt,
        loss_mask=sampled,
        behavior_logprobs=behavior,
        version_branch=version,
        version_step=version,
        turn=np.zeros(num_tokens, dtype=np.int16),
        end_reason=EndReason.EOS,
        seed=0,
        reward=RewardResult(decision=decision, reward=reward, verifier="exact", verifier_version="1"),
    )


def make_group(group_id: str, rollouts: Sequence[Rollout]) -> RolloutGroup:
    return RolloutGroup(
        group_id=group_id,
        owner_epoch=0,
        problem_id=f"problem-{group_id}",
        domain="sums",
        sampler_id="sampler-0",
        ticket_step=0,
        config_hash="hash",
        dispatched_at_s=0.0,
        finished_at_s=1.0,
        rollouts=tuple(rollouts),
    )


def make_random_groups(num_groups: int, group_size: int, vocab_size: int, seed: int) -> list[RolloutGroup]:
    """Groups of mixed lengths with rewards 1, 0, 0, ... and behavior logprobs near those of a flat distribution."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        prompt = rng.integers(0, vocab_size, int(rng.integers(2, 6))).tolist()
        rollouts = []
        for i in range(group_size):
            response = rng.integers(0, vocab_size, int(rng.integers(1, 9))).tolist()
            logprobs = -np.log(vocab_size) + rng.normal(0, 0.2, len(response))
            rollouts.append(make_rollout(prompt, response, float(i == 0), logprobs.tolist()))
        groups.append(make_group(f"g{g}", rollouts))
    return groups


def learner_engine(*arguments: Any, **settings: Any) -> LearnerEngine:
    """A LearnerEngine. DeepSpeed takes seconds to import: fast tests, collected with these, need not wait for it."""
    from stream_grpo.learner.engine import LearnerEngine

    return LearnerEngine(*arguments, **settings)


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """One for all engines of a session: DeepSpeed keeps groups of the first, and bears no other after it."""
    from stream_grpo.learner.zero import join_process_group  # DeepSpeed takes seconds

    join_process_group(60.0)
    yield
    if torch.distributed.is_initialized():  # an engine of vLLM in this process takes the group along when it ends
        torch.distributed.destroy_process_group()


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    return make_rollout


@pytest.fixture
def group() -> Callable[..., RolloutGroup]:
    return make_group


@pytest.fixture
def random_groups() -> Callable[[int, int, int, int], list[RolloutGroup]]:
    return make_random_groups
