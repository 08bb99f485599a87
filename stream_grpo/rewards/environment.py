"""What an environment says of a trajectory, as a verifier: the whole, or one part of it for a composition.

The column `trajectory` of the row holds it, which the sampler adds. The column `part`, which a component of a
composition sets, chooses:

    outcome           the environment's score; passes with a success (this where no part is named)
    permitted         1 unless it was stopped for what it may not do: a gate
    completed         1 unless its steps or tokens were used up
    errors            how many of its calls failed: a score with a weight below 0
    recovered         1 where none of them failed, or it succeeded all the same
    milestone.NAME    what the environment says of that milestone; 0 where it says nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_grpo.rewards.result import VerifiableProblem
from stream_grpo.types import Decision, EndReason, RewardResult

NAME, VERSION = "environment", "1"
COLUMN = "trajectory"
"""Of a row, what is known of its trajectory: end, score, milestones, num_steps, num_calls, num_errors, evidence."""
MILESTONE = "milestone."
_PASS = 0.5


def check_environment(response_text: str, problem: VerifiableProblem, is_cut: bool = False) -> RewardResult:
    """The part of the trajectory that the row asks for. A response without one raises ValueError."""
    trajectory = problem.extra.get(COLUMN)
    if not isinstance(trajectory, Mapping):
        raise ValueError(
            f"problem {problem.problem_id}: its verifier is {NAME!r}, and the response was made in no environment; "
            f"name one in environment.name, or another verifier"
        )
    part, end = str(problem.extra.get("part", "outcome")), EndReason(trajectory["end"])
    evidence = f"{part}: ended as {end} after {trajectory['num_steps']} steps; {trajectory['evidence']}"
    if part == "outcome":
        score = trajectory["score"]
        if score is None and end is not EndReason.LENGTH:
            raise ValueError(f"the environment leaves its answers to a verifier, and the row names {NAME!r}")
        return _scored(end is EndReason.SUCCESS, 0.0 if score is None else float(score), evidence)
    if part.startswith(MILESTONE):
        value = float(trajectory["milestones"].get(part.removeprefix(MILESTONE), 0.0))
        return _scored(value >= _PASS, value, evidence)
    if part == "errors":
        return _scored(trajectory["num_errors"] == 0, float(trajectory["num_errors"]), evidence)
    holds = _parts(end, trajectory)
    if part not in holds:
        raise ValueError(f"part = {part!r}: expected outcome, errors, {', '.join(holds)} or {MILESTONE}NAME")
    return _scored(holds[part], float(holds[part]), evidence)


def _parts(end: EndReason, trajectory: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "permitted": end is not EndReason.SAFETY_BLOCKED,
        "completed": end not in (EndReason.MAX_STEPS, EndReason.LENGTH),
        "recovered": trajectory["num_errors"] == 0 or end is EndReason.SUCCESS,
    }


def _scored(passed: bool, reward: float, evidence: str) -> RewardResult:
    return RewardResult(
        decision=Decision.PASS if passed else Decision.FAIL,
        reward=reward,
        verifier=NAME,
        verifier_version=VERSION,
        evidence=evidence[:400],
    )
