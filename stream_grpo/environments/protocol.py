"""What an environment is: a start state, steps that answer actions with observations, and an end. Pure.

An environment is made for one problem and lives in a worker process. It must be repeatable: the same problem, seed,
snapshot and actions give the same observations and the same end. That is what lets a trajectory outlive its worker, by
playing its actions again, and lets the rollouts of a group share their chance. What a step does must stay inside the
environment.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from stream_grpo.rewards.messages import ProblemRow

MAX_SNAPSHOT_BYTES = 1 << 16
"""A larger snapshot is an error: it is kept with every rollout."""
MAX_EVIDENCE_CHARACTERS = 400
"""Longer evidence is cut."""


class End(StrEnum):
    """Why a trajectory is over. All but the last are ends of a rollout; see `types.EndReason`."""

    SUCCESS = "success"
    POLICY_FAILURE = "policy_failure"
    MAX_STEPS = "max_steps"
    MODEL_TIMEOUT = "model_timeout"
    ENV_ERROR = "env_error"
    SAFETY_BLOCKED = "safety_blocked"
    ANSWERED = "answered"
    """The action is an answer, and the row's verifier says which of the first two it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How an environment begins."""

    snapshot: bytes
    """The start state: equal states have equal bytes, and `reset` with them begins from it again."""
    observation: str = ""
    """What the policy reads after its prompt; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment answers to one action."""

    observation: str = ""
    """What the policy reads next; of no use at an end."""
    end: End | None = None
    """None: the policy acts again."""
    score: float | None = None
    """With an end, of the whole trajectory; None: 1 for success, else 0."""
    step_score: float | None = None
    """Of this step alone."""
    milestones: Mapping[str, float] = field(default_factory=dict)
    """What has been reached so far, by name."""
    tool: str | None = None
    """The tool that the action called; None: none."""
    failed: bool = False
    """Whether the call of the action failed, or could not be made."""
    evidence: str = ""
    """Why, with an end."""


class Environment(Protocol):
    """One task. Both methods may be `async`; then they run on an event loop that lives as long as the worker."""

    def reset(self, seed: int, snapshot: bytes | None) -> Start | Awaitable[Start]:
        """Begin. `seed` decides all chance, from now on too. `snapshot`: the start state to begin from; None: the
        environment makes it, of problem and seed alone."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer an action, which is the text of one turn without special tokens."""


Factory = Callable[[ProblemRow], Environment]
"""Makes the environment of a problem."""


def snapshot_hash(snapshot: bytes) -> str:
    """SHA-256 of a start state."""
    return hashlib.sha256(snapshot).hexdigest()


def digest(step: Step) -> str:
    """A short hash of what the policy is told by a step: a replay must give the same."""
    return hashlib.sha256(f"{step.end}\0{step.observation}".encode(errors="replace")).hexdigest()[:16]


def cut(text: str, max_bytes: int) -> str:
    """The text, or where it has more UTF-8 bytes its first and last part with a note of how much is left out between.

    The parts are of half the limit each, without a character that the cut would divide.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    half = max_bytes // 2
    head, tail = data[:half].decode(errors="ignore"), data[len(data) - half :].decode(errors="ignore")
    return f"{head}[{len(data) - 2 * half} bytes left out]{tail}"


def sound_start(start: object) -> Start:
    """The start itself. Raises TypeError or ValueError for what is none."""
    if not isinstance(start, Start):
        raise TypeError(f"reset returned {type(start).__name__}, not a Start")
    if not isinstance(start.snapshot, bytes) or not isinstance(start.observation, str):
        raise TypeError("reset returned a Start whose snapshot is no bytes or whose observation is no text")
    if len(start.snapshot) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"a snapshot of {len(start.snapshot)} bytes; at most {MAX_SNAPSHOT_BYTES} are kept")
    return start


def sound_step(step: object) -> Step:
    """The step with plain numbers. Raises TypeError or ValueError for what is none."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}, not a Step")
    for name, text in (("observation", step.observation), ("tool", step.tool or ""), ("evidence", step.evidence)):
        if not isinstance(text, str):
            raise TypeError(f"the {name} is {type(text).__name__}, not a text")
    if step.end is End.MODEL_TIMEOUT:
        raise ValueError("step ended with model_timeout, which is for the sampler to say")
    for name, value in (("score", step.score), ("step_score", step.step_score), *step.milestones.items()):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, which is no finite number")
    return replace(
        step,
        end=None if step.end is None else End(step.end),
        score=None if step.score is None else float(step.score),
        step_score=None if step.step_score is None else float(step.step_score),
        milestones={str(name): float(value) for name, value in step.milestones.items()},
        failed=bool(step.failed),
    )
