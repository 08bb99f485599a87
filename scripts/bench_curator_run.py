"""What the curator brings a real run: the small model on 3,000 graded problems, most of them solved or out of reach.

Three runs of real engines sample as many tokens: about one group of each problem.
  uniform        problems drawn evenly
  ours           the item-response model, drawn by expected worth
  ours_offline   the same with offline pass rates: four samples of each problem by the model as it is, measured first by
                 `curator score`; its tokens are told apart
Figures: groups whose rewards differ, of all that were sampled; and the tokens after which the held-out score first
reached the target, by default the best that every run reached. Goals: 1.5 times as many groups with signal as uniform,
1.5 times fewer tokens to the target, 2 times with offline rates.

Under --root everything is kept: what has ended is not made again, what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from curator.pool import Pool
from curator.schema import OFFLINE_PASS_RATE
from stream_grpo import arithmetic
from stream_grpo.comparison.runs import Run, read_run
from stream_grpo.experiments.cells import Cell, Series, call

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "arithmetic-cpu.toml"
COUNTS = {1: 81, 2: 150, 3: 300, 4: 360, 5: 300, 6: 909, 7: 900}
"""Problems by digits. The model solves those of 1, learns those of 2 to 4, and has never seen 6 or 7."""
SCREEN = 4
UNIFORM = {"curator.choice": "signal", "curator.exploration": "1.0"}
OURS = {
    "curator.estimator": "item_response",
    "curator.choice": "worth",
    "curator.signal": "centered",
    "curator.sharpness": "32.0",
    "curator.exploration": "0.005",
    "curator.unseen_share": "0.0",
    "curator.domain_share": "0.0",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/bench_curator_run"), help="folder of all runs")
    parser.add_argument("--tokens", type=int, default=900_000, help="sampled by each run")
    parser.add_argument("--steps", type=int, help="learner steps at most: a smoke test, not a measurement")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind")
    parser.add_argument("--target", type=float, help="held-out pass@1")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs; repeatable")
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "models" / "model" / "model.safetensors").exists():
        call(["make-model", str(root / "models")], root / "make-model.log")
    plain = root / "problems.jsonl"
    if not plain.exists():
        write(plain, [dict(row) for row in arithmetic.rows(COUNTS, seed=0, held_out=False)])
    rated, offline_tokens = with_offline_rates(root, plain)
    series = Series(file=CONFIG, overrides=settings(root, options), root=root / "runs")
    kinds = {"uniform": (UNIFORM, plain), "ours": (OURS, plain), "ours_offline": (OURS, rated)}
    cells = {
        (kind, seed): Cell(f"{kind}-{seed}", {**own, "pool.files": json.dumps([str(file)]), "run.seed": str(seed)})
        for seed in range(options.seeds)
        for kind, (own, file) in kinds.items()
    }
    series.check(cells.values())
    runs = {key: series.made(cell, log) for key, cell in cells.items()}
    figures = compare(runs, options.target)
    figures["ours_offline"]["offline_tokens"] = offline_tokens
    for kind, found in figures.items():
        print(line(kind, found, figures["uniform"]))
    if options.json:
        print(json.dumps(figures))
    return 0


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.rename(path)


def with_offline_rates(root: Path, plain: Path) -> tuple[Path, int]:
    """The same problems with the pass rates of the model before training; and the tokens that these cost."""
    pool, rated = root / "pool", root / "problems-rated.jsonl"
    table = pool.with_name("pool.scores.parquet")
    if not pool.exists():
        curator("import", str(plain), "--pool", str(pool), "--yes")
    if not table.exists():
        model = ("--model", str(root / "models" / "model"), "--settings", str(CONFIG))
        curator("score", str(pool), *model, "--screen", str(SCREEN), "--most", "0")
    scored = {row["problem_id"]: row for row in pq.read_table(table).to_pylist()}
    if not rated.exists():
        rows = [json.loads(text) for text in plain.read_text(encoding="utf-8").splitlines()]
        write(rated, [{**row, OFFLINE_PASS_RATE: scored[row["id"]]["rate"]} for row in rows])
    return rated, sum(row["tokens"] for row in scored.values())


def curator(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "curator.cli", *command], check=True, stdout=sys.stderr)


def settings(root: Path, options: argparse.Namespace) -> tuple[str, ...]:
    """Of all runs."""
    return (
        f"model.path={root / 'models' / 'model'}",
        f"evaluation.files={json.dumps([str(root / 'models' / 'heldout.jsonl')])}",
        "evaluation.interval=8",
        "evaluation.interval_problems=90",
        "evaluation.problems_seed=0",
        "sampler.group_size=8",
        "tracking.wandb=disabled",
        f"run.num_steps={options.steps or 100_000}",
        f"run.max_generated_tokens={options.tokens}",
        *options.set,
    )


def compare(runs: Mapping[tuple[str, int], Path], target: float | None) -> dict[str, dict[str, Any]]:
    """Figures by kind of run, means over seeds: signal at equal tokens, and tokens to the target score."""
    read = {key: read_run(path) for key, path in runs.items()}
    sampled = {key: groups_of(path) for key, path in runs.items()}
    tokens = min(int(cost.sum()) for cost, _ in sampled.values())
    wanted = min(max(score for _, score in curve(run)) for run in read.values()) if target is None else target
    figures: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(kind for kind, _ in runs):
        keys = [key for key in runs if key[0] == kind]
        within = [signal[np.cumsum(cost) <= tokens] for cost, signal in (sampled[key] for key in keys)]
        reached = [tokens_to(read[key], wanted) for key in keys]
        figures[kind] = {
            "tokens": tokens,
            "groups": float(np.mean([len(signal) for signal in within])),
            "groups_with_signal": float(np.mean([signal.sum() for signal in within])),
            "before": float(np.mean([read[key].before.pass_at_1 or 0.0 for key in keys])),
            "after": float(np.mean([read[key].after.pass_at_1 or 0.0 for key in keys])),
            "target": wanted,
            "tokens_to_target": None if None in reached else float(np.mean([each for each in reached if each])),
        }
    return figures


def groups_of(run: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens of every group that was sampled, in the order they came in, and whether its rewards differed."""
    outcomes = Pool.open(run / "pool").outcomes()
    is_group = np.asarray(outcomes["num_tokens"]) > 0
    has_signal = np.array(outcomes["fate"].to_pylist()) == "accepted"
    return np.asarray(outcomes["num_tokens"])[is_group], has_signal[is_group]


