"""How long `curator import` takes for a million rows of Parquet on one core, and how much memory it needs.

The rows are those of Big-Math in kind: a word problem of some 200 characters, a gold, a source, a list of domains and a
pass rate. One row in a hundred is the same as an earlier one but for case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

GOAL_S = 120.0
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon")
THINGS = ("pens", "apples", "stamps", "marbles", "books", "shells", "coins", "cards", "beads", "nails")
SCHEMA = pa.schema(
    {
        "problem": pa.string(),
        "answer": pa.string(),
        "source": pa.string(),
        "domain": pa.list_(pa.string()),
        "llama8b_solve_rate": pa.float64(),
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--near", action="store_true", help="also look for near duplicates")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, pool = Path(folder) / "rows.parquet", Path(folder) / "pool"
        write_rows(file, arguments.rows)
        command = [sys.executable, "-m", "curator.cli", "import", str(file), "--pool", str(pool), "--verifier", "math"]
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, "--yes", *(["--near", "0.8"] if arguments.near else [])],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "LANCE_CPU_THREADS": "1"},
        )
        seconds = time.perf_counter() - begun
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout.splitlines()[0])
    result = {
        "rows": arguments.rows,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "max_memory_mib": usage.ru_maxrss >> 10,
    }
    print(
        f"{seconds:.1f} s, {result['cpu_seconds']} s of processor time, at most {result['max_memory_mib']} MiB; "
        f"the goal for a million rows is {GOAL_S:.0f} s"
    )
    if arguments.json:
        print(json.dumps({"import": result}))


def write_rows(path: Path, num_rows: int, batch_rows: int = 50_000) -> None:
    draw = random.Random(0)
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for start in range(0, num_rows, batch_rows):
            rows = [make_row(draw, number) for number in range(start, min(num_rows, start + batch_rows))]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))


def make_row(draw: random.Random, number: int) -> dict[str, object]:
    is_repeat = number % 100 == 99
    a = number - 1 if is_repeat else number
    name, thing = NAMES[a % 10], THINGS[a // 10 % 10]
    text = (
        f"{name} has {a} {thing} in a box and buys {a % 97} boxes more, each of which holds {a % 89 + 2} {thing}. "
        f"On the way home a third of the new ones is lost. How many {thing} does {name} have in the end? "
        "Round down to a whole number."
    )
    return {
        "problem": text.upper() if is_repeat else text,
        "answer": str(a + (a % 97) * (a % 89 + 2) * 2 // 3),
        "source": f"part{a % 7}",
        "domain": [f"Mathematics -> {thing}", "Mathematics"],
        "llama8b_solve_rate": round(draw.random(), 4),
    }


if __name__ == "__main__":
    main()
