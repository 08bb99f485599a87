"""How well `curator score` ranks problems by their true pass rate, and at how many samples.

The truth is 256 samples of each of 500 problems of the small model, sampled by real vLLM through `curator score` itself
in one stage; its log is kept in the work folder, so that a killed run goes on. Both ways of scoring are then drawn from
these samples without an engine, a fresh order for each repetition, and held against the rate over all samples.
`--live` also scores the pool anew in two stages with other seeds, so that not one sample is shared with the truth.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from curator.scoring import fit_priors, more_samples

SETTINGS = "configs/arithmetic-cpu.toml"
ONE_STAGE = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
TWO_STAGES = ((2, 0.15), (2, 0.1), (4, 0.15), (4, 0.12), (4, 0.1), (4, 0.08), (8, 0.1), (8, 0.08))
"""(samples to screen, standard deviation at which the second stage ends)."""
MOST = 64
GOAL_SPEARMAN, GOAL_SHARE = 0.9, 0.5
Matrix = NDArray[np.bool_]


class Found(NamedTuple):
    """A way of scoring: samples a problem on average, and Spearman's correlation with the truth."""

    samples: float
    spearman: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/arithmetic"), help="a folder of make-model")
    parser.add_argument("--work", type=Path, default=Path("build/bench_score"))
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--truth", type=int, default=256, help="samples of each problem that count as the truth")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--live", action="store_true", help="also score in two stages with real vLLM and other seeds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    pool = make_pool(arguments)
    if not has_truth(pool, arguments.truth):
        score(pool, arguments.model, "truth", "--screen", str(arguments.truth), "--most", "0")
    domains, passes = read_log(arguments.work / "truth.jsonl", pool, arguments.truth)
    result = compare(domains, passes, arguments.repetitions)
    if arguments.live:
        result["live"] = live(pool, arguments, dict(zip(domains, passes.mean(axis=1), strict=True)))
    if arguments.json:
        print(json.dumps({"score": result}))


def make_pool(arguments: argparse.Namespace) -> Path:
    pool: Path = arguments.work / "pool"
    if not pool.exists():
        pool.parent.mkdir(parents=True, exist_ok=True)
        rows = (arguments.model / "pool.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        random.Random(0).shuffle(rows)
        file = arguments.work / "problems.jsonl"
        file.write_text("".join(rows[: arguments.problems]), encoding="utf-8")
        curator("import", str(file), "--pool", str(pool), "--yes")
    return pool


def has_truth(pool: Path, num_samples: int) -> bool:
    """Whether the table of the truth is there, which is written last, with so many samples of each problem."""
    table = pool.with_name("truth.parquet")
    return table.exists() and min(pq.read_table(table)["attempts"].to_pylist()) >= num_samples


def score(pool: Path, model: Path, name: str, *options: str) -> None:
    files = ("--log", str(pool.with_name(f"{name}.jsonl")), "--out", str(pool.with_name(f"{name}.parquet")))
    curator("score", str(pool), "--model", str(model / "model"), "--settings", SETTINGS, *files, *options)


def curator(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "curator.cli", *command], check=True)


def read_log(path: Path, pool: Path, num_samples: int) -> tuple[dict[str, str], Matrix]:
    """Domains by problem, and [P, N] whether each sample passed, in the same order."""
    table = pq.read_table(pool.with_name("truth.parquet"), columns=["problem_id", "domain"]).to_pylist()
    domains = {row["problem_id"]: row["domain"] for row in table}
    index = {problem_id: i for i, problem_id in enumerate(domains)}
    passes = np.zeros((len(index), num_samples), bool)
    with path.open(encoding="utf-8") as file:
        next(file)  # the header
        for line in file:
            for problem_id, number, passed, *_ in json.loads(line):
                if number < num_samples:
                    passes[index[problem_id], number] = bool(passed)
    return domains, passes


