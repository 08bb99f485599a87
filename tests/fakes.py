"""Small stand-ins and builders for tests. Each is under 50 lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stream_grpo.types import (
    Decision,
    EndReason,
    Generation,
    GenerationRequest,
    PolicyVersion,
    RewardResult,
    Rollout,
    RolloutGroup,
)
from stream_grpo.weights.manifest import TensorSpec

START = PolicyVersion(0, 0)


def make_rollout(
    reward: float | None = 1.0,
    *,
    num_prompt: int = 3,
    num_response: int = 4,
    version: PolicyVersion | Sequence[PolicyVersion] = START,
    end_reason: EndReason = EndReason.EOS,
    logprob: float = -0.5,
    seed: int = 0,
    mixed_context_from: int | None = None,
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
        mixed_context_from=mixed_context_from,
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


class FakeEngine:
    """One token a step, id 7, logprob -0.5, ends by itself; probe logprobs are -1 plus `probe_error`.

    Of every prompt the first token is called cached.
    """

    def __init__(self, num_slots: int = 64) -> None:
        self.num_slots, self.probe_error, self.version = num_slots, 0.0, PolicyVersion(0, 0)
        self.fingerprint: tuple[dict[str, bytes], ...] = ()
        self.events: list[tuple[object, ...]] = []
        self._running: dict[str, tuple[GenerationRequest, list[PolicyVersion]]] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def add(self, request: GenerationRequest) -> None:
        self.events.append(("add", request.request_id))
        self._running[request.request_id] = (request, [])

    def step(self) -> list[Generation]:
        self.events.append(("step", len(self._running)))
        for _, versions in self._running.values():
            versions.append(self.version)
        done = [name for name, (request, versions) in self._running.items() if len(versions) == request.max_new_tokens]
        return [self._end(name, EndReason.EOS) for name in done]

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        names = [name for name in request_ids if name in self._running]
        self.events += [("abort", name) for name in names]
        return [self._end(name, EndReason.ABORT) for name in names]

    def progress(self, request_ids: Iterable[str]) -> list[Generation]:
        return [self._generation(n, EndReason.PARTIAL) for n in request_ids if n in self._running]

    def num_sampled(self, request_ids: Iterable[str]) -> int:
        return sum(len(self._running[name][1]) for name in request_ids if name in self._running)

    def _end(self, name: str, reason: EndReason) -> Generation:
        generation = self._generation(name, reason)
        del self._running[name]
        return generation

    def _generation(self, name: str, reason: EndReason) -> Generation:
        request, versions = self._running[name]
        ids, logprobs = np.full(len(versions), 7, np.int32), np.full(len(versions), -0.5, np.float32)
        return Generation(
            request_id=name, token_ids=ids, logprobs=logprobs, versions=tuple(versions), end_reason=reason,
            num_prompt_tokens=len(request.prompt_ids), num_cached_tokens=1,
        )  # fmt: skip

    def expected_tensors(self) -> dict[str, TensorSpec]:
        return {"w": TensorSpec((2,), "float32")}

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        self.events.append(("weights", version))
        self.version = version
        return 0.001

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0 + self.probe_error] * (len(ids) - 1) for ids in sequences]

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[dict[str, bytes], ...]:
        self.events.append(("fingerprints", len(sequences)))
        return self.fingerprint

    def clear_kv(self) -> None:
        self.events.append(("clear_kv",))

    def close(self) -> None: ...
