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
from staleness import picture as runs_picture
from staleness import runs
from time_to_score.contestants import OURS, Point
from time_to_score.outcome import Reached, ratios, reached, typical
from time_to_score.training import SNAPSHOTS, is_complete

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
    # It had spent less than the median seed took, so that the median of all can be larger.
    assert typical([never._replace(seconds=20.0), fast, slow]) == (3, 20.0, 300, True)


def test_ratios_say_how_many_times_as_much_the_others_take() -> None:
    found = {
        "default": Reached(10, 50.0, 1000),
        "trl": Reached(20, 125.0, 4000),
        "sync_uniform": Reached(20, 100.0, 1500),
        "uniform": Reached(20, 80.0, 1600),
    }
    values = {name: ratio.value for name, ratio in ratios(found).items()}
    assert values == {"vs_trl": 2.5, "vs_sync_uniform": 2.0, "tokens_vs_uniform": 1.6}
    # Of TRL's two ways the faster one counts.
    assert ratios({**found, "trl_vllm": Reached(20, 75.0, 4000)})["vs_trl"] == (1.5, "trl_vllm", "")
    del found["trl"]
    assert ratios(found)["vs_trl"].value is None
    assert ratios({"trl": Reached(20, 125.0, 4000)})["vs_trl"].value is None


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
    assert not is_complete(folder, {"seed": 0})
    assert not folder.exists()
    folder.mkdir()
    (folder / SNAPSHOTS).write_text(json.dumps({"settings": {"seed": 0}}))
    assert is_complete(folder, {"seed": 0})
    with pytest.raises(SystemExit, match=r"other settings \(seed\)"):
        is_complete(folder, {"seed": 1})


def test_shares_of_a_step_come_from_the_lines_of_a_run() -> None:
    sampler = {
        "event": "status", "part": "sampler-0", "num_updates": 2, "apply_s": 0.04, "prove_s": 0.1, "busy_s": 2.1,
        "stall_s": 0.15, "score_s": 0.3, "idle_s": {"policy": 0.1, "buffer": 0.2},
    }  # fmt: skip
    first = {"event": "step", "publish_s": 0.01, "time_s": 112.0, "step_s": 0.8, "seconds": 0.7, "waited_s": 9.0}
    lines = [
        first,
        {**sampler, "num_updates": 1, "apply_s": 9.0},
        {**first, "publish_s": 0.03, "time_s": 113.0, "waited_s": 0.15, "checkpoint_s": 0.02},
        sampler,
        {"event": "status", "part": "learner", "busy_s": 3.0},
    ]
    found = figures(lines, {"loop_wall_s": 3.0, "steps": 2}, begun_s=100.0)
    loop = found.pop("loop")
    # The newest status of a sampler holds its sums: 0.04 s of loading and 0.1 s of proofs over 2 updates.
    assert found == pytest.approx({"step_s": 1.5, "publish_s": 0.02, "apply_s": 0.02, "prove_s": 0.05, "start_s": 12.0})
    # Of 3 s: 2.1 + 0.15 + 0.3 + 0.3 leave 0.15.
    assert loop["sampler"] == pytest.approx(
        {"generation": 0.7, "weights": 0.05, "verification": 0.1, "nothing to sample": 0.1, "the rest": 0.05}
    )
    # The loop ends with the last step, so it begins at 110, and 1.2 s of the first wait lie in it; what was published
    # before it is not of it. 1.4 + 0.2 + 0.03 + 0.02 + 1.35 = 3.
    assert loop["learner"] == pytest.approx(
        {
            "forward, backward, update": 1.4 / 3,
            "making the batch": 0.2 / 3,
            "publishing": 0.01,
            "checkpoints": 0.02 / 3,
            "waiting for groups": 0.45,
            "the rest": 0.0,
        },
        abs=1e-9,
    )


def test_flops_of_a_step_by_hand() -> None:
    # One layer: a token takes 2 x 2 x 3 + 2 x 3 x 2 = 24 in two matrices and 4 x 5 x 2 = 40 in attention over 5 tokens;
    # 4 logits take 2 x 4 x 2 x 7 = 112. Forward and backward of 2 sequences: 3 x 2 x (5 x 64 + 112) = 2592.
    found = flops(
        {(2, 3): 1, (3, 2): 1},
        hidden_size=2, num_layers=1, vocab_size=7, num_sequences=2, num_tokens=5, num_logits=4,
    )  # fmt: skip
    assert found == 2592
    assert matmul_rate({(2, 3): 2}, 8, num_tries=1) > 0


def test_runs_of_one_age_are_a_row_over_their_seeds_and_problems(tmp_path: Path) -> None:
    cells = runs.cells([0, 4], [1, 2])
    assert [cell.name for cell in cells] == ["age-0_seed-1", "age-4_seed-1", "age-0_seed-2", "age-4_seed-2"]
    before = {"a": [1, 4], "b": [2, 4], "never scored": [0, 0]}
    # Seconds, and passes of a and of b; the last of the four is not there yet.
    ended = {"age-0_seed-1": (60.0, 2, 2), "age-4_seed-1": (40.0, 4, 4), "age-0_seed-2": (80.0, 3, 4)}
    made = {
        name: {"age": 1.5, "seconds": seconds, "counts": {"a": [a, 4], "b": [b, 4], "never scored": [4, 4]}}
        for name, (seconds, a, b) in ended.items()
    }
    first, second = runs.rows(made, before, [0, 4], [1, 2])
    # Age 0: rises of 1/4 and 0 with seed 1, 1/2 and 1/2 with seed 2, 5/16 in the mean; scores 1/2, 1/2, 3/4, 1.
    assert first[:6] == (0, 2, 1.5, 70.0, 60.0, 80.0)
    assert (first.rise, first.score) == pytest.approx((5 / 16, 11 / 16))
    assert 0.0 <= first.low < first.rise < first.high <= 0.5
    # With one seed the interval is over its two problems, which rise by 3/4 and 1/2.
    assert second == pytest.approx((4, 1, 1.5, 40.0, 40.0, 40.0, 0.625, 0.5, 0.75, 1.0))
    runs_picture.draw([], [first, second], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script", ["bench_stages", "bench_time_to_score", "bench_staleness", "bench_overlap", "train_smollm2"]
)
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
