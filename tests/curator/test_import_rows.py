"""Ids, pass rates and arrays: what an import decides once it has the rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator.errors import PoolError, RowRefused
from curator.ingest.fields import FROM_CONTENT
from curator.ingest.json_array import elements
from curator.ingest.pass_rate import PassRate, parse_pass_rate
from curator.ingest.report import import_files
from curator.ingest.rows import RowReader, to_problem
from curator.schema import OFFLINE_PASS_RATE


def verl(index: Any, prompt: str, split: str | None = None) -> dict[str, Any]:
    info = {"index": index} if split is None else {"index": index, "split": split}
    return {"prompt": prompt, "data_source": "s", "reward_model": {"ground_truth": "2"}, "extra_info": info}


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_c45_two_prompts_a_hundred_times_each_are_two_problems(tmp_path: Path) -> None:
    path = lines(tmp_path / "copies.jsonl", [verl(i % 2, f"{i % 2}+1?") for i in range(200)])
    report = import_files([path])
    assert (report.num_rows, report.num_kept, report.num_duplicates) == (200, 2, 198)
    assert [problem.problem_id for problem in report.problems] == ["s/0", "s/1"]
    assert f"{path}:3 = {path}:1" in report.text()


def test_c45_one_index_with_two_contents_is_an_error_that_names_both_lines_and_what_to_do(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [verl(0, "1+1?"), verl(0, "0+2?"), verl(0, "2+0?")])
    with pytest.raises(PoolError, match=r"a\.jsonl:2: id 's/0' is also the id of .*a\.jsonl:1, whose.*\(and 1 more\)"):
        import_files([path])
    assert import_files([path], mapping={"problem_id": FROM_CONTENT}).num_kept == 3


def test_one_index_in_two_splits_is_two_problems(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [verl(0, "1+1?", "train"), verl(0, "0+2?", "test")])
    assert [p.problem_id for p in import_files([path]).problems] == ["s/train/0", "s/test/0"]


@pytest.mark.parametrize(
    ("scale", "of", "value", "share"),
    [
        ("0..1", "success", 0.25, 0.25),
        ("0..1", "failure", 0.25, 0.75),
        ("0..100", "success", "25", 0.25),
        ("k/n", "success", "5/8", 0.625),
        ("k/n", "failure", "5/8", 0.375),
        ("0..16", "failure", 16, 0.0),
        ("0..1", "success", "n/a", None),
        ("0..1", "success", None, None),
        ("0..1", "success", float("nan"), None),
        ("k/n", "success", "0/0", None),
    ],
)
def test_a_pass_rate_is_read_by_its_stated_scale_and_direction(scale: str, of: str, value: Any, share: Any) -> None:
    assert parse_pass_rate("rate", scale, of).read(value) == share


@pytest.mark.parametrize(
    ("scale", "value", "reason"),
    [
        ("0..1", 40, "off the stated scale"),
        ("0..100", -1, "off the stated scale"),
        ("k/n", "9/8", "off the stated scale"),
        ("k/n", 0.5, "not of the form k/n"),
        ("0..1", "high", "is no number"),
        ("0..1", True, "is no number"),
    ],
)
def test_a_pass_rate_that_does_not_fit_its_scale_refuses_the_row(scale: str, value: Any, reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        parse_pass_rate("rate", scale, "success").read(value)


@pytest.mark.parametrize(
    ("scale", "of", "message"),
    [
        (None, "success", "say what it means with --pass-rate-scale"),
        ("0..1", None, "say what it means with --pass-rate-scale"),
        ("0..1", "passes", "expected success or failure"),
        ("percent", "success", "expected LOW..HIGH"),
        ("1..0", "success", "expected LOW..HIGH"),
    ],
)
def test_a_pass_rate_without_scale_or_direction_is_not_taken(scale: Any, of: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pass_rate("rate", scale, of)


def test_the_pass_rate_of_a_row_stands_in_extra_under_its_own_name() -> None:
    reader = RowReader(default_verifier="v", pass_rate=PassRate(column="x.m-1.5B", of="failure", high=16))
    read = reader.read({"prompt": "?", "answer": "2", "x": {"m-1.5B": 4}})
    assert read.problem.extra == {"x": {"m-1.5B": 4}, OFFLINE_PASS_RATE: 0.75}
    assert read.used[OFFLINE_PASS_RATE] == "x.m-1.5B"
    assert OFFLINE_PASS_RATE not in reader.read({"prompt": "?", "answer": "2"}).problem.extra


def test_a_verifier_is_renamed_and_its_old_name_kept() -> None:
    reader = RowReader(verifier_names={"openai/gsm8k": "math"})
    problem = reader.read({"prompt": "?", "answer": "2", "dataset": "openai/gsm8k"}).problem
    assert (problem.verifier, problem.extra) == ("math", {"dataset": "openai/gsm8k"})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.lists(JSON_VALUES, max_size=6), st.integers(1, 20), st.sampled_from([None, 1]))
def test_an_array_is_read_alike_whatever_part_of_it_is_in_memory(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], chunk: int, indent: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "array.json"
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    path.write_text(text, encoding="utf-8", newline="")
    counted: list[int] = []
    assert list(elements(path, counted.append, chunk_characters=chunk)) == values
    assert sum(counted) == len(text)


@pytest.mark.parametrize(
    ("text", "line"), [("[1,\n2,\n}", 3), ("[1\n\n2]", 3), ("[\n[1,\n", 3), ('{"a": 1}', 1), ("", 1)]
)
def test_a_broken_array_is_told_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "a.json").write_text(text)
    for chunk in (1, 1000):
        with pytest.raises(PoolError, match=rf"a\.json:{line}: not JSON"):
            list(elements(tmp_path / "a.json", chunk_characters=chunk))


def test_a_list_of_verifiers_is_one_text_of_the_problem() -> None:
    entries = ["gsm8k", {"verifier": "regex", "gate": True}]
    row = {"prompt": "1+1?", "answer": "2", "verifier": entries}
    text = '["gsm8k", {"verifier": "regex", "gate": true}]'
    assert to_problem(row).verifier == text
    assert to_problem(row | {"verifier": text}).verifier == text
    assert to_problem(row | {"verifier": ["math"]}).verifier == "math"
    # As Parquet has it: every entry has every field.
    structs = [{"verifier": "gsm8k", "gate": None}, {"verifier": "regex", "gate": True}]
    assert to_problem(row | {"verifier": structs}).verifier == text
    renamed = RowReader(verifier_names={"gsm8k": "math"}).read(row).problem
    assert renamed.verifier == '["math", {"verifier": "regex", "gate": true}]'


def test_a_list_of_verifiers_that_is_none_is_refused_with_file_row_and_field(tmp_path: Path) -> None:
    good = {"prompt": "1+1?", "answer": "2", "verifier": ["math", "regex"]}
    bad = {"prompt": "1+2?", "answer": "3", "verifier": ["math", {"verifier": "regex", "weight": -1}]}
    path = lines(tmp_path / "rows.jsonl", [good, bad])
    report = import_files([path], max_refused_share=0.5)
    assert [problem.verifier for problem in report.problems] == ['["math", "regex"]']
    (refusal,) = report.refusals()
    assert f"{path}:2" in refusal
    assert "verifier: [1].weight = -1: expected a number above 0" in refusal
    with pytest.raises(PoolError, match="the default verifier: an empty list"):
        import_files([path], default_verifier="[]")
