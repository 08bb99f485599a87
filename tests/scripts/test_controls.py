"""What scripts/controls and scripts/controls_environments take for a rise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import controls_environments
from controls import Threshold, is_right, line
from controls_environments import judge, main

from stream_grpo.experiments.cells import Cell, Series

TENTH = Threshold(least_rise=0.10, least_low=0.05)


def summary(before: float, after: float, half: float = 0.02) -> dict[str, Any]:
    rise = after - before
    return {
        "heldout_before": {"headline": {"pass_at_1": before}},
        "heldout_after": {"headline": {"pass_at_1": after}},
        "heldout_rise": {"mean": rise, "low": rise - half, "high": rise + half, "num_problems": 360},
    }


@pytest.mark.parametrize(
    ("mean", "low", "is_control", "expected"),
    [
        (0.10, 0.051, False, True),
        (0.099, 0.09, False, False),  # too little
        (0.30, 0.05, False, False),  # too uncertain: the low end is not above
        (-0.2, -0.3, False, False),
        (0.02, 0.01, True, True),
        (0.021, -0.1, True, False),  # a control that rises
        (-0.2, -0.3, True, True),
    ],
)
def test_a_run_rises_by_mean_and_interval_and_a_control_does_not(
    mean: float, low: float, is_control: bool, expected: bool
) -> None:
    rise = {"mean": mean, "low": low, "high": mean + 0.1}
    assert is_right(rise, TENTH, is_control=is_control) is expected


def test_a_line_has_both_scores_and_the_interval() -> None:
    assert line("as-it-is", summary(0.5, 0.75), right=True) == (
        "as-it-is         before 0.500  after 0.750  rise +0.250 [+0.230, +0.270]  360 problems  ok"
    )


def test_judged_are_the_run_as_it_is_and_its_control() -> None:
    judged = judge("records", {"as-it-is": summary(0.5, 0.8), "learning-rate-0": summary(0.5, 0.8)})
    assert {name: cell["is_right"] for name, cell in judged.items()} == {"as-it-is": True, "learning-rate-0": False}
    assert judged["as-it-is"]["after"] == 0.8


@pytest.mark.parametrize(("risen", "expected"), [("as-it-is", 0), ("learning-rate-0", 1)])
def test_the_exit_code_says_whether_all_is_as_it_must_be(
    risen: str, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def let_run(environment: str, options: object) -> dict[str, dict[str, Any]]:
        return {name: summary(0.5, 0.8 if name == risen else 0.5) for name in ("as-it-is", "learning-rate-0")}

    monkeypatch.setattr(controls_environments, "let_run", let_run)
    monkeypatch.setattr(sys, "argv", ["controls_environments", "--json", "--only", "records"])
    assert main() == expected
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: cell["before"] for name, cell in last["records"].items()} == {"as-it-is": 0.5, "learning-rate-0": 0.5}


def test_both_runs_of_an_environment_are_of_its_configuration_and_differ_in_the_learning_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}

    def made_here(series: Series, cell: Cell, say: object) -> Path:
        made[cell.name] = series.config(cell)
        run = made[cell.name].run_dir
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps(summary(0.5, 0.5)))
        return Path(run)

    monkeypatch.setattr(controls_environments, "made_model", lambda root, task: root / task)
    monkeypatch.setattr(Series, "made", made_here)
    monkeypatch.setattr(sys, "argv", ["controls_environments", "--root", str(tmp_path), "--steps", "7"])
    assert main() == 1  # nothing has risen
    assert list(made) == ["as-it-is", "learning-rate-0"]  # of the second environment, in a folder of its own
    as_it_is, control = made.values()
    assert as_it_is.environment.name == control.environment.name == "records"
    assert (as_it_is.run.num_steps, control.run.num_steps) == (7, 7)
    assert as_it_is.learner.learning_rate > control.learner.learning_rate == 0
    assert as_it_is.evaluation.files == control.evaluation.files == (tmp_path / "records" / "heldout.jsonl",)
