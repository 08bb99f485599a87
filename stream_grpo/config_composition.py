"""The settings of a reward that several verifiers make together. Loads no torch.

Part of the tree of `config`; what a composition cannot do is refused here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stream_grpo.config_section import Section

COMPOSE_PREFIX = "compose:"
"""Of the name by which a row asks for a composition."""

CostKind = Literal["tokens", "tool_calls"] | Annotated[str, Field(pattern=r"^tool:[A-Za-z0-9_.-]{1,64}$")]
Value = str | bool | int | float | tuple[str | bool | int | float, ...]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class Asked(Section):
    """A verifier, and what of a row it is told."""

    verifier: str = Field(min_length=1)
    """Its name, as a row would write it; no composition."""
    gold: str | None = None
    """The column that is its gold, of the row or set in `columns`; None: the row's answer."""
    columns: dict[str, Value] = Field(default_factory=dict)
    """Set over the row's own columns, for this verifier alone."""

    @model_validator(mode="after")
    def _is_plain(self) -> Asked:
        if self.verifier.startswith(COMPOSE_PREFIX):
            raise ValueError(f"verifier = {self.verifier!r}: a composition is made of verifiers, not of compositions")
        return self


class Component(Asked):
    """One verifier of a composition, and what its result does."""

    role: Literal["score", "gate", "tier"] = "score"
    """`score`: its reward counts by weight; `gate`: it must pass, or nothing else counts; `tier`: a response that
    passes it stands above every response that does not."""
    weight: float = 1.0
    """score: what a scaled reward of 1 is worth; below 0 it is a penalty."""
    mean: float = 0.0
    """score: the reward that is worth nothing."""
    spread: float = Field(1.0, gt=0)
    """score: (reward - mean) / spread counts. Given once, never that of a group: rewards of two groups compare."""
    decides: bool = True
    """Whether a response that does not pass it is a fail of the whole; the reward is not touched by it."""
    optional: bool = False
    """Whether the response keeps its reward where this verifier has none to give; `if_missing` counts then."""
    if_missing: float | None = None
    """score, optional: the reward that counts where there is none. None: `mean`, which is worth nothing."""
    tail_above: float | None = None
    """score: a scaled reward above this counts only if `tail_verifier` passes the response too; else it is worth 0."""
    tail_verifier: str | None = None
    """Who is asked of the extreme tail, with the same gold and columns."""

    @model_validator(mode="after")
    def _role_fits(self) -> Component:
        scores = {"weight": 1.0, "mean": 0.0, "spread": 1.0, "tail_above": None, "if_missing": None}
        for name, unset in scores.items():
            if self.role != "score" and getattr(self, name) != unset:
                raise ValueError(f"{name} = {getattr(self, name)}: a {self.role} only passes or fails; leave it out")
        if self.weight == 0:
            raise ValueError("weight = 0.0: the verifier would be asked for nothing; leave the component out")
        if self.optional and self.role == "tier":
            raise ValueError("optional = true with role = tier: a response of unknown tier has no place; use false")
        if self.if_missing is not None and not self.optional:
            raise ValueError(
                f"if_missing = {self.if_missing:g}: without its reward the response is left out; set optional = true"
            )
        if (self.tail_above is None) != (self.tail_verifier is None):
            raise ValueError("tail_above and tail_verifier need each other; give both or none")
        if self.tail_verifier is not None and self.tail_verifier.startswith(COMPOSE_PREFIX):
            raise ValueError(f"tail_verifier = {self.tail_verifier!r}: a composition cannot be one")
        if self.tail_verifier == self.verifier:
            raise ValueError(f"tail_verifier = {self.tail_verifier!r} is the verifier that is in question; use another")
        return self


class Cost(Section):
    """What a response pays for its length or its tools: weight (n - free) / per above `free`, up to `limit`."""

    weight: float = Field(gt=0)
    """Taken for every `per` units above `free`."""
    free: int = Field(0, ge=0)
    """Units that cost nothing."""
    per: float = Field(1.0, gt=0)
    """Units that `weight` is for."""
    limit: float = Field(1.0, gt=0)
    """The most that is taken."""


class Composition(Section):
    """Several verifiers as one: with f a failed gate, k tiers passed, `bounds` holding the sum,

    reward = gate_reward if f, else clip(sum weight (r - mean) / spread - costs, low, high) + tier_step k.
    """

    components: dict[Name, Component] = Field(min_length=1)
    """By a name of yours, which the components of the result carry. Tiers stand in their order, lowest first."""
    costs: dict[CostKind, Cost] = Field(default_factory=dict)
    """Of the response itself: sampled tokens; how often `tool_marker` stands in it, or in an environment how often it
    called a tool; `tool:NAME`: how often it called that one."""
    tool_marker: str = Field("<tool_call>", min_length=1)
    """What opens a call of a tool."""
    bounds: tuple[float, float] | None = None
    """What scores and costs together are held within; needed with gates and tiers."""
    gate_reward: float | None = None
    """Of a response that fails a gate: below `bounds`, so that nothing buys the gate back."""
    tier_step: float | None = Field(None, gt=0)
    """What each tier is worth: more than the width of `bounds`, so that no tier reaches the next."""
    replaces: tuple[str, ...] = ()
    """Verifiers that rows name and that this composition stands in for; its own components ask them as they are."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Composition:
        for complaint in _complaints(self):
            raise ValueError(complaint)
        return self

    def of_role(self, role: str) -> dict[str, Component]:
        """The components of one role, in their order."""
        return {name: component for name, component in self.components.items() if component.role == role}


def _complaints(composition: Composition) -> Iterable[str]:
    gates, tiers = composition.of_role("gate"), composition.of_role("tier")
    if not any(component.decides and not component.optional for component in composition.components.values()):
        yield "components: none of them decides; one that is not optional must say pass or fail of the whole"
    for role, found, name in (("gate", gates, "gate_reward"), ("tier", tiers, "tier_step")):
        if bool(found) != (getattr(composition, name) is not None):
            yield f"{name} and components with role = {role} need each other; give both or none"
    if (bounds := composition.bounds) is None:
        if gates or tiers:
            yield "bounds is missing: a sum of scores without bounds could buy back a gate or reach the next tier"
        return
    low, high = bounds
    if low > high:
        yield f"bounds = {list(bounds)}: the lower one comes first"
    if composition.gate_reward is not None and composition.gate_reward >= low:
        yield f"gate_reward = {composition.gate_reward:g}: a failed gate would pay; use less than bounds[0] = {low:g}"
    if (step := composition.tier_step) is not None:
        # As the rewards are computed, rounding included.
        tops = [high + step * k for k in range(len(tiers))]
        if any(top >= low + step * (k + 1) for k, top in enumerate(tops)):
            yield (
                f"tier_step = {step:g}: the best of a tier would reach the worst of the next; use more than "
                f"bounds[1] - bounds[0] = {high - low:g}"
            )


def composition_complaints(compositions: dict[str, Composition]) -> Iterable[str]:
    """What several compositions cannot do together."""
    pairs = itertools.combinations(compositions.items(), 2)
    for (name, one), (other, two) in pairs:
        if taken := sorted(set(one.replaces) & set(two.replaces)):
            yield f"compose.{name} and compose.{other} both replace {taken[0]!r}; one of them can"
