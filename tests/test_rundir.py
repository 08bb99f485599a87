"""What a run checks and writes before anything starts."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from curator.earlier import earlier_outcomes
from curator.errors import PoolError
from curator.pool import Pool
from curator.pool_features import TEXT_TABLE
from curator.schema import outcomes_to_batch
from stream_grpo.config import Config
from stream_grpo.config_file import load_run, parse
from stream_grpo.errors import CheckpointError, ConfigError, StreamGrpoError
from stream_grpo.identity import identity_hash
from stream_grpo.learner.layout import Layout, write_layout
from stream_grpo.make_model import new_model, new_tokenizer
from stream_grpo.parts_common import GUARDS_FILE, INTERVAL_HELDOUT_FILE, heldout_problems
from stream_grpo.parts_sampler import evaluation_shares
from stream_grpo.rundir import choose_heldout, held, load_prompts, prepare
from tests.curator.fakes import make_outcome


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    new_model().save_pretrained(path)
    new_tokenizer().save_pretrained(path)
    return path


def write_rows(path: Path, sums: list[tuple[int, int]], **more: str) -> Path:
    rows = [
        {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b), "verifier": "exact", **more} for a, b in sums
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configuration(tmp_path: Path, model_dir: Path, **sections: dict[str, Any]) -> Config:
    pool = write_rows(tmp_path / "pool.jsonl", [(a, 30) for a in range(10, 30)], domain="add-2")
    heldout = write_rows(tmp_path / "heldout.jsonl", [(a, 30) for a in range(10, 14)], domain="add-2")
    tree = {
        "model": {"path": str(model_dir), "max_length_tokens": 128},
        "run": {"name": "r", "root": str(tmp_path / "runs")},
        "pool": {"files": [str(pool)]},
        "evaluation": {"files": [str(heldout)], "num_problems": 3, "interval_problems": 2},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return parse(tree, "test")


def test_a_new_run_has_its_pool_its_held_out_problems_and_its_manifest(tmp_path: Path, model_dir: Path) -> None:
    said: list[str] = []
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=said.append)
    heldout = heldout_problems(config)
    assert len(heldout) == 3  # evaluation.num_problems
    ids = {problem.problem_id for problem in Pool.open(config.run_dir / "pool").problems()}
    # 20 problems, of which the 3 that are evaluated leave the pool by content.
    assert len(ids) == 17
    assert not ids & {problem.problem_id for problem in heldout}
    assert "3 problems are held out by content and leave the pool" in said
    manifest = json.loads((config.run_dir / "manifest.json").read_text())
    assert manifest["group_config_hash"]
    assert "model.safetensors" in manifest["model_sha256"]
    assert load_run(config.run_dir) == config


def test_the_source_of_an_environment_is_in_the_identity_of_its_run(tmp_path: Path, model_dir: Path) -> None:
    module = tmp_path / "counting_world.py"
    sections: dict[str, Any] = {
        "environment": {"name": "python:counting_world.Made", "max_steps": 1, "max_observation_tokens": 16},
        "rewards": {"function_dir": str(tmp_path)},
    }
    config = configuration(tmp_path, model_dir, **sections)
    for text in ("one", "two"):
        module.write_text(f"# {text}")
        prepare(config, resume=text == "two", say=lambda line: None)
    identities = json.loads((config.run_dir / "manifest.json").read_text())["identities"]
    one, two = (hashlib.sha256(f"# {text}".encode()).hexdigest()[:12] for text in ("one", "two"))
    assert [item["identity"]["environment"]["version"] for item in identities] == [one, two]


def test_a_run_starts_from_what_another_learned_or_says_what_is_wrong(tmp_path: Path, model_dir: Path) -> None:
    first = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    pool = Pool.open(first.run_dir / "pool")
    ids = pool.problem_ids
    pool.append_outcomes(outcomes_to_batch([make_outcome(i, problem_id) for i, problem_id in enumerate(ids[:5])]))
    pool.close()
    sections = {"run": {"name": "s"}, "curator": {"start_from": str(first.run_dir)}}
    second = prepare(configuration(tmp_path, model_dir, **sections), resume=False, say=lambda line: None)
    kept = Pool.open(second.run_dir / "pool")
    kept.become_writer()  # nobody holds it any more
    assert [outcome.problem_id for outcome in earlier_outcomes(kept)] == ids[:5]
    assert load_run(second.run_dir) == second
    nowhere = configuration(tmp_path, model_dir, run={"name": "t"}, curator={"start_from": str(tmp_path / "nowhere")})
    with pytest.raises(PoolError, match="nowhere: no pool there"):
        prepare(nowhere, resume=False, say=lambda line: None)
    assert sorted(path.name for path in first.run_dir.parent.iterdir()) == ["r", "s"]


def test_a_model_that_cannot_take_the_adapter_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    tokenizer, folder = new_tokenizer(), tmp_path / "gpt2"
    shape = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = configuration(tmp_path, folder, learner={"lora": {"rank": 2}})
    with pytest.raises(ConfigError, match="is a Conv1D, the head or no linear layer"):
        prepare(config, resume=False, say=lambda line: None)
    assert not config.run.root.exists()
    prepare(configuration(tmp_path, folder), resume=False, say=lambda line: None)


def test_a_resume_with_another_beginning_is_refused(tmp_path: Path, model_dir: Path) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    before = (config.run_dir / "config.toml").read_text()
    changed = load_run(config.run_dir, [f'curator.start_from="{tmp_path}"'])
    with pytest.raises(ConfigError, match=r"curator\.start_from = .*: a run keeps .*, from nowhere; leave it"):
        prepare(changed, resume=True, say=lambda line: None)
    assert (config.run_dir / "config.toml").read_text() == before


def test_numbers_of_texts_are_made_before_a_deadline_counts_once_and_where_they_are_read(
    tmp_path: Path, model_dir: Path
) -> None:
    said: list[str] = []
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=said.append)
    made = "curator.text_numbers = 32: made of 17 prompts in "
    assert sum(line.startswith(made) for line in said) == 1
    kept = Pool.open(config.run_dir / "pool").further_table(TEXT_TABLE)
    assert kept is not None
    assert kept.num_rows == 17  # 20 problems, of which 3 are held out
    # A run of which an earlier version has made the pool, and one that has them.
    shutil.rmtree(config.run_dir / "pool" / f"{TEXT_TABLE}.lance")
    for expected in (1, 0):
        said.clear()
        prepare(config, resume=True, say=said.append)
        assert sum(line.startswith(made) for line in said) == expected
    Pool.open(config.run_dir / "pool").become_writer()  # nobody holds it any more
    sections = {"run": {"name": "beta"}, "curator": {"estimator": "beta"}}
    without = prepare(configuration(tmp_path, model_dir, **sections), resume=False, say=lambda line: None)
    assert Pool.open(without.run_dir / "pool").further_table(TEXT_TABLE) is None


def test_a_run_that_is_there_is_not_overwritten(tmp_path: Path, model_dir: Path) -> None:
    config = configuration(tmp_path, model_dir)
    prepare(config, resume=False, say=lambda line: None)
    with pytest.raises(ConfigError, match=r"exists: choose another run.name, or go on with --resume"):
        prepare(config, resume=False, say=lambda line: None)


def test_a_resume_needs_no_problem_files_and_says_what_changed(tmp_path: Path, model_dir: Path) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    before = json.loads((config.run_dir / "manifest.json").read_text())
    (tmp_path / "pool.jsonl").unlink()
    (tmp_path / "heldout.jsonl").unlink()
    said: list[str] = []
    changed = load_run(config.run_dir, ["sampler.temperature=0.5", "run.num_steps=7"])
    prepare(changed, resume=True, say=said.append)
    assert said == [
        "changed: run.num_steps = 7 (was 100)",
        "changed: sampler.temperature = 0.5 (was 1.0)",
        "from step 0 on something else is optimised, see manifest.json: sampler.temperature",
    ]
    after = json.loads((config.run_dir / "manifest.json").read_text())
    # Sampling settings are part of what every group carries; the number of steps is not.
    assert after["group_config_hash"] != before["group_config_hash"]
    assert after["resumed"][0]["group_config_hash"] == after["group_config_hash"]
    assert load_run(config.run_dir).sampler.temperature == 0.5


def test_a_new_run_says_what_it_optimises_before_anything_starts(tmp_path: Path, model_dir: Path) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    manifest = json.loads((config.run_dir / "manifest.json").read_text())
    (only,) = manifest["identities"]
    assert only["from_step"] == 0
    assert only["sha256"] == identity_hash(only["identity"])
    assert only["identity"]["algo"]["preset"] == config.algo.preset
    assert only["identity"]["verifiers"] == {"exact": "1"}
    assert only["identity"]["contents"]["pool"] == manifest["pool_fingerprint"]
    assert only["identity"]["contents"].items() >= manifest["model_sha256"].items()


def test_a_resume_with_another_identity_adds_one_and_keeps_those_before(tmp_path: Path, model_dir: Path) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)

    def resume(*overrides: str) -> list[dict[str, Any]]:
        prepare(load_run(config.run_dir, overrides), resume=True, say=lambda line: None)
        identities: list[dict[str, Any]] = json.loads((config.run_dir / "manifest.json").read_text())["identities"]
        return identities

    begun = resume("run.num_steps=7")  # how long it goes on is no part of it
    assert len(begun) == 1
    (config.run_dir / "checkpoints" / "checkpoint-0.40").mkdir(parents=True)
    changed = resume("algo.mask_binary_kl=0.5")
    assert changed[:-1] == begun
    assert changed[-1]["from_step"] == 40
    assert changed[-1]["identity"]["algo"]["mask_binary_kl"] == 0.5
    assert resume() == changed
    # Back to what it was is a change too.
    assert [
        item["sha256"] for item in resume(f"algo.mask_binary_kl={begun[0]['identity']['algo']['mask_binary_kl']}")
    ] == [
        *(item["sha256"] for item in changed),
        begun[0]["sha256"],
    ]


def test_a_resume_with_another_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    manifest = config.run_dir / "manifest.json"
    plain = json.loads(manifest.read_text())
    plain["model_sha256"]["model.safetensors"] = "0"
    manifest.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="not the model that this run began with"):
        prepare(config, resume=True, say=lambda line: None)


def test_a_resume_with_other_ranks_is_said_and_with_another_kind_of_stage_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    engine = config.run_dir / "checkpoints" / "checkpoint-0.3" / "engine"
    engine.mkdir(parents=True)
    write_layout(engine, Layout(1, 1))
    prepare(load_run(config.run_dir), resume=True, say=lambda line: None)
    before = (config.run_dir / "config.toml").read_text()
    with pytest.raises(CheckpointError, match=r"checkpoint-0.3: .* num_ranks = 2 and zero_stage = 3 are set"):
        prepare(
            load_run(config.run_dir, ["learner.num_ranks=2", "learner.zero_stage=3"]),
            resume=True,
            say=lambda line: None,
        )
    assert (config.run_dir / "config.toml").read_text() == before
    said: list[str] = []
    prepare(load_run(config.run_dir, ["learner.num_ranks=2"]), resume=True, say=said.append)
    assert "checkpoint-0.3 is of other ranks, and cut anew for 2 before the first step" in said


def test_a_resume_with_another_adapter_than_that_of_the_checkpoint_is_refused(tmp_path: Path, model_dir: Path) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    engine = config.run_dir / "checkpoints" / "checkpoint-0.3" / "engine"
    engine.mkdir(parents=True)
    write_layout(engine, Layout(1, 1))
    with pytest.raises(CheckpointError, match=r"checkpoint-0.3: holds all weights .*rank = 8, alpha = 32 of all lin"):
        prepare(load_run(config.run_dir, ["learner.lora.rank=8"]), resume=True, say=lambda line: None)


def test_report_c36_another_pool_is_refused_on_resume(tmp_path: Path, model_dir: Path) -> None:
    """Neither other files nor another pool in the place of the run's own is taken up without a word."""
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    other = write_rows(tmp_path / "other.jsonl", [(a, 40) for a in range(10, 13)], domain="add-2")
    with pytest.raises(ConfigError, match=r"pool\.files = .*other\.jsonl.*: a run keeps the pool that was imported"):
        prepare(load_run(config.run_dir, [f'pool.files=["{other}"]']), resume=True, say=lambda line: None)
    shutil.rmtree(config.run_dir / "pool")
    Pool.create(config.run_dir / "pool", [*heldout_problems(config)]).close()
    with pytest.raises(ConfigError, match="not the pool that this run began with"):
        prepare(load_run(config.run_dir), resume=True, say=lambda line: None)


