"""Kills of a run of real processes: nothing acknowledged is lost, nothing trained twice, nothing too old."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def chaos(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """What scripts/chaos.py prints last; its exit code must be 0."""
    command = [sys.executable, "scripts/chaos.py", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_forty_kills_of_a_fake_run_lose_nothing(tmp_path: Path) -> None:
    found = chaos("--fake", "--kills", "40", "--root", str(tmp_path / "run"), timeout_s=300)
    assert (found["lost"], found["trained_twice"], found["age_violations"]) == (0, 0, 0)
    assert found["ledger_closes"]
    assert found["kills"] == 40
    assert sum(found["by_point"].values()) == 20
    assert min(found["by_process"].values()) >= 2
    assert found["steps"] >= 30
    assert found["groups_trained"] == 2 * found["steps"]


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_of_a_real_run_lose_nothing(tmp_path: Path, seed: int) -> None:
    arguments = ("--root", str(tmp_path / "run"), "--model", str(tmp_path / "arithmetic"), "--seed", str(seed))
    found = chaos(*arguments, timeout_s=3600)
    assert (found["lost"], found["trained_twice"], found["age_violations"]) == (0, 0, 0)
    assert found["ledger_closes"]
    assert min(found["by_process"].values()) >= 2


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the scenes came to."""
    command = [sys.executable, "tests/chaos/scenes.py", str(tmp_path_factory.mktemp("scenes"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_report_c23_a_sampler_killed_while_it_takes_weights_comes_back_and_the_run_goes_on(
    scenes: dict[str, dict[str, Any]],
) -> None:
    # Both samplers had further groups acknowledged after the kill, and three further steps were made.
    assert scenes["C23"] == {"code": 0, "findings": [], "num_both_had": 2}


@pytest.mark.slow
def test_report_c34_a_resume_in_the_middle_makes_every_step_that_is_missing(
    scenes: dict[str, dict[str, Any]],
) -> None:
    found = scenes["C34"]
    assert (found["code"], found["findings"], found["final"][1]) == (0, [], 6)
    assert found["steps"] == [1, 2, 3, 4, 5, 6]
    assert found["steps_after"] == [4, 5, 6]  # by the last start of the learner


@pytest.mark.slow
def test_kills_of_a_run_with_further_uses_and_old_rollouts_lose_nothing(scenes: dict[str, dict[str, Any]]) -> None:
    assert scenes["uses"] == {"code": 0, "findings": [], "was_reused": True}


@pytest.mark.slow
def test_kills_of_a_run_with_groups_of_several_sizes_lose_nothing(scenes: dict[str, dict[str, Any]]) -> None:
    found = {"code": 0, "findings": [], "are_several": True, "num_of_another_size": 0, "has_some": True}
    assert scenes["sizes"] == found
