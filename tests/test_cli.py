"""The commands that start nothing: what they print and how they end."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stream_grpo.algo.presets import DEFAULT, PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.cli import app
from stream_grpo.config_file import parse, to_toml
from stream_grpo.identity import entry
from stream_grpo.make_model import new_model, new_tokenizer


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_run(path: Path, *, seed: int = 0, weight: str = "ppo") -> Path:
    path.mkdir()
    manifest = {
        "seed": seed,
        "python": "3.11.9",
        "libraries": {"torch": "2.9.0"},
        "identities": [entry({"algo": {"weight": weight, "cap": None}}, from_step=0)],
        "resumed": [],
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_diff_of_equal_runs_says_so_and_ends_with_0(tmp_path: Path) -> None:
    left, right = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    result = call("diff", left, right)
    assert (result.exit_code, result.stdout) == (0, "equal\n")
    assert json.loads(call("diff", left, right, "--json").stdout) == {"equal": True, "differences": []}


def test_diff_shows_what_differs_and_ends_with_1(tmp_path: Path) -> None:
    left, right = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=3, weight="cispo")
    result = call("diff", left, right)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["algo.weight  ppo | cispo", "seed         0   | 3"]
    result = call("diff", left, right, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "equal": False,
        "differences": [
            {"name": "algo.weight", "left": "ppo", "right": "cispo"},
            {"name": "seed", "left": 0, "right": 3},
        ],
    }


def test_diff_without_a_run_ends_with_2(tmp_path: Path) -> None:
    result = call("diff", make_run(tmp_path / "a"), tmp_path / "none", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no run there (no manifest.json)" in result.stderr


def test_presets_lists_all_with_source_and_trade() -> None:
    result = call("presets")
    assert result.exit_code == 0
    assert f"the default is {DEFAULT}" in result.stdout
    words = " ".join(result.stdout.replace("│", " ").split())
    for name, preset in PRESETS.items():
        assert f" {name} " in words
        assert preset.trades.split()[0] in words
    assert max(map(len, result.stdout.splitlines())) <= 80  # what a terminal of unknown width is taken for


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_as_toml_that_gives_its_recipe(name: str) -> None:
    result = call("presets", name)
    assert result.exit_code == 0
    row: dict[str, Any] = tomllib.loads(f"[algo]\n{result.stdout}")["algo"]
    recipe = PRESETS[name].recipe
    # Only what acts is shown, and pasting all of it is what the name gives.
    assert row == {"preset": name, **json.loads(recipe.model_dump_json(exclude_none=True))}
    algo = parse({"model": {"path": "m"}, "algo": row}, "x").algo
    assert Recipe.model_validate(algo.model_dump(include=set(Recipe.model_fields))) == recipe
    comments = " ".join(line[2:] for line in result.stdout.splitlines() if line.startswith("# "))
    assert comments == f"{name}: {PRESETS[name].source} {PRESETS[name].trades}"


def test_presets_as_json() -> None:
    every = json.loads(call("presets", "--json").stdout)
    assert list(every) == list(PRESETS)
    one = json.loads(call("presets", "grpo", "--json").stdout)
    assert one == {"grpo": every["grpo"]}
    assert one["grpo"]["source"] == "2402.03300"
    assert one["grpo"]["recipe"]["scale"] == "group_std"


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    result = call("presets", "gspoo", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "preset = 'gspoo': no such preset; did you mean 'gspo'?" in result.stderr


def test_the_commands_that_only_show_load_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from stream_grpo.cli import app\n"
        "app(['presets'], standalone_mode=False)\n"
        "sys.exit(', '.join({'torch', 'lancedb', 'ray', 'transformers', 'pyarrow'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_dry_run_refuses_an_environment_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    tree = {"model": {"path": str(tmp_path), "max_length_tokens": 1024}, "environment": {"name": "recrods"}}
    file.write_text(to_toml(parse(tree, "test")))
    shown = call("train", file, "--dry-run")
    assert shown.exit_code == 2
    assert "no environment is called 'recrods'" in shown.output


def test_a_dry_run_refuses_a_grammar_that_the_model_cannot_write(tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path / "model")
    new_tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "run.toml"

    def dry_run(**options: str) -> Result:
        environment = {"name": "calculator", "max_steps": 1, "max_observation_tokens": 8, "grammar": True}
        tree = {
            "model": {"path": str(tmp_path / "model"), "max_length_tokens": 128},
            "sampler": {"max_new_tokens": 32},
            "environment": environment | {"options": options},
        }
        file.write_text(to_toml(parse(tree, "test")))
        return call("train", file, "--dry-run")

    # Its tokens are the characters of sums: no brace, no letter.
    refused = dry_run()
    assert refused.exit_code == 2
    assert "<tool_call>" in refused.output
    assert dry_run(open="=", close="+", body="plain").exit_code == 0


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ({"lora": {"rank": 2, "target_modules": ["c_attn"]}}, "c_attn is a Conv1D, the head or no linear layer"),
        ({"lora": {"rank": 2, "target_modules": ["q_proj"]}}, "no linear layer 'q_proj' in its tensors; has c_attn"),
        ({"activation_checkpointing": True}, None),
        ({}, None),
    ],
)
def test_a_dry_run_refuses_what_the_model_cannot_do_for_the_learner(
    tmp_path: Path, learner: dict[str, Any], reason: str | None
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = new_tokenizer()
    shape = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "run.toml"
    tree = {
        "model": {"path": str(tmp_path / "model"), "max_length_tokens": 128},
        "sampler": {"max_new_tokens": 32},
        "learner": learner,
    }
    file.write_text(to_toml(parse(tree, "test")))
    shown = call("train", file, "--dry-run")
    assert shown.exit_code == (0 if reason is None else 2), shown.output
    assert reason is None or reason in " ".join(shown.output.split())
