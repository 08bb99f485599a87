"""What the model predicts of a run that has ended, held against what it measured, over the same steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stream_grpo.config_file import load_run
from stream_grpo.errors import ConfigError
from stream_grpo.metrics import MetricsReader
from stream_grpo.planner.commands import settings_of
from stream_grpo.planner.simulation import simulate
from stream_grpo.planner.world import World

WARMUP_SHARE = 1 / 3
"""Of the steps of a run: the stream fills up first."""
MIN_STEPS = 6
"""With fewer a rate says nothing."""


class Measured(NamedTuple):
    """What a run did after its first third."""

    throughput: float
    """Trained tokens a second."""
    age: float
    """Mean policy age of its trained groups."""
    num_steps: int
    """Of the whole run."""


class Compared(NamedTuple):
    """Predicted and measured figures of a setting."""

    throughput: float
    predicted_throughput: float
    age: float
    predicted_age: float
    bottleneck: str

    @property
    def throughput_error(self) -> float:
        """Relative to what was measured."""
        return self.predicted_throughput / self.throughput - 1

    @property
    def age_error(self) -> float:
        """Relative to what was measured; ages of a fraction of a step are held against a whole one."""
        return (self.predicted_age - self.age) / max(self.age, 1.0)

    def as_fields(self) -> dict[str, Any]:
        """As plain values."""
        return self._asdict() | {"throughput_error": self.throughput_error, "age_error": self.age_error}


def measure(run: Path) -> Measured:
    """The figures of a run. Raises ConfigError for one that is too short.

    Time is counted between neighbouring steps of one branch: what a restart took, and what it made again, is left out.
    """
    steps = _kept(line for line in MetricsReader(run).new_lines() if line["event"] == "step")
    warmup = int(len(steps) * WARMUP_SHARE)
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{run}: {len(steps)} learner steps; to measure a rate, {MIN_STEPS} are needed")
    rest = steps[warmup:]
    pairs = [(a, b) for a, b in pairwise(steps[warmup - 1 :]) if a["branch"] == b["branch"]]
    seconds = math.fsum(b["time_s"] - a["time_s"] for a, b in pairs)
    num_trained = sum(b["tokens"]["trained"] - a["tokens"]["trained"] for a, b in pairs)
    return Measured(
        throughput=num_trained / max(seconds, 1e-9),
        age=math.fsum(step["age_mean"] for step in rest) / len(rest),
        num_steps=len(steps),
    )


def _kept(steps: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without those that a restore took back."""
    kept: list[Mapping[str, Any]] = []
    for step in steps:
        while kept and kept[-1]["step"] >= step["step"]:
            kept.pop()
        kept.append(step)
    return kept


def compare(world: World, run: Path, cores: int) -> Compared:
    """The same steps of a real run and of the model; `cores` as in `Settings`.

    Raises ConfigError where the run is too short or has settings that the model leaves out, ValueError where the model
    stands still.
    """
    found = measure(run)
    settings = replace(settings_of(load_run(run)), cores=cores)
    warmup = int(found.num_steps * WARMUP_SHARE)
    predicted = simulate(world, settings, num_steps=found.num_steps, warmup_steps=warmup)
    return Compared(
        throughput=found.throughput,
        predicted_throughput=predicted.trained_tokens_per_s,
        age=found.age,
        predicted_age=predicted.age_mean,
        bottleneck=predicted.bottleneck(),
    )
