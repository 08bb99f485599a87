"""Held-out score by minutes of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from smollm2.cells import SAID, Score

_COLORS = {"ours": "#2a5d9f", "trl": "#c8553d"}


def draw(curves: Mapping[str, Sequence[Score]], path: Path) -> None:
    """A line a trainer; bands are 95 % intervals over problems."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for name, curve in curves.items():
        minutes = [point.seconds / 60 for point in curve]
        axis.plot(minutes, [point.pass_at_1 for point in curve], color=_COLORS[name], marker=".", label=SAID[name])
        axis.fill_between(
            minutes, [point.low for point in curve], [point.high for point in curve], color=_COLORS[name], alpha=0.15
        )
    axis.set_xlabel("minutes of training")
    axis.set_xlim(0)
    axis.set_title("held-out pass@1", loc="left")
    if curves:
        axis.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
