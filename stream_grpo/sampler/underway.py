"""One trajectory while it is made: ids as they come, turn after turn, and the generation that they make. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stream_grpo.environments.instance import Call
from stream_grpo.environments.protocol import Start, Step, digest
from stream_grpo.rewards.messages import row_of
from stream_grpo.sampler.rollout import continued_seed
from stream_grpo.types import EndReason, Generation, GenerationRequest, PolicyVersion, StepScore, Trajectory


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one kind in a row."""

    token_ids: tuple[int, ...]
    turn: int
    sampled: Generation | None
    """None: an observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """A trajectory as it stands before one of its actions, from where the rollouts of a branching group go on."""

    snapshot: bytes | None
    """The start state."""
    pieces: tuple[_Piece, ...]
    actions: tuple[str, ...]
    seen: tuple[str, ...]
    calls: Mapping[str, int]
    milestones: Mapping[str, float]
    num_errors: int

    @property
    def num_tokens(self) -> int:
        """Of actions and observations."""
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def num_sampled(self) -> int:
        """Of actions."""
        return sum(len(piece.token_ids) for piece in self.pieces if piece.sampled is not None)


def replica_seed(seed: int, number: int) -> int:
    """The seed of an environment's replica: that of the episode for the first, the same on every machine."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}~{number}".encode()).digest()[:8], "big") >> 1


