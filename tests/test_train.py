"""The figures at the end of a run, by hand."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from stream_grpo import train as training
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.console import Console
from stream_grpo.errors import ConfigError, StallError
from stream_grpo.evaluation import ProblemScore
from stream_grpo.files import write_json
from stream_grpo.guards import guarded_id
from stream_grpo.learner.checkpoint import write_checkpoint
from stream_grpo.metrics import MetricsLog, MetricsReader
from stream_grpo.train import TrainingRun, refuse_finished
from stream_grpo.types import PolicyVersion


def finished(run_dir: Path, *, steps: int, checkpoint: int) -> Config:
    write_json(run_dir / "summary.json", {"steps": steps})
    write_checkpoint(run_dir / "checkpoints", PolicyVersion(0, checkpoint), lambda path: None)
    return parse({"model": {"path": "m"}, "run": {"root": str(run_dir.parent), "name": run_dir.name}}, "test")


def test_a_run_that_has_come_to_its_end_is_not_ended_again(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    config = finished(tmp_path / "r", steps=100, checkpoint=100)  # run.num_steps is 100
    with pytest.raises(ConfigError, match=r"run\.num_steps = 100: nothing to do, 100 steps are done; raise it"):
        refuse_finished(config)
    refuse_finished(config.model_copy(update={"run": config.run.model_copy(update={"num_steps": 101})}))


def test_a_run_whose_tokens_are_spent_is_not_ended_again(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    config = finished(tmp_path / "r", steps=50, checkpoint=50)  # of run.num_steps = 100
    tokens = {"generated": 1100, "evaluation": 100}
    write_json(tmp_path / "r" / "summary.json", {"steps": 50, "tokens": tokens})
    spent, more = (
        config.model_copy(update={"run": config.run.model_copy(update={"max_generated_tokens": budget})})
        for budget in (1000, 1001)
    )
    with pytest.raises(ConfigError, match=r"max_generated_tokens = 1000: nothing to do, 1000 tokens are sampled"):
        refuse_finished(spent)
    refuse_finished(more)
    refuse_finished(config)


@pytest.mark.parametrize("what", ["no summary", "summary cut", "steps beyond the summary"])
def test_a_run_whose_end_is_still_to_be_made_goes_on(tmp_path: Path, what: str) -> None:
    (tmp_path / "r").mkdir()
    config = finished(tmp_path / "r", steps=100, checkpoint=150 if what == "steps beyond the summary" else 100)
    if what == "no summary":
        (tmp_path / "r" / "summary.json").unlink()
    elif what == "summary cut":
        (tmp_path / "r" / "summary.json").write_text('{"ste')
    refuse_finished(config)  # raises nothing


class FakeRun:
    """A run that a signal reaches, and that stops as it is told."""

    number: signal.Signals | None = signal.SIGTERM
    failed: list[str] = []  # noqa: RUF012
    stopped: list[str] = []  # noqa: RUF012

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def go(self, begun: float) -> dict[str, Any]:
        if self.number is None:
            raise StallError("no batch for step 8")
        os.kill(os.getpid(), self.number)
        raise AssertionError("the signal did not interrupt")

    def stop_all(self) -> list[str]:
        self.stopped.append("all")
        return self.failed


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    class Fresh(FakeRun):
        stopped: list[str] = []  # noqa: RUF012

    monkeypatch.setattr(training, "TrainingRun", Fresh)
    monkeypatch.setattr(training, "ray_session", lambda config: nullcontext())
    return Fresh


@pytest.mark.parametrize(
    ("number", "failed", "code"),
    [
        (signal.SIGTERM, [], 0),
        (signal.SIGTERM, ["sampler-0"], 0),  # its groups are in the buffer
        (signal.SIGTERM, ["learner"], 1),  # it has left no checkpoint of its last steps
        (signal.SIGINT, [], 130),
        (signal.SIGHUP, [], 130),
    ],
)
def test_a_signal_stops_everything_in_order_and_has_its_exit_code(
    tmp_path: Path, fake_run: type[FakeRun], number: signal.Signals, failed: list[str], code: int
) -> None:
    fake_run.number, fake_run.failed = number, failed
    config = parse({"model": {"path": "m"}, "run": {"root": str(tmp_path)}}, "test")
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        training._run(config, 0.0, False, Console())
    assert int(ended.value.code or 0) == code
    assert fake_run.stopped == ["all"]
    assert signal.getsignal(number) == before


def test_report_c28_a_run_that_cannot_go_on_stops_its_learner_which_leaves_a_checkpoint(
    tmp_path: Path, fake_run: type[FakeRun]
) -> None:
    fake_run.number = None
    config = parse({"model": {"path": "m"}, "run": {"root": str(tmp_path)}}, "test")
    with pytest.raises(StallError, match="no batch for step 8"):
        training._run(config, 0.0, False, Console())
    assert fake_run.stopped == ["all"]


class Told:
    """In a launcher's place: the statuses that a test gives."""

    def __init__(self, statuses: dict[str, dict[str, Any]]) -> None:
        self._statuses = statuses

    def has(self, name: str) -> bool:
        return name in self._statuses

    def status(self, name: str) -> dict[str, Any]:
        return self._statuses[name]

    def silent(self) -> list[str]:
        return []