def test_report_c36_the_subset_is_the_same_after_a_resume_without_a_seed_being_given(
    tmp_path: Path, model_dir: Path
) -> None:
    """3 of 4 held-out problems are drawn; what was drawn, and with which seed, is in the run's folder."""
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    before = heldout_problems(config)
    resumed = load_run(config.run_dir)
    prepare(resumed, resume=True, say=lambda line: None)
    assert heldout_problems(resumed) == before
    assert resumed.run.seed == json.loads((config.run_dir / "manifest.json").read_text())["seed"]


def test_prompts_that_do_not_fit_are_named_and_too_many_are_refused(tmp_path: Path, model_dir: Path) -> None:
    said: list[str] = []
    # 64 tokens are left for a prompt; this one has 35 + 1 + 35 + 1.
    long = write_rows(tmp_path / "long.jsonl", [(10**34 + 1, 10**34)], domain="add-2")
    some = {"files": [str(tmp_path / "pool.jsonl"), str(long)]}
    config = prepare(configuration(tmp_path, model_dir, pool=some), resume=False, say=said.append)
    assert len(Pool.open(config.run_dir / "pool").problems()) == 17
    assert any("a prompt of 72 tokens, at most 64 fit" in line for line in said), said
    only = {"files": [str(long)], "max_refused_share": 0.5}
    with pytest.raises(ConfigError, match=r"1 of 1 prompts cannot be sampled, .*pool\.max_refused_share allows 50%"):
        prepare(configuration(tmp_path, model_dir, pool=only, run={"name": "s"}), resume=False, say=lambda line: None)


