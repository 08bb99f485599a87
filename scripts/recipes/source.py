"""Rollout groups for one learner step, sampled at once by the weights that the engine has."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from curator.curation import Curation
from curator.schema import Pick
from stream_grpo.buffer.admission import admit
from stream_grpo.buffer.facts import facts_of
from stream_grpo.buffer.lineage import Lineage
from stream_grpo.buffer.outcomes import outcome_of
from stream_grpo.buffer.signal import SignalWatch
from stream_grpo.buffer.tickets import block_size, group_id_of, seed_of
from stream_grpo.buffer.transitions import Kind, Transition
from stream_grpo.config import Config
from stream_grpo.rewards.score import Scorer
from stream_grpo.sampler.generation import Engine, generate
from stream_grpo.sampler.prompts import Prompts
from stream_grpo.sampler.rollout import GroupInProgress, group_of, make_requests
from stream_grpo.transport.codec import group_to_batch
from stream_grpo.types import Fate, PolicyVersion, RolloutGroup, Ticket

MAX_GROUPS = 16
"""So many times the groups of a learner step are sampled at most to find those with signal."""


class NoSignal(Exception):
    """Too few groups have signal for a learner step."""


class Sample(NamedTuple):
    """What one learner step takes."""

    groups: list[RolloutGroup]
    mean_reward: float
    """Of all that was sampled, groups without signal included."""


class Source:
    """Curator, sampler and buffer of one training, in step and without a wire.

    As with `max_policy_age` 0, groups come in blocks: each is of problems that are picked at once, and the curator has
    learnt from it before the next.
    """

    def __init__(self, config: Config, engine: Engine, prompts: Prompts, scorer: Scorer, curation: Curation) -> None:
        self._config, self._engine, self._prompts, self._scorer = config, engine, prompts, scorer
        self._curation = curation
        self._signal = SignalWatch()
        self._num_groups = self._num_tokens = 0
        self._sample_s = 0.0

    def sample(self, learner: PolicyVersion, *, max_policy_age: int) -> Sample:
        """The groups of one learner step, the first by id that the buffer would accept.

        Raises NoSignal where they are not found.
        """
        begun, num_needed = time.perf_counter(), self._config.stream.groups_per_step
        lineage = Lineage()
        lineage.version = learner
        accepted: list[RolloutGroup] = []
        rewards: list[float] = []
        first = self._num_groups
        while (num_missing := num_needed - len(accepted)) > 0:
            if self._num_groups - first >= MAX_GROUPS * num_needed:
                raise NoSignal(
                    f"learner step {learner.step + 1}: {len(accepted)} of {self._num_groups - first} groups have "
                    f"signal, {num_needed} are needed"
                )
            for group in self._block(block_size(num_missing, self._signal.expected_share), learner):
                rewards += [r.reward.reward for r in group.rollouts if r.reward.reward is not None]
                if self._takes(group, lineage, max_policy_age):
                    accepted.append(group)
        self._sample_s += time.perf_counter() - begun
        return Sample(accepted[:num_needed], float(np.mean(rewards)))

    def totals(self) -> dict[str, Any]:
        """Over all steps so far."""
        return {"groups": self._num_groups, "sampled_tokens": self._num_tokens, "sample_s": self._sample_s}

    def _block(self, num_groups: int, learner: PolicyVersion) -> list[RolloutGroup]:
        """Groups of problems that are picked at once, in the order of their ids."""
        ids = [group_id_of(self._num_groups + i + 1) for i in range(num_groups)]
        under_way = {pick.group_id: self._begin(pick, learner) for pick in self._curation.next(ids)}
        requests = [request for group in under_way.values() for request in group.unfinished]
        for generation in generate(self._engine, requests):
            group = under_way[group_of(generation.request_id)]
            text = self._prompts.decode(generation.token_ids.tolist())
            group.add(generation, self._scorer.score(group.problem, text, generation.end_reason))
        self._num_groups += num_groups
        return [
            group.finish(sampler_id="bench", config_hash="", finished_at_s=time.time()) for group in under_way.values()
        ]

    def _begin(self, pick: Pick, learner: PolicyVersion) -> GroupInProgress:
        ticket = Ticket(
            group_id=pick.group_id,
            owner_epoch=0,
            step=learner.step,
            seed=seed_of(self._config.run.seed, pick.group_id),
            issued_at_s=time.time(),
            deadline_s=np.inf,
        )
        requests = make_requests(ticket, self._prompts.token_ids(pick.problem), self._config, pick.group_size)
        return GroupInProgress(ticket, pick.problem, requests, time.time())

    def _takes(self, group: RolloutGroup, lineage: Lineage, max_policy_age: int) -> bool:
        """Judge a group as the buffer does, and tell the curator."""
        facts = facts_of(group_to_batch(group))
        algo = self._config.algo
        fate = admit(
            facts,
            lineage,
            max_policy_age=max_policy_age,
            signal_tolerance=algo.signal_tolerance if algo.needs_spread else None,
            config_hash=None,
        ).fate
        self._signal.apply(Transition(kind=Kind(fate.value), time_s=0.0))
        self._curation.report([outcome_of(self._curation.position().next_sequence, facts, fate.value)])
        self._num_tokens += facts.num_tokens
        return fate is Fate.ACCEPTED
