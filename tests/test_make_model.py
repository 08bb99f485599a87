"""Tests of the small model's folder; how well a fully trained one adds is measured, not tested here."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from curator.ingest.rows import RowReader
from stream_grpo import arithmetic, make_model
from stream_grpo.environments.protocol import End
from stream_grpo.environments.records import Records
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.messages import ProblemRow

TINY: dict[str, Any] = {"steps": 2, "batch_size": 4, "pool_counts": {1: 5, 2: 5}, "held_out_counts": {2: 5, 3: 5}}


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "small"
    make_model.make_model(out, **TINY)
    return out


def test_a_place_that_can_hold_no_folder_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder can be made there"):
        make_model.make_model(tmp_path / "file" / "out", report=lambda line: pytest.fail(line))


def test_the_same_arguments_make_the_same_bytes(made: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # what the caller did with torch's generator has no influence
    make_model.make_model(tmp_path / "again", **TINY)
    assert content(tmp_path / "again") == content(made)


def test_the_model_of_the_records_has_its_own_vocabulary_and_problems_that_a_pool_takes(tmp_path: Path) -> None:
    counts: dict[str, Any] = {"pool_counts": {"set": 3, "restore": 3}, "held_out_counts": {"move": 2}}
    manifest = make_model.make_model(tmp_path / "records", steps=2, batch_size=4, task="records", **counts)
    assert manifest["settings"]["task"] == "records"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "records" / "model")
    assert model.config.vocab_size == len(make_model.vocabulary_of("records"))
    lines = (tmp_path / "records" / "pool.jsonl").read_text().splitlines()
    assert len(lines) == 6
    for line in lines:
        problem = RowReader().read(json.loads(line)).problem
        row = ProblemRow(
            problem_id=problem.problem_id, answer=problem.answer, verifier=problem.verifier, extra=problem.extra
        )
        database = Records(row, open="{", close="}", body="plain")
        database.reset(0, None)
        for statement in problem.answer.split("; "):
            database.step(f"{{{statement}}}")
        assert database.step("done").end is End.SUCCESS


def test_another_seed_makes_another_model_and_pool(made: Path, tmp_path: Path) -> None:
    make_model.make_model(tmp_path / "other", seed=1, **TINY)
    for name in ("model/model.safetensors", "pool.jsonl", "heldout.jsonl"):
        assert content(tmp_path / "other")[name] != content(made)[name]


def test_the_caller_keeps_its_generator_and_threads(tmp_path: Path) -> None:
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    make_model.make_model(tmp_path / "small", **TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads


def test_the_manifest_holds_settings_and_the_hash_of_every_file(made: Path) -> None:
    manifest = json.loads((made / make_model.MANIFEST).read_text())
    assert (manifest["settings"]["seed"], manifest["settings"]["steps"]) == (0, 2)
    files = content(made)
    del files[make_model.MANIFEST]
    assert manifest["files"] == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert {"model/config.json", "model/model.safetensors", "pool.jsonl", "heldout.jsonl"} <= files.keys()


def test_nothing_is_done_where_it_is_already_made(made: Path) -> None:
    before, lines = {p: p.stat().st_mtime_ns for p in made.rglob("*")}, list[str]()
    manifest = make_model.make_model(made, **TINY, report=lines.append)
    assert manifest == json.loads((made / make_model.MANIFEST).read_text())
    assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == before
    assert lines == [f"{made}: already made"]


def test_other_settings_are_refused_by_name(made: Path) -> None:
    with pytest.raises(ConfigError, match="made with steps = 2, not 3: remove it or choose another folder"):
        make_model.make_model(made, **{**TINY, "steps": 3})


def test_a_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    make_model.make_model(tmp_path / "small", **TINY)
    (tmp_path / "small" / "pool.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"pool\.jsonl is missing or not as it was made"):
        make_model.make_model(tmp_path / "small", **TINY)


def test_a_folder_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no readable make_model\.json"):
        make_model.make_model(tmp_path, **TINY)
    assert content(tmp_path) == {"notes.txt": b"mine"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    make_model.make_model(tmp_path / "a" / "b", **TINY)  # parents are made too
    (tmp_path / "empty").mkdir()
    make_model.make_model(tmp_path / "empty", **TINY)
    assert content(tmp_path / "empty") == content(tmp_path / "a" / "b")


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than population"):
        make_model.make_model(tmp_path / "small", **{**TINY, "pool_counts": {2: 10_000}})
    assert list(tmp_path.iterdir()) == []


def test_the_folder_loads_as_a_hugging_face_model(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == 256
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied


def test_an_untied_head_is_saved_apart(tmp_path: Path) -> None:
    make_model.make_model(tmp_path / "small", **TINY, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small" / "model")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_the_saved_tokenizer_is_the_one_trained_with(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = arithmetic.prompt_of(57, 68) + arithmetic.response_of(57, 68, random.Random(0))
    ids = [make_model.VOCABULARY[character] for character in text]
    # The model never saw a token before the prompt, so none may be added.
    assert tokenizer(text).input_ids == tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_training_covers_the_response_and_its_end_alone_and_no_held_out_sum() -> None:
    token_ids_BT, targets_BT = make_model._batch(random.Random(0), 200, 0.0)
    characters = {i: token for token, i in make_model.VOCABULARY.items()}
    for ids, targets in zip(token_ids_BT.tolist(), targets_BT.tolist(), strict=True):
        prompt, _, response = "".join(characters[i] for i in ids).partition("<eos>")[0].partition("=")
        trained = "".join(characters[i] for i in targets if i != make_model.IGNORED)
        assert trained == response + "<eos>"
        # Each target is the id that follows its position.
        assert all(after == t for after, t in zip(ids[1:], targets, strict=False) if t != make_model.IGNORED)
        a, b = map(int, prompt.split("+"))
        assert not arithmetic.is_held_out(a, b)
