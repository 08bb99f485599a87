"""From a ticket and a problem to requests, and from generations and rewards to a rollout group. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.types import (
    Decision,
    EndReason,
    Generation,
    GenerationRequest,
    RewardResult,
    Rollout,
    RolloutGroup,
    Ticket,
)


def rollout_seed(group_seed: int, index: int) -> int:
    """The seed of rollout `index` of a group: the same on every machine, in [0, 2^63)."""
    digest = hashlib.sha256(f"{group_seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def config_hash(config: Config, tokenizer_fingerprint: str, rewards_version: str) -> str:
    """What every rollout carries: equal only where prompts, sampling and rewards mean the same.

    Covers sampling settings, prompt format, length limits, tokenizer and chat template, verifiers.
    """
    sampler = config.sampler
    meaning = {
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "top_k": sampler.top_k,
        "min_p": sampler.min_p,
        "max_new_tokens": sampler.max_new_tokens,
        "group_size": sampler.group_size,
        "prompt_format": config.model.prompt_format,
        "max_length_tokens": config.model.max_length_tokens,
        "tokenizer": tokenizer_fingerprint,
        "rewards": rewards_version,
    }
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]


def make_requests(ticket: Ticket, prompt_ids: Sequence[int], config: Config) -> tuple[GenerationRequest, ...]:
    """The `group_size` requests of a group; request `i` has id `<group id>/<i>` and a seed of its own."""
    return tuple(
        GenerationRequest(
            request_id=f"{ticket.group_id}/{i}",
            prompt_ids=tuple(prompt_ids),
            seed=rollout_seed(ticket.seed, i),
            max_new_tokens=config.sampler.max_new_tokens,
        )
        for i in range(config.sampler.group_size)
    )


def group_of(request_id: str) -> str:
    """The group id in a request id of `make_requests`."""
    return request_id.rpartition("/")[0]


def task_id_of(ticket: Ticket, request_id: str, attempt: int = 0) -> str:
    """Under which a response is scored: with the epoch, so that no result of a group serves another of its name.

    `attempt` counts how often a group of one ticket began anew.
    """
    return f"{request_id}@{ticket.owner_epoch}" + (f".{attempt}" if attempt else "")


def request_of(task_id: str) -> str:
    """The request id in a task id of `task_id_of`."""
    return task_id.rpartition("@")[0]


def make_rollout(request: GenerationRequest, generation: Generation, reward: RewardResult) -> Rollout:
    """One rollout over prompt and response: T = prompt tokens + response tokens, the response is the policy's."""
    num_prompt, length = len(request.prompt_ids), len(request.prompt_ids) + len(generation.token_ids)
    mixed = generation.mixed_context_from
    return Rollout(
        token_ids=np.concatenate([np.asarray(request.prompt_ids, np.int32), generation.token_ids]),
        num_prompt_tokens=num_prompt,
        loss_mask=np.arange(length) >= num_prompt,
        behavior_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), generation.logprobs]),
        version_branch=np.array([-1] * num_prompt + [v.branch for v in generation.versions], np.int32),
        version_step=np.array([-1] * num_prompt + [v.step for v in generation.versions], np.int32),
        turn=np.zeros(length, np.int16),
        end_reason=generation.end_reason,
        seed=request.seed,
        reward=reward,
        mixed_context_from=None if mixed is None else num_prompt + mixed,
    )


class GroupInProgress:
    """A group that collects its rollouts; they come in any order and stand in the order of their requests."""

    def __init__(
        self,
        ticket: Ticket,
        problem: Problem,
        requests: Sequence[GenerationRequest],
        dispatched_at_s: float,
        attempt: int = 0,
    ) -> None:
        self.ticket, self.problem, self.attempt = ticket, problem, attempt
        self._requests = {request.request_id: request for request in requests}
        self._waiting: dict[str, Generation] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._dispatched_at_s = dispatched_at_s

    @property
    def unfinished(self) -> list[GenerationRequest]:
        """Requests without a generation yet, in order."""
        return [r for name, r in self._requests.items() if name not in self._rollouts and name not in self._waiting]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, but for those that the engine holds of unfinished requests."""
        waiting = sum(len(generation.token_ids) for generation in self._waiting.values())
        return waiting + sum(rollout.num_sampled_tokens for rollout in self._rollouts.values())

    def anew(self) -> GroupInProgress:
        """The same group with nothing sampled; rewards under way for what it had are not its own."""
        return GroupInProgress(
            self.ticket, self.problem, list(self._requests.values()), self._dispatched_at_s, self.attempt + 1
        )

    @property
    def unscored(self) -> list[str]:
        """Requests that have their generation and no reward yet, by id."""
        return list(self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether every request has its rollout: generation and reward."""
        return len(self._rollouts) == len(self._requests)

    def take(self, generation: Generation) -> None:
        """Keep a generation until it is scored. Raises ValueError for one that is not of this group or comes twice."""
        request_id = generation.request_id
        if request_id not in self._requests or request_id in self._rollouts or request_id in self._waiting:
            raise ValueError(f"generation {request_id} is not awaited by group {self.ticket.group_id}")
        self._waiting[request_id] = generation

    def score(self, request_id: str, reward: RewardResult) -> None:
        """Make a rollout of a generation and its reward. Raises KeyError where it does not wait for one."""
        self._rollouts[request_id] = make_rollout(self._requests[request_id], self._waiting.pop(request_id), reward)

    def add(self, generation: Generation, reward: RewardResult) -> None:
        """Take a generation that is scored already. Raises ValueError as `take` does."""
        self.take(generation)
        self.score(generation.request_id, reward)

    def finish(self, *, sampler_id: str, config_hash: str, finished_at_s: float) -> RolloutGroup:
        """The complete group. Raises ValueError while a rollout is missing."""
        if not self.is_complete:
            missing = [name for name in self._requests if name not in self._rollouts]
            raise ValueError(f"group {self.ticket.group_id} lacks {missing}")
        return RolloutGroup(
            group_id=self.ticket.group_id,
            owner_epoch=self.ticket.owner_epoch,
            problem_id=self.problem.problem_id,
            domain=self.problem.domain,
            sampler_id=sampler_id,
            ticket_step=self.ticket.step,
            config_hash=config_hash,
            dispatched_at_s=self._dispatched_at_s,
            finished_at_s=finished_at_s,
            rollouts=tuple(self._rollouts[name] for name in self._requests),
        )


def refused_group(ticket: Ticket, problem: Problem, reason: str, config: Config, now_s: float) -> GroupInProgress:
    """A complete group for a problem that cannot be sampled: no tokens, no rewards, and the reason as evidence.

    It travels like any other, so that the ticket is given back and the curator learns that the problem is unusable.
    """
    group = GroupInProgress(ticket, problem, make_requests(ticket, (), config), now_s)
    reward = RewardResult(
        decision=Decision.ENV_ERROR, reward=None, verifier=problem.verifier, verifier_version="", evidence=reason
    )
    for request in group.unfinished:
        nothing = Generation(
            request_id=request.request_id,
            token_ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            versions=(),
            end_reason=EndReason.ERROR,
        )
        group.add(nothing, reward)
    return group
