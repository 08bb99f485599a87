"""W&B: one row a learner step. The only file that imports wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stream_grpo.sinks.sink import Rows, numbers

OVERVIEW: Mapping[str, str] = {
    "reward_mean": "last,max",
    "came_in/mixed": "last,mean",
    "entropy": "last,min",
    "k3": "last,max",
    "ess": "last,min",
    "grad_norm": "last,max",
    "response_tokens_mean": "last,max",
    "end_share/length": "last,max",
    "age_mean": "last,mean",
    "age_max": "last,max",
    "waited_s": "last,mean",
    "step_s": "last,mean",
}
"""Figures that a workspace shows together, under `overview/`, and what the table of runs says of each.

W&B keeps the layout of a workspace on its server alone, where an offline run has none. It makes a section of every
prefix, so that a prefix of its own is the overview of any run.
"""


class WandbSink:
    """`mode` is offline, online or disabled."""

    def __init__(self, run_dir: Path, name: str, project: str, mode: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # The child process of W&B takes a group of its own: Ctrl-C reaches the launcher alone.
        self._run = wandb.init(
            project=project,
            name=name,
            mode=mode,  # type: ignore[arg-type]
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(x_disable_stats=True, console="off", disable_git=True, disable_code=True),
        )
        self._rows = Rows()
        # What is evaluated is some steps old by then: its figures have an axis of their own.
        self._run.define_metric("heldout/*", step_metric="heldout/step")
        for figure, summary in OVERVIEW.items():
            self._run.define_metric(_overview(figure), summary=summary)

    def write(self, line: Mapping[str, Any]) -> None:
        """A row of what a line completes."""
        if row := self._rows.take(line):
            row |= {_overview(name): row[name] for name in OVERVIEW if name in row}
            # The learner is ahead of what was evaluated: W&B takes no row of an earlier step.
            self._run.log(row, step=self._rows.step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and end."""
        self._run.summary.update(dict(numbers(summary)))
        self._run.finish()


def _overview(name: str) -> str:
    return f"overview/{name.replace('/', '_')}"
