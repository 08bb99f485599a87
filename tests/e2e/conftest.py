"""One small model and one run with the real engines, shared by all end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "stream_grpo.cli"]


@dataclass(frozen=True)
class Run:
    """A run folder, and how the command that made it ended."""

    path: Path
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]


class Making:
    """`make-model` in the background: it takes a minute on one core, while the tests before those of runs go on."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="stream-grpo-made-")
        self.out = Path(self._folder.name) / "arithmetic"
        command = [*COMMAND, "make-model", str(self.out)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait(self) -> Path:
        output, _ = self._process.communicate()
        assert self._process.returncode == 0, output
        return self.out

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


MAKING: pytest.StashKey[Making] = pytest.StashKey()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of runs come last: until then their model is made."""
    items.sort(key=lambda item: "made" in needs(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to make the model as soon as it is known that a test needs it."""
    if not session.config.option.collectonly and any("made" in needs(item) for item in session.items):
        session.config.stash[MAKING] = Making()


def needs(item: pytest.Item) -> list[str]:
    """The fixtures of a test of this folder; others may have one of the same name."""
    return list(getattr(item, "fixturenames", ())) if Path(__file__).parent in item.path.parents else []


def pytest_unconfigure(config: pytest.Config) -> None:
    if making := config.stash.get(MAKING, None):
        making.end()


@pytest.fixture(scope="session")
def made(pytestconfig: pytest.Config) -> Path:
    """The folder of `make-model`."""
    if MAKING not in pytestconfig.stash:  # for a test of another folder
        pytestconfig.stash[MAKING] = Making()
    return pytestconfig.stash[MAKING].wait()


def arguments(made: Path, root: Path, name: str, **settings: object) -> list[str]:
    """Of `stream-grpo train`, for a run on the small model."""
    chosen = {
        "run.root": root,
        "run.name": name,
        "model.path": made / "model",
        "pool.files": [str(made / "pool.jsonl")],
        "evaluation.files": [str(made / "heldout.jsonl")],
        **settings,
    }
    config = str(ROOT / "configs" / "arithmetic-cpu.toml")
    return [*COMMAND, "train", config, *(part for key, value in chosen.items() for part in ("--set", f"{key}={value}"))]


USERS_OWN = "python:tests.e2e.verifiers.ends_right"
REWARDS: dict[str, object] = {
    "rewards.functions": [USERS_OWN],
    "rewards.compose.both.components.answer": '{verifier = "exact", weight = 0.5}',
    "rewards.compose.both.components.own": f'{{verifier = "{USERS_OWN}", weight = 0.5, decides = false}}',
    "rewards.compose.both.replaces": ["exact"],
    "rewards.hidden.verifier": "regex",
    "rewards.hidden.max_disagreement": 1.0,
}
"""Half of the reward is the user's own, in worker processes. The hidden verifier looks for the gold anywhere."""


@pytest.fixture(scope="session")
def run(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run, rewarded by a composition: evaluated, trained for 16 steps, evaluated on the way and after it."""
    root = tmp_path_factory.mktemp("runs")
    settings: dict[str, object] = {
        "run.num_steps": 16,
        "evaluation.num_problems": 100,
        "evaluation.num_samples": 8,
        "evaluation.interval": 8,
        "evaluation.interval_samples": 2,
        "alarms.mismatch": 1e-12,  # which two engines in float32 always exceed
        **REWARDS,
    }
    done = subprocess.run(arguments(made, root, "first", **settings), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(root / "first", done.stdout)


class Live:
    """A command that runs; it takes Ctrl-C as from a terminal, with its whole process group."""

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self._run_dir = run_dir
        # A shell that starts jobs in the background has SIGINT ignored, and children inherit that, but no handler. One
        # is set here: with a function to call in the child, all memory of this process would be forked.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, f"the run ended early:\n{self._process.communicate()[0]}"
            assert time.monotonic() < deadline, "nothing happened in time"
            time.sleep(0.1)

    def interrupt(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children()

    def terminate(self) -> None:
        os.kill(self._process.pid, signal.SIGTERM)

    def end(self, timeout_s: float) -> tuple[int, str]:
        output, _ = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, output

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


@pytest.fixture
def live() -> Iterator[Callable[[list[str], Path], Live]]:
    """Starts commands; what still runs after the test is killed."""
    started: list[Live] = []

    def start(command: list[str], run_dir: Path) -> Live:
        started.append(Live(command, run_dir))
        return started[-1]

    yield start
    for command in started:
        command.kill()
