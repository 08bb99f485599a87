"""A sweep whose cells are already there: the table, the picture, the figures."""

import json
from pathlib import Path

import pytest

from stream_grpo.console import Console
from stream_grpo.errors import ConfigError
from stream_grpo.experiments import sweep as sweeps
from stream_grpo.experiments.cells import Cell, Series
from stream_grpo.planner.calibration import Calibration
from tests.planner.test_measured import make_run
from tests.planner.worlds import constant_world


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sweeps.Sweep:
    """Two cells that have ended, one with weights that the model leaves out."""
    file = tmp_path / "c.toml"
    file.write_text('[model]\npath = "m"\n')
    grid = sweeps.parse_grid(["weights.on_update=keep,finish"])
    runs = {
        cell.name: make_run(tmp_path / cell.name, 9, weights=cell.settings["weights.on_update"])
        for cell in sweeps.cells_of(grid)
    }
    for run in runs.values():
        (run / "summary.json").write_text(json.dumps({"heldout_rise": {"mean": 0.125}}))

    def made(self: Series, cell: Cell, say: object) -> Path:
        return runs[cell.name]

    monkeypatch.setattr(Series, "made", made)
    monkeypatch.setattr(sweeps, "calibrate", lambda run: Calibration(constant_world(), ("x: 0 is taken",)))
    return sweeps.sweep(Series(file=file, overrides=(), root=tmp_path / "out"), grid, None, lambda text: None)


def test_every_cell_has_its_figures_and_where_nothing_is_predicted_the_reason(swept: sweeps.Sweep) -> None:
    found = swept.as_fields()
    keep, finish = found["cells"]
    assert (keep["settings"], keep["throughput"], keep["rise"]) == ({"weights.on_update": "keep"}, 4.0, {"mean": 0.125})
    assert found["worst_throughput_error"] == abs(keep["throughput_error"])
    assert "the model leaves this out" in finish["refusal"]
    assert "predicted_throughput" not in finish
    assert found["calibrated_by"].endswith("on_update-keep")


def test_it_is_a_table_and_a_picture(swept: sweeps.Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.show(swept, Console())
    output = capsys.readouterr().out
    assert "on_update\ttrained/s\tpredicted\terror" in output
    assert "on_update-finish: nothing predicted: weights.on_update = finish" in output
    assert "not measured: x: 0 is taken" in output
    sweeps.draw(swept, tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_what_calibrates_is_looked_at_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\npath = "m"\n')
    monkeypatch.setattr(Series, "made", lambda *arguments: pytest.fail("a cell was trained"))
    series, grid = Series(file=file, overrides=(), root=tmp_path / "out"), {"stream.max_policy_age": ["4"]}
    with pytest.raises(ConfigError, match="nowhere"):
        sweeps.sweep(series, grid, tmp_path / "nowhere", lambda text: None)