class Underway:
    """A trajectory that is being made. R response tokens so far."""

    def __init__(
        self, request: GenerationRequest, name: str, *, max_turn_tokens: int | None, max_observation_bytes: int
    ) -> None:
        """`name`: of the trajectory at its environment. Raises ValueError for a request without an episode."""
        if request.episode is None:
            raise ValueError(f"request {request.request_id} has no episode")
        self.request, self.name, self._episode = request, name, request.episode
        self.seed = request.seed
        """Of what is sampled from now on."""
        self._max_turn_tokens, self._max_observation_bytes = max_turn_tokens, max_observation_bytes
        self._pieces: list[_Piece] = []
        self._actions: list[str] = []
        self._seen: list[str] = []
        self._calls: Counter[str] = Counter()
        self._step_scores: list[StepScore] = []
        self._num_errors = 0
        self._milestones: dict[str, float] = {}
        self.scores: list[float] = []
        """What its environment says of the whole, first itself, then replicas."""
        self.snapshot: bytes | None = None
        self.num_steps = 0
        """Actions that were answered."""
        # What it went on from, and of that the tokens that another rollout sampled.
        self._num_trunk_tokens = self._num_taken_tokens = 0

    @property
    def group(self) -> str:
        """Of those that begin in one state."""
        return self._episode.group

    @property
    def num_trunk_actions(self) -> int:
        """Actions that one of its group plays for all; 0 where the group does not branch."""
        return self._episode.num_trunk_actions

    @property
    def num_actions(self) -> int:
        """Actions so far."""
        return len(self._actions)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum(len(piece.token_ids) for piece in self._pieces if piece.sampled is not None)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_new_tokens - self._num_taken_tokens - self.num_sampled

    @property
    def last_ids(self) -> tuple[int, ...]:
        """Of the newest action; empty before the first."""
        return next((piece.token_ids for piece in reversed(self._pieces) if piece.sampled is not None), ())

    # -- branching ----------------------------------------------------------------------------------------------------

    def trunk(self) -> Trunk:
        """It as it stands, before an action."""
        return Trunk(
            snapshot=self.snapshot,
            pieces=tuple(self._pieces),
            actions=tuple(self._actions),
            seen=tuple(self._seen),
            calls=dict(self._calls),
            milestones=dict(self._milestones),
            num_errors=self._num_errors,
        )

    def go_on_from(self, trunk: Trunk, *, is_own: bool) -> None:
        """Become a trajectory that has come so far and goes on by the seed of its request.

        `is_own`: it has sampled the trunk's actions itself; another one has them as context, as observations are. Its
        environment gets there when it is called next: it plays the trunk's actions, and must answer as it did.
        """
        self.seed, self.snapshot, self.num_steps = self.request.seed, trunk.snapshot, len(trunk.actions)
        self._pieces = [piece if is_own else replace(piece, sampled=None) for piece in trunk.pieces]
        self._actions, self._seen = list(trunk.actions), list(trunk.seen)
        self._calls, self._milestones, self._num_errors = Counter(trunk.calls), dict(trunk.milestones), trunk.num_errors
        # Scores of single actions are compared as far as they are trained.
        self._step_scores, self.scores = [], []
        self._num_trunk_tokens = trunk.num_tokens
        self._num_taken_tokens = 0 if is_own else trunk.num_sampled

    # -- what comes in ------------------------------------------------------------------------------------------------

    def begin(self, start: Start) -> None:
        """Its environment has begun."""
        self.snapshot = start.snapshot

    def act(self, generation: Generation, text: str) -> None:
        """Take what the engine made of `next_request`; `text`: of its tokens."""
        ids = tuple(generation.token_ids.tolist())
        if ids:  # one that was aborted before its first token has none
            self._pieces.append(_Piece(ids, len(self._actions), generation))
        self._actions.append(text)

    def answered(self, step: Step) -> None:
        """Its environment has answered the newest action."""
        self.num_steps += 1
        self._seen.append(digest(step))
        self._num_errors += step.failed
        if step.tool is not None:
            self._calls[step.tool] += 1
        self._milestones |= step.milestones
        if step.step_score is not None:
            self._step_scores.append(StepScore(self._num_tokens, step.step_score))

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append an observation, which belongs to the action before it."""
        if token_ids:
            self._pieces.append(_Piece(tuple(token_ids), max(0, len(self._actions) - 1), None))

    # -- what goes out ------------------------------------------------------------------------------------------------

    def next_request(self, *, grammar: str | None = None, reuses_history: bool = False) -> GenerationRequest:
        """The request for the next action: the whole history as it was sampled and observed, nothing encoded again.

        `reuses_history`: whether its keys and values may come from earlier actions.
        """
        history = [token_id for piece in self._pieces for token_id in piece.token_ids]
        num_new = self.num_left if self._max_turn_tokens is None else min(self._max_turn_tokens, self.num_left)
        seed = self.seed if not self._actions else continued_seed(self.seed, len(history))
        return replace(
            self.request,
            prompt_ids=(*self.request.prompt_ids, *history),
            seed=seed,
            max_new_tokens=num_new,
            episode=None,
            grammar=grammar,
            reads_cache=reuses_history or not self._actions,
        )

    def call(self, *, snapshot: bytes | None = None) -> Call:
        """What its environment is asked now: to begin, from `snapshot` where one is given, or to answer the newest
        action."""
        return Call(
            trajectory=self.name,
            problem=row_of(self._episode.problem, self._episode.problem.verifier),
            seed=self._episode.seed,
            snapshot=self.snapshot if snapshot is None else snapshot,
            actions=tuple(self._actions),
            seen=tuple(self._seen),
            max_observation_bytes=self._max_observation_bytes,
        )

    def replica_calls(self, num_replicas: int) -> list[Call]:
        """What plays all its actions again, by other chance from the same start; none for a single replica."""
        return [
            replace(
                self.call(),
                trajectory=f"{self.name}~{number}",
                seed=replica_seed(self._episode.seed, number),
                seen=(),
                open_loop=True,
            )
            for number in range(1, num_replicas)
        ]

    def generation(self, end_reason: EndReason, *, is_answer: bool = False, evidence: str = "") -> Generation:
        """All of it as one generation. `is_answer`: the newest action is what a verifier scores.

        Nothing that was only observed is left at its end, and nothing at all where nothing was sampled.
        """
        pieces = list(self._pieces)
        while pieces and pieces[-1].sampled is None:
            pieces.pop()
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        logprobs = [
            np.zeros(len(piece.token_ids), np.float32) if piece.sampled is None else piece.sampled.logprobs
            for piece in pieces
        ]
        lengths = [len(piece.token_ids) for piece in pieces]
        sampled = [piece.sampled for piece in pieces if piece.sampled is not None]
        trajectory = Trajectory(
            observed=np.repeat([piece.sampled is None for piece in pieces], lengths).astype(np.bool_),
            turn=np.repeat([piece.turn for piece in pieces], lengths).astype(np.int16),
            snapshot=self.snapshot,
            answer=self._actions[-1] if is_answer and self._actions else "",
            scores=tuple(self.scores),
            milestones=dict(self._milestones),
            num_steps=self.num_steps,
            num_calls=dict(self._calls),
            num_errors=self._num_errors,
            steps=tuple(self._step_scores),
            evidence=evidence,
            num_trunk_tokens=min(self._num_trunk_tokens, len(token_ids)),
            num_taken_tokens=self._num_taken_tokens if pieces else 0,
        )
        return Generation(
            request_id=self.request.request_id,
            token_ids=np.asarray(token_ids, np.int32),
            logprobs=np.concatenate([np.zeros(0, np.float32), *logprobs]),
            versions=_versions(pieces),
            end_reason=end_reason,
            mixed_context_from=_mixed_context_from(pieces),
            num_prompt_tokens=sum(each.num_prompt_tokens for each in sampled),
            num_cached_tokens=sum(each.num_cached_tokens for each in sampled),
            trajectory=trajectory,
        )

    @property
    def _num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self._pieces)


def _versions(pieces: Sequence[_Piece]) -> tuple[PolicyVersion, ...]:
    """[R] of an observed token that of the next sampled one."""
    versions: list[PolicyVersion] = []
    for piece in reversed(pieces):
        if piece.sampled is not None:
            versions += reversed(piece.sampled.versions)
        else:
            versions += [versions[-1]] * len(piece.token_ids)
    return tuple(reversed(versions))


def _mixed_context_from(pieces: Sequence[_Piece]) -> int | None:
    """The first response token on a KV cache of older weights: every action has a cache of its own, computed from the
    first token on."""
    start = 0
    for piece in pieces:
        if piece.sampled is not None and piece.sampled.mixed_context_from is not None:
            return start + piece.sampled.mixed_context_from
        start += len(piece.token_ids)
    return None
