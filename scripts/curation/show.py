"""The comparison as tables with paired intervals, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from curation.run import FROM_ROLLOUTS, NUM_ROLLOUTS

Rows = Mapping[str, Mapping[int, dict[str, Any]]]
"""Figures by method and seed, of one world."""
FIGURES = ("auc", "effective_ratio", "calibration_error", "worst_domain")

# Student's t at 97.5%, by degrees of freedom; beyond them the normal's is near enough.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093)  # fmt: skip


def paired(ours: Mapping[int, dict[str, Any]], other: Mapping[int, dict[str, Any]]) -> tuple[float, float]:
    """Mean difference of the areas over the seeds that both have, and half its 95% interval; infinite for one seed."""
    seeds = sorted(set(ours) & set(other))
    gaps = np.array([ours[seed]["auc"] - other[seed]["auc"] for seed in seeds])
    if len(gaps) < 2:
        return float(gaps.mean()) if len(gaps) else math.nan, math.inf
    quantile = _T[len(gaps) - 2] if len(gaps) - 2 < len(_T) else 1.96
    return float(gaps.mean()), quantile * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))


def mean(rows: Iterable[dict[str, Any]], name: str) -> float | None:
    """Mean of a figure over those that have it; None where one has not."""
    values = [row[name] for row in rows]
    return None if not values or None in values else float(np.mean(values))


def table(rows: Rows, against: Sequence[str] = ("mopps", "bots_free")) -> str:
    """One world as a Markdown table; differences are paired by seed, with 95% intervals."""
    heads = ["method", "seeds", "auc", *(f"auc less {name}" for name in against), "krollouts to .7", "Mtokens to .7",
             "effective ratio", "calibration error", "worst domain", "forgetting"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, by_seed in rows.items():
        every = list(by_seed.values())
        gaps = [paired(by_seed, rows.get(other, {})) if name != other else (math.nan, 0.0) for other in against]
        cells = [
            name,
            str(len(every)),
            _text(mean(every, "auc")),
            *("" if math.isnan(gap) else f"{gap:+.3f} ± {half:.3f}" for gap, half in gaps),
            _text(mean(every, "rollouts_to_target"), 1e-3, 0),
            _text(mean(every, "tokens_to_target"), 1e-6, 1),
            *(_text(mean(every, figure)) for figure in FIGURES[1:]),
            _text(mean(every, "forgetting")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _text(value: float | None, scale: float = 1.0, digits: int = 3) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"


def picture(worlds: Mapping[str, Rows], path: Path) -> None:
    """Mean held-out accuracy over rollouts, a panel a world, four in a row; without worlds of no whole seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(world, rows) for world, rows in worlds.items() if all(rows.values())]
    columns = min(4, max(1, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 4.2 * lines), sharey=True, squeeze=False)
    at = np.linspace(FROM_ROLLOUTS, NUM_ROLLOUTS, 100)[::5] / 1000
    names = sorted({name for rows in worlds.values() for name in rows})
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (world, rows) in zip(axes.flat, panels, strict=False):
        for name, by_seed in rows.items():
            curve: NDArray[np.float64] = np.mean([row["curve"] for row in by_seed.values()], axis=0)
            is_ours = name.startswith("ours")
            width = 2.4 if is_ours else 1.2
            style = "--" if "free" in name or name == "oracle" else "-"
            axis.plot(
                at, curve, style, label=name, linewidth=width, color=plt.get_cmap("tab20")(names.index(name) % 20)
            )
        axis.set_title(world)
        axis.set_xlabel("thousand rollouts")
        axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("held-out accuracy")
    axes[0][columns - 1].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
