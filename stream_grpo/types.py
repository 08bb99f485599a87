"""The words of the stream as data: versions, tickets, rollouts, groups, fates. No torch, nothing of ours.

Lengths: T is the number of tokens of one rollout, prompt and response together. Every per-token array of a rollout
has length T, so that one index means one token everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class PolicyVersion(NamedTuple):
    """Which weights: the branch of the run and the learner step on it. Ordered; never goes back within a run."""

    branch: int
    step: int

    def __str__(self) -> str:
        return f"{self.branch}.{self.step}"


Forks = Mapping[int, PolicyVersion]
"""For every branch above 0 the version of an earlier branch from which it forks."""


def forks_to_plain(forks: Forks) -> dict[str, list[int]]:
    """Forks as JSON and messages hold them: {"1": [0, 10]}."""
    return {str(branch): list(fork) for branch, fork in sorted(forks.items())}


def forks_from_plain(plain: Mapping[str, Sequence[int]]) -> dict[int, PolicyVersion]:
    """The inverse of `forks_to_plain`. Raises ValueError, TypeError or AttributeError for anything else."""
    return {int(branch): PolicyVersion(*map(int, fork)) for branch, fork in plain.items()}


def spent_tokens(tokens: Mapping[str, int]) -> int:
    """What of an account's sampled tokens was for training: all but those of evaluations."""
    return tokens.get("generated", 0) - tokens.get("evaluation", 0)


def policy_age(version: PolicyVersion, learner: PolicyVersion, forks: Forks) -> int:
    """Learner steps between two versions, over their common ancestor.

    Age = steps from `version` back to the common ancestor + steps from there to `learner`. On one branch this is
    `learner.step - version.step`.

    Example: branch 1 forks from (0, 10). Weights (0, 13) against a learner at (1, 12) are 3 + 2 = 5 old.

    Raises ValueError for a branch without a recorded fork, or a version ahead of the learner on its own branch.
    """
    if version.branch == learner.branch and version.step > learner.step:
        raise ValueError(f"version {version} is ahead of the learner at {learner}")
    ancestor = _common_ancestor(version, learner, forks)
    return version.step + learner.step - 2 * ancestor.step


def _common_ancestor(a: PolicyVersion, b: PolicyVersion, forks: Forks) -> PolicyVersion:
    while a.branch != b.branch:
        if a.branch < b.branch:
            a, b = b, a
        if a.branch not in forks:
            raise ValueError(f"branch {a.branch} has no recorded fork")
        fork = forks[a.branch]
        a = fork if fork.step <= a.step else PolicyVersion(fork.branch, a.step)
    return a if a.step <= b.step else b


class Decision(StrEnum):
    """What a verifier decided. Only pass and fail make a reward."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    ENV_ERROR = "env_error"


class EndReason(StrEnum):
    """Why a rollout stopped."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    PARTIAL = "partial"
    """It had not: its group was recorded while it was being sampled."""
    # Of a trajectory of several turns; one whose tokens are used up ends as `length`.
    SUCCESS = "success"
    POLICY_FAILURE = "policy_failure"
    MAX_STEPS = "max_steps"
    """All its actions are used up."""
    MODEL_TIMEOUT = "model_timeout"
    """Its deadline came while it was being sampled."""
    ENV_ERROR = "env_error"
    """Its environment failed, or did not answer by its deadline."""
    SAFETY_BLOCKED = "safety_blocked"
    """It tried what it has no permission for."""


NEVER_VALID = frozenset(
    {EndReason.ABORT, EndReason.ERROR, EndReason.PARTIAL, EndReason.MODEL_TIMEOUT, EndReason.ENV_ERROR}
)
"""Ends after which a rollout enters no advantage."""


def sampling_part(config_hash: str) -> str:
    """What a configuration hash `<sampling>-<rewards>` says of prompts and sampling, its rewards left out."""
    return config_hash.partition("-")[0]


