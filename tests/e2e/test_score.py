"""`curator score` with the real engine and the small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def curator(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "curator.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_easy_problems_are_told_from_hopeless_ones_and_no_sample_is_paid_for_twice(made: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (made / "pool.jsonl").read_text().splitlines()]
    chosen = [row for digits in (1, 6) for row in [r for r in rows if r["digits"] == digits][:10]]
    file, pool = tmp_path / "rows.jsonl", tmp_path / "p"
    file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    curator("import", file, "--pool", pool, "--yes")
    model = ("--model", made / "model", "--settings", ROOT / "configs" / "arithmetic-cpu.toml")
    first = curator("score", pool, *model, "--screen", "4", "--most", "8")
    assert first["problems"] == 20
    assert first["unscored"] == 0
    assert first["samples"] >= 80
    table = pq.read_table(tmp_path / "p.scores.parquet").to_pylist()
    rates = {digits: [row["rate"] for row in table if row["domain"] == f"add-{digits}"] for digits in (1, 6)}
    # The model solves one digit nearly always and six almost never.
    assert sum(rates[1]) / 10 > 0.5 > 0.2 > sum(rates[6]) / 10
    log = tmp_path / "p.scores.jsonl"
    before = log.read_bytes()
    assert curator("score", pool, *model, "--screen", "4", "--most", "8") == first
    assert log.read_bytes() == before