def test_an_unknown_verifier_is_refused_before_anything_starts(tmp_path: Path, model_dir: Path) -> None:
    config = configuration(tmp_path, model_dir)
    rows = (tmp_path / "pool.jsonl").read_text().replace('"exact"', '"exakt"')
    (tmp_path / "pool.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match="no verifier is called 'exakt'; known: choice, code, environment, exact"):
        prepare(config, resume=False, say=lambda line: None)
    assert not (tmp_path / "runs").exists()


def test_missing_files_are_all_named(tmp_path: Path, model_dir: Path) -> None:
    config = configuration(tmp_path, model_dir, model={"path": "nowhere"}, pool={"files": ["none.jsonl"]})
    with pytest.raises(ConfigError, match=r"(?s)model\.path = .*nowhere: no such folder.*pool\.files: .*none\.jsonl"):
        prepare(config, resume=False, say=lambda line: None)


def test_a_damaged_model_is_refused_before_anything_is_written(tmp_path: Path, model_dir: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match=r"model\.safetensors: 1000 bytes"):
        prepare(configuration(tmp_path, broken), resume=False, say=lambda line: None)
    assert not (tmp_path / "runs").exists()


def test_columns_of_other_names_are_mapped(tmp_path: Path, model_dir: Path) -> None:
    rows = [{"task": f"{a}+30=", "gold": str(a + 30)} for a in range(10, 20)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool: dict[str, Any] = {"files": [str(tmp_path / "odd.jsonl")], "verifier": "exact"}
    none: dict[str, Any] = {"files": []}
    unmapped = configuration(tmp_path, model_dir, pool=pool, evaluation=none)
    with pytest.raises(ConfigError, match=r'10 of 10 rows refused.*\n.*set mapping\.prompt = "<column>" to name it'):
        prepare(unmapped, resume=False, say=lambda line: None)
    pool["mapping"] = {"prompt": "task", "answer": "gold"}
    said: list[str] = []
    config = prepare(configuration(tmp_path, model_dir, pool=pool, evaluation=none), resume=False, say=said.append)
    assert len(Pool.open(config.run_dir / "pool").problems()) == 10
    assert "no evaluation before and after training: evaluation.files names no file" in said


def test_a_pool_of_which_nothing_is_left_says_why(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"q": "1+1=", "a": "2"}\n')
    every = {"files": [str(tmp_path / "odd.jsonl")], "max_refused_share": 1.0}
    with pytest.raises(ConfigError, match=r"odd\.jsonl: all 1 rows are refused:\n1 refused: no column for the prompt"):
        prepare(configuration(tmp_path, model_dir, pool=every), resume=False, say=lambda line: None)
    held_out = {"files": [str(tmp_path / "heldout.jsonl")]}
    four = {"num_problems": 4}
    with pytest.raises(ConfigError, match=r"all 4 problems stand in evaluation\.files too and are held out"):
        prepare(configuration(tmp_path, model_dir, pool=held_out, evaluation=four), resume=False, say=lambda line: None)


def test_prompts_with_tokens_that_the_model_has_not_are_refused(tmp_path: Path, model_dir: Path) -> None:
    broken = tmp_path / "grown"
    shutil.copytree(model_dir, broken)
    tokenizer = new_tokenizer()
    tokenizer.add_tokens(["1"])  # in the vocabulary already
    tokenizer.add_tokens(["+3"])
    tokenizer.save_pretrained(broken)
    with pytest.raises(
        ConfigError, match=r"cannot be sampled, first: .*: token id 18, but the model's vocab_size = 18"
    ):
        prepare(configuration(tmp_path, broken), resume=False, say=lambda line: None)


@pytest.mark.parametrize(
    ("name", "error"),
    [("manifest.json", ConfigError), ("branches.json", CheckpointError), ("index.json", CheckpointError)],
)
def test_a_resume_names_a_damaged_file(
    tmp_path: Path, model_dir: Path, name: str, error: type[StreamGrpoError]
) -> None:
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    path = config.run_dir / ("checkpoints" if name == "index.json" else "") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    with pytest.raises(error, match=rf"{name}: empty.*put back a copy of the file"):
        prepare(config, resume=True, say=lambda line: None)


def test_more_samplers_than_memory_holds_are_refused(tmp_path: Path, model_dir: Path) -> None:
    many = {"num_samplers": 4096, "kv_cache_bytes": 1 << 40}  # 4 EiB
    with pytest.raises(
        ConfigError, match=r"sampler\.num_samplers = 4096: .*this machine has \d+ MiB; use num_samplers ="
    ):
        prepare(configuration(tmp_path, model_dir, sampler=many), resume=False, say=lambda line: None)
    assert not (tmp_path / "runs" / "r").exists()


def test_a_run_belongs_to_one_process(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run there \(no config\.toml\)"), held(tmp_path):
        pass
    config = prepare(configuration(tmp_path, model_dir), resume=False, say=lambda line: None)
    with held(config.run_dir), pytest.raises(ConfigError, match="another process runs this run"), held(config.run_dir):
        pass
    with held(config.run_dir):  # free again
        pass


def test_evaluations_during_training_have_the_first_problems_of_the_headlines_domains(
    tmp_path: Path, model_dir: Path
) -> None:
    rows = [write_rows(tmp_path / f"{name}.jsonl", sums, domain=name).read_text() for name, sums in (
        ("add-1", [(a, 3) for a in range(9)]),
        ("add-2", [(a, 30) for a in range(10, 13)]),
        ("add-3", [(a, 300) for a in range(100, 105)]),
    )]  # fmt: skip
    (tmp_path / "many.jsonl").write_text("".join(rows))
    evaluation = {"files": [str(tmp_path / "many.jsonl")], "domains": ["add-2", "add-3"]}

    def chosen(name: str, num_problems: int, interval_problems: int) -> tuple[list[str], list[str]]:
        section = {**evaluation, "num_problems": num_problems, "interval_problems": interval_problems}
        config = configuration(tmp_path, model_dir, run={"name": name}, evaluation=section)
        config = prepare(config, resume=False, say=lambda line: None)
        around, during = heldout_problems(config), heldout_problems(config, INTERVAL_HELDOUT_FILE)
        ids = {problem.problem_id for problem in Pool.open(config.run_dir / "pool").problems()}
        assert not ids & {problem.problem_id for problem in (*around, *during)}
        return [p.problem_id for p in around], [p.domain for p in during]

    around, during = chosen("a", 5, 7)
    # Taken in turns: 3 of add-2 are all there are, and 4 of the 5 of add-3.
    assert during == ["add-2", "add-3", "add-2", "add-3", "add-2", "add-3", "add-3"]
    # A larger choice begins as the smaller one, whatever the other has.
    assert chosen("b", 9, 1)[0][:5] == around
    assert chosen("c", 0, 2) == ([], ["add-2", "add-3"])


def test_problems_of_guards_are_held_out_and_kept_under_the_names_of_their_guards(
    tmp_path: Path, model_dir: Path
) -> None:
    guard = write_rows(tmp_path / "guard.jsonl", [(a, 30) for a in range(12, 18)], domain="add-2")
    guards = [{"name": "adds", "files": [str(guard)], "num_problems": 4}]
    said: list[str] = []
    config = prepare(
        configuration(tmp_path, model_dir, evaluation={"guards": guards, "num_engines": 2}),
        resume=False,
        say=said.append,
    )
    guarded = [problem.problem_id for problem in heldout_problems(config, GUARDS_FILE)]
    assert len(guarded) == 4
    assert all(problem_id.startswith("guard/adds/") for problem_id in guarded)
    trained = {problem.problem_id for problem in Pool.open(config.run_dir / "pool").problems()}
    assert not trained & {problem_id.removeprefix("guard/adds/") for problem_id in guarded}
    # 3 held-out problems and 4 of the guard, dealt out to two engines.
    assert [len(share) for share in evaluation_shares(config)] == [4, 3]
    other = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"guards": ()})})
    with pytest.raises(ConfigError, match=r"evaluation\.guards: not those that this run began with"):
        prepare(other, resume=True, say=said.append)


