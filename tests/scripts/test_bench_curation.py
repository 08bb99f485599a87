"""The simulated learner and its comparison: pairs, resumption, intervals."""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from curation.cells import Cell, Results, make_cell, run_cells, tuning_cells
from curation.methods import METHODS
from curation.page import described, page
from curation.run import run
from curation.show import Rows, paired, table
from curation.world import WORLDS, Learner, World, smaller

SMALL = smaller(WORLDS["2k_lag4"], 300)


def test_a_seed_makes_the_same_problems_for_every_method() -> None:
    first, second = Learner(SMALL, 3), Learner(SMALL, 3)
    np.testing.assert_array_equal(first.pass_rate(), second.pass_rate())
    assert not np.array_equal(first.pass_rate(), Learner(SMALL, 4).pass_rate())


def test_groups_without_signal_teach_nothing_and_mixed_ones_do() -> None:
    learner = Learner(World(num_problems=300), 0)
    index = np.arange(64)
    learner.train(index, np.zeros(64, np.int64), 8)
    assert np.all(learner.theta_K == 0)
    learner.train(index, np.full(64, 4), 8)
    assert np.all(learner.theta_K >= 0)
    assert learner.theta_K.sum() > 0


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_repeats(name: str) -> None:
    figures = run(SMALL, name, 0, METHODS[name][0].trials[0], num_rollouts=12_000)
    assert 0 < figures["auc"] < 1
    assert 0 <= figures["effective_ratio"] <= 1
    assert figures == run(SMALL, name, 0, METHODS[name][0].trials[0], num_rollouts=12_000)


def test_offline_rollouts_are_paid_for_where_they_are_charged() -> None:
    # 2 x 16 x 300 = 9,600 of 12,000 are gone before the first step.
    free = run(SMALL, "bots_free", 0, {}, num_rollouts=12_000)
    charged = run(SMALL, "bots_charged", 0, {}, num_rollouts=12_000)
    assert charged["accuracy"] < free["accuracy"]


def test_every_method_with_settings_has_the_same_number_of_trials() -> None:
    assert {len(made.trials) for made, _ in METHODS.values()} == {1, 6}


def test_what_has_run_is_kept_and_a_torn_line_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fake(cell: Cell) -> dict[str, float]:
        ran.append(cell.seed)
        return {"auc": cell.seed / 10}

    monkeypatch.setattr("curation.cells.run_cell", fake)
    path = tmp_path / "cells.jsonl"
    cells = [make_cell("2k_lag4", "uniform", seed, {}) for seed in range(3)]
    assert run_cells(cells[:2], Results(path), num_jobs=1, until=math.inf)
    path.write_text(path.read_text()[:-9])
    assert run_cells(cells, Results(path), num_jobs=1, until=math.inf)
    assert ran == [0, 1, 1, 2]
    assert [json.loads(line)["figures"]["auc"] for line in path.read_text().splitlines()] == [0.0, 0.1, 0.2]
    more = make_cell("2k_lag4", "dapo", 0, {})
    assert not run_cells([more], Results(path), num_jobs=1, until=time.monotonic() - 1)


def test_tuning_seeds_are_never_reported() -> None:
    assert {cell.seed for cell in tuning_cells(["2k_lag16"], METHODS)} == {1000, 1001}
    assert {cell.world for cell in tuning_cells(["2k_lag16", "12k_lag16"], ["mopps"])} == {"2k_lag4", "12k_lag4"}


def test_a_paired_interval_by_hand() -> None:
    ours = {0: {"auc": 0.5}, 1: {"auc": 0.7}, 2: {"auc": 0.9}}
    other = {0: {"auc": 0.4}, 1: {"auc": 0.4}, 3: {"auc": 0.0}}
    # Differences 0.1 and 0.3: mean 0.2, deviation 0.1414, t of one degree 12.706: 12.706 x 0.1414 / sqrt(2) = 1.2706.
    gap, half = paired(ours, other)
    assert gap == pytest.approx(0.2)
    assert half == pytest.approx(1.2706, abs=1e-4)
    assert paired(ours, {0: {"auc": 0.1}}) == (pytest.approx(0.4), math.inf)


def test_the_table_leaves_out_what_a_method_does_not_predict() -> None:
    figures = run(SMALL, "uniform", 0, {}, num_rollouts=12_000)
    text = table({"uniform": {0: figures}, "mopps": {0: figures}})
    assert "+0.000" in text
    assert text.count("\n") == 3


def test_the_page_has_a_line_and_a_table_for_each_world_that_has_run() -> None:
    figures = run(SMALL, "ours", 0, {}, num_rollouts=12_000)
    rows = {name: dict.fromkeys((0, 1), figures) for name in ("mopps", "ours")}
    shown: dict[str, Rows] = {"lag64": rows, "link": {name: {} for name in rows}}
    text = page(
        shown,
        {"2k_lag4": {"mopps": {"keep": 0.5}}},
        cpu_s=120.0,
        picture=Path("docs/images/c.png"),
        at=Path("docs/f.md"),
    )
    assert "(images/c.png)" in text
    assert "| lag64 | 2 | +0.000 ± 0.000 |  |" in text
    assert "## `lag64`: lag = 64" in text
    assert "## `link`" not in text
    assert "4 runs reported; with those of the tuning, 2 minutes of one processor." in text
    assert "| mopps | keep = 0.5 |" in text
    assert described("2k_lag4") == "`2k_lag4`"


def test_progress_is_told_and_every_cell_is_run_by_two_processes(tmp_path: Path) -> None:
    cells = [make_cell("2k_lag4", "uniform", seed, {})._replace(num_rollouts=600) for seed in range(4)]
    told: list[str] = []
    assert run_cells(cells, Results(tmp_path / "cells.jsonl"), num_jobs=2, until=math.inf, say=told.append)
    assert [text.split(" cells")[0] for text in told] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert set(Results(tmp_path / "cells.jsonl").cells) == set(cells)
