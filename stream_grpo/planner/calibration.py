"""A run folder as the model's world: what its journal and metrics say of lengths, signal and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_grpo.config import Config
from stream_grpo.config_file import load_run
from stream_grpo.errors import ConfigError
from stream_grpo.metrics import FILE_NAME, MetricsReader
from stream_grpo.planner.world import LearnerTimes, Rollouts, SamplerTimes, World
from stream_grpo.rollouts.views import Filters, Groups, journal_of

MIN_GROUPS, MIN_STEPS = 32, 8
"""With fewer a run says too little."""
MAX_GROUPS = 4000
"""The newest that are read."""
BASE_SHARE = 0.05
"""Default: part of an engine step with all slots taken that does not depend on how many run. Small models on CPU."""
MIN_RANGE = 1.5
"""Where the number of running sequences varies by less than this, it does not say how steps depend on it."""
MAX_SLOPE_ERROR = 0.25
"""A slope with a larger relative standard error is not known: seconds are taken as proportional instead."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a run says, and what it does not."""

    world: World
    defaults: tuple[str, ...]
    """Sentences on figures that the run does not give, and what is taken for them."""


class _Line(NamedTuple):
    """A straight line through measured points."""

    base: float
    slope: float
    is_proportional: bool


def calibrate(run: Path) -> Calibration:
    """Read the world of a run. Raises ConfigError where there is too little of it, or its lines are not a run's."""
    try:
        return _calibrate(run)
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / FILE_NAME}: its lines are not those of a run: {error!r}") from error


def _calibrate(run: Path) -> Calibration:
    config = load_run(run.resolve())
    if config.curator.group_sizes:
        raise ConfigError(
            f"{run}: its groups are of several sizes (curator.group_sizes), which the model leaves out; calibrate from "
            "a run whose groups are of one"
        )
    lines = list(MetricsReader(run).new_lines())
    defaults: list[str] = []
    world = World(
        rollouts=measured_rollouts(run),
        sampler=sampler_times(lines, config, defaults),
        learner=learner_times([line for line in lines if line["event"] == "step"], config, defaults),
    )
    return Calibration(world, tuple(defaults))


def measured_rollouts(run: Path) -> Rollouts:
    """Lengths and rewards of the newest groups whose rollouts are all valid. Raises ConfigError for too few."""
    groups = Groups(journal_of(run))
    rows: list[tuple[list[int], Sequence[float]]] = []
    for line in groups.lines(Filters(), newest_first=True):
        lengths = [rollout.num_tokens for rollout in line.facts.rollouts]
        if len(lengths) == line.facts.num_rollouts and (not rows or len(lengths) == len(rows[0][0])):
            rows.append((lengths, line.facts.rewards))
        if len(rows) == MAX_GROUPS:
            break
    if len(rows) < MIN_GROUPS:
        raise ConfigError(
            f"{run}: {len(rows)} groups with a reward for every rollout are on disk; to calibrate, {MIN_GROUPS} are "
            f"needed: let the run go on, or name another"
        )
    return Rollouts(
        length_RG=np.array([lengths for lengths, _ in rows], np.int64),
        reward_RG=np.array([rewards for _, rewards in rows], np.float64),
    )


