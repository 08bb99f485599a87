"""W&B's rows, with a library that only remembers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stream_grpo.registry.names import find
from stream_grpo.sinks.wandb_sink import OVERVIEW, WandbSink
from tests.sinks.test_sinks import ALARM, EVALUATION, SAMPLER, STEP


class FakeRun:
    """What `wandb.init` gives."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.defined: dict[str, dict[str, str]] = {}
        self.summary: dict[str, Any] = {}
        self.is_finished = False

    def define_metric(self, name: str, **how: str) -> None:
        self.defined[name] = how

    def log(self, row: Mapping[str, float], step: int) -> None:
        assert not self.rows or step >= self.rows[-1][0], "W&B drops a row of an earlier step"
        self.rows.append((step, dict(row)))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    library = SimpleNamespace(init=lambda **_: fake, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", library)
    return fake


def test_a_row_a_step_the_overview_a_second_time_and_evaluations_at_the_newest_step(
    run: FakeRun, tmp_path: Path
) -> None:
    sink = WandbSink(tmp_path, "r", "p", "offline", {})
    for line in (SAMPLER, {**STEP, "reward_mean": 0.5, "came_in": {"mixed": 0.75}}, EVALUATION, ALARM):
        sink.write(line)
    (first, row), (second, heldout), (third, alarm) = run.rows
    assert (first, second, third) == (3, 3, 3)  # the evaluation was of step 2
    assert (row["reward_mean"], row["overview/reward_mean"], row["overview/came_in_mixed"]) == (0.5, 0.5, 0.75)
    assert row["sampler-0/num_running"] == 12
    assert heldout["heldout/step"] == 2
    assert alarm == {"alarm/entropy": 1.0}
    sink.finish({"steps": 3, "tokens": {"trained": 7}})
    assert (run.summary, run.is_finished) == ({"steps": 3, "tokens/trained": 7}, True)


def test_held_out_scores_have_an_axis_of_their_own_and_the_overview_its_summaries(run: FakeRun, tmp_path: Path) -> None:
    WandbSink(tmp_path, "r", "p", "offline", {})
    assert run.defined["heldout/*"] == {"step_metric": "heldout/step"}
    assert run.defined["overview/came_in_mixed"] == {"summary": "last,mean"}


def test_what_the_overview_shows_is_in_the_registry() -> None:
    assert len(OVERVIEW) == 12
    assert [name for name in OVERVIEW if find("step", tuple(name.split("/"))) is None] == []