def compare(domains: dict[str, str], passes: Matrix, repetitions: int) -> dict[str, Any]:
    names = list(domains.values())
    truth = passes.mean(axis=1)
    draw = np.random.default_rng(0)
    orders = [draw.permuted(passes, axis=1) for _ in range(repetitions)]
    print(f"{len(names)} problems, {passes.shape[1]} samples each, mean rate {truth.mean():.3f}")
    plain = {n: mean_of(Found(n, spearman(order[:, :n].mean(axis=1), truth)) for order in orders) for n in ONE_STAGE}
    shrunk = {
        n: mean_of(two_stages(names, order, truth, screen=n, target_sd=0.5, most=0) for order in orders)
        for n in ONE_STAGE
    }
    print("one stage: samples, Spearman of the share of passes, of the posterior mean")
    for n in ONE_STAGE:
        print(f"  {n:6d}  {plain[n].spearman:.3f}  {shrunk[n].spearman:.3f}")
    print("two stages: screen, target, samples, Spearman; one stage of the same accuracy needs (share), (posterior)")
    rows = []
    for screen, target in TWO_STAGES:
        found = mean_of(two_stages(names, order, truth, screen=screen, target_sd=target, most=MOST) for order in orders)
        needs = [samples_for(found.spearman, way) for way in (plain, shrunk)]
        rows.append({"screen": screen, "target_sd": target, **found._asdict(), "one_stage": needs})
        print(f"  {screen:2d}  {target:.2f}  {found.samples:6.1f}  {found.spearman:.3f}  {needs[0]}  {needs[1]}")
    reached = [row for row in rows if row["spearman"] >= GOAL_SPEARMAN]
    best = min(reached, key=lambda row: row["samples"], default=None)
    if best is not None:
        one = best["one_stage"][0]
        share = best["samples"] / one if one else None
        shown = f"{share:.2f} of the {one} samples of one stage" if one else f"one stage needs over {ONE_STAGE[-1]}"
        print(f"Spearman {best['spearman']:.3f} at {best['samples']:.1f} samples a problem: {shown}; goal {GOAL_SHARE}")
    return {"two_stages": rows, "best": best}


def two_stages(
    domains: list[str], passes: Matrix, truth: NDArray[np.float64], *, screen: int, target_sd: float, most: int
) -> Found:
    """What the two stages of `curator score` come to when each problem's samples are those of a row, in order."""
    scored = np.full(len(domains), screen)
    passed = passes[:, :screen].sum(axis=1)
    if most:
        for i, known in enumerate(posteriors(domains, passed, scored)):
            scored[i] += more_samples(known, target_sd=target_sd, most=min(most, passes.shape[1] - screen))
        passed = np.array([row[:num].sum() for row, num in zip(passes, scored, strict=True)])
    means = np.array([known.mean for known in posteriors(domains, passed, scored)])
    return Found(float(scored.mean()), spearman(means, truth))


def posteriors(domains: list[str], passed: NDArray[np.int64], scored: NDArray[np.int64]) -> list[Any]:
    counts: dict[str, list[tuple[int, int]]] = {}
    pairs = list(zip(passed.tolist(), scored.tolist(), strict=True))
    for domain, pair in zip(domains, pairs, strict=True):
        counts.setdefault(domain, []).append(pair)
    priors = fit_priors(counts)
    return [priors[domain].after(*pair) for domain, pair in zip(domains, pairs, strict=True)]


def samples_for(target: float, one_stage: dict[int, Found]) -> int | None:
    """The fewest samples a problem at which one stage is as accurate; None where none of those tried is."""
    return next((n for n, found in sorted(one_stage.items()) if found.spearman >= target), None)


def live(pool: Path, arguments: argparse.Namespace, truth: dict[str, float]) -> dict[str, float]:
    score(pool, arguments.model, "live", "--screen", "4", "--target-sd", "0.1", "--seed", "1")
    rows = pq.read_table(pool.with_name("live.parquet")).to_pylist()
    rates = np.array([truth[row["problem_id"]] for row in rows])
    found = {
        "samples": sum(row["attempts"] for row in rows) / len(rows),
        "spearman": spearman(np.array([row["posterior_rate"] for row in rows]), rates),
        "spearman_of_share": spearman(np.array([row["rate"] for row in rows]), rates),
        "interval_holds": float(
            np.mean([r["rate_low"] <= t <= r["rate_high"] for r, t in zip(rows, rates, strict=True)])
        ),
    }
    print("live: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    return found


def mean_of(found: Any) -> Found:
    samples, correlations = zip(*found, strict=True)
    return Found(float(np.mean(samples)), float(np.mean(correlations)))


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Pearson's correlation of mean ranks."""
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((2 * ends - counts - 1) / 2)[place]


if __name__ == "__main__":
    main()
