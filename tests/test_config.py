"""What the configuration refuses, and with which words."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import load, parse, to_toml
from stream_grpo.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def tree(**sections: dict[str, object]) -> dict[str, object]:
    return {"model": {"path": "m"}, **sections}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    assert load(path).run.num_steps > 0


def test_the_resolved_configuration_reads_back_equal() -> None:
    mapping = {"prompt": "task", "answer": "the target"}
    form = {"verifier": "regex", "role": "gate", "columns": {"pattern": "<a b>", "a key": [1, 2]}}
    parts = {"form": form, "answer": {"verifier": "python:my.reward"}}
    composed = {"components": parts, "costs": {"tokens": {"weight": 0.5}}, "bounds": [-1, 1], "gate_reward": -2}
    rewards = {"compose": {"careful": composed}, "hidden": {"verifier": "math"}, "shaping": {"overlong_tokens": 8}}
    sampler = {"temperature": 0.7, "max_restarts": 0}
    config = parse(tree(pool={"mapping": mapping}, sampler=sampler, rewards=rewards), "x")
    assert parse(tomllib.loads(to_toml(config)), "x") == config
    assert list(config.rewards.compose["careful"].components) == ["form", "answer"]


@pytest.mark.parametrize(
    ("rewards", "hint"),
    [
        (
            {"compose": {"a": {"components": {"x": {"verifer": "math"}}}}},
            "did you mean rewards.compose.a.components.x.v",
        ),
        ({"compose": {"a": {"bound": [0, 1]}}}, "did you mean rewards.compose.a.bounds?"),
        ({"hidden": {"verifer": "math"}}, "did you mean rewards.hidden.verifier?"),
        ({"shaping": {"truncate": "keep"}}, "did you mean rewards.shaping.truncated?"),
        ({"shaping": {"overlong_tokens": 65}}, "at most sampler.max_new_tokens = 64 can be used"),
        (
            {
                "compose": {name: {"components": {"x": {"verifier": "math"}}, "replaces": ["exact"]} for name in "ab"},
            },
            "compose.a and compose.b both replace 'exact'",
        ),
        (
            {
                "time_limit_s": 30,
                "compose": {"a": {"components": {"x": {"verifier": "math", "tail_above": 1, "tail_verifier": "code"}}}},
            },
            "use more than 120",
        ),
    ],
)
def test_parts_of_rewards_are_refused_by_name(rewards: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(tree(rewards=rewards), "x")
    assert hint in str(refused.value)


def test_c52_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown key stream\.max_policy_ago: did you mean stream\.max_policy_age\?"):
        parse(tree(stream={"max_policy_ago": 2}), "x")


def test_c52_an_unknown_key_without_a_near_name_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown key cluster\.qqqq: known: address"):
        parse(tree(cluster={"qqqq": 2}), "x")


@pytest.mark.parametrize(
    ("section", "name", "hint"),
    [
        # A setting without its section, or in another one, is looked for everywhere.
        ("group_size", 8, "did you mean sampler.group_size?"),
        ("mapping", {"prompt": "q"}, "did you mean pool.mapping?"),
        ("steps", 3, "did you mean run.num_steps?"),
        ("learner", {"temperature": 1.0}, "did you mean sampler.temperature?"),
        # What is near to nothing is taken for nothing.
        ("problems", {"files": []}, "known: alarms, algo, buffer"),
        ("x", 3, "known: alarms, algo, buffer"),
        ("run", {"pool": 2}, "known: max_generated_tokens, name, num_steps, root, seed"),
    ],
)
def test_c52_a_hint_is_given_only_where_it_makes_sense(section: str, name: object, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(tree(**{section: name}), "x")  # type: ignore[arg-type]
    assert hint in str(refused.value)


def test_a_value_of_another_kind_is_told_in_words_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"pool\.files = 'a\.jsonl': expected a list, in square brackets"):
        parse(tree(pool={"files": "a.jsonl"}), "x")
    with pytest.raises(ConfigError, match=r"sampler = 3: expected a section with settings of its own"):
        parse(tree(sampler=3), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        ("learner", "adam_betas", [0.9, 1.0], "less than 1"),
        ("learner", "adam_betas", [-0.1, 0.9], "greater than or equal to 0"),
        ("sampler", "num_samplers", 4097, "less than or equal to 4096"),
        ("rewards", "functions", ["os.system"], "match pattern"),
        ("tracking", "wandb_project", "team/project", "match pattern"),
        ("tracking", "wandb_project", "", "match pattern"),
        ("run", "seed", 1 << 63, "less than 9223372036854775808"),
        ("pool", "mapping", {"gold": "a"}, "'prompt', 'answer', 'verifier'"),
    ],
)
def test_values_out_of_bounds_are_refused(section: str, name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(tree(**{section: {name: value}}), "x")


def test_c52_an_unknown_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key lerner: did you mean learner"):
        parse(tree(lerner={}), "x")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"sampler": {"group_size": 1}}, "a group needs at least 2"),
        ({"curator": {"choice": "worth", "exploration": 0.6, "unseen_share": 0.5}}, "their sum is at most 1"),
        (
            {"curator": {"group_sizes": [8, 4]}},
            r"group_sizes = \[8, 4\]: expected .* sampler.group_size = 8 among them, as \[4, 8\]",
        ),
        ({"curator": {"group_sizes": [4, 16]}}, r"sampler.group_size = 8 among them, as \[4, 8, 16\]"),
        ({"curator": {"group_sizes": [1, 8]}}, r"from 2 that ascend, .* as \[8\]"),
        (
            {"curator": {"group_sizes": [8, 32]}, "sampler": {"max_num_seqs": 16}},
            "must fit sampler.max_num_seqs = 16; raise max_num_seqs, or leave the largest out",
        ),
        (
            {"curator": {"group_sizes": [4, 8]}, "algo": {"preset": "ppo"}},
            r"group_sizes = \[4, 8\] with algo.advantage = gae: .* the smallest size would always pay best",
        ),
        (
            {"curator": {"group_sizes": [4, 8]}, "environment": {"name": "e", "branch_share": 0.5}},
            "with environment.branch_share = 0.5: the rollouts of a branching group share their beginning",
        ),
        (
            # 4 groups of at least 4 in 2 updates.
            {
                "curator": {"group_sizes": [4, 8]},
                "stream": {"groups_per_step": 4},
                "learner": {"num_ranks": 9, "num_minibatches": 2},
            },
            "num_ranks = 9: an optimizer update has 8 sequences .* use at most 8",
        ),
        ({"stream": {"groups_per_step": 6}, "learner": {"num_minibatches": 4}}, "4 does not divide .* = 6"),
        (
            # 4 x 4 sequences in 2 updates.
            {
                "sampler": {"group_size": 4},
                "stream": {"groups_per_step": 4},
                "learner": {"num_ranks": 9, "num_minibatches": 2},
            },
            "num_ranks = 9: an optimizer update has 8 sequences .* use at most 8",
        ),
        (
            {"learner": {"num_ranks": 2, "num_gpus": 0.5}},
            "num_gpus = 0.5: NCCL wants one GPU for each rank; use num_gpus = 1, or 0",
        ),
        ({"weights": {"transfer": "nccl"}}, "NCCL goes from GPU to GPU.* use files, or num_gpus of 1"),
        (
            {"weights": {"transfer": "nccl"}, "learner": {"num_gpus": 1}, "sampler": {"num_gpus": 1}},
            "transfer = nccl with sampler.engine = in_process: .* use engine = 'async'",
        ),
        (
            {
                "weights": {"transfer": "nccl"},
                "learner": {"num_gpus": 1},
                "sampler": {"num_gpus": 1, "engine": "async"},
                "cluster": {"address": "a:1", "node_root": "/scratch"},
            },
            "transfer = nccl with cluster.node_root: manifests and probes go by files",
        ),
        (
            {"algo": {"preset": "ppo"}, "learner": {"num_ranks": 2}},
            "num_ranks = 2 with algo.advantage = gae: the critic is of one rank",
        ),
        ({"algo": {"preset": "ppo"}, "learner": {"zero_stage": 3}}, "use zero_stage = 2 or less"),
        (
            {"learner": {"lora": {"target_modules": ["q_proj"]}}},
            "with learner.lora.rank = 0: without a rank there is no",
        ),
        (
            {"learner": {"lora": {"rank": 8, "target_modules": ["lm_head"]}}},
            "target_modules: 'lm_head' gets no adapter",
        ),
        (
            {"algo": {"preset": "ppo"}, "learner": {"lora": {"rank": 8}}},
            "rank = 8 with algo.advantage = gae: the critic",
        ),
        (
            {
                "algo": {
                    "kl": "k3",
                    "kl_place": "loss",
                    "kl_weight": 0.1,
                    "kl_reference": "ema",
                    "kl_ema_decay": 0.9,
                    "regularize_without_signal": True,
                },
                "learner": {"lora": {"rank": 8}},
            },
            "kl_reference = ema with learner.lora.rank = 8: the reference is the model without its adapter",
        ),
        ({"algo": {"preset": "ppo"}, "stream": {"too_old": "baseline_only"}}, "too_old = baseline_only with algo.adv"),
        (
            {
                "model": {"path": "m", "max_length_tokens": 8192, "max_prompt_tokens": 7000},
                "sampler": {"max_new_tokens": 2000},
            },
            "= 9000 > model.max_length_tokens = 8192",
        ),
        (
            {"model": {"path": "m", "max_length_tokens": 2000}, "sampler": {"max_new_tokens": 2000}},
            "no room for a prompt .* at most 1999",
        ),
        ({"sampler": {"group_size": 16, "max_num_seqs": 8}}, "must fit sampler.max_num_seqs = 8"),
        (
            {"stream": {"sample_deadline_s": 20.0}, "rewards": {"time_limit_s": 10.0}},
            "sample_deadline_s = 20: .* use more than 20",
        ),
        ({"stream": {"publish_interval": 6, "max_policy_age": 4}}, "at most max_policy_age \\+ 1 = 5"),
        (
            {"stream": {"selector": "freshest_first"}},
            "selector = freshest_first with stream.too_old = wait: any other order .* use another too_old, as drop",
        ),
        ({"stream": {"too_old": "drop", "max_policy_age": 0}}, "too_old = drop .* the synchronous loop waits"),
        ({"stream": {"max_uses": 2, "max_policy_age": 0}}, "max_uses = 2 .* every group is 1 step old"),
        ({"stream": {"max_uses": 2, "groups_per_step": 3}}, "reuse_share = 0.25 .* = 3 is less than one group"),
        (
            {"stream": {"max_uses": 2, "groups_per_step": 4, "reuse_share": 0.75}, "learner": {"num_minibatches": 4}},
            "no more than its 1 fresh groups, too few for learner.num_minibatches = 4",
        ),
        ({"stream": {"reuse_share": 1.0}}, "less than 1"),
        (
            {"stream": {"uniform_group_version": True}},
            "with weights.on_update = keep: .* use on_update = finish or restart",
        ),
        ({"sampler": {"top_p": 0.9}}, "smaller support"),
        ({"sampler": {"top_k": 10}}, "smaller support"),
        ({"algo": {"preset": "icepop", "correction_low": 3.0}}, "1 must lie between"),
        ({"algo": {"preset": "rloo", "cap": 5.0}}, "cap = 5.0 would do nothing: it is read with weight = cispo"),
        ({"algo": {"preset": "dapoo"}}, "did you mean 'dapo'"),
    ],
)
def test_c53_impossible_sizes_are_refused_with_the_true_reason(sections: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(tree(**sections), "x")  # type: ignore[arg-type]


def test_an_error_names_file_key_value_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[model]\npath = "m"\n[learner]\nlearning_rate = -1\n')
    with pytest.raises(ConfigError, match=r"a\.toml: learner\.learning_rate = -1: .*greater than or equal to 0"):
        load(path)


def test_overrides_apply_and_are_checked_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[model]\npath = "m"\n')
    config = load(path, ["run.name=b", "learner.learning_rate=1e-3", "evaluation.domains=['add-2']"])
    assert (config.run.name, config.learner.learning_rate, config.evaluation.domains) == ("b", 1e-3, ("add-2",))
    with pytest.raises(ConfigError, match=r"unknown key run\.nmae: did you mean run\.name\?"):
        load(path, ["run.nmae=b"])
    with pytest.raises(ConfigError, match="expected key=value"):
        load(path, ["run.name"])


def test_missing_files_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        load(tmp_path / "bad.toml")


def test_the_configuration_is_frozen() -> None:
    config = parse(tree(), "x")
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "module", ["stream_grpo.config", "stream_grpo.types", "stream_grpo.cli", "stream_grpo.buffer.process"]
)
def test_light_modules_load_no_heavy_library(module: str) -> None:
    heavy = ("torch", "vllm", "ray", "deepspeed", "transformers")
    code = f"import {module}, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_field_has_its_sentence() -> None:
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, name


def test_the_share_of_places_for_reuse_is_rounded_down() -> None:
    def places(**stream: object) -> int:
        return parse(tree(stream=stream), "x").stream.reused_per_step  # type: ignore[arg-type]

    assert (places(groups_per_step=30), places(groups_per_step=30, max_uses=2)) == (0, 7)  # 7.5
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert places(groups_per_step=100, max_uses=2, reuse_share=0.29) == 29


JUDGE = {"kind": "chat", "url": "http://h:1/v1/chat/completions", "model": "m"}


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"url": "h:1/x"}, r"rewards\.http\.j\.url = 'h:1/x': expected a whole address"),
        ({"url": "http://me:secret@h/v1/chat/completions"}, "without user, password"),
        ({"url": "http://h/v1"}, r"rewards\.http\.j: url = 'http://h/v1': expected the address of a chat endpoint"),
        ({"temprature": 1}, r"unknown key rewards\.http\.j\.temprature: did you mean rewards\.http\.j\.temperature\?"),
        ({"kind": "chatt"}, r"rewards\.http\.j: .*'chat', 'score', 'process', 'pairwise'"),
        ({"prompt": "{prompt}"}, r"prompt: \{response\} does not stand in it"),
        ({"prompt": "{response} {first}"}, r"prompt: \{first\} is not filled in here; known: .*row\.NAME"),
        ({"low": 10}, "low = 10, high = 10: the best score must be above the worst"),
        ({"pass_score": 11}, "pass_score = 11: outside the scale, 0 to 10"),
        ({"read": "json"}, "field belongs to read = 'json', which needs it"),
        ({"field": "score"}, "field belongs to read = 'json'"),
        ({"read": "pattern", "pattern": "("}, r"rewards\.http\.j\.pattern = '\(': not a regular expression"),
        ({"read": "pattern", "pattern": "a*"}, "finds something everywhere"),
        ({"read": "pattern", "pattern": "a"}, "expected exactly one group"),
        ({"labels": {"A": 1}}, "labels: a last number is no word"),
        ({"kind": "process", "split": "pattern"}, r"unknown key rewards\.http\.j\.|split_pattern belongs to split"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(judge: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"model": {"path": "m"}, "rewards": {"http": {"j": {**JUDGE, **judge}}}}, "test")


def test_judges_survive_the_way_through_a_file() -> None:
    judges = {
        "j": {**JUDGE, "body": {"chat_template_kwargs": {"enable_thinking": False}}, "read": "pattern"}
        | {"pattern": r"\[\[(\w+)\]\]", "labels": {"very good": 10.0}},
        "p-1": {"kind": "process", "url": "http://h/", "aggregate": "weighted", "step_weight": "length"},
        "2": {**JUDGE, "kind": "pairwise"},
    }
    config = parse({"model": {"path": "m"}, "rewards": {"http": judges}}, "test")
    assert parse(tomllib.loads(to_toml(config)), "test") == config
