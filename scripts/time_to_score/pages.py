"""What docs/benchmarks.md says of the times to a score. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.page import Goal, goals, table
from benchmarks.watch import memory_table

from time_to_score.contestants import OURS, PEERS, SAID, TRL, Point
from time_to_score.outcome import RATIOS, Ratio, Reached, most_of_overlap, ratios, reached, spread, typical

Found = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Lines of results by contestant and seed."""


def section(
    found: Found,
    failures: Mapping[str, str],
    options: argparse.Namespace,
    *,
    config: str,
    tried: Mapping[float, Sequence[Any]] = {},
) -> tuple[str, dict[str, Ratio]]:
    """The section, and the ratios of it. `tried`: the curves of TRL's learning rates that were tried."""
    by_name = {
        name: {
            seed: reached([Point(*point) for point in line["curve"]], options.target) for seed, line in lines.items()
        }
        for name, lines in found.items()
    }
    medians = {name: typical(list(seeds.values())) for name, seeds in by_name.items()}
    compared, by_seed = ratios(medians), spread(_by_seed(by_name))
    parts = [
        _about(found, failures, options, config),
        table(
            (
                "contestant",
                "reached",
                "seconds",
                "generated tokens, thousands",
                "optimizer steps",
                "best score",
                "start",
            ),
            [_row(name, by_name[name], medians[name], found[name]) for name in found],
        ),
        goals([Goal(name, ratio.value, RATIOS[name].goal) for name, ratio in compared.items()]),
        *[_said(name, ratio, by_seed[name]) for name, ratio in compared.items() if ratio.value is not None],
        *[f"{SAID[name]} does not run here: `{error}`" for name, error in failures.items()],
        *_tried(tried, options.target),
        "Where the seconds go, means over seeds; sampler and learner may overlap in this trainer:",
        table(
            ("contestant", "seconds a step", "tokens/s", "sampler busy", "learner busy", "tokens trained on"),
            [_loop_row(name, lines) for name, lines in found.items()],
        ),
        *_bounded(found, compared),
        "![Held-out pass@1 by seconds and by generated tokens](images/time_to_score.png)",
        *_memory(found),
    ]
    return "\n\n".join(parts), compared


def _by_seed(by_name: Mapping[str, Mapping[int, Reached]]) -> dict[int, dict[str, Reached]]:
    seeds = sorted({seed for found in by_name.values() for seed in found})
    return {seed: {name: found[seed] for name, found in by_name.items() if seed in found} for seed in seeds}


def _about(found: Found, failures: Mapping[str, str], options: argparse.Namespace, config: str) -> str:
    lines = [line for seeds in found.values() for line in seeds.values()]
    num_scored = max(line["num_scored"] for line in lines)
    num_wanted = options.seeds * len({*OURS, TRL, *found} - {*failures})
    text = (
        f"Held-out pass@1 of {options.target:g}, {num_scored} problems, {options.samples} samples each, scored off the "
        f"clock; medians over seeds. `{config}`: the same weights, pool, reward, group size and batch for all; nobody "
        f"is evaluated while the clock runs, which begins with the first sampling."
    )
    if len(lines) < num_wanted:
        text += f" **{len(lines)} of {num_wanted} trainings are there.**"
    if (trl := next(iter(found.get(TRL, {}).values()), None)) is not None:
        named = ", ".join(f"{name} {version}" for name, version in trl["versions"].items())
        chosen = trl["settings"]
        text += f" TRL: {named}, learning rate {chosen['learning_rate']:g}, {chosen['num_threads']} threads."
    return text


def _row(
    name: str, seeds: Mapping[int, Reached], typical: Reached, lines: Mapping[int, Mapping[str, Any]]
) -> tuple[str, ...]:
    over = "over " if typical.is_bound else ""
    num = sum(not found.is_bound for found in seeds.values())
    best = max(point[3] for line in lines.values() for point in line["curve"])
    spread = [found.seconds for found in seeds.values() if not found.is_bound]
    told = f" ({min(spread):.0f} to {max(spread):.0f})" if len(spread) > 1 else ""
    return (
        SAID[name],
        f"{num} of {len(seeds)}",
        f"{over}{typical.seconds:.0f}{told}",
        f"{over}{typical.tokens / 1000:,.0f}",
        f"{over}{typical.step:.0f}",
        f"{best:.3f}",
        f"{fmean(line['start_s'] for line in lines.values()):.0f} s",
    )


def _said(name: str, ratio: Ratio, by_seed: list[Ratio]) -> str:
    against = SAID[ratio.against]
    return f"`{name}` is {ratio} against {against}; seed by seed {', '.join(map(str, by_seed))}."


def _tried(tried: Mapping[float, Sequence[Any]], target: float) -> list[str]:
    if not tried:
        return []
    told = []
    for rate, curve in sorted(tried.items()):
        found = reached([Point(*point) for point in curve], target)
        told.append(
            f"{rate:g} {'not reached' if found.is_bound else f'{found.seconds:.0f} s'}, at last {curve[-1][3]:.3f}"
        )
    return [f"TRL's learning rates that were tried, with the time to the target: {'; '.join(told)}."]


def _loop(lines: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    loops = [line["loop"] for line in lines.values()]
    return {name: fmean(loop[name] for loop in loops) for name in loops[0]}


def _loop_row(name: str, lines: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    loop = _loop(lines)
    return (
        SAID[name],
        f"{loop['wall_s'] / loop['steps']:.2f}",
        f"{loop['tokens'] / loop['wall_s']:,.0f}",
        f"{loop['sampler_s'] / loop['wall_s']:.0%}",
        f"{loop['learner_s'] / loop['wall_s']:.0%}",
        f"{loop['trained_share']:.0%}",
    )


def _bounded(found: Found, compared: Mapping[str, Ratio]) -> list[str]:
    """Where a goal is missed, what bounds this trainer: its slower half, and what overlap can give at most."""
    missed = [name for name, ratio in compared.items() if ratio.value is not None and ratio.value < RATIOS[name].goal]
    if not missed or "default" not in found:
        return []
    loop = _loop(found["default"])
    slower = "sampler" if loop["sampler_s"] >= loop["learner_s"] else "learner"
    step_s = max(loop["sampler_s"], loop["learner_s"]) / loop["steps"]
    busy = loop[f"{slower}_s"] / loop["wall_s"]
    most = most_of_overlap(loop["sampler_s"], loop["learner_s"])
    text = (
        f"Missed: {', '.join(f'`{name}`' for name in missed)}. This trainer's {slower} is busy {busy:.0%} of the time "
        f"and takes {step_s:.2f} s a step, which no overlap makes shorter; both halves wholly overlapped are "
        f"{most:.2f} times as fast as one after the other."
    )
    steps = {name: median(_steps(found[name])) for name in ("default", *PEERS) if name in found}
    if len(steps) > 1:
        told = ", ".join(f"{SAID[name]} {value:.2f} s" for name, value in steps.items())
        text += f" Seconds a step: {told}; the rest of a ratio to TRL is how many steps each needs."
    return [text]


def _steps(lines: Mapping[int, Mapping[str, Any]]) -> list[float]:
    return [line["loop"]["wall_s"] / line["loop"]["steps"] for line in lines.values()]


def _memory(found: Found) -> list[str]:
    parts = []
    for name in ("default", TRL):
        line = next(iter(found.get(name, {}).values()), None)
        if line is not None and line.get("memory"):
            parts += [f"Peak resident memory by process, {SAID[name]}:", memory_table(line["memory"])]
    return parts