def curve(run: Run) -> list[tuple[int, float]]:
    """(tokens, held-out pass@1) of every evaluation."""
    return [(at.num_tokens, at.pass_at_1) for at in (run.before, *run.during, run.after) if at.pass_at_1 is not None]


def tokens_to(run: Run, target: float) -> float | None:
    """Tokens after which the score first reached the target, between two evaluations on the line; None: never."""
    points = curve(run)
    if points[0][1] >= target:
        return 0.0
    for (left, low), (right, high) in pairwise(points):
        if high >= target:
            return left + (right - left) * (target - low) / (high - low)
    return None


def line(kind: str, found: Mapping[str, Any], uniform: Mapping[str, Any]) -> str:
    needed, even = found["tokens_to_target"], uniform["tokens_to_target"]
    times = found["groups_with_signal"] / max(1.0, uniform["groups_with_signal"])
    reached = "not reached" if needed is None else f"after {needed / 1000:.0f}k tokens"
    fewer = f", {even / needed:.2f} times fewer" if needed and even else ""
    return (
        f"{kind:13} {found['groups_with_signal']:.0f} of {found['groups']:.0f} groups with signal in "
        f"{found['tokens'] / 1000:.0f}k tokens ({times:.2f} times); score {found['before']:.3f} to "
        f"{found['after']:.3f}, {found['target']:.3f} {reached}{fewer}"
    )


if __name__ == "__main__":
    sys.exit(main())
