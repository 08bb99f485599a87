"""From the record of a group that an earlier owner of its ticket has begun to a group in progress. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.sampler.rollout import GroupInProgress, make_requests
from stream_grpo.types import EndReason, Generation, PolicyVersion, Rollout, RolloutGroup, Ticket


def continued_group(ticket: Ticket, problem: Problem, prefix: RolloutGroup, config: Config) -> GroupInProgress:
    """The group of a ticket that is issued again, with all that `prefix` has of it but its rewards.

    Rollouts that have ended are not sampled again, and wait for a reward: one of `prefix` may be of another
    configuration, or shaped, or given in comparison with what its group has not got any more. The ids of the prompt are
    those that were sampled from, and the step of the first ticket decides every schedule.
    """
    ticket = replace(ticket, step=prefix.ticket_step, prefix=b"")
    first = prefix.rollouts[0]
    prompt_ids = first.token_ids[: first.num_prompt_tokens].tolist()
    requests = make_requests(ticket, prompt_ids, config, len(prefix.rollouts))
    rollouts = dict(zip((request.request_id for request in requests), prefix.rollouts, strict=True))
    generations = {name: generation_of(name, rollout) for name, rollout in rollouts.items()}
    # One without a token has not begun: it goes by its own seed.
    begun = [g for g in generations.values() if g.end_reason is EndReason.PARTIAL and len(g.token_ids)]
    group = GroupInProgress(ticket, problem, requests, prefix.dispatched_at_s, begun)
    for name, rollout in rollouts.items():
        if rollout.end_reason is not EndReason.PARTIAL:
            group.take(generations[name])
    return group


def generation_of(request_id: str, rollout: Rollout) -> Generation:
    """What an engine gave for a rollout: the inverse of `rollout.make_rollout`."""
    start, mixed = rollout.num_prompt_tokens, rollout.mixed_context_from
    versions = zip(rollout.version_branch[start:].tolist(), rollout.version_step[start:].tolist(), strict=True)
    return Generation(
        request_id=request_id,
        token_ids=np.asarray(rollout.token_ids[start:], np.int32),
        logprobs=np.asarray(rollout.behavior_logprobs[start:], np.float32),
        versions=tuple(PolicyVersion(*version) for version in versions),
        end_reason=rollout.end_reason,
        mixed_context_from=None if mixed is None else mixed - start,
    )
