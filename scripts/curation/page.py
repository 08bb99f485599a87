"""The page of all figures: what stands out, a table for each world, the settings that tuning chose."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from curation.show import Rows, mean, paired, table
from curation.world import WORLDS, World

_INTRODUCTION = """# How ways of choosing problems compare

Written by `scripts/bench_curation`, which see for what runs. A learner that is simulated (its formulas stand in
`scripts/curation/world.py`) is taught by problems that each method chooses; the area `auc` is its mean held-out
accuracy between 10,000 and 180,000 rollouts. Settings are tuned on seeds that are not reported, with as many trials for
each method that has any. Differences are paired by seed, with 95% intervals. [curation.md](curation.md) says what
`ours` is and how to read this with care.
"""
_OURS, _OFFLINE = "ours", "ours_offline_free"
_PEERS = ("uniform", "dapo", "greso", "speed", "sliding_rate", "mopps", "bots_free", "bots_charged")


def page(
    shown: Mapping[str, Rows],
    settings: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    cpu_s: float,
    picture: Path | None,
    at: Path,
) -> str:
    """The page as Markdown. `settings` by tuning world and method; `at` is where the page goes."""
    parts = [_INTRODUCTION]
    if picture is not None:
        parts.append(f"![held-out accuracy over rollouts]({os.path.relpath(picture, at.parent)})\n")
    parts.append(f"## In short\n\n{short_table(shown)}\n\n{_counts(shown, cpu_s)}\n")
    parts += [f"## {described(world)}\n\n{table(rows)}\n" for world, rows in shown.items() if _num_seeds(rows)]
    parts.append(f"## Settings of the largest area on the tuning seeds\n\n{_settings_table(settings)}\n")
    return "\n".join(parts)


def described(name: str) -> str:
    """A world in words: its name, and in what it differs from the plain one."""
    world, plain = WORLDS[name], World()
    differing = [
        f"{field} = {value}" for field in World.__slots__ if (value := getattr(world, field)) != getattr(plain, field)
    ]
    return f"`{name}`" + (f": {', '.join(differing)}" if differing else "")


def short_table(shown: Mapping[str, Rows]) -> str:
    """One line a world: what it gains over the best known, and whether calibration and the worst domain are best."""
    heads = ["world", "seeds", "ours less mopps", "ours with offline rates less bots_free", "groups with signal, ours",
             "best peer", "calibration error, ours", "best peer", "worst domain, ours", "best peer"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for world, rows in shown.items():
        if not _num_seeds(rows) or _OURS not in rows:
            continue
        cells = [world, str(_num_seeds(rows)), _gap(rows, _OURS, "mopps"), _gap(rows, _OFFLINE, "bots_free")]
        for figure, best in (("effective_ratio", max), ("calibration_error", min), ("worst_domain", max)):
            of_peers = [value for name in _PEERS if (value := _mean(rows, name, figure)) is not None]
            cells += [_text(_mean(rows, _OURS, figure)), _text(best(of_peers) if of_peers else None)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _num_seeds(rows: Rows) -> int:
    return min((len(by_seed) for by_seed in rows.values()), default=0)


def _mean(rows: Rows, name: str, figure: str) -> float | None:
    return mean(rows.get(name, {}).values(), figure)


def _gap(rows: Rows, ours: str, other: str) -> str:
    gap, half = paired(rows.get(ours, {}), rows.get(other, {}))
    return "" if math.isnan(gap) else f"{gap:+.3f} ± {half:.3f}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _counts(shown: Mapping[str, Rows], cpu_s: float) -> str:
    num = sum(len(by_seed) for rows in shown.values() for by_seed in rows.values())
    return f"{num} runs reported; with those of the tuning, {cpu_s / 60:.0f} minutes of one processor."


def _settings_table(settings: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    methods: Sequence[str] = list(dict.fromkeys(name for chosen in settings.values() for name in chosen))
    lines = ["| method | " + " | ".join(settings) + " |", "|" + "---|" * (1 + len(settings))]
    for method in methods:
        cells = [_setting(settings[world].get(method, {}).items()) for world in settings]
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _setting(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in pairs)
