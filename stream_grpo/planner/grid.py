"""Which settings are tried, what each would come to, and which is recommended. Pure."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from stream_grpo.errors import ConfigError
from stream_grpo.planner.prediction import Prediction
from stream_grpo.planner.simulation import simulate
from stream_grpo.planner.world import Settings, World

NUMBERS = tuple(field.name for field in fields(Settings) if field.name not in ("too_old", "sample_deadline_s"))
"""Settings that a grid may go over, as whole numbers."""
NAMES = (*NUMBERS, "sample_deadline_s", "too_old")
MAX_SETTINGS = 512
TOLERANCE = 0.03
"""A throughput nearer than this to the best is as good: the lower age decides."""
SETTLED = 3
"""Steps before the reported ones: so many times the age that tokens can reach, and some more."""


@dataclass(frozen=True, slots=True)
class Point:
    """A setting and what it would come to; a reason instead where it cannot be."""

    settings: Settings
    prediction: Prediction | None
    refusal: str = ""


def parse_grid(texts: Iterable[str]) -> dict[str, list[Any]]:
    """`name=value,value` as lists of values. Raises ConfigError with the nearest name, or the value that is wrong."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().rpartition(".")[2]
        if not equals or not values.strip():
            raise ConfigError(f"--grid {text}: expected name=value,value, for example --grid max_policy_age=1,2,4")
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMES)}"
            raise ConfigError(f"--grid {name}: no setting that the model knows; {hint}")
        if name in grid:
            raise ConfigError(f"--grid {name}: given twice; list all its values once, as {name}=1,2")
        grid[name] = [_value(name, value.strip()) for value in values.split(",")]
    return grid


def _value(name: str, text: str) -> Any:
    if name == "too_old":
        if text in ("wait", "drop"):
            return text
        raise ConfigError(f"--grid {name}={text}: expected wait or drop")
    try:
        return float(text) if name == "sample_deadline_s" else int(text)
    except ValueError:
        raise ConfigError(
            f"--grid {name}={text}: expected a {'' if name == 'sample_deadline_s' else 'whole '}number"
        ) from None


def expand(settings: Settings, grid: dict[str, list[Any]]) -> list[tuple[dict[str, Any], str]]:
    """Every combination, as changes to `settings`, with the reason why it cannot be, if it cannot.

    Raises ConfigError for too many.
    """
    num = math.prod(len(values) for values in grid.values())
    if num > MAX_SETTINGS:
        raise ConfigError(f"--grid: {num} combinations, at most {MAX_SETTINGS}; leave out values")
    found = []
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        try:
            replace(settings, **changes)
            found.append((changes, ""))
        except ValueError as error:
            found.append((changes, str(error)))
    return found


def num_steps_of(settings: Settings, num_steps: int) -> tuple[int, int]:
    """Steps to go in all, and those before the reported ones: the stream fills up first."""
    warmup = SETTLED * (settings.max_policy_age + settings.publish_interval) + 4
    return warmup + num_steps, warmup


def sweep(world: World, settings: Settings, grid: dict[str, list[Any]], *, num_steps: int, seed: int) -> list[Point]:
    """Predict every combination; one that stands still is refused with the reason."""
    points = []
    for changes, refusal in expand(settings, grid):
        if refusal:
            points.append(Point(settings, None, f"{_text(changes)}: {refusal}"))
            continue
        changed = replace(settings, **changes)
        total, warmup = num_steps_of(changed, num_steps)
        try:
            found = simulate(world, changed, seed=seed, num_steps=total, warmup_steps=warmup)
        except ValueError as error:
            points.append(Point(changed, None, f"{_text(changes)}: {error}"))
            continue
        points.append(Point(changed, found))
    return points


def _text(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in changes.items())


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points than which no other has both more trained tokens a second and a lower mean age; by age."""
    found: list[Point] = []
    best = -math.inf
    for point in sorted(_predicted(points), key=lambda p: (_age(p), -_rate(p))):
        if _rate(point) > best:
            best = _rate(point)
            found.append(point)
    return found


def recommend(points: Sequence[Point]) -> Point | None:
    """The lowest mean age within TOLERANCE of the most trained tokens a second; None where nothing is predicted."""
    predicted = _predicted(points)
    if not predicted:
        return None
    best = max(map(_rate, predicted))
    good = [point for point in predicted if _rate(point) >= (1 - TOLERANCE) * best]
    return min(good, key=lambda p: (_age(p), -_rate(p)))


def reason(points: Sequence[Point], chosen: Point, names: Sequence[str]) -> str:
    """The recommendation in one sentence."""
    assert chosen.prediction is not None
    fastest = max(_predicted(points), key=_rate)
    setting = ", ".join(f"{name} = {getattr(chosen.settings, name)}" for name in names) or "the settings as they are"
    rate = f"{_rate(chosen):,.0f} tokens trained a second at mean age {_age(chosen):.2f}"
    if fastest is chosen or _rate(fastest) == _rate(chosen):
        why = "nothing in the grid is faster"
        return f"Recommended: {setting}: {rate}, as {why}; {chosen.prediction.bottleneck()}."
    gain = _rate(fastest) / _rate(chosen) - 1
    why = f"the fastest gains {gain:.1%} for a mean age of {_age(fastest):.2f}"
    return f"Recommended: {setting}: {rate}, as {why}; {chosen.prediction.bottleneck()}."


def _predicted(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.prediction is not None and point.prediction.num_steps]


def _rate(point: Point) -> float:
    assert point.prediction is not None
    return point.prediction.trained_tokens_per_s


def _age(point: Point) -> float:
    assert point.prediction is not None
    return point.prediction.age_mean
