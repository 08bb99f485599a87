"""The command `plan`: grids, refusals, the recommendation."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stream_grpo.cli import app
from stream_grpo.config_file import parse
from stream_grpo.errors import ConfigError
from stream_grpo.planner.commands import COLUMNS, settings_of
from stream_grpo.planner.given import Given
from stream_grpo.planner.grid import NAMES, Point, expand, frontier, parse_grid, reason, recommend, sweep
from stream_grpo.planner.picture import labels
from stream_grpo.planner.world import Settings
from tests.planner.worlds import constant_world, mixed_world

GIVEN = ("--given", "mean_tokens=20", "--given", "engine_step_s=0.1", "--given", "learner_tokens_per_s=2000")
SMALL = Settings(group_size=2, max_num_seqs=4, groups_per_step=2)


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.toml"
    sampler = "group_size = 4\nmax_num_seqs = 16\nmax_new_tokens = 64"
    path.write_text(f'[model]\npath = "m"\n[sampler]\n{sampler}\n[stream]\ngroups_per_step = 8\n')
    return str(path)


def test_a_grid_gives_a_row_a_setting_and_a_recommendation(config: str, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.svg"
    grid = ("--grid", "max_policy_age=1,4", "publish_interval=1,2")
    result = plan(config, *grid, *GIVEN, "--steps", "10", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    assert len([line for line in result.output.splitlines() if re.match(r"[14]\s+[12]\s", line)]) == 4
    assert "Recommended: max_policy_age = " in result.output
    assert "<svg" in picture.read_text()


def test_json_has_every_point_with_its_settings_and_figures(config: str) -> None:
    result = plan(
        config, "--grid", "max_policy_age=0,2", "--grid", "publish_interval=1,2", *GIVEN, "--steps", "5", "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(point["max_policy_age"], point["publish_interval"]) for point in found["points"]] == [
        (0, 1),
        (2, 1),
        (2, 2),
    ]
    assert found["points"][0]["age_max"] == 0
    assert "no ticket could ever be issued" in found["refused"][0]
    assert found["recommended"]["max_policy_age"] in (0, 2)


def test_thousands_of_samplers_are_planned_for(config: str) -> None:
    # 2,000 samplers hold 4 groups each and 8 more a cohort; a step of 8 groups is all that the stream lets in: 5 x 8.
    result = plan(config, "--samplers", "2000", *GIVEN, "--steps", "5", "--json")
    assert result.exit_code == 0, result.output
    (point,) = json.loads(result.stdout)["points"]
    assert point["bottleneck"].startswith("the learner is the bottleneck")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid", "max_policy_ag=1"), "no setting that the model knows; did you mean max_policy_age?"),
        (("--grid", "max_policy_age"), "expected name=value,value"),
        (("--grid", "max_policy_age=1,x"), "--grid max_policy_age=x: expected a whole number"),
        (("--grid", "too_old=late"), "--grid too_old=late: expected wait or drop"),
        (("--grid", "cores=1", "--grid", "cores=2"), "--grid cores: given twice"),
        (("--grid", "num_samplers=1", "--samplers", "2"), "name it once"),
        (("--given", "mean_token=1"), "did you mean mean_tokens?"),
        (("--given", "mean_tokens=1"), "engine_step_s, learner_tokens_per_s missing"),
        ((*GIVEN, "--given", "signal_share=2"), "signal_share = 2: expected 0 to 1"),
        ((), "name a run that has measured them with --like RUN"),
        ((*GIVEN, "--given", "tokens_cv=nan"), "tokens_cv = nan: expected a finite number"),
        ((*GIVEN, "--given", "publish_s=inf"), "publish_s = inf: expected a finite number"),
        ((*GIVEN, "--picture", "frontier.doc"), "expected a name that ends in .svg"),
        ((*GIVEN, "--picture", "/nowhere/at/all.svg"), "/nowhere/at is no folder"),
        ((*GIVEN, "--steps", "5", "--picture", "/proc/frontier.svg"), "--picture /proc/frontier.svg: "),
        ((*GIVEN, "--steps", "10001"), "equal to 10000"),
        ((*GIVEN, "--samplers", "100001"), "equal to 100000"),
        ((*GIVEN, "--set", "stream.max_uses=2"), "stream.max_uses = 2: the model leaves this out"),
        ((*GIVEN, "--set", "curator.group_sizes=[4,8]"), "curator.group_sizes = (4, 8): the model leaves this out"),
    ],
)
def test_bad_input_is_one_error_that_says_what_would_be_right(
    config: str, arguments: tuple[str, ...], message: str
) -> None:
    result = plan(config, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_picture_in_place_of_a_folder_is_refused_before_anything_is_predicted(config: str, tmp_path: Path) -> None:
    (tmp_path / "f.svg").mkdir()
    result = plan(config, *GIVEN, "--picture", str(tmp_path / "f.svg"))
    assert result.exit_code == 2
    assert "it is a folder; name a file" in " ".join(result.output.split())
    assert "tokens/s" not in result.output


def test_a_grid_of_too_many_combinations_is_refused() -> None:
    grid = parse_grid(
        [f"{name}={','.join(map(str, range(1, 10)))}" for name in ("max_policy_age", "cores", "group_size")]
    )
    with pytest.raises(ConfigError, match="729 combinations, at most 512"):
        expand(SMALL, grid)


def test_a_slower_setting_of_lower_age_is_recommended_where_nothing_is_lost() -> None:
    # With a learner that takes no time nothing is gained by an age above what the sampler's slots need.
    points = sweep(constant_world(), SMALL, {"max_policy_age": [1, 8]}, num_steps=10, seed=0)
    chosen = recommend(points)
    assert chosen is not None
    assert chosen.settings.max_policy_age == 1
    assert reason(points, chosen, ["max_policy_age"]).startswith("Recommended: max_policy_age = 1: 4 tokens trained")


def test_the_frontier_rises_and_holds_the_fastest() -> None:
    settings = replace(SMALL, group_size=4, max_num_seqs=16, groups_per_step=4)
    points = sweep(mixed_world(), settings, {"max_policy_age": [0, 1, 2, 4]}, num_steps=20, seed=0)
    edge = [point.prediction for point in frontier(points) if point.prediction]
    rates = [found.trained_tokens_per_s for found in edge]
    assert rates == sorted(rates)
    assert rates[-1] == max(point.prediction.trained_tokens_per_s for point in points if point.prediction)
    assert labels(points, ["max_policy_age"])


def test_nothing_is_recommended_where_nothing_can_be() -> None:
    refused = [Point(SMALL, None, "no")]
    assert recommend(refused) is None
    assert frontier(refused) == []


def test_settings_are_those_of_the_configuration() -> None:
    tree = {
        "model": {"path": "m"},
        "stream": {"max_policy_age": 3, "too_old": "requeue"},
        "sampler": {"num_samplers": 7},
    }
    found = settings_of(parse(tree, "test"))
    assert (found.max_policy_age, found.too_old, found.num_samplers) == (3, "drop", 7)


def test_the_page_has_every_setting_given_figure_and_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    names = [*NAMES, *(field.name for field in fields(Given)), *COLUMNS]
    assert not [name for name in names if f"`{name}`" not in page]
