"""The curves: held-out score by seconds and by generated tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from time_to_score.contestants import SAID, Point

_COLORS = {
    "default": "#2a5d9f",
    "synchronous": "#7fa6d6",
    "filter": "#d9c27a",
    "uniform": "#8d6a9f",
    "sync_uniform": "#b8c4d6",
    "trl": "#c8553d",
    "trl_vllm": "#e0a090",
}


def draw(curves: Mapping[str, Sequence[Sequence[Point]]], target: float, path: Path) -> None:
    """A line a seed, a color a contestant."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
    for name, seeds in curves.items():
        for number, curve in enumerate(seeds):
            scores, label = [point.score for point in curve], None if number else SAID[name].replace("`", "")
            axes[0].plot([point.seconds for point in curve], scores, color=_COLORS[name], label=label, linewidth=1.3)
            axes[1].plot([point.tokens / 1000 for point in curve], scores, color=_COLORS[name], linewidth=1.3)
    for axis, said in zip(axes, ("seconds since sampling began", "generated tokens, thousands"), strict=True):
        axis.axhline(target, color="#444", linewidth=0.8, linestyle=":")
        axis.set_xlabel(said)
        axis.set_xlim(0)
    axes[0].set_title("held-out pass@1", loc="left")
    axes[0].legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
