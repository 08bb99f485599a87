"""The record of what a run optimises, its hash, and in what two records differ."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.presets import PRESETS
from stream_grpo.algo.recipe import Recipe
from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.errors import ConfigError
from stream_grpo.identity import (
    NOT_IN_IT,
    WHERE_USED,
    Difference,
    differences,
    entry,
    identity,
    identity_hash,
    lines,
    read_identity,
)

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
NAMES = st.sampled_from("abcd")
RECORDS = st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=2)))


_OPTIONAL = {"control", "environment"}
"""Sections that are in the record where they are in use."""


def config(**sections: dict[str, Any]) -> Config:
    return parse({"model": {"path": "m"}, **sections}, "test")


def record(of: Config | None = None, **more: Any) -> dict[str, Any]:
    contents = {"model_sha256": {"model.safetensors": "a" * 64}, "tokenizer": "t", "pool": "p"}
    return identity(of or config(), **{**contents, "verifiers": {"exact": "1"}, **more})


def names(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [difference.name for difference in differences(left, right)]


def write_run(path: Path, what: dict[str, Any], **more: Any) -> Path:
    path.mkdir()
    manifest = {
        "seed": 0,
        "python": "3.11.9",
        "libraries": {"torch": "2.9.0"},
        "identities": [entry(what, from_step=0)],
        "resumed": [],
        **more,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_every_choice_of_the_recipe_is_in_the_record_those_that_are_off_too() -> None:
    found = record()["algo"]
    assert found.keys() == {*Recipe.model_fields, "preset", "shuffle_rewards"} - WHERE_USED["algo"].keys()
    assert found["mask_tv"] is None


def test_the_record_has_all_that_decides_what_is_optimised() -> None:
    found = record()
    assert found["sampler"]["group_size"] == 8
    assert {"temperature", "top_p", "top_k", "min_p", "max_new_tokens"} <= found["sampler"].keys()
    assert {"num_epochs", "num_minibatches", "learning_rate", "adam_betas", "filter_logits"} <= found["learner"].keys()
    assert {"max_policy_age", "publish_interval", "groups_per_step"} <= found["stream"].keys()
    assert found["policies"].keys() == {"behavior", "proximal", "reference"}
    assert found["verifiers"] == {"exact": "1"}
    assert found["contents"] == {"pool": "p", "tokenizer": "t", "model.safetensors": "a" * 64}


def test_every_setting_is_in_the_record_or_named_as_one_that_is_not() -> None:
    settings = {section: set(values) for section, values in config().model_dump().items()}
    assert NOT_IN_IT.keys() <= settings.keys()
    for section, left_out in NOT_IN_IT.items():
        assert (left_out or set()) <= settings[section], section
    found = record()
    for section, fields in settings.items():
        left_out = NOT_IN_IT.get(section, frozenset()) if section not in _OPTIONAL else None
        expected = set() if left_out is None else fields - left_out - WHERE_USED.get(section, {}).keys()
        assert set(found.get(section, {})) == expected, section


def test_a_critic_and_an_earlier_run_are_in_the_record_where_there_is_one() -> None:
    critic = {"advantage", "gae_gamma", "gae_lambda", "gae_whiten", "value_clip", "critic_rate"}
    assert not critic & record()["algo"].keys()
    assert not {"start_from", "group_sizes"} & record()["curator"].keys()
    assert record(config(curator={"group_sizes": [4, 8]}))["curator"]["group_sizes"] == [4, 8]
    assert critic <= record(config(algo={"preset": "ppo"}))["algo"].keys()
    assert record(config(curator={"start_from": "runs/a"}))["curator"]["start_from"] == "runs/a"


def test_an_adapter_is_in_the_record_where_there_is_one() -> None:
    assert "lora" not in record()["learner"]
    found = record(config(learner={"lora": {"rank": 8}}))["learner"]["lora"]
    assert found == {"rank": 8, "alpha": 32.0, "target_modules": []}


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"seed": 3, "num_steps": 7, "name": "x"}},
        {"sampler": {"num_samplers": 3, "num_threads": 2}},
        {"learner": {"microbatch_tokens": 77, "zero_stage": 2}},
        {"buffer": {"segment_bytes": 1 << 20}},
        {"evaluation": {"num_samples": 3}},
        {"rewards": {"num_workers": 3, "max_retries": 0, "function_dir": "elsewhere"}},
    ],
)
def test_seeds_places_and_lengths_leave_the_hash_as_it_is(sections: dict[str, Any]) -> None:
    assert identity_hash(record(config(**sections))) == identity_hash(record())


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"sampler": {"temperature": 0.5}}, "sampler.temperature"),
        ({"stream": {"max_policy_age": 2}}, "stream.max_policy_age"),
        ({"learner": {"num_epochs": 2}}, "learner.num_epochs"),
        ({"algo": {"shuffle_rewards": True}}, "algo.shuffle_rewards"),
        ({"algo": {"mask_binary_kl": 0.1}}, "algo.mask_binary_kl"),
        ({"model": {"path": "m", "dtype": "bfloat16"}}, "model.dtype"),
        ({"curator": {"exploration": 0.5}}, "curator.exploration"),
        ({"rewards": {"time_limit_s": 5.0}}, "rewards.time_limit_s"),
    ],
)
def test_a_choice_changes_the_record_by_its_name_and_the_hash(sections: dict[str, Any], name: str) -> None:
    changed = record(config(**sections))
    assert names(record(), changed) == [name]
    assert identity_hash(changed) != identity_hash(record())


def test_what_follows_from_a_choice_is_said_in_words() -> None:
    grpo, reinforce = (record(config(algo={"preset": name})) for name in ("grpo", "reinforce"))
    assert grpo["samples"]["group without spread"] == "ends as no_signal"
    assert reinforce["samples"]["group without spread"] == "trained"
    assert grpo["reduction"]["D"].startswith("sequences with a trained token")
    assert record(config(algo={"preset": "decoupled"}))["policies"]["proximal"].startswith("the learner's weights")


def test_all_presets_have_records_of_their_own() -> None:
    hashes = {identity_hash(record(config(algo={"preset": name}))) for name in PRESETS}
    assert len(hashes) == len(PRESETS)


def test_contents_and_verifiers_count() -> None:
    assert names(record(), record(verifiers={"exact": "2"})) == ["verifiers.exact"]
    assert names(record(), record(pool="q")) == ["contents.pool"]


def test_the_version_of_the_environment_counts() -> None:
    acting = {"name": "calculator", "max_steps": 2}
    found = [record(config(environment=acting), environment=version) for version in "12"]
    assert names(*found) == ["environment.version"]


def test_branching_is_in_the_record_where_groups_branch() -> None:
    acting = {"name": "calculator", "max_steps": 2}
    plain, branching = (record(config(environment=acting | more)) for more in ({}, {"branch_share": 0.5}))
    assert names(plain, branching) == ["environment.branch_share"]
    assert not {"branch_share", "branch_turns"} & plain["environment"].keys()


def test_a_grammar_is_in_the_record_where_there_is_one() -> None:
    acting = {"name": "calculator", "max_steps": 2}
    free, constrained = (record(config(environment=acting | more)) for more in ({}, {"grammar": True}))
    assert "grammar" not in free["environment"]
    assert names(free, constrained) == ["environment.grammar"]


def test_the_hash_is_that_of_canonical_json() -> None:
    # Keys sorted, no spaces: {"a":{"c":[1,2],"d":null},"b":0.5}
    expected = hashlib.sha256(b'{"a":{"c":[1,2],"d":null},"b":0.5}').hexdigest()
    assert identity_hash({"b": 0.5, "a": {"d": None, "c": [1, 2]}}) == expected


@given(RECORDS)
def test_a_record_equals_what_json_makes_of_it(of: dict[str, Any]) -> None:
    read = json.loads(json.dumps(of))
    assert differences(of, read) == []
    assert identity_hash(read) == identity_hash(of)


@given(RECORDS, RECORDS)
def test_differences_are_the_same_from_either_side(left: dict[str, Any], right: dict[str, Any]) -> None:
    there, back = differences(left, right), differences(right, left)
    assert sorted(there, key=str) == sorted((Difference(name, a, b) for name, b, a in back), key=str)


def test_a_name_that_one_record_lacks_is_a_difference() -> None:
    assert differences({"a": {"b": 1, "c": None}}, {"a": {"b": 1}, "d": 2}) == [
        Difference("a.c", None, None),
        Difference("d", None, 2),
    ]


def test_lines_are_aligned_and_hashes_are_cut() -> None:
    found = [Difference("algo.cap", None, 5.0), Difference("contents.pool", "a" * 64, "b" * 64)]
    assert lines(found) == [
        "algo.cap       -               | 5.0",
        "contents.pool  aaaaaaaaaaaa... | bbbbbbbbbbbb...",
    ]


def test_a_run_is_read_as_its_last_start_left_it(tmp_path: Path) -> None:
    later = record(config(sampler={"temperature": 0.5}))
    restart = {"seed": 1, "python": "3.12.0", "libraries": {"torch": "2.9.1"}}
    one = write_run(tmp_path / "one", later)
    two = write_run(
        tmp_path / "two", {}, identities=[entry(record(), from_step=0), entry(later, from_step=40)], resumed=[restart]
    )
    found = {item.name: (item.left, item.right) for item in differences(read_identity(one), read_identity(two))}
    assert found.keys() == {"history", "seed", "versions.python", "versions.torch"}
    assert found["seed"] == (0, 1)
    assert found["history"] == (
        [],
        [f"0 {identity_hash(record())[:12]}", f"40 {identity_hash(later)[:12]}"],
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: "", "empty"),
        (lambda text: text.replace('"identities"', '"x"'), "no identity in it: KeyError"),
        (lambda text: text.replace('"sha256"', '"x"').replace('"identity"', '"y"'), "no identity in it: KeyError"),
        (lambda text: text.replace('"resumed": []', '"resumed": [1]'), "no identity in it: TypeError"),
    ],
)
def test_a_manifest_without_an_identity_is_named(tmp_path: Path, spoil: Callable[[str], str], reason: str) -> None:
    path = write_run(tmp_path / "run", record()) / "manifest.json"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ConfigError, match=rf"manifest\.json: {reason}"):
        read_identity(tmp_path / "run")


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run there \(no manifest\.json\)"):
        read_identity(tmp_path)


def test_it_loads_no_torch() -> None:
    code = "import sys, stream_grpo.identity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
