"""What the benchmarks make of what they measure: the page, the first crossing of a target, ratios, shares of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benchmarks.page import QUICK, table, write_section
from stages.flops import flops, matmul_rate
from stages.whole_run import figures
from staleness import runs
from time_to_score.contestants import OURS, Point
from time_to_score.outcome import Reached, ratios, reached, typical
from time_to_score.training import SNAPSHOTS, kept

from stream_grpo.config_file import load

ROOT = Path(__file__).parents[2]


def test_each_script_writes_its_own_section_alone(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    assert write_section(page, "bench_a", "A", "first", is_quick=False)
    assert write_section(page, "bench_b", "B", "other", is_quick=False)
    assert write_section(page, "bench_a", "A", "second", is_quick=False)
    text = page.read_text()
    assert "first" not in text
    assert text.index("second") < text.index("other")
    assert text.count("`scripts/bench_a`, 20") == 1
    assert "cores, " in text


def test_a_quick_look_is_marked_and_never_replaces_a_measurement(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    assert write_section(page, "bench_a", "A", "look", is_quick=True)
    assert QUICK in page.read_text()
    assert write_section(page, "bench_a", "A", "second look", is_quick=True)
    assert write_section(page, "bench_a", "A", "measured", is_quick=False)
    assert QUICK not in page.read_text()
    assert not write_section(page, "bench_a", "A", "third look", is_quick=True)
    assert "measured" in page.read_text()


def test_a_table_is_markdown() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


CURVE = [Point(0, 0.0, 0, 0.6), Point(5, 10.0, 1000, 0.8), Point(10, 20.0, 3000, 1.0), Point(15, 30.0, 4000, 0.7)]


def test_a_target_is_reached_on_the_line_between_two_scores() -> None:
    # 0.85 is a quarter of the way from 0.8 at step 5 to 1.0 at step 10.
    assert reached(CURVE, 0.85) == pytest.approx((6.25, 12.5, 1500.0, False))
    assert reached(CURVE, 0.5) == (0, 0.0, 0, False)
    assert reached(CURVE[:2], 0.9) == (5, 10.0, 1000, True)
    with pytest.raises(ValueError, match="without a point"):
        reached([], 0.5)


def test_the_median_of_seeds_is_a_bound_where_it_has_not_reached_the_target() -> None:
    fast, slow, never = Reached(1, 10.0, 100), Reached(3, 30.0, 300), Reached(9, 90.0, 900, is_bound=True)
    assert typical([never, fast, slow]) == (3, 30.0, 300, False)
    assert typical([never, never, slow]) == (9, 90.0, 900, True)


def test_ratios_say_how_many_times_as_much_the_others_take() -> None:
    found = {
        "default": Reached(10, 50.0, 1000),
        "trl": Reached(20, 125.0, 4000),
        "sync_uniform": Reached(20, 100.0, 1500),
        "uniform": Reached(20, 80.0, 1600),
    }
    assert ratios(found) == {"vs_trl": 2.5, "vs_sync_uniform": 2.0, "tokens_vs_uniform": 1.6}
    del found["trl"]
    assert ratios(found)["vs_trl"] is None
    assert set(ratios({**found, "default": Reached(10, 50.0, 1000, is_bound=True)}).values()) == {None}


@pytest.mark.parametrize("name", OURS)
def test_every_contestant_can_be_configured(name: str) -> None:
    settings = [f"{key}={value}" for key, value in OURS[name].settings.items()]
    config = load(ROOT / "configs" / "arithmetic-cpu.toml", settings)
    # All are trained on where the choice is uniform and nothing is left out.
    assert config.algo.needs_spread == ("uniform" not in name)


def test_a_training_that_was_cut_off_is_removed_and_one_of_other_settings_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "trl-0"
    folder.mkdir()
    (folder / "000000.safetensors").write_bytes(b"")
    assert not kept(folder, {"seed": 0})
    assert not folder.exists()
    folder.mkdir()
    (folder / SNAPSHOTS).write_text(json.dumps({"settings": {"seed": 0}}))
    assert kept(folder, {"seed": 0})
    with pytest.raises(SystemExit, match=r"other settings \(seed\)"):
        kept(folder, {"seed": 1})


def test_shares_of_a_step_come_from_the_lines_of_a_run() -> None:
    sampler = {"event": "status", "part": "sampler-0", "num_updates": 2, "apply_s": 0.04, "prove_s": 0.1}
    lines = [
        {"event": "step", "publish_s": 0.01, "time_s": 112.0},
        {**sampler, "num_updates": 1, "apply_s": 9.0},
        {"event": "step", "publish_s": 0.03, "time_s": 113.0},
        sampler,
        {"event": "status", "part": "learner", "busy_s": 3.0},
    ]
    found = figures(lines, {"loop_wall_s": 3.0, "steps": 2}, begun_s=100.0)
    # The newest status of a sampler holds its sums: 0.04 s of loading and 0.1 s of proofs over 2 updates.
    assert found == pytest.approx({"step_s": 1.5, "publish_s": 0.02, "apply_s": 0.02, "prove_s": 0.05, "start_s": 12.0})


def test_flops_of_a_step_by_hand() -> None:
    # One layer: a token takes 2 x 2 x 3 + 2 x 3 x 2 = 24 in two matrices and 4 x 5 x 2 = 40 in attention over 5 tokens;
    # 4 logits take 2 x 4 x 2 x 7 = 112. Forward and backward of 2 sequences: 3 x 2 x (5 x 64 + 112) = 2592.
    found = flops(
        {(2, 3): 1, (3, 2): 1},
        hidden_size=2, num_layers=1, vocab_size=7, num_sequences=2, num_tokens=5, num_logits=4,
    )  # fmt: skip
    assert found == 2592
    assert matmul_rate({(2, 3): 2}, 8, num_tries=1) > 0


def test_runs_of_one_age_are_a_row_with_the_means_over_their_seeds(tmp_path: Path) -> None:
    cells = runs.cells([0, 4], [1, 2])
    assert [cell.name for cell in cells] == ["age-0_seed-1", "age-4_seed-1", "age-0_seed-2", "age-4_seed-2"]
    made = {}
    # The last of the four is not there yet.
    for cell, rise, seconds in zip(cells[:3], (0.1, 0.2, 0.3), (60.0, 40.0, 80.0), strict=True):
        made[cell.name] = tmp_path / cell.name
        made[cell.name].mkdir()
        summary = {
            "heldout_rise": {"mean": rise, "low": rise - 0.05, "high": rise + 0.05},
            "heldout_after": {"headline": {"pass_at_1": 0.6 + rise}},
            "loop_wall_s": seconds,
            "age": {"mean": 1.5},
        }
        (made[cell.name] / "summary.json").write_text(json.dumps(summary))
    first, second = runs.rows(made, [0, 4], [1, 2])
    # Age 0 has rises of 0.1 and 0.3 in 60 and 80 s.
    assert first == pytest.approx((0, 2, 1.5, 70.0, 0.2, 0.15, 0.25, 0.8))
    assert second == pytest.approx((4, 1, 1.5, 40.0, 0.2, 0.15, 0.25, 0.8))


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["bench_stages", "bench_time_to_score", "bench_staleness"])
def test_the_quick_form_of_each_runs(script: str, tmp_path: Path) -> None:
    command = [
        ROOT / "scripts" / script,
        "--quick",
        "--json",
        "--root",
        tmp_path / "root",
        "--page",
        tmp_path / "page.md",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True, timeout=1800)
    assert isinstance(json.loads(ended.stdout.splitlines()[-1]), dict)
    assert QUICK in (tmp_path / "page.md").read_text()
