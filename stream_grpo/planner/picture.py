"""The picture of a grid: trained tokens a second against mean policy age, with the frontier."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stream_grpo.errors import ConfigError
from stream_grpo.planner.grid import Point, frontier

ENDINGS = (".svg", ".png", ".pdf")
_BLUE, _GREY, _RED = "#2a5d9f", "#b8c4d6", "#c8553d"


def check_path(path: Path) -> None:
    """Raises ConfigError for a file that no picture can be written to, as far as that is known before it is."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--picture {path}: expected a name that ends in {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--picture {path}: {path.absolute().parent} is no folder")
    if path.is_dir():
        raise ConfigError(f"--picture {path}: it is a folder; name a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--picture {path}: it may not be written; name another place")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While the picture is drawn. Raises ConfigError where the file cannot be written after all."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--picture {path}: cannot be written: {error.strerror or error}") from error


def labels(points: Sequence[Point], names: Sequence[str]) -> dict[tuple[float, float], str]:
    """What stands at each place: the values of `names`; points that would be written over each other share a label."""
    predicted = [(point, point.prediction) for point in points if point.prediction]
    oldest = max((found.age_mean for _, found in predicted), default=0.0) or 1.0
    fastest = max((found.trained_tokens_per_s for _, found in predicted), default=0.0) or 1.0
    written: dict[tuple[float, float], str] = {}
    for point, found in predicted:
        place = (found.age_mean, found.trained_tokens_per_s)
        label = " / ".join(str(getattr(point.settings, name)) for name in names)
        near = [p for p in written if abs(p[0] - place[0]) < oldest / 8 and abs(p[1] - place[1]) < fastest / 25]
        written[near[0] if near else place] = f"{written[near[0]]}, {label}" if near else label
    return written


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
            axis.scatter(found.age_mean, found.trained_tokens_per_s, color=color, zorder=4 if point is chosen else 3)
    for (age, rate), label in labels(points, names).items():
        axis.annotate(label, (age, rate), (5, -11), textcoords="offset points")
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
