"""A run with real engines that goes on with another number of learner ranks: from two to one and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import COMMAND, Live, Run, arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

GROUPS = 4
SETTINGS: dict[str, object] = {
    "run.num_steps": 3,
    "sampler.group_size": 4,
    "sampler.max_num_seqs": 64,
    "stream.groups_per_step": GROUPS,
    "learner.num_ranks": 2,
    "learner.checkpoint_interval": 100,  # one, at the end of every start
    "weights.keep_versions": 20,
    "evaluation.num_problems": 0,
    "evaluation.interval": 0,
    "tracking.wandb": "disabled",
    "tracking.dashboard": "false",
}


def started(live: Callable[[list[str], Path], Live], command: list[str], run: Run) -> str:
    """What the command says until it ends."""
    code, output = live(command, run.path).end(timeout_s=240)
    assert code == 0, output
    return " ".join(output.split())


def tensors(run: Run, version: str) -> str:
    """The hash of the published tensors of a version."""
    manifest: dict[str, Any] = json.loads((run.path / "weights" / version / "manifest.json").read_text())
    return str(manifest["sha256"])


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_run_goes_on_with_one_rank_of_two_and_with_two_again(
    made: Path, tmp_path: Path, live: Callable[[list[str], Path], Live], zero_stage: int
) -> None:
    run = Run(tmp_path / "ranks", "")
    first = arguments(made, tmp_path, "ranks", **SETTINGS, **{"learner.zero_stage": zero_stage})
    assert "cut anew" not in started(live, first, run)
    for num_ranks, num_steps, newest in ((1, 5, "0.3"), (2, 7, "1.5")):
        resume = [*COMMAND, "train", "--resume", str(run.path), "--set", f"learner.num_ranks={num_ranks}"]
        said = started(live, [*resume, "--set", f"run.num_steps={num_steps}"], run)
        expected = f"checkpoint-{newest} is of other ranks, and cut anew for {num_ranks} before the first step"
        assert expected in said
    steps = run.lines("step")
    # Every step once, on a branch for each start; a restore lost none, since each start ends with a checkpoint.
    assert [(line["branch"], line["step"]) for line in steps] == [
        (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (2, 6), (2, 7)
    ]  # fmt: skip
    assert run.summary["ledger_closes"]
    assert run.summary["groups"]["trained"] == 7 * GROUPS
    # In float32 the weights go through the cutting as they are, and samplers prove them by the probe as ever.
    assert tensors(run, "1.00000003") == tensors(run, "0.00000003")
    assert tensors(run, "2.00000005") == tensors(run, "1.00000005")
    assert tensors(run, "2.00000007") != tensors(run, "2.00000005")
    assert run.summary["probe_gap"]["mean"] < 1e-4
