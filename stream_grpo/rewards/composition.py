"""Several verifiers as one reward: gates, tiers, scaled scores, costs. Pure.

Scales are given and never those of a group: the same response is worth the same whatever its neighbours are. A gate
that fails leaves nothing to weigh, and a tier is worth more than all that scores and costs can move.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stream_grpo.config_composition import COMPOSE_PREFIX, Asked, Component, Composition, Cost, CostKind
from stream_grpo.config_section import settings
from stream_grpo.rewards.environment import COLUMN
from stream_grpo.rewards.listed import label_of, listed
from stream_grpo.rewards.messages import ProblemRow, row_of
from stream_grpo.rewards.result import MAX_EVIDENCE_CHARACTERS, VerifiableProblem
from stream_grpo.types import Decision, RewardResult

COST = "cost."
"""Before the name of a cost in the components of a result."""
TOOL = "tool:"
"""Before the name of a tool in the kind of a cost."""
TIER, SCORE = "tier", "score"
"""Components of a result: tiers passed; scores and costs together, within their bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a response has used."""

    num_tokens: int = 0
    """Sampled tokens."""
    num_tool_calls: int = 0
    num_calls: Mapping[str, int] = field(default_factory=dict)
    """Of tools, by their names."""

    def of(self, kind: CostKind) -> int:
        """The units of one kind."""
        if kind.startswith(TOOL):
            return self.num_calls.get(kind.removeprefix(TOOL), 0)
        return self.num_tokens if kind == "tokens" else self.num_tool_calls


def usage_of(problem: VerifiableProblem, response_text: str, marker: str, num_tokens: int) -> Usage:
    """What a response has used: of a trajectory the calls of its tools, else how often the marker stands in it."""
    trajectory = problem.extra.get(COLUMN)
    if trajectory is None:
        return Usage(num_tokens=num_tokens, num_tool_calls=response_text.count(marker))
    num_calls = dict(trajectory["num_calls"])
    return Usage(num_tokens=num_tokens, num_tool_calls=sum(num_calls.values()), num_calls=num_calls)


def scaled(reward: float, component: Component) -> float:
    """(reward - mean) / spread."""
    return (reward - component.mean) / component.spread


def cost_of(num_units: int, cost: Cost) -> float:
    """min(limit, weight max(0, n - free) / per)."""
    return min(cost.limit, cost.weight * max(0, num_units - cost.free) / cost.per)


def in_tail(component: Component, result: RewardResult) -> bool:
    """Whether a score is so high that a second verifier is asked before it counts."""
    if component.tail_above is None or result.reward is None:
        return False
    return scaled(result.reward, component) > component.tail_above


def tails(composition: Composition, results: Mapping[str, RewardResult]) -> list[str]:
    """The components whose second verifier is to be asked; none where the reward is settled without it."""
    if _failed_gates(composition, results) or _missing(composition, results, {}):
        return []
    return [name for name, component in composition.components.items() if in_tail(component, results[name])]


def absent(composition: Composition, results: Mapping[str, RewardResult]) -> list[str]:
    """The optional components that had no reward to give."""
    return [key for key, part in composition.components.items() if part.optional and results[key].reward is None]


def compose(
    name: str,
    version: str,
    composition: Composition,
    results: Mapping[str, RewardResult],
    seconds: Mapping[str, RewardResult],
    usage: Usage,
) -> RewardResult:
    """The result of the whole, as verifier `name`, from those of every component and of the second ones of `tails`.

    It passes where every component that decides does. A failed gate settles it, whatever else is known or unknown;
    otherwise it has no reward where a component that is not optional has none: env_error before unknown. Components:
    the reward of each part by its name and theirs behind it, costs as negative numbers, tier and score. Steps are those
    of the first part that has some.
    """
    evidence = _joined(composition, results, seconds)
    components = _components(results)
    if failed := _failed_gates(composition, results):
        assert composition.gate_reward is not None
        evidence = f"gate {', '.join(failed)} failed; {evidence}"
        return _result(name, version, Decision.FAIL, composition.gate_reward, components, evidence)
    if missing := _missing(composition, results, seconds):
        decision = Decision.ENV_ERROR if Decision.ENV_ERROR in missing.values() else Decision.UNKNOWN
        evidence = f"no reward from {', '.join(missing)}; {evidence}"
        return _result(name, version, decision, None, components, evidence)
    costs = {kind: cost_of(usage.of(kind), cost) for kind, cost in composition.costs.items()}
    score = sum(_worth(part, results[key], seconds.get(key)) for key, part in composition.of_role("score").items())
    score -= sum(costs.values())
    if composition.bounds is not None:
        score = min(max(score, composition.bounds[0]), composition.bounds[1])
    num_tiers = _tiers_passed(composition, results)
    components |= {COST + kind: -cost for kind, cost in costs.items()} | {SCORE: score}
    if composition.tier_step is not None:
        components[TIER] = float(num_tiers)
    passed = all(
        results[key].decision is Decision.PASS
        for key, part in composition.components.items()
        if part.decides and not (part.optional and results[key].reward is None)
    )
    reward = score + (composition.tier_step or 0.0) * num_tiers
    whole = _result(name, version, Decision.PASS if passed else Decision.FAIL, reward, components, evidence)
    return replace(whole, steps=next((results[key].steps for key in composition.components if results[key].steps), ()))


def part_row(problem: VerifiableProblem, asked: Asked, verifier: str, name: str) -> ProblemRow:
    """The problem as one part sees it: its verifier, its gold, its columns over the row's.

    A part with a gold or columns of its own has an id of its own: what is known of the row's gold is not of this one.
    Raises ValueError where the row has no such column.
    """
    row = row_of(problem, verifier)
    if asked.gold is None and not asked.columns:
        return row
    extra, answer = {**row.extra, **asked.columns}, row.answer
    if asked.gold is not None:
        if (value := extra.get(asked.gold)) is None:
            raise ValueError(f"problem {row.problem_id} has no column {asked.gold!r}, the gold of {name}")
        answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return replace(row, problem_id=f"{row.problem_id}#{name}", answer=answer, extra=extra)


def version_of(composition: Composition, versions: Mapping[str, str]) -> str:
    """The version of a composition: a hash of its settings and of the versions of its verifiers."""
    used = {name: versions[name] for name in sorted(verifiers_of(composition))}
    text = json.dumps([settings(composition), used], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def verifiers_of(composition: Composition) -> set[str]:
    """The verifiers that a composition may ask."""
    parts = composition.components.values()
    return {part.verifier for part in parts} | {part.tail_verifier for part in parts if part.tail_verifier is not None}


class Chosen(NamedTuple):
    """The composition that scores a row."""

    name: str
    """The verifier of its results: `compose:NAME`, or for a list of verifiers their names, joined."""
    composition: Composition


def chosen(verifier: str, compositions: Mapping[str, Composition]) -> Chosen | None:
    """The composition that scores a row with this verifier, or None: it says so, is a list, or is replaced.

    Raises ConfigError for a list that is none.
    """
    if verifier.startswith(COMPOSE_PREFIX):
        name = verifier.removeprefix(COMPOSE_PREFIX)
        return Chosen(verifier, compositions[name]) if name in compositions else None
    if (composition := listed(verifier)) is not None:
        return Chosen(label_of(composition), composition)
    found = (Chosen(COMPOSE_PREFIX + name, one) for name, one in compositions.items() if verifier in one.replaces)
    return next(found, None)


def plain_verifiers(names: Iterable[str], compositions: Mapping[str, Composition]) -> set[str]:
    """The verifiers that are asked for rows that name `names`, compositions taken apart."""
    found: set[str] = set()
    for name in names:
        whole = chosen(name, compositions)
        found |= {name} if whole is None else verifiers_of(whole.composition)
    return found


def _worth(component: Component, result: RewardResult, second: RewardResult | None) -> float:
    """weight (reward - mean) / spread, of `if_missing` where there is no reward; 0 for a tail that is not confirmed."""
    if result.reward is None:
        return 0.0 if component.if_missing is None else component.weight * scaled(component.if_missing, component)
    if in_tail(component, result) and (second is None or second.decision is not Decision.PASS):
        return 0.0
    return component.weight * scaled(result.reward, component)


def _failed_gates(composition: Composition, results: Mapping[str, RewardResult]) -> list[str]:
    return [name for name in composition.of_role("gate") if results[name].decision is Decision.FAIL]


def _missing(
    composition: Composition, results: Mapping[str, RewardResult], seconds: Mapping[str, RewardResult]
) -> dict[str, Decision]:
    """Components without which there is no reward, by name: what their verifier, or the second one, said."""
    required = [name for name, component in composition.components.items() if not component.optional]
    asked = {name: results[name] for name in required}
    asked |= {f"{name} (tail)": seconds[name] for name in required if name in seconds}
    return {name: result.decision for name, result in asked.items() if result.reward is None}


def _tiers_passed(composition: Composition, results: Mapping[str, RewardResult]) -> int:
    """The tiers passed before the first that is not."""
    num_passed = 0
    for name in composition.of_role("tier"):
        if results[name].decision is not Decision.PASS:
            break
        num_passed += 1
    return num_passed


def _components(results: Mapping[str, RewardResult]) -> dict[str, float]:
    """The reward of every part that has one, and its own components behind its name."""
    found: dict[str, float] = {}
    for name, result in results.items():
        if result.reward is not None:
            found[name] = result.reward
        found |= {f"{name}.{key}": value for key, value in result.components.items()}
    return found


def _joined(composition: Composition, results: Mapping[str, RewardResult], seconds: Mapping[str, RewardResult]) -> str:
    """What every part says, in the order of the composition, each cut to the same length."""
    said = {name: results[name] for name in composition.components}
    said |= {f"{name} (tail)": result for name, result in seconds.items()}
    return "; ".join(
        f"{name} {result.decision}: {result.evidence[:MAX_EVIDENCE_CHARACTERS]}" for name, result in said.items()
    )


def _result(
    name: str, version: str, decision: Decision, reward: float | None, components: Mapping[str, Any], evidence: str
) -> RewardResult:
    return RewardResult(
        decision=decision,
        reward=reward,
        verifier=name,
        verifier_version=version,
        components=components,
        evidence=evidence,
    )
