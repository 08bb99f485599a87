"""The pages under docs/ say what the code has."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.algo.statistics import Ratio, gather, measure
from stream_grpo.buffer.staleness import Losses, Staleness
from stream_grpo.config_file import parse
from stream_grpo.config_stream import Control, Stream
from stream_grpo.experiments.ablate import AXES

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
CHOICES = PAGE.partition("## The choices")[2].partition("\n## ")[0]


def options(annotation: Any) -> tuple[str, ...]:
    """The words of a Literal, inside an optional one too."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in options(part))


def test_the_table_of_presets_is_that_of_the_code() -> None:
    table = [
        "| name | source | what it trades |",
        "|---|---|---|",
        *(f"| `{name}` | {preset.source} | {preset.trades} |" for name, preset in PRESETS.items()),
    ]
    text = "\n".join(table)
    assert text in PAGE, f"the table in docs/recipes.md should be:\n{text}"
    assert f"Without `preset` a run takes `{DEFAULT}`." in PAGE


@pytest.mark.parametrize("name", Recipe.model_fields)
def test_every_choice_of_a_recipe_is_on_the_page_with_its_options(name: str) -> None:
    # A choice has a line of its own, a number stands in the line of the choice that reads it.
    lines = [line for line in CHOICES.splitlines() if line.startswith("|") and f"`{name}`" in line]
    lines.sort(key=lambda line: not line.startswith(f"| `{name}`"))
    assert lines, f"{name} is not in the table of choices"
    missing = [word for word in options(Recipe.model_fields[name].annotation) if f"`{word}`" not in lines[0]]
    assert not missing, f"{name}: {missing} are not in the table of choices"


def test_the_page_has_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_load(example: str) -> None:
    tree = tomllib.loads(example)
    algo = parse({"model": {"path": "m"}, **tree}, "docs/recipes.md").algo
    assert {name: value for name, value in tree["algo"].items() if name != "mask_sequence"} == {
        name: getattr(algo, name) for name in tree["algo"] if name != "mask_sequence"
    }
    assert algo.mask_sequence == (0.95, 1.05)


def test_every_metric_of_the_loss_is_on_the_page() -> None:
    ones = torch.ones(1, 2, dtype=torch.float64)
    shares = ("clipped_low", "clipped_high", "clipped_dual", "rejected", "correction")
    reasons = ("ratio_band", "tv", "binary_kl", "second_moment", "sequence_band", "sequence_k3", "negative_kl", "veto")
    signs = ("positive", "negative")
    measured = measure(
        ones.bool(),
        torch.zeros(1, dtype=torch.int64),
        Ratio(ones, ones),
        Ratio(ones, ones),
        dict.fromkeys((*shares, *(f"rejected_{reason}" for reason in (*signs, *reasons))), ones),
        dict.fromkeys(("proximal", "reference"), Ratio(ones, ones)),
        num_clamped=torch.zeros(()),
    )
    statistics = gather([measured])
    names = {name for name in statistics.metrics() if not name.startswith("mask_share_")}
    names |= {f"mask_share_{sign}" for sign in signs} | set(reasons)
    assert len(names) > 25
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]
    assert {"by_age", "by_length"} <= set(re.findall(r"`(\w+)`", PAGE))


def test_the_page_on_staleness_has_every_option_and_figure() -> None:
    page = (Path(__file__).parents[1] / "docs" / "staleness.md").read_text(encoding="utf-8")
    for name in ("max_policy_age", "publish_interval", "max_requeues", "max_uses", "reuse_share", "sample_deadline_s"):
        assert f"| `{name}` | {Stream.model_fields[name].default:g} |" in page
    for name in ("too_old", "selector"):
        assert f"| `{name}` | `{Stream.model_fields[name].default}` |" in page
        assert not [word for word in options(Stream.model_fields[name].annotation) if f"**`{word}`**" not in page]
    assert not [name for name in (*Losses(1).as_fields(), "lost_share") if f"`{name}`" not in page]
    assert not [part for part in Staleness._fields if f"`age_{part}_*`" not in page]


def test_the_page_on_the_closed_loop_has_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[1] / "docs" / "control.md").read_text(encoding="utf-8")
    for name, field in Control.model_fields.items():
        assert name == "enabled" or f"| `{name}` | {field.default:g} |" in page


def test_the_page_on_comparisons_has_every_axis_and_its_guard_loads() -> None:
    page = (Path(__file__).parents[1] / "docs" / "compare.md").read_text(encoding="utf-8")
    assert not [name for name in AXES if f"| `{name}` |" not in page]
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (guard,) = parse({"model": {"path": "m"}, **tomllib.loads(example)}, "docs/compare.md").evaluation.guards
    assert (guard.name, guard.max_drop) == ("refusals", 0.02)
