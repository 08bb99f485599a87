"""The pictures of a report, as SVG that stands in a page by itself."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from curator.report_figures import CAUSES, NUM_RATE_BINS, PoolReport

COLOURS = ("#2e7d32", "#90caf9", "#37474f", "#f9a825", "#c62828", "#8e24aa")
"""Of CAUSES."""
MAX_LABEL = 28
# Text as outlines: no font of the reader's is needed, and no text of a data set stands in the SVG as such.
STYLE: dict[str, Any] = {"svg.fonttype": "path", "svg.hashsalt": "curator", "font.size": 9, "text.parse_math": False}
Draw = Callable[[Any, PoolReport], None]


def pictures(report: PoolReport) -> Iterator[tuple[str, str, Figure]]:
    """Title, sentence and figure of each picture that the pool has numbers for."""
    rows = max(2.4, 0.34 * len(report.domains) + 1.3)
    if any(domain.num_sampled for domain in report.domains):
        yield (
            "Difficulty by domain",
            f"Share of a domain's sampled problems by their rate of passes, from {report.rates_from}; a column is a "
            "tenth. Groups of problems in the first and last columns rarely have signal.",
            _figure(rows, draw_difficulty, report),
        )
    if len(report.step_edges) > 2:
        yield (
            "How it moved",
            "Rate of passes by the learner step whose weights sampled. What is sampled is chosen, so that a line also "
            "moves with the choice.",
            _figure(3.2, draw_moved, report),
        )
    if report.num_outcomes:
        yield ("Why groups had no signal", "Share of a domain's groups.", _figure(rows, draw_causes, report))


def svg_of(figure: Figure) -> str:
    """A figure as one `svg` element."""
    with _style():
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    # Declaration and document type belong to files of their own.
    return text[text.index("<svg") :]


def draw_difficulty(axes: Any, report: PoolReport) -> None:
    """A row for each domain, ten columns of rates."""
    counts = np.array([domain.rate_bins for domain in report.domains], float)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    edges = np.arange(NUM_RATE_BINS + 1) - 0.5
    axes.pcolormesh(edges, np.arange(len(shares) + 1) - 0.5, shares, cmap="Blues", vmin=0, vmax=1)
    axes.invert_yaxis()
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005:
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", color="white" if share > 0.5 else "black")
    axes.set_xticks(edges, [f"{i / NUM_RATE_BINS:.1f}" for i in range(NUM_RATE_BINS + 1)])
    axes.set_xlabel("rate of passes of a problem")
    _label_domains(axes, report)


def draw_moved(axes: Any, report: PoolReport) -> None:
    """A line for each domain."""
    edges = np.array(report.step_edges)
    middles = (edges[1:] + edges[:-1]) / 2
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined, unused-ignore]
    for domain, colour in zip(report.domains, colours, strict=False):
        rates = np.array([np.nan if rate is None else rate for rate in domain.moved])
        if np.isfinite(rates).any():
            axes.plot(middles, rates, marker="o", markersize=3, color=colour, label=label(domain.domain))
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("learner step")
    axes.set_ylabel("rate of passes")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)


def draw_causes(axes: Any, report: PoolReport) -> None:
    """A bar for each domain, cut by cause."""
    counts = np.array([domain.causes for domain in report.domains], float)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    left = np.zeros(len(shares))
    for column, (cause, colour) in enumerate(zip(CAUSES, COLOURS, strict=True)):
        if counts[:, column].any():
            axes.barh(np.arange(len(shares)), shares[:, column], left=left, color=colour, label=cause.partition(":")[0])
        left += shares[:, column]
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.set_xlabel("share of groups")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    _label_domains(axes, report)


def label(text: str) -> str:
    """A name as a label: printable, and not too long."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= MAX_LABEL else f"{clean[: MAX_LABEL - 3]}..."


def _label_domains(axes: Any, report: PoolReport) -> None:
    axes.set_yticks(range(len(report.domains)), [label(domain.domain) for domain in report.domains])


def _figure(height: float, draw: Draw, report: PoolReport) -> Figure:
    with _style():
        figure = Figure(figsize=(8.6, height), layout="constrained")
        draw(figure.add_subplot(), report)
    return figure


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A glyph that the font lacks is drawn as a box; whoever reads the table below it sees the name.
        warnings.simplefilter("ignore", UserWarning)
        yield
