"""Small stand-ins and builders for tests. Each is under 50 lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stream_grpo.types import Decision, EndReason, PolicyVersion, RewardResult, Rollout, RolloutGroup


def make_rollout(
    reward: float | None = 1.0,
    *,
    num_prompt: int = 3,
    num_response: int = 4,
    version: PolicyVersion | Sequence[PolicyVersion] = PolicyVersion(0, 0),
    end_reason: EndReason = EndReason.EOS,
    logprob: float = -0.5,
    seed: int = 0,
) -> Rollout:
    """A rollout with ids 5, 6, 7, ... ; `version` is one for all response tokens, or one for each."""
    length = num_prompt + num_response
    mask = np.arange(length) >= num_prompt
    versions = [version] * num_response if isinstance(version, PolicyVersion) else list(version)
    branch, step = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    branch[num_prompt:], step[num_prompt:] = [v.branch for v in versions], [v.step for v in versions]
    decision = Decision.UNKNOWN if reward is None else Decision.PASS if reward > 0 else Decision.FAIL
    return Rollout(
        token_ids=np.arange(5, 5 + length, dtype=np.int32),
        num_prompt_tokens=num_prompt,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        version_branch=branch,
        version_step=step,
        turn=np.zeros(length, np.int16),
        end_reason=end_reason,
        seed=seed,
        reward=RewardResult(decision=decision, reward=reward, verifier="exact", verifier_version="1"),
    )


def make_group(
    group_id: str = "g0", rewards: Sequence[float | None] = (1.0, 0.0), *, owner_epoch: int = 0, **rollout: object
) -> RolloutGroup:
    """A group with one rollout a reward; further arguments go to `make_rollout`."""
    return RolloutGroup(
        group_id=group_id,
        owner_epoch=owner_epoch,
        problem_id=f"problem-of-{group_id}",
        domain="add-2",
        sampler_id="sampler-0",
        ticket_step=0,
        config_hash="c0",
        dispatched_at_s=100.0,
        finished_at_s=101.5,
        rollouts=tuple(make_rollout(r, seed=i, **rollout) for i, r in enumerate(rewards)),  # type: ignore[arg-type]
    )
