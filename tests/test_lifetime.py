"""Processes of a run end with their launcher, and the next start waits for what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_grpo.errors import StallError
from stream_grpo.lifetime import PARTS_LOCK, children, is_alive, wait_for_parts

ROOT = Path(__file__).parents[1]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that somebody else's life may depend on."""
    process = subprocess.Popen(["sleep", "60"])
    # Its start is over a moment before the system knows it by its arguments.
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    yield process
    process.kill()
    process.wait()


def part(run_dir: Path, launcher: int) -> subprocess.Popen[str]:
    """A process that counts as a part of the run; it is one when this returns."""
    code = (
        "import sys, time; from pathlib import Path; from stream_grpo.lifetime import become_part, end_with;"
        "become_part(Path(sys.argv[1])); print('there', flush=True); end_with(int(sys.argv[2])); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(run_dir), str(launcher)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_a_part_dies_with_its_launcher_and_is_waited_for(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    process = part(tmp_path, sleeper.pid)
    with pytest.raises(StallError, match=f"processes of an earlier start still live after 0 s.*{PARTS_LOCK}"):
        wait_for_parts(tmp_path, timeout_s=0.0)
    sleeper.kill()  # and nobody takes note of its end
    wait_for_parts(tmp_path, timeout_s=20.0)
    assert process.wait(20.0) == -signal.SIGKILL


def test_a_part_of_a_launcher_that_is_dead_already_dies_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert part(tmp_path, gone.pid).wait(20.0) == -signal.SIGKILL


def test_a_run_without_parts_is_not_waited_for(tmp_path: Path) -> None:
    wait_for_parts(tmp_path, timeout_s=0.0)
    wait_for_parts(tmp_path, timeout_s=0.0)


def test_children_are_found_by_program_and_seen_to_die(sleeper: subprocess.Popen[bytes]) -> None:
    assert children(["sleep"]) == {"sleep": sleeper.pid}
    assert children(["raylet"]) == {}
    assert is_alive(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_alive(sleeper.pid):  # it is a zombie: nobody has waited for it
        assert time.monotonic() < deadline