class Fate(StrEnum):
    """The states of a group. The last five are ends: a group has exactly one."""

    TICKETED = "ticketed"
    ACCEPTED = "accepted"
    LEASED = "leased"
    TRAINED = "trained"
    STALE = "stale"
    NO_SIGNAL = "no_signal"
    INVALID = "invalid"
    REFUSED = "refused"


class StepScore(NamedTuple):
    """What a verifier says of one step of a response."""

    end: int
    """Where the step ends, exclusive: in characters of the response as a verifier gives it, in tokens of the response
    as a rollout keeps it."""
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """What a verifier says of one rollout."""

    decision: Decision
    reward: float | None
    """None where nothing was scored; never 0 for 'unknown' or 'env_error'."""
    verifier: str
    verifier_version: str
    components: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """Why: what was extracted, both sides of the comparison."""
    steps: tuple[StepScore, ...] = ()
    """The steps of the response in order, their ends rising; empty where only the whole is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What makes a request a trajectory of several turns."""

    group: str
    """Trajectories of one group begin in one state."""
    seed: int
    """Of the environment's chance: the same for the whole group."""
    problem: Any
    """The problem, as a verifier reads it."""
    num_trunk_actions: int = 0
    """Of a branching group: actions that one rollout plays for all before each samples its own. 0: a plain group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a generation of several turns has beside its tokens. R response tokens, observations among them."""

    observed: NDArray[np.bool_]
    """[R] True where this rollout did not sample the token: of an observation, or of an action that another rollout of
    its branching group has played for it. It has no logprob and no version."""
    turn: NDArray[np.int16]
    """[R] the action that the token belongs to or answers, from 0."""
    snapshot: bytes | None
    """The start state of its environment; None where it never began."""
    answer: str = ""
    """The last action where it is what a verifier scores; empty where the trajectory ended in another way."""
    scores: tuple[float, ...] = ()
    """What the environment says of the whole, once for each replica; empty where it leaves that to a verifier."""
    milestones: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0
    """Actions that the environment answered."""
    num_calls: Mapping[str, int] = field(default_factory=dict)
    """Of tools, by their names."""
    num_errors: int = 0
    """Actions whose call failed or could not be made."""
    steps: tuple[StepScore, ...] = ()
    """Scores of single actions; each ends with the action, in tokens of the response."""
    evidence: str = ""
    num_trunk_tokens: int = 0
    """Of a branching group: so many first tokens of the response are its trunk, which is context of what is trained."""
    num_taken_tokens: int = 0
    """Of these the ones that another rollout has sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to sample from an engine. Tokens in, tokens out."""

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    """Every rollout has a seed of its own."""
    max_new_tokens: int
    """Sampled ones; of a trajectory all turns together."""
    episode: Episode | None = None
    """None: one turn."""
    grammar: str | None = None
    """JSON of the structural tag that what is sampled keeps to; None: it is free."""
    reads_cache: bool = True
    """Whether keys and values of the same tokens may come from the prefix cache, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine made of one request. R response tokens."""

    request_id: str
    token_ids: NDArray[np.int32]
    """[R] as sampled."""
    logprobs: NDArray[np.float32]
    """[R] under the distribution really sampled from (temperature included)."""
    versions: tuple[PolicyVersion, ...]
    """[R] the weights that sampled each token."""
    end_reason: EndReason
    mixed_context_from: int | None = None
    """First response token sampled on a KV cache of older weights, or None."""
    num_prompt_tokens: int = 0
    """Of the request."""
    num_cached_tokens: int = 0
    """Of these the ones that another request had computed."""
    trajectory: Trajectory | None = None
    """None: one turn, all of it sampled. Where a token was observed its logprob is 0 and its version that of the next
    sampled token, or of the last."""

    @property
    def num_sampled(self) -> int:
        """Response tokens that were sampled."""
        return len(self.token_ids) - (0 if self.trajectory is None else int(self.trajectory.observed.sum()))

    @property
    def num_action_tokens(self) -> int:
        """Tokens of all its actions, whoever sampled them: what a limit or a cost by length counts."""
        return self.num_sampled + (0 if self.trajectory is None else self.trajectory.num_taken_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The buffer's permission to a sampler to make one group."""

    group_id: str
    owner_epoch: int
    """Raised when the ticket is issued again; an insert under a lower epoch is refused."""
    step: int
    """Learner step at issue: decides every schedule for the whole group."""
    seed: int
    """Rollout i of the group samples with a seed derived from this one and i."""
    issued_at_s: float
    """Unix time."""
    deadline_s: float
    """Unix time by which the group must have been inserted."""
    problem_id: str = ""
    """The problem of the group, where an earlier owner has named it."""
    group_size: int = 0
    """Rollouts that the group is to have, where an earlier owner has said; 0: nobody has."""
    prefix: bytes = b""
    """The encoded group as far as an earlier owner has brought it, to be continued; empty: sampled from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled answer: ids as sampled and what is known of every token."""

    token_ids: NDArray[np.int32]
    """[T] prompt then response."""
    num_prompt_tokens: int
    loss_mask: NDArray[np.bool_]
    """[T] True where the token was sampled by the policy and is trained; prompt, observations and the trunk of a
    branching group are context."""
    behavior_logprobs: NDArray[np.float32]
    """[T] 0 where this rollout did not sample the token."""
    version_branch: NDArray[np.int32]
    """[T] -1 where this rollout did not sample the token."""
    version_step: NDArray[np.int32]
    """[T] -1 where this rollout did not sample the token."""
    turn: NDArray[np.int16]
    """[T] turn of a conversation; 0 in single-turn tasks."""
    end_reason: EndReason
    seed: int
    reward: RewardResult
    mixed_context_from: int | None = None
    """Index into [T] of the first token sampled on a KV cache of older weights, or None."""
    environment_snapshot: bytes | None = None

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """[T] True where the policy sampled the token for this rollout: what has a loss mask, and the trunk of a
        branching group in the rollout that played it."""
        sampled: NDArray[np.bool_] = self.loss_mask | (self.version_step >= 0)
        return sampled

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled: the unit of the token account."""
        return int(self.is_sampled.sum())

    @property
    def num_target_tokens(self) -> int:
        """Of these the ones that may be trained."""
        return int(self.loss_mask.sum())

    @property
    def valid(self) -> bool:
        """Whether this rollout may enter advantages: scored, finished by itself or by length, and not empty."""
        return self.reward.reward is not None and self.end_reason not in NEVER_VALID and self.num_target_tokens > 0

    def versions(self) -> set[PolicyVersion]:
        """The versions that sampled tokens of this rollout."""
        sampled = self.is_sampled
        pairs = zip(self.version_branch[sampled].tolist(), self.version_step[sampled].tolist(), strict=True)
        return {PolicyVersion(branch, step) for branch, step in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one problem: the unit of insert, lease, evict and advantage."""

    group_id: str
    owner_epoch: int
    problem_id: str
    domain: str
    sampler_id: str
    ticket_step: int
    config_hash: str
    """`<sampling>-<rewards>`: of tokenizer, chat template and sampling settings; of verifiers and reward settings."""
    dispatched_at_s: float
    finished_at_s: float
    rollouts: tuple[Rollout, ...]

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of all rollouts."""
        return sum(r.num_sampled_tokens for r in self.rollouts)

    @property
    def num_trunk_tokens(self) -> int:
        """Of these the ones of its trunk, which one rollout sampled for all; 0 where it does not branch."""
        return self.num_sampled_tokens - sum(r.num_target_tokens for r in self.rollouts)

    def versions(self) -> set[PolicyVersion]:
        """The versions that sampled any token of the group."""
        return set().union(*(r.versions() for r in self.rollouts)) if self.rollouts else set()

    def age(self, learner: PolicyVersion, forks: Forks) -> int:
        """The largest policy age of its sampled tokens against the learner's version."""
        return max((policy_age(v, learner, forks) for v in self.versions()), default=0)
