"""Predictions of the planner beside what real runs measured, as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stream_grpo.planner.measured import Compared


def draw_predicted(cells: Iterable[tuple[str, Compared]], title: str, path: Path) -> None:
    """Write the picture: predicted against measured, throughput and age, each cell with its label.

    On the grey line both are equal.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = list(cells)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "cells"})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), constrained_layout=True)
    panels = (("throughput", "trained tokens a second"), ("age", "mean policy age, learner steps"))
    for axis, (name, what) in zip(axes, panels, strict=True):
        top = 0.0
        places = sorted((getattr(c, name), getattr(c, f"predicted_{name}"), label) for label, c in cells)
        for number, (*place, label) in enumerate(places):
            axis.scatter(*place, color="#2a5d9f", zorder=3)
            # Neighbours have their labels on different sides.
            offset, side = ((7, -4), "left") if number % 2 else ((-7, -4), "right")
            axis.annotate(label, place, offset, textcoords="offset points", horizontalalignment=side)
            top = max(top, *place)
        axis.plot([0, 1.1 * top], [0, 1.1 * top], color="#999999", linewidth=0.8)
        axis.set_xlabel(f"measured {what}")
        axis.set_ylabel("predicted")
    axes[0].set_title(title, loc="left")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
