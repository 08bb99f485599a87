"""The picture of a grid: trained tokens a second against mean policy age, with the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stream_grpo.errors import ConfigError
from stream_grpo.planner.grid import Point, frontier

ENDINGS = (".svg", ".png", ".pdf")
_BLUE, _GREY, _RED = "#2a5d9f", "#b8c4d6", "#c8553d"


def check_path(path: Path) -> None:
    """Raises ConfigError for a file that no picture can be written to."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--picture {path}: expected a name that ends in {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--picture {path}: {path.absolute().parent} is no folder")


def draw(points: Sequence[Point], chosen: Point | None, names: Sequence[str], path: Path) -> None:
    """Write the picture; every point is labelled with its values of `names`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "plan"})
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    edge = frontier(points)
    for point in points:
        if (found := point.prediction) is not None:
            color = _RED if point is chosen else _BLUE if point in edge else _GREY
            axis.scatter(found.age_mean, found.trained_tokens_per_s, color=color, zorder=3)
            label = " / ".join(str(getattr(point.settings, name)) for name in names)
            axis.annotate(label, (found.age_mean, found.trained_tokens_per_s), (4, 4), textcoords="offset points")
    predictions = [point.prediction for point in edge if point.prediction is not None]
    axis.plot(
        [found.age_mean for found in predictions], [found.trained_tokens_per_s for found in predictions], color=_BLUE
    )
    axis.set_xlabel("mean policy age of the trained groups, learner steps")
    axis.set_ylabel("tokens trained a second")
    axis.set_ylim(bottom=0)
    axis.set_title(f"predicted; labels: {' / '.join(names) or 'as configured'}; red: recommended", loc="left")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
