"""A comparison as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream_grpo.comparison.compare import Comparison, Row
from stream_grpo.comparison.runs import Evaluated, Run
from stream_grpo.console import Console

COLUMNS = ("configuration", "runs", "tokens", "before", "pass@1", "by run", "difference", "95% interval", "differs in")
_COLORS = ("#2a5d9f", "#c8553d", "#5b8c5a", "#d9a441", "#8d6a9f", "#3f9c9c", "#7a7a7a", "#b85c8e")


def show(found: Comparison, console: Console) -> None:
    """The table, and the sentence on what was compared."""
    console.table(COLUMNS, map(cells, found.rows), numbers=COLUMNS[1:-1])
    console.say(f"Held-out pass@1 {found.sentence}.")
    if any(len(row.runs) > 1 for row in found.rows):
        console.say("Intervals are over problems, and over the runs of a configuration where it has several.")


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    d = row.difference
    return (
        row.label,
        str(len(row.runs)),
        f"{row.num_tokens:,.0f}",
        f"{row.before:.3f}",
        f"{row.pass_at_1:.3f}",
        " ".join(f"{rate:.3f}" for rate in row.by_seed) if len(row.runs) > 1 else "",
        "first" if d is None else f"{d.mean:+.3f}",
        "" if d is None else f"{d.low:+.3f} to {d.high:+.3f}",
        ", ".join(row.differs),
    )


def draw(found: Comparison, path: Path) -> None:
    """Write the picture: held-out pass@1 over sampled tokens, and every difference with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "compare"}
    plt.rcParams.update(style)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for index, row in enumerate(found.rows):
        color = _COLORS[index % len(_COLORS)]
        for number, run in enumerate(row.runs):
            _curve(left, run, color, row.label if number == 0 else None)
        if row.difference is not None:
            d = row.difference
            right.errorbar(d.mean, index, xerr=[[d.mean - d.low], [d.high - d.mean]], fmt="o", color=color, capsize=3)
    left.set_xlabel("tokens sampled for training")
    left.set_ylabel("held-out pass@1")
    left.set_title("filled: after training; line: evaluations during it", loc="left")
    left.legend(frameon=False)
    right.axvline(0, color="#999999", linewidth=0.8)
    right.set_yticks(range(1, len(found.rows)), [row.label for row in found.rows[1:]])
    right.set_ylim(len(found.rows) - 0.5, 0.5)
    right.set_xlabel(f"difference to {found.rows[0].label}, 95% interval")
    right.set_title("paired by problem" + ("" if found.is_same_budget else "; BUDGETS DIFFER"), loc="left")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _curve(axis: Any, run: Run, color: str, label: str | None) -> None:
    def places(evaluations: Sequence[Evaluated]) -> tuple[list[int], list[float]]:
        known = [(e.num_tokens, e.pass_at_1) for e in evaluations if e.pass_at_1 is not None]
        return [tokens for tokens, _ in known], [rate for _, rate in known]

    axis.plot(*places(run.during), color=color, linewidth=1, alpha=0.8)
    axis.plot(*places([run.before]), "o", color=color, fillstyle="none")
    axis.plot(*places([run.after]), "o", color=color, label=label)
