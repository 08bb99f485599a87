"""Samplers are added to and removed from a running run by command, with the real engines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import COMMAND, ROOT, Live, arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def samplers(run: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [*COMMAND, "samplers", str(run), *options, "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_sampler_comes_and_another_goes_while_the_run_goes_on(
    made: Path, tmp_path: Path, live: Callable[[list[str], Path], Live]
) -> None:
    run = tmp_path / "r"
    settings = {"run.num_steps": 36, "evaluation.num_problems": 0, "evaluation.interval": 0}
    training = live(arguments(made, tmp_path, "r", **settings), run)

    def lines(event: str) -> list[dict[str, Any]]:
        path = run / "metrics.jsonl"
        found = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [line for line in found if line["event"] == event]

    training.wait_until(lambda: len(lines("step")) >= 2)
    assert samplers(run, "--add", "1")["added"] == ["sampler-1"]

    def has_sampled(name: str) -> bool:
        return any(line["part"] == name and line.get("num_groups_done", 0) for line in lines("status"))

    training.wait_until(lambda: has_sampled("sampler-1"))
    # The one it began with goes, and the new one makes the rest.
    assert samplers(run, "--remove", "sampler-0", "--within", "5")["leaving"] == "sampler-0"
    training.wait_until(lambda: [s["name"] for s in samplers(run)["samplers"]] == ["sampler-1"])
    code, output = training.end(timeout_s=240)
    assert code == 0, output
    assert "sampler-0 has left: its groups are handed over" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 36
    assert summary["ledger_closes"]
    refused = subprocess.run([*COMMAND, "samplers", str(run)], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "nobody runs this run" in refused.stderr + refused.stdout
