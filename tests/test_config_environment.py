"""What the settings of an environment refuse, and with which words."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_environment import Environment, as_rules
from stream_grpo.config_file import parse
from stream_grpo.errors import ConfigError

PAGE = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")


def config(environment: dict[str, Any], **sections: dict[str, Any]) -> Config:
    model = {"path": "m", "max_length_tokens": 400}
    return parse({"model": model, "environment": environment, **sections}, "test")


def test_without_a_name_nothing_changes() -> None:
    plain = parse({"model": {"path": "m"}}, "test")
    assert plain.environment.name is None
    assert plain.prompt_limit_tokens == 256 - 64


def test_a_prompt_leaves_room_for_all_actions_and_observations() -> None:
    # 400 tokens in all, 64 of actions, 3 observations of 50.
    found = config({"name": "calculator", "max_steps": 3, "max_observation_tokens": 50})
    assert found.prompt_limit_tokens == 400 - 64 - 150


@pytest.mark.parametrize(
    ("environment", "sections", "reason"),
    [
        ({"max_steps": 3}, {}, r"max_steps: without environment\.name nothing reads it"),
        ({"name": "rm -rf"}, {}, r"environment\.name"),
        ({"name": "calculator", "max_steps": 8}, {}, r"max_steps x environment\.max_observation_tokens = 512"),
        ({"name": "calculator", "max_steps": 2}, {"weights": {"on_update": "finish"}}, "on_update = finish with"),
        (
            {"name": "calculator", "max_steps": 2, "branch_turns": 3, "branch_share": 0.5},
            {},
            r"branch_turns = 3: .* max_steps = 2 turns",
        ),
        (
            {"name": "calculator", "max_steps": 2, "branch_turns": 2},
            {},
            r"branch_turns = 2: with branch_share = 0 nothing reads it",
        ),
        ({"name": "calculator", "max_steps": 1, "branch_share": 0.5}, {}, r"branch_share = 0\.5 with max_steps = 1"),
        ({"branch_share": 0.5}, {}, r"branch_share: without environment\.name"),
        (
            {"name": "calculator", "max_steps": 2, "step_timeout_s": 60},
            {},
            r"2 tries of one step, each of up to environment\.step_timeout_s = 60",
        ),
        ({"grammar": True}, {}, r"grammar: without environment\.name nothing reads it"),
        (
            {"name": "calculator", "max_steps": 2, "waiting_kv": "keep"},
            {},
            r"waiting_kv = keep with sampler\.prefix_cache = false",
        ),
    ],
)
def test_what_cannot_work_is_refused(environment: dict[str, Any], sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(environment, **sections)


def test_only_what_decides_the_meaning_of_a_trajectory_is_in_its_hash() -> None:
    one = config({"name": "calculator", "max_steps": 2})
    fast = config({"name": "calculator", "max_steps": 2, "num_workers": 7, "max_waiting": 3, "waiting_kv": "drop"})
    other = config({"name": "calculator", "max_steps": 2, "options": {"open": "["}})
    assert as_rules(one.environment) == as_rules(fast.environment) != as_rules(other.environment)
    branching = config({"name": "calculator", "max_steps": 2, "branch_share": 0.5})
    assert as_rules(branching.environment) == as_rules(one.environment) | {"branch_share": 0.5, "branch_turns": None}
    constrained = config({"name": "calculator", "max_steps": 2, "grammar": True})
    assert as_rules(constrained.environment) == as_rules(one.environment) | {"grammar": True}


def test_a_plain_environment_has_the_hash_that_it_always_had() -> None:
    # A name too many here would make every run of before another one: its buffered groups would be invalid.
    assert as_rules(Environment(name="calculator")).keys() == {
        "name",
        "options",
        "max_steps",
        "max_turn_tokens",
        "max_observation_tokens",
        "max_observation_bytes",
        "observation_prefix",
        "observation_suffix",
        "observation_role",
        "replicas",
    }


def test_the_page_on_environments_has_every_setting_and_its_examples_load() -> None:
    assert not [name for name in Environment.model_fields if not re.search(rf"\b{name}\b", PAGE)]
    first, second = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL))
    assert config(first["environment"]).environment.max_steps == 3
    (acting,) = parse({"model": {"path": "m"}, **second}, "page").rewards.compose.values()
    assert acting.costs["tool:sql"].free == 2


def test_the_environment_that_the_page_shows_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    task = names["Countdown"](None, start=2)
    assert task.reset(0, None).observation == "2 left"
    assert task.step("tick").observation == "1 left"
    assert task.step("tick").end == "success"