def test_a_held_out_problem_that_looks_like_one_of_a_guard_is_refused(tmp_path: Path, model_dir: Path) -> None:
    config = configuration(tmp_path, model_dir)
    row = {"id": "guard/adds/1", "prompt": "1+2=", "answer": "3", "verifier": "exact"}
    with (tmp_path / "heldout.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"problem 'guard/adds/1': ids that begin with 'guard/' are those of guards"):
        prepare(config, resume=False, say=lambda line: None)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "file").touch()
    config = configuration(tmp_path, model_dir, run={"root": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=r"run\.root = .*file: no folder can be made there"):
        prepare(config, resume=False, say=lambda line: None)


def test_runs_of_several_seeds_hold_out_the_same_problems_where_they_are_told_to(
    tmp_path: Path, model_dir: Path
) -> None:
    many = write_rows(tmp_path / "many.jsonl", [(a, 50) for a in range(10, 60)], domain="add-2")
    prompts = load_prompts(configuration(tmp_path, model_dir))

    def chosen(seed: int, problems_seed: int | None) -> set[str]:
        section = {"files": [str(many)], "num_problems": 10, "problems_seed": problems_seed}
        config = configuration(tmp_path, model_dir, run={"seed": seed}, evaluation=section)
        return {problem.problem_id for problem in choose_heldout(config, prompts, lambda line: None).around}

    assert chosen(1, None) != chosen(2, None)
    assert chosen(1, 5) == chosen(2, 5) == chosen(5, None)


def test_a_grammar_that_the_model_cannot_write_is_refused(tmp_path: Path, model_dir: Path) -> None:
    environment = {"name": "calculator", "max_steps": 1, "max_observation_tokens": 8, "grammar": True}
    config = configuration(tmp_path, model_dir, environment=environment, sampler={"max_new_tokens": 32})
    # Its tokens are the characters of sums: no brace, no letter.
    with pytest.raises(ConfigError, match="the mark '<tool_call>' of a call is read back as ''"):
        prepare(config, resume=False, say=lambda line: None)
    assert not config.run_dir.exists()
    refused = config
    plain = {**environment, "options": {"open": "=", "close": "+", "body": "plain"}}
    config = configuration(tmp_path, model_dir, environment=plain, sampler={"max_new_tokens": 32})
    prepare(config, resume=False, say=lambda line: None)
    assert config.run_dir.exists()
    # A start that is refused leaves no trace in the run.
    before = {name: (config.run_dir / name).read_bytes() for name in ("manifest.json", "config.toml")}
    with pytest.raises(ConfigError, match="the mark '<tool_call>'"):
        prepare(refused, resume=True, say=lambda line: None)
    assert {name: (config.run_dir / name).read_bytes() for name in before} == before
