"""What the curator costs on a large pool: picks, outcomes, memory and the start from disk, for each estimator.

pick     `next` of 64 groups, told their outcomes before the next: median and 99th percentile. Goal: p99 under 20 ms.
report   Outcomes taken in a second, written to the pool's table in batches of 512. Goal: 10,000.
stats    The figures that a service makes every second.
first    Pool and state from disk for the first time: the numbers of the texts are made, and kept.
start    The same the next time, with the file of the state after all outcomes so far. Goal: under 10 s.
fold     And without that file: all outcomes are folded.
save     Writing that file, which the service does not answer meanwhile; its bytes.
memory   What the curator's state then adds to the process once the pool is loaded, over the problems. Goal: 300 bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from curator.curation import Curation
from curator.pool import Pool
from curator.schema import Outcome, Problem

GROUP_SIZE, BATCH, NUM_DOMAINS = 8, 64, 32
TEMPLATE = Outcome(
    sequence=0, group_id="", problem_id="", domain="", num_passed=4, num_failed=4, num_unscored=0, mean_reward=0.5,
    reward_spread=1.0, num_truncated=0, branch=0, min_step=0, max_step=0, mean_step=0.0, num_tokens=800, seconds=1.0,
    fate="accepted",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1_000_000)
    parser.add_argument("--picks", type=int, default=300, help="questions of 64 groups")
    parser.add_argument("--outcomes", type=int, default=50_000)
    parser.add_argument("--estimators", nargs="+", default=["sliding_rate", "item_response"])
    parser.add_argument("--group-sizes", type=int, nargs="*", default=[], help="as curator.group_sizes")
    parser.add_argument("--text-numbers", type=int, default=32, help="as curator.text_numbers")
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool"
        start = time.perf_counter()
        Pool.create(path, make_problems(options.problems)).close()
        print(f"a pool of {options.problems} problems, written in {time.perf_counter() - start:.1f} s")
        for name in options.estimators:
            figures[name] = measure(path, name, options)
            print(name, json.dumps(figures[name]), flush=True)
    if options.json:
        print(json.dumps(figures))


def make_problems(num: int) -> Iterator[Problem]:
    """Sums, in domains by the length of their numbers and the like."""
    for i in range(num):
        yield Problem(
            problem_id=f"sum-{i:07d}", prompt=f"{i}+{i // 7}=", answer=str(i + i // 7), verifier="exact",
            domain=f"d{i % NUM_DOMAINS}",
        )  # fmt: skip


def measure(path: Path, estimator: str, options: argparse.Namespace) -> dict[str, float]:
    """All figures of one estimator; what it is told stays in the pool."""
    rules: dict[str, Any] = {
        "estimator": estimator, "choice": "worth", "text_numbers": options.text_numbers,
        "group_sizes": tuple(options.group_sizes),
    }  # fmt: skip
    curation, first = started(path, rules)
    rng = np.random.default_rng(0)
    pick_ms, sequence = [], curation.position().next_sequence
    for turn in range(options.picks):
        begun = time.perf_counter()
        picks = curation.next([f"{estimator}-{turn}-{i}" for i in range(BATCH)])
        pick_ms.append(1000 * (time.perf_counter() - begun))
        told = [outcome(sequence + i, pick.group_id, pick.problem.problem_id, rng) for i, pick in enumerate(picks)]
        sequence = curation.report(told)
    indices = rng.integers(0, options.problems, options.outcomes)
    told = [outcome(sequence + i, f"{estimator}-o{i}", f"sum-{index:07d}", rng) for i, index in enumerate(indices)]
    begun = time.perf_counter()
    for at in range(0, len(told), BATCH):
        curation.report(told[at : at + BATCH])
    report_s = time.perf_counter() - begun
    stats_ms = [milliseconds(curation.stats) for _ in range(5)]
    curation.close()
    save_s = curation.stats()["state"]["write_s"]
    del curation
    gc.collect()
    curation, again = started(path, rules)
    num_outcomes, num_restored = curation.position().next_sequence, curation.stats()["state"]["restored"]
    curation.close()
    del curation
    gc.collect()
    state_path = Pool.open(path).state_path
    state_bytes = state_path.stat().st_size
    state_path.unlink()
    curation, folded = started(path, rules)
    curation.close()
    return {
        "pick_ms_median": round(float(np.median(pick_ms)), 2),
        "pick_ms_p99": round(float(np.quantile(pick_ms, 0.99)), 2),
        "outcomes_per_s": round(len(told) / report_s),
        "stats_ms": round(max(stats_ms), 1),
        "state_bytes_per_problem": round(again.state_bytes / options.problems, 1),
        "first_start_s": round(first.start_s, 2),
        "start_s": round(again.start_s, 2),
        "of_which_pool_s": round(again.pool_s, 2),
        "fold_s": round(folded.start_s, 2),
        "save_s": round(save_s, 3),
        "state_file_bytes": state_bytes,
        "outcomes_at_start": num_outcomes,
        "of_which_restored": num_restored,
    }


class Started(NamedTuple):
    """What a start took."""

    pool_s: float
    start_s: float
    """The pool included."""
    state_bytes: int


def started(path: Path, rules: dict[str, Any]) -> tuple[Curation, Started]:
    """A curation of the pool on disk."""
    begun = time.perf_counter()
    pool = Pool.open(path)
    _ = pool.problem_ids, pool.domain_numbers
    pool_s, loaded = time.perf_counter() - begun, resident_bytes()
    curation = Curation(pool, group_size=GROUP_SIZE, **rules)
    start_s = time.perf_counter() - begun
    gc.collect()
    pa.default_memory_pool().release_unused()
    return curation, Started(pool_s, start_s, resident_bytes() - loaded)


def milliseconds(function: Callable[[], object]) -> float:
    """What one call takes."""
    begun = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - begun)


def outcome(sequence: int, group_id: str, problem_id: str, rng: np.random.Generator) -> Outcome:
    """A group of 8 with some passes, of a policy that moves one step in 64 groups."""
    passed = int(rng.integers(0, GROUP_SIZE + 1))
    return replace(
        TEMPLATE, sequence=sequence, group_id=group_id, problem_id=problem_id, num_passed=passed,
        num_failed=GROUP_SIZE - passed, mean_reward=passed / GROUP_SIZE, mean_step=sequence / BATCH,
        max_step=sequence // BATCH,
    )  # fmt: skip


def resident_bytes() -> int:
    """Resident memory of this process, by the kernel."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
