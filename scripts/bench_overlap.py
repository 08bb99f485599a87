"""Asynchronous against synchronous: one run of the small model with the configured age, one with 0, of equal steps.

overlap = (busy sampler + busy learner - wall) / the smaller of the two, of the asynchronous run, as in its summary.
speedup_over_sync = steps a second of the asynchronous run over those of the synchronous one; both walls run from the
first engine step with a running request to the end of the last learner step. Goal: an overlap of at least 0.9.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import made, page
from benchmarks.page import Goal, goals, table
from benchmarks.small_model import made_model
from benchmarks.watch import memory_table, watched_memory

from stream_grpo.experiments.cells import Cell, Series
from stream_grpo.files import read_object

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "arithmetic-cpu.toml"
MIN_OVERLAP = 0.9
SYNCHRONOUS = {"stream.max_policy_age": "0", "stream.publish_interval": "1", "stream.too_old": "wait"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line {overlap, speedup_over_sync}")
    parser.add_argument("--quick", action="store_true", help="few steps: a look, not a measurement")
    parser.add_argument("--steps", type=int, help="learner steps of each run; 60, or 12 with --quick")
    parser.add_argument("--root", type=Path, help="a folder to keep; by default a temporary one")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="where the section is written")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both runs; repeatable")
    options = parser.parse_args()
    root = (options.root or Path(tempfile.mkdtemp(prefix="bench-overlap-"))).resolve()
    series = Series(file=CONFIG, overrides=settings(made_model(root), options), root=root / "runs")
    cells = [Cell("asynchronous", {}), Cell("synchronous", SYNCHRONOUS)]
    series.check(cells)
    with watched_memory() as memory:
        found = {cell.name: read_object(series.made(cell, log) / "summary.json") for cell in cells}
    for name, summary in found.items():
        print(line(name, summary))
    figures = {
        "overlap": found["asynchronous"]["overlap"],
        "speedup_over_sync": rate(found["asynchronous"]) / rate(found["synchronous"]),
    }
    overlap, speedup = figures.values()
    print(f"overlap {overlap:.2f}, goal {MIN_OVERLAP}; {speedup:.2f} times as fast as the synchronous loop")
    page.put(
        options.page,
        "bench_overlap",
        "Asynchronous against synchronous",
        section(found, figures, memory),
        is_quick=options.quick,
        command=made.command("bench_overlap", sys.argv[1:]),
        say=log,
    )
    if options.json:
        print(json.dumps(figures))
    return 0 if options.quick or figures["overlap"] >= MIN_OVERLAP else 1


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def settings(models: Path, options: argparse.Namespace) -> tuple[str, ...]:
    """Of both runs: nothing is evaluated, so that samplers and learner have the machine to themselves."""
    return (
        f"model.path={models / 'model'}",
        f"pool.files={json.dumps([str(models / 'pool.jsonl')])}",
        "evaluation.files=[]",
        "evaluation.domains=[]",
        "evaluation.interval=0",
        "evaluation.num_problems=0",
        "tracking.wandb=disabled",
        f"run.num_steps={options.steps or (12 if options.quick else 60)}",
        *options.set,
    )


def section(found: dict[str, Any], figures: dict[str, float], memory: dict[str, Any]) -> str:
    """The section in docs/benchmarks.md."""
    heads = ("run", "steps", "seconds", "sampler busy", "learner busy", "overlap", "mean age")
    rows = [
        (
            name,
            str(summary["steps"]),
            f"{summary['loop_wall_s']:.1f}",
            f"{summary['busy_s']['sampler']:.1f} s",
            f"{summary['busy_s']['learner']:.1f} s",
            f"{summary['overlap']:.2f}",
            f"{summary['age']['mean']:.2f}",
        )
        for name, summary in found.items()
    ]
    busy = found["asynchronous"]["busy_s"]
    most = (busy["sampler"] + busy["learner"]) / max(busy["sampler"], busy["learner"])
    parts = [
        f"`{CONFIG.name}`, the same steps with the configured `max_policy_age` and with 0.",
        table(heads, rows),
        goals([Goal("overlap", figures["overlap"], MIN_OVERLAP)]),
        f"The asynchronous run makes {figures['speedup_over_sync']:.2f} times as many steps a second. With both halves "
        f"as long as in it, overlap alone gives at most {most:.2f}.",
    ]
    if memory:  # none where both runs were there already
        parts += ["Memory by process, the larger of both runs:", memory_table(memory)]
    return "\n\n".join(parts)


def rate(summary: dict[str, Any]) -> float:
    """Learner steps a second of the loop."""
    return float(summary["steps"] / summary["loop_wall_s"])


def line(name: str, summary: dict[str, Any]) -> str:
    busy = summary["busy_s"]
    return (
        f"{name:13} {summary['steps']} steps in {summary['loop_wall_s']:.1f} s, sampler busy {busy['sampler']:.1f} s, "
        f"learner busy {busy['learner']:.1f} s, overlap {summary['overlap']:.2f}, mean age {summary['age']['mean']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
