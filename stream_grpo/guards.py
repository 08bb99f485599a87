"""Guard sets: problems of capabilities that training must not cost, scored with the held-out ones, judged apart. Pure.

A guard's problem carries the guard in its id, `guard/NAME/ID`, so that the same problem may be held out, or be of two
guards, and each is counted for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from stream_grpo.config_problems import Guard
from stream_grpo.evaluation import ALL, ProblemScore, derived_seed, paired_rise, summarize

GUARDED = "guard/"
"""How the ids of guards' problems begin, and no others."""


class _Identified(Protocol):
    @property
    def problem_id(self) -> str: ...


T = TypeVar("T", bound=_Identified)


def guarded_id(guard: str, problem_id: str) -> str:
    """The id under which a guard's problem is scored."""
    return f"{GUARDED}{guard}/{problem_id}"


def is_guarded(problem_id: str) -> bool:
    """Whether an id is that of a guard's problem."""
    return problem_id.startswith(GUARDED)


def split(scores: Iterable[T]) -> tuple[list[T], list[T]]:
    """What is held out, and what is of guards."""
    heldout: list[T] = []
    guarded: list[T] = []
    for score in scores:
        (guarded if is_guarded(score.problem_id) else heldout).append(score)
    return heldout, guarded


def judge(
    guards: Sequence[Guard], before: Sequence[ProblemScore], after: Sequence[ProblemScore], seed: int
) -> dict[str, dict[str, Any]]:
    """What became of every guard: pass@1 before and after, the rise paired by problem, whether that is an alarm.

    `dropped`: the whole 95 % interval of the rise lies below -max_drop. A guard none of whose problems were scored on
    both sides has no rise, and is no alarm. Raises ValueError where both sides do not hold the same problems.
    """
    return {guard.name: _judged(guard, _of(guard, before), _of(guard, after), seed) for guard in guards}


def _of(guard: Guard, scores: Iterable[ProblemScore]) -> list[ProblemScore]:
    start = guarded_id(guard.name, "")
    return [replace(score, domain=guard.name) for score in scores if score.problem_id.startswith(start)]


def _judged(guard: Guard, before: list[ProblemScore], after: list[ProblemScore], seed: int) -> dict[str, Any]:
    known = {score.problem_id for score in after if score.num_scored}
    paired = any(score.num_scored and score.problem_id in known for score in before)
    rise = paired_rise(before, after, derived_seed(seed, guard.name)) if paired else None
    return {
        "before": _row(before, seed),
        "after": _row(after, seed),
        "rise": rise.as_dict() if rise else None,
        "max_drop": guard.max_drop,
        "dropped": rise is not None and rise.high < -guard.max_drop,
    }


def _row(scores: list[ProblemScore], seed: int) -> dict[str, Any]:
    return summarize([replace(score, domain="guard") for score in scores], seed)[ALL].as_dict()


def alarms(judged: Mapping[str, Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """An alarm for every guard that dropped: name, sentence, cause, and the learner step of the weights."""
    found = []
    for name, facts in judged.items():
        if facts["dropped"]:
            rise, before, after = facts["rise"], facts["before"]["pass_at_1"], facts["after"]["pass_at_1"]
            sentence = (
                f"guard {name}: pass@1 fell from {before:.3f} to {after:.3f}, by {-rise['high']:.3f} to "
                f"{-rise['low']:.3f} (95% over {rise['num_problems']} problems); max_drop is {facts['max_drop']:g}"
            )
            cause = (
                "training has moved the model away from what these problems ask for; mix such problems into the pool, "
                "hold the policy nearer with algo.kl, or train for fewer steps"
            )
            found.append({"name": f"guard:{name}", "sentence": sentence, "cause": cause, "step": step})
    return found


def guard_lines(judged: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the end of a run says of its guards, one line each."""
    lines = []
    for name, facts in judged.items():
        if (rise := facts["rise"]) is None:
            lines.append(f"guard    {name}: nothing scored on both sides")
        else:
            verdict = "DROPPED" if facts["dropped"] else "holds"
            lines.append(f"guard    {name}: {rise['mean']:+.3f} [{rise['low']:+.3f}, {rise['high']:+.3f}], {verdict}")
    return lines
