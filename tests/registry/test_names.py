"""The registry has every figure that the code writes, and docs/metrics.md has the registry."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.algo.presets import PRESETS
from stream_grpo.metrics import MetricsLog
from stream_grpo.registry.figure import figures
from stream_grpo.registry.names import REGISTRY, as_markdown, find, kind_of, unknown
from tests.learner.table_model import TableModel
from tests.learner.test_critic_step import TableCritic, step_of
from tests.learner.test_process import FakeBuffer, FakeEngine, configuration, learner, serving
from tests.learner.test_train_step import batch_of, ragged_groups

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "metrics_run.jsonl"


def test_the_page_has_the_tables_of_the_registry_and_no_other_figure() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.partition("## Every figure")[2].count("| `") == len(REGISTRY)
    assert as_markdown() in page, f"the tables in docs/metrics.md should be:\n{as_markdown()}"


def test_no_name_stands_twice_in_one_kind_of_line() -> None:
    names = [(figure.line, figure.name) for figure in REGISTRY]
    assert len(set(names)) == len(names) > 250


def test_a_run_of_real_engines_wrote_nothing_that_the_registry_lacks() -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert {kind_of(line) for line in lines} >= {"step", "evaluation", "sampler", "buffer", "curator", "learner"}
    assert {name for line in lines for name in unknown(line)} == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_figure_of_every_recipe_is_in_the_registry(preset: str) -> None:
    recipe = PRESETS[preset].recipe
    critic = TableCritic() if recipe.has_critic else None
    step = step_of(TableModel(12), critic, recipe, learning_rate=0.01, num_epochs=2)
    found = step.run(batch_of(recipe, ragged_groups(0)))
    assert {"entropy_by_position", "by_age"} <= found.keys()
    assert unknown({"event": "step", **found}) == []


def test_every_figure_of_the_learners_loop_is_in_the_registry(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    with serving(FakeBuffer()) as channel:
        process = learner(config, channel, FakeEngine())
        process.run(threading.Event())
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 5
    assert [unknown(line) for line in lines] == [[]] * 5
    status = {name: value for name, value in process.status().items() if name != "ledger"}
    assert unknown({"event": "status", "part": "learner", **status}) == []


def test_a_field_that_the_registry_lacks_is_named_by_its_path(tmp_path: Path) -> None:
    line = {"event": "step", "step": 1, "by_age": {"0": {"ess": 1.0, "odd": 2.0}}, "strange": {}}
    assert unknown(line) == ["by_age/0/odd"]
    MetricsLog(tmp_path, "learner").write("step", {"step": 1})
    (written,) = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert unknown(written) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("mask_share",), "mask_share"),
        (("mask_share_binary_kl",), "mask_share_*"),
        (("tokens", "generated"), "tokens/generated"),  # an exact name before one with a free word
        (("tokens", "stale"), "tokens/*"),
        (("by_length", "17-64", "entropy"), "by_length/*/entropy"),
        (("by_length", "17-64"), None),
    ],
)
def test_a_name_with_a_free_word_stands_for_every_word(path: tuple[str, ...], name: str | None) -> None:
    found: Any = find("step", path)
    assert (found and found.name) == name


def test_a_row_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table of step lines: 'loss \| mean': expected name \| unit \| meaning"):
        figures("step", "loss | mean")