def sampler_times(lines: Sequence[Mapping[str, Any]], config: Config, defaults: list[str]) -> SamplerTimes:
    """Seconds of one sampler, the mean of all, from the launcher's status lines. Raises ConfigError for too few."""
    names = ("busy_s", "apply_s", "prove_s", "num_updates", "num_tokens", *_counted(lines, config))
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    running: list[float] = []
    wall_s = 0.0
    for earlier, later in _neighbours(lines):
        for name in sums:
            sums[name] += later[name] - earlier[name]
        running.append(min(later["num_running"], config.sampler.max_num_seqs))
        wall_s += later["time_s"] - earlier["time_s"]
    num_tokens = sums["num_tokens"] + sum(line["num_tokens"] for line in lines if line["event"] == "evaluation")
    if not running or not num_tokens:
        raise ConfigError(
            "metrics.jsonl: no status lines of a sampler that samples; let the run go on for some seconds"
        )
    mean_running = float(np.mean(running))
    num_updates = sums["num_updates"]
    # A proof is an engine step that takes longer: running sequences sample a token in it.
    num_steps = sums["num_engine_steps"] + num_updates if "num_engine_steps" in sums else num_tokens / mean_running
    step_s = (sums["busy_s"] - sums["prove_s"]) / max(num_steps - num_updates, 1.0)
    proof_s = max(0.0, sums["prove_s"] / num_updates - step_s) if num_updates else 0.0
    if not num_updates:
        defaults.append("seconds of an update of weights: none was seen; 0 is taken")
    num_scored = sums.get("num_groups_scored", 0.0)
    if not num_scored and any((line.get("rewards") or {}).get("pool") for line in lines):
        defaults.append("seconds from the last token of a group to its last reward: not in the metrics; 0 is taken")
    line = _step_line(lines, config, step_s, mean_running, defaults)
    commits = [item for item in lines if item.get("part") == "buffer" and item.get("num_commits")]
    commit_s = commits[-1]["commit_s"] / commits[-1]["num_commits"] if commits else 0.0
    return SamplerTimes(
        base_s=line.base,
        per_sequence_s=line.slope,
        between_per_sequence_s=max(0.0, wall_s - sums["busy_s"] - sums["apply_s"]) / num_tokens,
        update_s=(sums["apply_s"] / num_updates if num_updates else 0.0) + proof_s,
        insert_s=config.buffer.group_commit_s + commit_s,
        score_s=sums["score_wait_s"] / num_scored if num_scored else 0.0,
    )


def _counted(lines: Iterable[Mapping[str, Any]], config: Config) -> Iterator[str]:
    """The counts that every sampler's lines have, of those that not every run has."""
    samplers = [line for line in lines if line["event"] == "status" and "num_running" in line]
    for name in ("num_engine_steps", "score_wait_s", "num_groups_scored"):
        # The async engine's own steps are not seen: its loop counts looks.
        is_meant = name != "num_engine_steps" or config.sampler.engine != "async"
        if is_meant and all(name in line for line in samplers):
            yield name


