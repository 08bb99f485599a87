"""A failpoint kills once, where it is armed, and nowhere else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stream_grpo import failpoints
from stream_grpo.failpoints import POINTS, VARIABLE, arm, disarm, failpoint, is_armed

ROOT = Path(__file__).parents[1]


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been killed, and with which signal."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    return found


def test_without_a_folder_nothing_is_armed(tmp_path: Path, kills: list[object]) -> None:
    arm(tmp_path, "journal.log_written")
    assert failpoints.armed_from() == ""
    failpoint("journal.log_written")
    assert kills == []
    assert is_armed(tmp_path, "journal.log_written")


def test_it_kills_at_its_passage_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(failpoints, "_folder", str(tmp_path))
    arm(tmp_path, "answer.batch", passage=3)
    for passage in range(1, 6):
        failpoint("answer.batch")
        failpoint("answer.taken")  # not armed
        assert len(kills) == (passage >= 3)
    assert kills == [(os.getpid(), signal.SIGKILL)]
    assert not is_armed(tmp_path, "answer.batch")


def test_a_file_that_holds_no_number_arms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: list[object]
) -> None:
    monkeypatch.setattr(failpoints, "_folder", str(tmp_path))
    (tmp_path / "answer.batch").write_text("soon")
    failpoint("answer.batch")
    assert kills == []


def test_it_can_be_taken_back(tmp_path: Path) -> None:
    arm(tmp_path, "answer.batch")
    assert disarm(tmp_path, "answer.batch")
    assert not disarm(tmp_path, "answer.batch")


@pytest.mark.parametrize(("name", "passage"), [("journal.segment", 1), ("answer.batch", 0)])
def test_what_never_comes_is_refused(tmp_path: Path, name: str, passage: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"failpoint {name!r}, passage {passage}: expected one of")):
        arm(tmp_path, name, passage)


def test_the_variable_arms_a_process_as_it_starts(tmp_path: Path) -> None:
    arm(tmp_path, "publish.renaming")
    code = "from stream_grpo.failpoints import failpoint; failpoint('publish.renaming'); print('lives')"
    environment = {**os.environ, VARIABLE: str(tmp_path)}
    for expected in (-signal.SIGKILL, 0):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True)
        assert done.returncode == expected


def test_every_point_is_passed_somewhere() -> None:
    """In the text of the code: answers by their kind, all others by name."""
    sources = [*(ROOT / "stream_grpo").rglob("*.py"), ROOT / "curator" / "curation.py"]
    text = "".join(path.read_text() for path in sources if path.name != "failpoints.py")
    for name in POINTS:
        if not name.startswith("answer."):
            assert re.search(rf'(failpoint|_at_point)\("{re.escape(name)}"\)', text), name
