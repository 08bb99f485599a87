"""Held-out rise by imposed age, and what a `max_policy_age` buys and costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from recipes import verdict

from staleness.runs import Row

_COLORS = ("#2a5d9f", "#c8553d", "#d9c27a", "#8d6a9f", "#7fa6d6", "#444444")


def draw(imposed: Sequence[verdict.Row], own: Sequence[Row], path: Path) -> None:
    """Three panels; bars and bands are 95 % intervals."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (by_lag, score, time) = plt.subplots(1, 3, figsize=(12, 4), constrained_layout=True)
    presets = list(dict.fromkeys(row.preset for row in imposed))
    for preset, color in zip(presets, _COLORS, strict=False):
        rows = sorted((row for row in imposed if row.preset == preset), key=lambda row: row.lag)
        lags = [row.lag for row in rows]
        by_lag.plot(lags, [row.rise for row in rows], color=color, marker=".", label=preset)
        by_lag.fill_between(lags, [row.low for row in rows], [row.high for row in rows], color=color, alpha=0.12)
    by_lag.axhline(0, color="#444", linewidth=0.8, linestyle=":")
    by_lag.set_xscale("symlog", base=2, linthresh=1)
    by_lag.set_xlabel("imposed age, learner steps")
    by_lag.set_title("rise of held-out pass@1", loc="left")
    if presets:
        by_lag.legend(frameon=False)
    ages = [str(row.max_policy_age) for row in own]
    errors = [[row.rise - row.low for row in own], [row.high - row.rise for row in own]]
    score.errorbar(ages, [row.rise for row in own], yerr=errors, color=_COLORS[0], marker=".", capsize=2)
    score.set_xlabel("max_policy_age")
    score.set_title("rise, the age as it works out", loc="left")
    time.bar(ages, [row.seconds for row in own], color="#b8c4d6")
    for place, row in enumerate(own):
        time.annotate(f"age {row.mean_age:.1f}", (place, row.seconds), (0, 2), textcoords="offset points", ha="center")
    time.set_xlabel("max_policy_age")
    time.set_title("seconds of the loop, mean age", loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
