"""Trains in the built-in environments, each as it is and with learning rate 0: only the first may rise.

The headline is held-out pass@1 over the domains of the configuration; a rise is paired by problem, with a 95 %
interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.small_model import made_model
from controls import AS_IT_IS, Threshold, is_right, line

from stream_grpo.experiments.cells import Cell, CellFailed, Series
from stream_grpo.files import read_object

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ("calculator", "records")
THRESHOLD = Threshold(least_rise=0.10, least_low=0.05)
CELLS = (Cell(AS_IT_IS, {}), Cell("learning-rate-0", {"learner.learning_rate": "0"}))


def main() -> int:
    options = parse_arguments()
    try:
        found = {name: let_run(name, options) for name in options.only or ENVIRONMENTS}
    except CellFailed as error:
        print(error, file=sys.stderr)
        return 1
    judged = {name: judge(name, summaries) for name, summaries in found.items()}
    if options.json:
        print(json.dumps(judged))
    return 0 if all(cell["is_right"] for cells in judged.values() for cell in cells.values()) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ENVIRONMENTS, help="one environment; repeatable")
    parser.add_argument("--root", type=Path, default=Path("runs/controls_environments"), help="folder that is kept")
    parser.add_argument("--steps", type=int, help="learner steps of a training; those of the configuration")
    parser.add_argument("--json", action="store_true", help="a last line {environment: {run: before, after, rise}}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all trainings; repeatable")
    return parser.parse_args()


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def let_run(environment: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The summaries of both runs; those that have ended are kept."""
    root = options.root.resolve()
    models = made_model(root, environment)
    series = Series(
        file=ROOT / "configs" / f"agent-{environment}-cpu.toml",
        overrides=(
            f"model.path={models / 'model'}",
            f"pool.files={json.dumps([str(models / 'pool.jsonl')])}",
            f"evaluation.files={json.dumps([str(models / 'heldout.jsonl')])}",
            "evaluation.interval=0",
            "tracking.wandb=disabled",
            "tracking.dashboard=false",
            *(() if options.steps is None else (f"run.num_steps={options.steps}",)),
            *options.set,
        ),
        root=root / environment,
    )
    series.check(CELLS)
    return {cell.name: read_object(series.made(cell, log) / "summary.json") for cell in CELLS}


def judge(environment: str, summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Says what became of both runs; by run what it scored, and whether that is as it must be."""
    judged = {}
    for name, summary in summaries.items():
        right = is_right(summary["heldout_rise"], THRESHOLD, is_control=name != AS_IT_IS)
        print(f"{environment:10} {line(name, summary, right)}")
        judged[name] = {
            "before": summary["heldout_before"]["headline"]["pass_at_1"],
            "after": summary["heldout_after"]["headline"]["pass_at_1"],
            "rise": summary["heldout_rise"],
            "is_right": right,
        }
    return judged


if __name__ == "__main__":
    sys.exit(main())
