"""What a verifier is given of a generation, and what a trajectory adds to its result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from stream_grpo.rewards.environment import COLUMN
from stream_grpo.rewards.messages import row_of
from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.types import Decision, EndReason, Generation, RewardResult, Trajectory

PREFIX = "environment."
"""Before the name of what a trajectory adds to the components of a result."""
REPLICA = f"{PREFIX}score."
"""Before the number of a replica, where there are several."""


def scored(
    problem: VerifiableProblem, generation: Generation, decode: Callable[[Sequence[int]], str]
) -> tuple[VerifiableProblem, str]:
    """The problem and the text for a verifier: all of a single turn; of a trajectory its answer, and the rest of what
    is known of it as a column of the row."""
    trajectory = generation.trajectory
    if trajectory is None:
        return problem, decode(generation.token_ids.tolist())
    row = row_of(problem, problem.verifier)
    return replace(row, extra={**row.extra, COLUMN: _column(generation.end_reason, trajectory)}), trajectory.answer


def _column(end_reason: EndReason, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "end": end_reason.value,
        "score": fmean(trajectory.scores) if trajectory.scores else None,
        "milestones": dict(trajectory.milestones),
        "num_steps": trajectory.num_steps,
        "num_calls": dict(trajectory.num_calls),
        "num_errors": trajectory.num_errors,
        "evidence": trajectory.evidence,
    }


def judged(generation: Generation, reward: RewardResult) -> tuple[Generation, RewardResult]:
    """A trajectory and its result, once it has one: an answer has become a success or a failure.

    Steps, calls, failed calls, milestones and the scores of replicas are components of the result; its steps are the
    scores of single actions. A generation of one turn is given back as it is.
    """
    trajectory = generation.trajectory
    if trajectory is None:
        return generation, reward
    ends = {Decision.PASS: EndReason.SUCCESS, Decision.FAIL: EndReason.POLICY_FAILURE}
    if generation.end_reason is EndReason.EOS and reward.decision in ends:
        generation = replace(generation, end_reason=ends[reward.decision])
    found = {"steps": trajectory.num_steps, "errors": trajectory.num_errors}
    found |= {f"calls.{tool}": num for tool, num in trajectory.num_calls.items()}
    components = {f"{PREFIX}{name}": float(value) for name, value in found.items()}
    components |= {f"{PREFIX}milestone.{name}": value for name, value in trajectory.milestones.items()}
    if len(trajectory.scores) > 1:
        components |= {f"{REPLICA}{number}": score for number, score in enumerate(trajectory.scores)}
    return generation, replace(reward, components={**reward.components, **components}, steps=trajectory.steps)