def _neighbours(lines: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Status lines of one sampler that follow each other, with sequences running at both."""
    by_sampler: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["event"] == "status" and "num_running" in line:
            by_sampler.setdefault(line["part"], []).append(line)
    for mine in by_sampler.values():
        for earlier, later in pairwise(mine):
            # A sampler that was started again counts from 0.
            if earlier["num_running"] and later["num_running"] and later["busy_s"] >= earlier["busy_s"]:
                yield earlier, later


def _step_line(
    lines: Sequence[Mapping[str, Any]], config: Config, step_s: float, mean_running: float, defaults: list[str]
) -> _Line:
    """How an engine step depends on what runs: fitted where that varies, else by BASE_SHARE through its mean."""
    slots = config.sampler.max_num_seqs
    points = [
        (
            min(later["num_running"], slots),
            later["busy_s"] - earlier["busy_s"],
            later["num_tokens"] - earlier["num_tokens"],
        )
        for earlier, later in _neighbours(lines)
    ]
    running = np.array([k for k, _, tokens in points if tokens > 0], float)
    if running.size >= MIN_STEPS and np.quantile(running, 0.9) >= MIN_RANGE * np.quantile(running, 0.1):
        seconds = np.array([busy / tokens for _, busy, tokens in points if tokens > 0])
        line = fit_line(running, seconds * running)
        if not line.is_proportional:
            return line
    defaults.append(
        f"how an engine step depends on running sequences: these hardly vary; {BASE_SHARE:.0%} of a step with all "
        f"{slots} slots taken are taken as independent of them"
    )
    per_slot_s = step_s / (BASE_SHARE * slots + (1 - BASE_SHARE) * mean_running)
    return _Line(BASE_SHARE * slots * per_slot_s, (1 - BASE_SHARE) * per_slot_s, False)


def learner_times(steps: Sequence[Mapping[str, Any]], config: Config, defaults: list[str]) -> LearnerTimes:
    """Seconds of the learner from its lines. Raises ConfigError for too few steps."""
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"metrics.jsonl: {len(steps)} learner steps; to calibrate, {MIN_STEPS} are needed")
    # What a step passes over: the sampled tokens of its groups, once an epoch.
    per_group = config.sampler.group_size * config.learner.num_epochs
    tokens = np.array([step["response_tokens_mean"] * step["num_groups"] * per_group for step in steps], float)
    seconds = np.array([step["step_s"] for step in steps], float)
    line = fit_line(tokens, seconds)
    if line.is_proportional:
        defaults.append("how a learner step depends on its tokens: these hardly vary; it is taken as proportional")
    # From the end of a step to the end of the next: publish, perhaps a checkpoint, the wait, the step.
    rests: dict[str, list[float]] = {"plain": [], "published": [], "checkpoint": []}
    for earlier, later in pairwise(steps):
        if later["step"] == earlier["step"] + 1:
            rest_s = later["time_s"] - earlier["time_s"] - later["waited_s"] - later["step_s"]
            rests[_what_follows(earlier["step"], config)].append(max(0.0, rest_s))
    if not rests["checkpoint"]:
        defaults.append("seconds of a checkpoint: none lies between two steps; 0 is taken")
    plain_s, publish_s, checkpoint_s = _between(steps, rests)
    factors = seconds / (line.base + line.slope * tokens)
    return LearnerTimes(
        base_s=line.base + plain_s,
        per_token_s=line.slope,
        publish_s=publish_s,
        checkpoint_s=checkpoint_s,
        spread=factors / factors.mean(),
    )


def _between(steps: Sequence[Mapping[str, Any]], rests: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Seconds of what is between two steps beside publish and checkpoint, of a publish, of a checkpoint.

    Measured where the lines have them; else from what is left where there is the one and not the other.
    """
    if all("publish_s" in step for step in steps):
        # A line has what came before its step; before the first there is the start of the run.
        between = [
            (later["time_s"] - earlier["time_s"] - later["waited_s"] - later["step_s"], later)
            for earlier, later in pairwise(steps)
            if later["step"] == earlier["step"] + 1
        ]
        plain = [max(0.0, rest - line["publish_s"] - line["checkpoint_s"]) for rest, line in between]
        published = [line["publish_s"] for _, line in between if line["publish_s"]]
        checkpoints = [line["checkpoint_s"] for _, line in between if line["checkpoint_s"]]
        return _median(plain), _median(published), float(np.mean(checkpoints)) if checkpoints else 0.0
    plain_s = _median(rests["plain"])
    published_s = _median(rests["published"]) if rests["published"] else plain_s
    checkpoint_s = max(0.0, float(np.mean(rests["checkpoint"])) - published_s) if rests["checkpoint"] else 0.0
    return plain_s, max(0.0, published_s - plain_s), checkpoint_s


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0


def _what_follows(step: int, config: Config) -> str:
    if step % config.learner.checkpoint_interval == 0:
        return "checkpoint"
    return "published" if step % config.stream.publish_interval == 0 else "plain"


def fit_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> _Line:
    """Least squares; through 0 where the slope is not known well, or either coefficient would be below 0."""
    through_zero = _Line(0.0, float(y.sum() / x.sum()), True)
    deviation = x - x.mean()
    if len(x) < 3 or not deviation.any():
        return through_zero
    slope = float(deviation @ (y - y.mean()) / (deviation @ deviation))
    base = float(y.mean() - slope * x.mean())
    residual = y - base - slope * x
    error = float(np.sqrt(residual @ residual / (len(x) - 2) / (deviation @ deviation)))
    if slope <= 0 or base < 0 or error > MAX_SLOPE_ERROR * slope:
        return through_zero
    return _Line(base, slope, False)
