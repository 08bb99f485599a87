"""From a ticket and a problem to requests, and from generations and rewards to a rollout group. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.config_environment import as_rules
from stream_grpo.environments.loading import version_of
from stream_grpo.environments.outcome import judged
from stream_grpo.sampler.step_tokens import steps_in_tokens
from stream_grpo.types import (
    Decision,
    EndReason,
    Episode,
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


def continued_seed(seed: int, num_tokens: int) -> int:
    """The seed by which a rollout of `seed` goes on after its first `num_tokens` tokens, in [0, 2^63)."""
    digest = hashlib.sha256(f"{seed}+{num_tokens}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def config_hash(config: Config, tokenizer_fingerprint: str, rewards_version: str) -> str:
    """What every rollout carries, `<sampling>-<rewards>`: equal only where prompts, sampling and rewards mean the same.

    The first part covers sampling settings, prompt format, length limits, tokenizer and chat template, the second
    verifiers and reward settings: groups that differ in it alone can be scored again.
    """
    sampler = config.sampler
    sampling: dict[str, Any] = {
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "top_k": sampler.top_k,
        "min_p": sampler.min_p,
        "max_new_tokens": sampler.max_new_tokens,
        "group_size": list(config.curator.group_sizes) or sampler.group_size,
        "prompt_format": config.model.prompt_format,
        "max_length_tokens": config.model.max_length_tokens,
        "tokenizer": tokenizer_fingerprint,
    }
    if (name := config.environment.name) is not None:
        version = version_of(name, [str(config.rewards.function_dir)])
        sampling["environment"] = as_rules(config.environment) | {"version": version}
        if config.environment.grammar:
            # It decides which tokens a grammar leaves to a draw.
            sampling["environment"]["xgrammar"] = metadata.version("xgrammar")
    return f"{_short_hash(sampling)}-{_short_hash({'rewards': rewards_version})}"


def _short_hash(meaning: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]


def make_requests(
    ticket: Ticket, prompt_ids: Sequence[int], config: Config, group_size: int = 0
) -> tuple[GenerationRequest, ...]:
    """The requests of a group; request `i` has id `<group id>/<i>` and a seed of its own.

    `group_size`: how many; 0: as many as `sampler.group_size` says.
    """
    return tuple(
        GenerationRequest(
            request_id=f"{ticket.group_id}/{i}",
            prompt_ids=tuple(prompt_ids),
            seed=rollout_seed(ticket.seed, i),
            max_new_tokens=config.sampler.max_new_tokens,
        )
        for i in range(group_size or config.sampler.group_size)
    )


def with_episodes(
    requests: Sequence[GenerationRequest], ticket: Ticket, problem: Problem, num_trunk_actions: int = 0
) -> tuple[GenerationRequest, ...]:
    """The requests of a group as trajectories that share start and chance of their environment, and so many actions."""
    episode = Episode(
        group=scored_as(ticket),
        seed=environment_seed(ticket.seed),
        problem=problem,
        num_trunk_actions=num_trunk_actions,
    )
    return tuple(replace(request, episode=episode) for request in requests)


def environment_seed(group_seed: int) -> int:
    """The seed of the environment of all rollouts of a group, in [0, 2^63)."""
    digest = hashlib.sha256(f"{group_seed}/environment".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def group_of(request_id: str) -> str:
    """The group id in a request id of `make_requests`."""
    return request_id.rpartition("/")[0]


def task_id_of(ticket: Ticket, request_id: str, attempt: int = 0) -> str:
    """Under which a response is scored: with the epoch, so that no result of a group serves another of its name.

    `attempt` counts how often a group of one ticket began anew.
    """
    return f"{request_id}@{ticket.owner_epoch}" + (f".{attempt}" if attempt else "")


def scored_as(ticket: Ticket, attempt: int = 0) -> str:
    """Under which the responses of a group are gathered where they are scored together."""
    return task_id_of(ticket, ticket.group_id, attempt)


def request_of(task_id: str) -> str:
    """The request id in a task id of `task_id_of`."""
    return task_id.rpartition("@")[0]


def make_rollout(request: GenerationRequest, generation: Generation, reward: RewardResult) -> Rollout:
    """One rollout over prompt and response: T = prompt tokens + response tokens, the response is the policy's but for
    what it observed, and trained but for the trunk of a branching group.

    Steps of the reward end at tokens of the response.
    """
    num_prompt, length = len(request.prompt_ids), len(request.prompt_ids) + len(generation.token_ids)
    mixed, trajectory = generation.mixed_context_from, generation.trajectory
    loss_mask, turn = np.arange(length) >= num_prompt, np.zeros(length, np.int16)
    branch = np.array([-1] * num_prompt + [v.branch for v in generation.versions], np.int32)
    step = np.array([-1] * num_prompt + [v.step for v in generation.versions], np.int32)
    if trajectory is not None:
        loss_mask[num_prompt:], turn[num_prompt:] = ~trajectory.observed, trajectory.turn
        branch[~loss_mask] = step[~loss_mask] = -1
        loss_mask[: num_prompt + trajectory.num_trunk_tokens] = False
    return Rollout(
        token_ids=np.concatenate([np.asarray(request.prompt_ids, np.int32), generation.token_ids]),
        num_prompt_tokens=num_prompt,
        loss_mask=loss_mask,
        behavior_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), generation.logprobs]),
        version_branch=branch,
        version_step=step,
        turn=turn,
        end_reason=generation.end_reason,
        seed=request.seed,
        reward=reward,
        mixed_context_from=None if mixed is None else num_prompt + mixed,
        environment_snapshot=None if trajectory is None else trajectory.snapshot,
    )


def rest_of(request: GenerationRequest, begun: Generation) -> GenerationRequest:
    """The request for what is still missing of a rollout that has begun."""
    num_begun = len(begun.token_ids)
    return replace(
        request,
        prompt_ids=(*request.prompt_ids, *begun.token_ids.tolist()),
        seed=continued_seed(request.seed, num_begun),
        max_new_tokens=request.max_new_tokens - num_begun,
    )


def joined(begun: Generation, rest: Generation) -> Generation:
    """The whole of a rollout that has begun and its rest.

    The rest has a KV cache of its own, computed from the first token on: it is of mixed context only where weights
    changed since, or where the beginning already was.
    """
    mixed = rest.mixed_context_from
    moved = None if mixed is None else len(begun.token_ids) + mixed
    return Generation(
        request_id=rest.request_id,
        token_ids=np.concatenate([begun.token_ids, rest.token_ids]),
        logprobs=np.concatenate([begun.logprobs, rest.logprobs]),
        versions=(*begun.versions, *rest.versions),
        end_reason=rest.end_reason,
        mixed_context_from=moved if begun.mixed_context_from is None else begun.mixed_context_from,
    )


class GroupInProgress:
    """A group that collects its rollouts; they come in any order and stand in the order of their requests."""

    def __init__(
        self,
        ticket: Ticket,
        problem: Problem,
        requests: Sequence[GenerationRequest],
        dispatched_at_s: float,
        begun: Iterable[Generation] = (),
        attempt: int = 0,
    ) -> None:
        """`begun`: the first tokens of some of its rollouts, by an earlier owner of the ticket."""
        self.ticket, self.problem, self.attempt = ticket, problem, attempt
        self._requests = {request.request_id: request for request in requests}
        self._begun = {generation.request_id: generation for generation in begun}
        self._waiting: dict[str, Generation] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._dispatched_at_s = dispatched_at_s

    @property
    def unfinished(self) -> list[GenerationRequest]:
        """What an engine is asked for: requests without a generation yet, in order; of begun ones the rest."""
        return [
            rest_of(request, self._begun[name]) if name in self._begun else request
            for name, request in self._requests.items()
            if name not in self._rollouts and name not in self._waiting
        ]

    @property
    def unscored(self) -> list[Generation]:
        """Generations, whole, that have no reward yet."""
        return list(self._waiting.values())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, but for those that the engine holds of unfinished requests."""
        begun = [g for name, g in self._begun.items() if name not in self._rollouts and name not in self._waiting]
        generations = [*begun, *self._waiting.values()]
        return sum(r.num_sampled_tokens for r in self._rollouts.values()) + sum(g.num_sampled for g in generations)

    def anew(self) -> GroupInProgress:
        """The same group with nothing sampled; rewards under way for what it had are not its own."""
        requests = list(self._requests.values())
        return GroupInProgress(self.ticket, self.problem, requests, self._dispatched_at_s, attempt=self.attempt + 1)

    @property
    def size(self) -> int:
        """Rollouts that it is to have."""
        return len(self._requests)

    @property
    def is_complete(self) -> bool:
        """Whether every request has its rollout: generation and reward."""
        return len(self._rollouts) == len(self._requests)

    def take(self, generation: Generation) -> Generation:
        """Keep a generation until it is scored; returns it whole, with what was begun.

        Raises ValueError for one that is not of this group or comes twice.
        """
        request_id = generation.request_id
        if request_id not in self._requests or request_id in self._rollouts or request_id in self._waiting:
            raise ValueError(f"generation {request_id} is not awaited by group {self.ticket.group_id}")
        self._waiting[request_id] = self._whole(generation)
        return self._waiting[request_id]

    def _whole(self, generation: Generation) -> Generation:
        begun = self._begun.get(generation.request_id)
        return joined(begun, generation) if begun else generation

    def score(
        self, request_id: str, reward: RewardResult, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        """Make a rollout of a generation and its reward. Raises KeyError where it does not wait for one.

        `decode`: of token ids to the text that was scored; what has steps needs it, to say at which tokens they end.
        """
        generation = self._waiting.pop(request_id)
        if generation.trajectory is not None:
            generation, reward = judged(generation, reward)
        elif reward.steps and decode is not None:
            reward = replace(reward, steps=steps_in_tokens(reward.steps, generation.token_ids.tolist(), decode))
        self._rollouts[request_id] = make_rollout(self._requests[request_id], generation, reward)

    def add(self, generation: Generation, reward: RewardResult) -> None:
        """Take a generation that is scored already. Raises ValueError as `take` does."""
        self.take(generation)
        self.score(generation.request_id, reward)

    def finish(self, *, sampler_id: str, config_hash: str, finished_at_s: float) -> RolloutGroup:
        """The complete group. Raises ValueError while a rollout is missing."""
        if not self.is_complete:
            missing = [name for name in self._requests if name not in self._rollouts]
            raise ValueError(f"group {self.ticket.group_id} lacks {missing}")
        rollouts = tuple(self._rollouts[name] for name in self._requests)
        return self._group(rollouts, sampler_id, config_hash, finished_at_s)

    def so_far(self, running: Iterable[Generation], *, sampler_id: str, config_hash: str, now_s: float) -> RolloutGroup:
        """The group as it is: `running` holds a generation for every unfinished request. Raises KeyError without.

        What has ended and is not scored yet has no reward, as what runs.
        """
        generations = {generation.request_id: self._whole(generation) for generation in running} | self._waiting
        unscored = RewardResult(
            decision=Decision.UNKNOWN, reward=None, verifier=self.problem.verifier, verifier_version=""
        )
        rollouts = tuple(
            self._rollouts[name] if name in self._rollouts else make_rollout(request, generations[name], unscored)
            for name, request in self._requests.items()
        )
        return self._group(rollouts, sampler_id, config_hash, now_s)

    def _group(
        self, rollouts: tuple[Rollout, ...], sampler_id: str, config_hash: str, finished_at_s: float
    ) -> RolloutGroup:
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
            rollouts=rollouts,
        )


def unknown_problem(problem_id: str) -> Problem:
    """What stands in a refused group for a problem of which nothing but the id is known."""
    return Problem(problem_id=problem_id, prompt="", answer="", verifier="")


def refused_group(
    ticket: Ticket, problem: Problem, reason: str, config: Config, now_s: float, group_size: int = 0
) -> GroupInProgress:
    """A complete group for a problem that cannot be sampled: no tokens, no rewards, and the reason as evidence.

    It travels like any other, so that the ticket is given back and the curator learns that the problem is unusable.
    """
    group = GroupInProgress(ticket, problem, make_requests(ticket, (), config, group_size), now_s)
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
