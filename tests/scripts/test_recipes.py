"""The parts of scripts/bench_recipes that need no engine, and a short form of the whole with real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench_recipes import ROOT, cells_of, configuration, until
from recipes import plan, verdict
from recipes.plan import BenchError, Cell, Delay, check_age
from recipes.results import Results, settings_hash
from recipes.workers import run_cells

from stream_grpo.algo.presets import PRESETS
from stream_grpo.config import Config


@pytest.mark.parametrize("lag", [0, 1, 2, 16])
def test_the_sampler_of_step_n_has_version_n_minus_lag(lag: int) -> None:
    delay: Delay[int] = Delay(lag)
    for step in range(40):
        delay.put(step)
        assert delay.value == max(0, step - lag)


def test_an_age_that_is_off_by_more_than_a_fifth_is_refused() -> None:
    for mean_age, lag in ((0.0, 0), (16.0, 16), (12.8, 16), (19.2, 16)):
        check_age(Cell("grpo", lag, 0, 40), mean_age)
    for mean_age, lag in ((0.001, 0), (12.7, 16), (19.3, 16), (0.0, 4)):
        with pytest.raises(BenchError, match=f"grpo, seed 0: .* lag = {lag}"):
            check_age(Cell("grpo", lag, 0, 40), mean_age)


def test_the_plan_has_the_cells_that_were_asked_for() -> None:
    assert len(plan.screen(PRESETS)) == len(PRESETS)
    best = ["rloo", "grpo", "tis", "mis", "topr", "sapo", "cispo"]
    cells = plan.seeds(best)
    # The six best, of which grpo is one, and decoupled: 7 presets x 3 lags x 3 seeds.
    assert len(set(cells)) == len(cells) == 63
    assert {cell.preset for cell in cells} == {*best[:6], "decoupled"}
    # What chose them does not judge them.
    assert not set(cells) & set(plan.screen(PRESETS))
    assert plan.long(best) == [Cell(preset, 64, 0, 200) for preset in best[:3]]


def result_of(cell: Cell, rise: float, **others: Any) -> dict[str, Any]:
    """A result of 10 problems x 10 samples, 2 passed before and `rise` more of 10 after."""
    result = {
        "passed_before": [2] * 10,
        "passed_after": [2 + round(10 * rise)] * 10,
        "num_samples": 10,
        "rewards": [0.5] * 20,
        "age": float(cell.lag),
        "ended_early": None,
    }
    return {**cell._asdict(), **result, **others}


def table_of(rises: dict[tuple[str, int, int], float]) -> list[verdict.Row]:
    cells = {Cell(*key, 40): rise for key, rise in rises.items()}
    return verdict.rows([result_of(cell, rise) for cell, rise in cells.items()])


def test_the_default_is_what_bears_its_worse_lag_best() -> None:
    table = table_of(
        {
            ("brilliant", 4, 0): 0.8,
            ("brilliant", 16, 0): 0.1,
            ("steady", 4, 0): 0.4,
            ("steady", 16, 0): 0.3,
            ("half", 4, 0): 0.8,  # never measured at lag 16
        }
    )
    assert verdict.best(table, verdict.DECIDING_LAGS) == ["steady", "brilliant"]


def test_seeds_that_differ_lower_the_bound() -> None:
    # Means 0.3 and 0.25; the first has 0.0 among its seeds, and a draw of that seed alone has probability 1/27.
    table = table_of(
        {("wild", 4, seed): rise for seed, rise in enumerate((0.0, 0.4, 0.5))}
        | {("calm", 4, seed): rise for seed, rise in enumerate((0.2, 0.3, 0.3))}
    )
    wild, calm = (next(row for row in table if row.preset == preset) for preset in ("wild", "calm"))
    assert (wild.num_seeds, wild.rise) == (3, pytest.approx(0.3))
    assert wild.low == pytest.approx(0.0)
    assert verdict.best(table, [4]) == ["calm", "wild"]
    assert calm.low <= calm.rise <= calm.high


def test_the_interval_is_that_of_a_slow_loop() -> None:
    differences_SP = np.random.default_rng(1).normal(0.1, 0.3, (3, 30))
    rng, means = np.random.default_rng(2), []
    for _ in range(4000):
        seeds, problems = rng.integers(0, 3, 3), rng.integers(0, 30, 30)
        means.append(np.mean([[differences_SP[s, p] for p in problems] for s in seeds]))
    # Percentiles of 2,000 and 4,000 draws: their standard error is below 0.005 each.
    assert verdict.interval(differences_SP) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.02)


def test_a_preset_that_came_to_a_stop_is_no_default() -> None:
    cells = [Cell(preset, lag, 0, 40) for preset in ("stops", "goes") for lag in verdict.DECIDING_LAGS]
    results = [result_of(cell, 0.5 if cell.preset == "stops" else 0.1) for cell in cells]
    results[1]["ended_early"] = "loss nan"
    assert verdict.best(verdict.rows(results), verdict.DECIDING_LAGS) == ["goes"]


def test_the_table_shows_what_there_is() -> None:
    cell = Cell("grpo", 16, 0, 40)
    row = result_of(cell, 0.1, ess=0.9, clip_share_low=0.01, clip_share_high=0.002)
    last = verdict.markdown(verdict.rows([row])).splitlines()[-1]
    assert last == "| 16 | grpo | 1 | +0.100 | +0.100 to +0.100 | 0.500 | 0.900 | 0.012 | - | 16 | 0 |"


def test_results_are_kept_and_only_those_of_the_same_settings_count(tmp_path: Path) -> None:
    path, cells = tmp_path / "sub" / "r.jsonl", [Cell("grpo", 0, seed, 40) for seed in range(3)]
    results = Results(path, lambda cell: "now")
    assert results.missing(cells) == cells
    for cell in cells[:2]:
        results.add(cell, {"rise": cell.seed})
    assert results.missing(cells) == cells[2:]
    again = Results(path, lambda cell: "now" if cell.seed else "changed")
    assert again.missing(cells) == [cells[0], cells[2]]
    assert again.num_outdated(cells) == 1
    assert [result["rise"] for result in again.of(cells)] == [1]
    again.add(cells[0], {"rise": 7})
    assert [result["rise"] for result in Results(path, again._hash_of).of(cells)] == [7, 1]


def test_a_line_that_a_killed_run_left_half_written_is_run_again(tmp_path: Path) -> None:
    path, cells = tmp_path / "r.jsonl", [Cell("grpo", 0, seed, 40) for seed in range(2)]
    results = Results(path, lambda cell: "now")
    for cell in cells:
        results.add(cell, {"rise": 1})
    path.write_text(path.read_text()[:-9])
    results = Results(path, lambda cell: "now")
    assert results.missing(cells) == cells[1:]
    results.add(cells[1], {"rise": 2})
    assert [json.loads(line)["rise"] for line in path.read_text().splitlines()] == [1, 2]
    path.write_text("{}\n")
    with pytest.raises(BenchError, match=r"r.jsonl, line 1: not a result"):
        Results(path, lambda cell: "now")


def test_a_stage_needs_the_one_before(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.jsonl", lambda cell: "now")
    # All presets but the one with a critic.
    assert len(PRESETS) == 27
    with pytest.raises(BenchError, match="--stage seeds: 26 of 26 cells of screen are missing"):
        cells_of("seeds", results)
    for cell in plan.screen(PRESETS):
        results.add(cell, result_of(cell, 0.3 if cell.preset in ("topr", "mis") else 0.1))
    seeds = cells_of("seeds", results)
    assert list(dict.fromkeys(cell.preset for cell in seeds))[:2] == ["mis", "topr"]
    for cell in results.missing(seeds):
        results.add(cell, result_of(cell, 0.4 if cell.preset == "topr" else 0.1))
    assert cells_of("long", results)[0] == Cell("topr", 64, 0, 200)


def test_no_cell_is_begun_after_the_deadline() -> None:
    cells = [Cell("grpo", 0, seed, 40) for seed in range(2)]
    assert list(until(float("inf"), cells)) == cells
    assert list(until(0.0, cells)) == []


def make_files(folder: Path) -> Path:
    (folder / "model").mkdir(parents=True)
    for name in ("model/config.json", "pool.jsonl", "heldout.jsonl"):
        (folder / name).write_text("{}")
    return folder


def test_the_hash_is_of_what_a_result_depends_on(tmp_path: Path) -> None:
    cell = Cell("grpo", 4, 0, 40)

    def found(folder: str, cell: Cell = cell, *overrides: str) -> str:
        path = tmp_path / folder
        return settings_hash(cell, configuration(path if path.exists() else make_files(path), cell, overrides))

    same = found("a")
    assert found("b") == same
    assert found("a", cell, "tracking.wandb=disabled") == same
    others = [
        found("a", cell._replace(lag=5)),
        found("a", cell._replace(preset="dapo")),
        found("a", cell, "learner.learning_rate=1e-5"),
        found("a", cell, "algo.clip_high=0.3"),
    ]
    (make_files(tmp_path / "c") / "pool.jsonl").write_text("{ }")
    others.append(found("c"))
    assert len({same, *others}) == 6


@pytest.mark.nightly
@pytest.mark.engine
def test_two_cells_with_real_engines_have_exactly_the_age_imposed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    subprocess.run(["stream-grpo", "make-model", str(model)], check=True, cwd=ROOT)
    cells = [Cell("rloo", 2, 0, 2), Cell("decoupled", 0, 0, 2)]

    def config_of(cell: Cell) -> Config:
        settings = ["evaluation.interval_problems=8", "evaluation.interval_samples=2", "stream.groups_per_step=2"]
        return configuration(model, cell, settings)

    waiting = ((cell, config_of(cell)) for cell in cells)
    results = dict(run_cells(waiting, num_jobs=1, start_with=config_of(cells[0])))
    lagged, synchronous = (results[cell] for cell in cells)
    # Step n is sampled by version max(0, n - 2): its tokens are min(n, 2) steps old.
    assert lagged["ages"] == [0.0, 1.0, 2.0, 2.0]
    assert lagged["age"] == 2.0
    assert synchronous["ages"] == [0.0, 0.0]
    for result in results.values():
        assert result["ended_early"] is None
        assert len(result["passed_after"]) == len(result["passed_before"]) == 8
        assert result["passed_after"] != [0] * 8
        assert len(result["rewards"]) == result["steps"]
        assert 0 < result["ess"] <= 1
    # The weights that sampled were others than those trained, and by lag 0 they were the same.
    assert lagged["abs_log_ratio"] > 10 * synchronous["abs_log_ratio"]
