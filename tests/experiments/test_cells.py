"""Cells, grids and variants: what is run, what is kept, what is refused before anything starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stream_grpo.cli import app
from stream_grpo.config import Config
from stream_grpo.config_file import load, parse, to_toml
from stream_grpo.errors import ConfigError
from stream_grpo.experiments import cells as celling
from stream_grpo.experiments.ablate import BASE, ablate, variants_of
from stream_grpo.experiments.ablate import cells_of as ablation_cells
from stream_grpo.experiments.cells import Cell, CellFailed, Series, call, name_of
from stream_grpo.experiments.sweep import cells_of, parse_grid
from stream_grpo.rundir import with_absolute_paths
from tests.comparison.folders import make_run

SWITCH = Cell("age-1", {"stream.max_policy_age": "1"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n[run]\nnum_steps = 10\n[evaluation]\nfiles = ["h.jsonl"]\n')
    return path


class FakeTrain:
    """In place of the process: notes what it was called with, and leaves a run folder behind."""

    def __init__(self, series: Series, *, ends: bool = True) -> None:
        self.series, self.ends, self.calls = series, ends, list[list[str]]()

    def __call__(self, arguments: list[str], log: Path, num_cores: int) -> None:
        self.calls.append(arguments)
        config = self.series.config(SWITCH)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "config.toml").write_text(to_toml(config))
        if self.ends:
            (config.run_dir / "summary.json").write_text("{}")


def test_a_cell_that_has_ended_is_kept_and_one_that_has_not_goes_on(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = Series(file=file, overrides=("run.seed=3",), root=tmp_path / "out")
    train = FakeTrain(series, ends=False)
    monkeypatch.setattr(celling, "call", train)
    run = series.made(SWITCH, lambda text: None)
    assert run == tmp_path / "out" / "age-1"
    assert train.calls[0][:2] == ["train", str(file)]
    assert "stream.max_policy_age=1" in train.calls[0]
    assert "run.seed=3" in train.calls[0]
    train.ends = True
    series.made(SWITCH, lambda text: None)
    assert train.calls[1] == ["train", "--resume", str(run)]
    series.made(SWITCH, lambda text: None)
    assert len(train.calls) == 2


def test_a_folder_of_other_settings_is_refused_before_anything_starts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = Series(file=file, overrides=(), root=tmp_path / "out")
    monkeypatch.setattr(celling, "call", FakeTrain(series))
    series.made(SWITCH, lambda text: None)
    other = Series(file=file, overrides=("learner.learning_rate=0.5",), root=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"cell age-1: .*a run of other settings: learner\.learning_rate = 0\.5"):
        other.check([SWITCH])
    with pytest.raises(ConfigError, match=r"cell bad: .*no ticket could ever be issued"):
        series.check([SWITCH, Cell("bad", {"stream.publish_interval": "9"})])


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(file: Path, tmp_path: Path) -> None:
    for out in (file / "out", file):
        with pytest.raises(ConfigError, match=f"--out {out}: no folder can be made there"):
            Series(file=file, overrides=(), root=out).check([SWITCH])


def test_no_more_seeds_than_anybody_can_wait_for(file: Path) -> None:
    result = CliRunner().invoke(app, ["ablate", str(file), "--over", "kl", "--seeds", "101"])
    assert result.exit_code == 2
    assert "equal to 100" in " ".join(result.output.split())


def test_a_process_that_fails_gives_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("of an earlier start\n")
    with pytest.raises(CellFailed) as caught:
        call(["train", str(tmp_path / "none.toml")], log)
    assert "ended with exit code 2" in str(caught.value)
    assert "none.toml: cannot be read" in str(caught.value)
    assert "of an earlier start" not in str(caught.value)
    assert sys.executable  # the interpreter of the tests runs it


def test_names_of_cells_may_be_names_of_runs() -> None:
    assert name_of(["max_policy_age-4", "learning_rate-3e-4"]) == "max_policy_age-4_learning_rate-3e-4"
    assert name_of(['files-["a b"]']) == "files--a-b"
    long = name_of(["x" * 200])
    assert len(long) <= 100
    assert long != name_of(["x" * 201])


def test_cells_of_one_name_are_refused(file: Path, tmp_path: Path) -> None:
    series = Series(file=file, overrides=(), root=tmp_path / "out")
    with pytest.raises(ConfigError, match="two cells are called 'age-1'"):
        series.check([SWITCH, SWITCH])


def test_a_grid_is_every_combination(file: Path) -> None:
    grid = parse_grid(["stream.max_policy_age=1, 4", "sampler.group_size=8,16"])
    assert [(cell.name, cell.settings["sampler.group_size"]) for cell in cells_of(grid)] == [
        ("max_policy_age-1_group_size-8", "8"),
        ("max_policy_age-1_group_size-16", "16"),
        ("max_policy_age-4_group_size-8", "8"),
        ("max_policy_age-4_group_size-16", "16"),
    ]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "sweep: no --grid"),
        (["stream.max_policy_age"], "expected section.name=value,value"),
        (["max_policy_age=1,2"], "expected section.name=value,value"),
        (["stream.max_policy_age=1,,2"], "expected section.name=value,value"),
        (["run.seed=1", "run.seed=2"], "--grid run.seed: given twice"),
        (["run.seed=" + ",".join(map(str, range(65)))], "65 combinations, at most 64"),
    ],
)
def test_a_grid_that_is_none_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_grid(texts)


def config(**sections: Any) -> Config:
    return parse({"model": {"path": "m"}, **sections}, "test")


def test_variants_change_one_choice_each_and_keep_the_rollouts_of_a_step() -> None:
    found = dict(variants_of(config(sampler={"group_size": 8}, stream={"groups_per_step": 32}), ["group_size"]))
    assert found == {
        BASE: {},
        "group_size-4": {"sampler.group_size": "4", "stream.groups_per_step": "64"},
        "group_size-16": {"sampler.group_size": "16", "stream.groups_per_step": "16"},
    }
    # Beside a run in which the curator chooses, those of one size have just that.
    chosen = config(sampler={"group_size": 8}, stream={"groups_per_step": 32}, curator={"group_sizes": [4, 8]})
    assert dict(variants_of(chosen, ["group_size"]))["group_size-4"]["curator.group_sizes"] == "[]"


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo", "ppo"])
def test_every_variant_of_every_axis_is_a_configuration(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[model]\npath = "m"\n[algo]\npreset = "{preset}"\n')
    base = load(path)
    variants = variants_of(base, ["group_size", "reward", "kl", "aggregation", "recipe"])
    assert len({name for name, _ in variants}) == len(variants)
    for name, settings in variants[1:]:
        changed = load(path, [f"{key}={value}" for key, value in settings.items()])
        assert changed != base, name


def test_a_recipe_is_compared_with_grpo_and_with_ppo() -> None:
    assert dict(variants_of(config(), ["recipe"])) == {
        BASE: {},
        "recipe-grpo": {"algo.preset": "grpo"},
        "recipe-ppo": {"algo.preset": "ppo"},
    }
    assert [name for name, _ in variants_of(config(algo={"preset": "ppo"}), ["recipe"])] == [BASE, "recipe-grpo"]


def test_seeds_share_their_heldout_problems_and_end_at_the_same_tokens() -> None:
    base = config(run={"seed": 7, "num_steps": 10}, evaluation={"files": ["h"]})
    cells = ablation_cells(base, [(BASE, {}), ("x", {"learner.num_epochs": "2"})], 3, budget=1000)
    assert [cell.name for cell in cells] == ["base-s7", "x-s7", "base-s8", "x-s8", "base-s9", "x-s9"]
    assert cells[3].settings == {
        "evaluation.problems_seed": "7",
        "run.max_generated_tokens": "1000",
        "run.num_steps": "100",
        "learner.num_epochs": "2",
        "run.seed": "8",
    }
    # Without a budget the steps of the configuration end each.
    assert "run.num_steps" not in ablation_cells(base, [(BASE, {})], 3, budget=None)[0].settings


def test_axes_that_are_none_are_refused_and_other_settings_go_by_hand() -> None:
    with pytest.raises(
        ConfigError, match="--over size: no such axis; known: group_size, reward, kl, aggregation, recipe"
    ):
        variants_of(config(), ["size"])
    with pytest.raises(ConfigError, match="nothing varies"):
        variants_of(config(), [])
    for fixed in ("run.seed=5,6", "run.max_generated_tokens=9", "evaluation.num_problems=3"):
        with pytest.raises(ConfigError, match="all runs of an ablation have it in common"):
            variants_of(config(), [], [fixed])
    found = variants_of(config(), [], ["stream.max_policy_age=1,8"])
    assert json.loads(json.dumps(found)) == [
        [BASE, {}],
        ["max_policy_age-1", {"stream.max_policy_age": "1"}],
        ["max_policy_age-8", {"stream.max_policy_age": "8"}],
    ]


def test_without_a_budget_the_first_run_sets_that_of_the_others_and_a_second_call_keeps_all(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series, begun = Series(file=file, overrides=(), root=tmp_path / "out"), list[str]()

    def train(arguments: list[str], log: Path, num_cores: int) -> None:
        settings = dict(part.split("=", 1) for part in arguments if "=" in part)
        config = load(file, [f"{key}={value}" for key, value in settings.items()])
        config = with_absolute_paths(config)
        budget = config.run.max_generated_tokens
        passed = {"a": 4 if config.learner.num_epochs == 2 else 2}
        run = make_run(
            tmp_path / "out", config.run.name, passed, num_tokens=budget or 1000, seed=config.run.seed,
            epochs=config.learner.num_epochs,
        )  # fmt: skip
        (run / "config.toml").write_text(to_toml(config))
        begun.append(config.run.name)

    monkeypatch.setattr(celling, "call", train)
    for _ in range(2):
        found = ablate(series, [], ["learner.num_epochs=2"], num_seeds=3, num_tokens=None, say=lambda text: None)
        # base: 2 of 4 right, the variant all, in every run.
        assert [(row.label, row.pass_at_1, row.num_tokens) for row in found.rows] == [
            ("base", 0.5, 1000),
            ("num_epochs-2", 1.0, 1000),
        ]
        assert found.rows[1].difference is not None
        assert found.rows[1].difference.low == 0.5
    assert begun == [f"{name}-s{seed}" for seed in range(3) for name in ("base", "num_epochs-2")]


@pytest.mark.parametrize("given", [["learner.num_epochs=2,2"], ["run.name=a"]])
def test_an_ablation_that_cannot_end_begins_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setattr(celling, "call", lambda *arguments: pytest.fail("a cell was trained"))
    series = Series(file=file, overrides=(), root=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"two cells are called|every cell has its own"):
        ablate(series, [], given, num_seeds=3, num_tokens=None, say=lambda text: None)
