"""The command `plan`: a run or a configuration as the model's world and settings; tables, sentences, plain values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from stream_grpo.config import Config
from stream_grpo.config_file import load, load_run
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError
from stream_grpo.planner import grid as grids
from stream_grpo.planner import picture
from stream_grpo.planner.calibration import Calibration, calibrate
from stream_grpo.planner.given import Given, given_world
from stream_grpo.planner.grid import Point
from stream_grpo.planner.prediction import Prediction
from stream_grpo.planner.world import Settings

COLUMNS = ("tokens/s", "trained/s", "sampling", "learning", "age", "max", "p90", "discarded", "bottleneck")


@dataclass(frozen=True, slots=True)
class Plan:
    """A grid with its predictions."""

    names: tuple[str, ...]
    """Settings that the grid goes over."""
    points: list[Point]
    chosen: Point | None
    defaults: tuple[str, ...]
    """Figures that were not measured."""

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        points = [
            asdict(point.settings) | (point.prediction.as_fields() if point.prediction else {})
            for point in self.points
            if point.prediction
        ]
        return {
            "points": points,
            "refused": [point.refusal for point in self.points if point.refusal],
            "recommended": asdict(self.chosen.settings) if self.chosen else None,
            "reason": grids.reason(self.points, self.chosen, self.names) if self.chosen else None,
            "frontier": [asdict(point.settings) for point in grids.frontier(self.points)],
            "defaults": list(self.defaults),
        }


def plan(
    source: Path,
    grid: Iterable[str],
    *,
    like: Path | None,
    given: Iterable[str],
    overrides: Sequence[str],
    num_samplers: int | None,
    num_steps: int,
    seed: int,
) -> Plan:
    """Predict every setting of a grid over a run or a configuration.

    Raises ConfigError for what cannot be read, tried or modelled.
    """
    values = grids.parse_grid(grid)
    config = load_run(source.resolve(), overrides) if source.is_dir() else load(source, overrides)
    settings = settings_of(config)
    if num_samplers is not None:
        if "num_samplers" in values:
            raise ConfigError("--samplers with --grid num_samplers: name it once")
        settings = replace(settings, num_samplers=num_samplers)
    calibration = _calibration(source, config, like, list(given), seed)
    points = grids.sweep(calibration.world, settings, values, num_steps=num_steps, seed=seed)
    return Plan(tuple(values), points, grids.recommend(points), calibration.defaults)


def settings_of(config: Config) -> Settings:
    """The settings of a configuration. Raises ConfigError for those that the model leaves out."""
    stream, sampler = config.stream, config.sampler
    for name, is_known, known in (
        ("curator.group_sizes", not config.curator.group_sizes, "[]"),
        ("weights.on_update", config.weights.on_update == "keep", "keep"),
        ("stream.max_uses", stream.max_uses == 1, "1"),
        ("stream.selector", stream.selector == "fewest_steps_left", "fewest_steps_left"),
        ("stream.too_old", stream.too_old != "baseline_only", "wait, drop or requeue"),
    ):
        if not is_known:
            section, _, field = name.partition(".")
            value = getattr(getattr(config, section), field)
            raise ConfigError(f"{name} = {value}: the model leaves this out; plan with --set {name}={known}")
    return Settings(
        num_samplers=sampler.num_samplers,
        group_size=sampler.group_size,
        max_num_seqs=sampler.max_num_seqs,
        groups_per_step=stream.groups_per_step,
        max_policy_age=stream.max_policy_age,
        publish_interval=stream.publish_interval,
        too_old="wait" if stream.too_old == "wait" else "drop",
        sample_deadline_s=stream.sample_deadline_s,
        checkpoint_interval=config.learner.checkpoint_interval,
        num_epochs=config.learner.num_epochs,
    )


def _calibration(source: Path, config: Config, like: Path | None, given: list[str], seed: int) -> Calibration:
    if given:
        if like is not None:
            raise ConfigError("--like and --given: times and lengths come from a run or are given; use one of the two")
        world = given_world(
            parse_given(given),
            group_size=config.sampler.group_size,
            max_num_seqs=config.sampler.max_num_seqs,
            max_tokens=config.sampler.max_new_tokens,
            seed=seed,
        )
        return Calibration(world, ())
    run = like or (source if source.is_dir() else None)
    if run is None:
        raise ConfigError(
            f"{source}: a configuration says nothing of times and lengths; name a run that has measured them with "
            f"--like RUN, or give them: {' '.join(f'--given {name}=...' for name in _required())}"
        )
    return calibrate(run)


def _required() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Given))[:3]


def parse_given(texts: Iterable[str]) -> Given:
    """`name=number` as the given figures. Raises ConfigError with the nearest name, or what is missing."""
    names, values = [field.name for field in fields(Given)], dict[str, float]()
    for text in texts:
        name, _, number = text.partition("=")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"--given {name}: no figure of the model; {hint}")
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigError(f"--given {text}: expected a number, as --given {name}=1") from None
    if missing := [name for name in _required() if name not in values]:
        raise ConfigError(f"--given: {', '.join(missing)} missing: there is no default for it")
    try:
        return Given(**values)
    except ValueError as error:
        raise ConfigError(f"--given {error}") from error


def show(found: Plan, console: Console) -> None:
    """The table, the recommendation with its reason, and what was taken by default."""
    columns = (*found.names, *COLUMNS)
    predicted = [(point, point.prediction) for point in found.points if point.prediction]
    console.table(columns, (_cells(point, p, found.names) for point, p in predicted), numbers=columns[:-1])
    for point in found.points:
        if point.refusal:
            console.say(f"refused: {point.refusal}")
    if found.chosen:
        console.say(grids.reason(found.points, found.chosen, found.names))
    for sentence in found.defaults:
        console.say(f"not measured: {sentence}")


def _cells(point: Point, found: Prediction, names: Sequence[str]) -> tuple[str, ...]:
    sampling, learning = found.utilisation
    return (
        *(str(getattr(point.settings, name)) for name in names),
        f"{found.sampled_tokens_per_s:,.0f}",
        f"{found.trained_tokens_per_s:,.0f}",
        f"{sampling:.0%}",
        f"{learning:.0%}",
        f"{found.age_mean:.2f}",
        str(found.age_max),
        f"{found.age_quantiles[0.9]:.2f}",
        f"{found.discarded_share:.1%}",
        found.bottleneck().partition(":")[0],
    )


def draw(found: Plan, path: Path) -> None:
    """The picture of the frontier."""
    picture.draw(found.points, found.chosen, found.names, path)
