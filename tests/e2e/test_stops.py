"""How a run with real engines ends, told to or unable to go on: with a checkpoint, a cause and an exit code."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stream_grpo.learner.checkpoint import newest_version
from tests.e2e.conftest import Live, Run, arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS: dict[str, object] = {
    "run.num_steps": 100000,
    "sampler.group_size": 4,
    "sampler.max_num_seqs": 64,
    "stream.groups_per_step": 4,
    "learner.checkpoint_interval": 100000,
    "evaluation.num_problems": 0,
    "evaluation.interval": 0,
    "tracking.wandb": "disabled",
    "tracking.dashboard": "false",
}
"""Steps of small groups, without end."""


@pytest.fixture
def stepping(made: Path, tmp_path: Path, live: Callable[[list[str], Path], Live]) -> Callable[..., tuple[Live, Run]]:
    """Starts a run and returns once it has made two steps."""

    def start(**settings: object) -> tuple[Live, Run]:
        run = Run(tmp_path / "stops", "")
        command = live(arguments(made, tmp_path, "stops", **{**SETTINGS, **settings}), run.path)
        metrics = run.path / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(run.lines("step")) >= 2)
        return command, run

    return start


def the_last_step_is_in_a_checkpoint(run: Run) -> bool:
    newest = newest_version(run.path / "checkpoints")
    return newest is not None and newest.step == run.lines("step")[-1]["step"]


def test_at_age_0_every_group_is_of_the_learners_own_weights_until_sigterm_leaves_a_checkpoint_of_the_last_step(
    stepping: Callable[..., tuple[Live, Run]],
) -> None:
    command, run = stepping(**{"stream.max_policy_age": 0, "evaluation.interval": 2, "evaluation.interval_problems": 8})
    command.wait_until(lambda: run.lines("step")[-1]["step"] >= 3 and bool(run.lines("evaluation")))
    command.terminate()
    code, output = command.end(timeout_s=60)
    assert code == 0, output
    assert f"--resume {run.path}" in output
    assert the_last_step_is_in_a_checkpoint(run)
    steps = run.lines("step")
    assert [(line["age_max"], line["age_mean"], line["num_groups"]) for line in steps] == [(0, 0.0, 4)] * len(steps)
    # Between two steps: nothing newer was there to wait.
    evaluations = [(line["step"], line["pinned_s"]) for line in run.lines("evaluation")]
    assert evaluations == [(step, 0.0) for step in range(2, 2 * len(evaluations) + 2, 2)] != []
    ledgers = [line["ledger"] for line in run.lines("status") if line["part"] == "buffer"]
    assert ledgers[-1]["groups"]["trained"] > 0
    assert all(ledger["closes"] for ledger in ledgers)


def test_report_c28_when_no_sampler_is_left_the_run_ends_with_cause_and_checkpoint(
    stepping: Callable[..., tuple[Live, Run]],
) -> None:
    command, run = stepping(**{"sampler.max_restarts": 0})
    log = str(run.path / "logs" / "sampler-0.log")
    (sampler,) = [pid for pid in psutil.pids() if _stdout_of(pid) == log]
    os.kill(sampler, signal.SIGKILL)
    code, output = command.end(timeout_s=60)
    assert code == 1, output
    assert f"sampler-0 died (process {sampler}" in output.replace("\n", " ")
    assert the_last_step_is_in_a_checkpoint(run)


@pytest.mark.parametrize("program", ["gcs_server", pytest.param("raylet", marks=pytest.mark.nightly)])
def test_a_ray_that_dies_ends_the_run_with_its_name(stepping: Callable[..., tuple[Live, Run]], program: str) -> None:
    command, run = stepping()
    (victim,) = [child for child in command.children() if Path(child.cmdline()[0]).name == program]
    victim.kill()
    code, output = command.end(timeout_s=90)
    assert code == 1, output
    assert f"Ray's {program} (process {victim.pid}) died" in output.replace("\n", " ")
    # Without its raylet the learner is killed by Ray, and what it had is that of the newest checkpoint.
    assert program == "raylet" or the_last_step_is_in_a_checkpoint(run)


def _stdout_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