class Sink:
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, line: Any) -> None:
        self.lines.append(line)

    def finish(self, summary: Any) -> None: ...


def unplaced(root: Path, **sections: dict[str, Any]) -> Config:
    """A run whose folder is there, and nothing else."""
    (root / "r").mkdir()
    quiet = {"run": {"root": str(root), "name": "r"}, "tracking": {"wandb": "disabled"}}
    return parse({"model": {"path": "m"}, **quiet, **sections}, "test")


def test_a_part_that_is_being_built_has_no_status_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = unplaced(tmp_path)
    run = TrainingRun(config, Console(), resume=False)
    ledger = {"tokens": {"generated": 7}}
    statuses: dict[str, dict[str, Any]] = {
        "sampler-0": {}, "buffer": {"ledger": ledger}, "curator": {"picks": 3}, "learner": {"ledger": ledger},
    }  # fmt: skip
    monkeypatch.setattr(run, "_launcher", Told(statuses))
    run._each_turn()
    # Nor has a learner of which nothing but the buffer's account is known.
    assert [line["part"] for line in MetricsReader(config.run_dir).new_lines()] == ["buffer", "curator"]


def test_a_resumed_run_whose_lines_an_alarm_cannot_read_goes_on_without_alarms(tmp_path: Path) -> None:
    config = unplaced(tmp_path)
    log = MetricsLog(config.run_dir, "launcher")
    for _ in range(2):
        log.write("status", {"part": "buffer", "groups_without_signal": "many"})
    run = TrainingRun(config, Console(), resume=True)
    sink = Sink()
    run._sinks.open("kept", lambda: sink)
    run._pass_on()
    warnings = [line["message"] for line in MetricsReader(config.run_dir).new_lines() if line["event"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("alarms are off, the run goes on: TypeError")


def scores(start: str, num_passed: int) -> list[ProblemScore]:
    """Of 40 problems with 5 tokens each, 200 in all."""
    return [
        ProblemScore(problem_id=f"{start}{i}", domain="math", num_scored=8, num_passed=num_passed, num_tokens=5)
        for i in range(40)
    ]


def test_a_guard_that_dropped_reaches_every_sink_and_its_tokens_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = unplaced(tmp_path, evaluation={"guards": [{"name": "prose", "files": ["g.jsonl"]}]})
    run, sink = TrainingRun(config, Console(), resume=False), Sink()
    run._sinks.open("kept", lambda: sink)
    guard = guarded_id("prose", "")
    found = {"before": [*scores("p", 4), *scores(guard, 8)], "after": [*scores("p", 6), *scores(guard, 2)]}
    for name in ("_place", "_train"):
        monkeypatch.setattr(run, name, lambda: None)
    monkeypatch.setattr(run, "_end", lambda: {"steps": 9})
    monkeypatch.setattr(run, "_evaluate", lambda when, model_dir: found[when])
    summary = run.go(0.0)
    assert [(line["name"], line["step"]) for line in sink.lines] == [("guard:prose", 9)]
    # Before and after, 200 tokens of what is held out and 200 of the guard.
    assert summary["evaluation_tokens"] == 800
    assert summary["heldout_before"]["headline"]["num_problems"] == 40


def test_scores_before_training_alone_say_nothing_of_a_rise(tmp_path: Path) -> None:
    # As where a resumed run is told `evaluation.num_problems = 0`.
    run = TrainingRun(unplaced(tmp_path), Console(), resume=False)
    before = [ProblemScore(problem_id="a", domain="math", num_scored=8, num_passed=4, num_tokens=5)]
    assert set(run._heldout(before, []).values()) == {None}
    assert run._heldout(before, before)["heldout_rise"]["mean"] == 0.0
