"""Data sets as people have them: what is read, what is refused and how it is told."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curator.errors import PoolError, RowRefused
from curator.ingest.columns import last_boxed
from curator.ingest.formats import read_rows
from curator.ingest.report import import_files
from curator.ingest.rows import to_problem

GSM8K = {
    "question": "A shop has 1,000 pens and buys 300 more. How many pens?",
    "answer": "1000+300=1300\n#### 1,300",
}


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(**row: Any) -> Any:
    return to_problem(row, default_verifier="exact")


def test_c42_gold_after_the_separator(tmp_path: Path) -> None:
    report = import_files([write_lines(tmp_path / "gsm8k.jsonl", [GSM8K])], default_verifier="math")
    (found,) = report.problems
    assert found.prompt == GSM8K["question"]
    assert found.answer == "1300"
    # The worked solution is not lost: the gold is only a part of that column.
    assert found.extra == {"answer": GSM8K["answer"]}
    assert {name: dict(c) for name, c in report.columns_used.items()} == {
        "prompt": {"question": 1},
        "answer": {"answer": 1},
    }


def test_c42_unknown_columns_are_named_with_the_setting_that_maps_them() -> None:
    with pytest.raises(RowRefused) as refused:
        problem(task="1+1?", target="2")
    assert str(refused.value) == (
        "no column for the prompt: the row has target, task; looked for prompt, messages, source_prompt, "
        "conversations, responses_create_params.input, problem, question, instruction; "
        'set mapping.prompt = "<column>" to name it'
    )
    mapped = to_problem(
        {"task": "1+1?", "target": 2}, default_verifier="v", mapping={"prompt": "task", "answer": "target"}
    )
    assert (mapped.prompt, mapped.answer) == ("1+1?", "2")


def test_c43_a_byte_order_mark_windows_line_ends_and_an_empty_last_line(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt":"1+1?","answer":"2"}\r\n\r\n')
    assert list(read_rows(path)) == [(1, {"prompt": "1+1?", "answer": "2"})]
    assert import_files([path], default_verifier="exact").num_rows == 1


def test_c46_parquet_messages_are_plain_values(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}]
    row = {"prompt": messages, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "tiny"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "verl.parquet")
    (found,) = import_files([tmp_path / "verl.parquet"]).problems
    assert found.prompt == tuple(messages)
    assert (found.answer, found.verifier, found.source) == ("2", "tiny", "tiny")
    assert found.extra == {"reward_model": {"style": "rule", "ground_truth": "2"}}


C47_ROWS = [
    {"prompt": "1+1?", "answer": "2"},
    {"prompt": None, "answer": "2"},
    {"prompt": "", "answer": "2"},
    {"prompt": [], "answer": "2"},
    {"prompt": " \n", "answer": "2"},
    {"prompt": "1+1?", "answer": None},
    {"prompt": "1+1?", "answer": ""},
    {"prompt": "1+1?", "answer": "  "},
]


def test_c47_rows_without_prompt_or_gold_are_refused_with_place_and_reason(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", C47_ROWS)
    report = import_files([path], default_verifier="exact", max_refused_share=0.9)
    assert (report.num_rows, report.num_kept, report.num_refused) == (8, 1, 7)
    assert {reason: [p.row for p in places] for reason, places in report.refused.items()} == {
        "prompt is null in column 'prompt'": [2],
        "empty prompt in column 'prompt'": [3, 4, 5],
        "gold is null in column 'answer'": [6],
        "empty gold in column 'answer'": [7, 8],
    }
    assert f"3 refused: empty prompt in column 'prompt' ({path}:3, {path}:4, {path}:5)" in report.text()


def test_c47_too_many_refused_rows_fail_the_import(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", C47_ROWS)
    with pytest.raises(PoolError, match=r"7 of 8 rows refused, more than the allowed share of 0\.5") as error:
        import_files([path], default_verifier="exact", max_refused_share=0.5)
    assert f"{path}:2" in str(error.value)
    assert "gold is null in column 'answer'" in str(error.value)


def test_a_null_column_gives_way_to_the_next() -> None:
    assert problem(prompt=None, question="1+1?", answer=None, final_answer=2).answer == "2"


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"reward_model": {"ground_truth": "1"}, "answer": "2"}, "1"),
        ({"ground_truth": {"value": "3"}, "answer": "2"}, "3"),
        ({"reward_model": {}, "answer": "2"}, "2"),
        ({"answer": "a, b #### c, 1,000"}, "c, 1,000"),
        ({"answer": "x #### -1,234,567.5"}, "-1234567.5"),
        ({"answer": "x #### 12,34"}, "12,34"),
        ({"final_answer": "1,300"}, "1,300"),
        ({"solution": "#### Step 1\nso \\boxed{\\frac{1}{2}} is it"}, "\\frac{1}{2}"),
        ({"solution": "so 5\n#### 5"}, "5"),
        ({"answer": 7}, "7"),
        ({"answer": True}, "true"),
        ({"answer": ["1", "2"]}, '["1", "2"]'),
        ({"ground_truth": [12]}, "12"),
        ({"reward_model": {"ground_truth": '["12"]'}}, "12"),
        ({"reward_model": {"ground_truth": '["1", "2"]'}}, '["1", "2"]'),
    ],
)
def test_golds(row: dict[str, Any], gold: str) -> None:
    assert problem(prompt="?", **row).answer == gold


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "work ####  "}, "empty gold"),
        ({"answer": []}, "the gold is a list without elements"),
        ({"answer": [{"a": 1}]}, "the gold is a list"),
        ({"answer": {"a": 1}}, "the gold is a dict"),
        ({"solution": "it is 5"}, "neither"),
    ],
)
def test_golds_that_are_none(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        problem(prompt="?", **row)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no box", None),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\fbox{3}", None),
        ("\\fboxed {3}", "3"),
    ],
)
def test_the_last_box_that_closes(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def turn(role: str, content: str = "x") -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_answer_turn_is_cut_from_messages() -> None:
    messages = [turn("user", "1+1?"), turn("assistant", "2"), turn("user", "2+2?"), turn("assistant", "4")]
    found = problem(messages=messages, ground_truth="4")
    assert found.prompt == tuple(messages[:3])
    assert found.extra == {"messages": messages}


def test_messages_that_end_with_a_question_are_not_cut_silently() -> None:
    messages = [turn("user", "1+1?"), turn("assistant", "2"), turn("user", "2+2?")]
    with pytest.raises(RowRefused, match="map prompt to them"):
        problem(messages=messages, ground_truth="4")
    mapped = to_problem(
        {"messages": messages, "ground_truth": "4"}, default_verifier="v", mapping={"prompt": "messages"}
    )
    assert mapped.prompt == tuple(messages)
    assert mapped.extra == {}


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([turn("system", "Be short.")], "empty prompt"),
        ([turn("user", " ")], "empty prompt"),
        ([{"role": "user"}], "role and a content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image'; only text can be sampled from"),
        (["1+1?"], "a message is a str"),
        ({"text": "1+1?"}, "the prompt is a dict"),
        ("\ud800", "surrogate"),
    ],
)
def test_prompts_that_are_none(prompt: Any, reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        problem(prompt=prompt, answer="2")


def test_names_come_from_the_first_column_that_has_one() -> None:
    found = to_problem(
        {"prompt": "?", "answer": "2", "dataset": ["a", "b"], "data_source": "gsm8k", "ability": "math", "id": 7}
    )
    assert (found.verifier, found.domain, found.source, found.problem_id) == ("gsm8k", "math", "gsm8k", "7")
    # A list is no name; it stays for the reward function. The id stays as the number it is.
    assert found.extra == {"dataset": ["a", "b"], "id": 7}


def test_a_row_without_a_verifier_is_refused_unless_there_is_a_default() -> None:
    with pytest.raises(RowRefused, match="no verifier: the row has answer, prompt; looked for verifier, dataset"):
        to_problem({"prompt": "?", "answer": "2"})


def test_the_id_of_a_row_without_one_is_made_of_prompt_and_gold() -> None:
    assert problem(prompt="1+1?", answer="2").problem_id == problem(question="1+1?", final_answer=2, level=3).problem_id
    assert problem(prompt="ab", answer="c").problem_id != problem(prompt="a", answer="bc").problem_id


def test_a_mapping_of_an_unknown_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mapping of 'gold'"):
        import_files([tmp_path / "none.jsonl"], mapping={"gold": "target"})


def test_other_columns_are_passed_on_unchanged(tmp_path: Path) -> None:
    row = {
        "prompt": "?",
        "answer": "2",
        "avg@8_model": 0.5,
        "org/model": [{"a": True}, None],
        "day": datetime.date(2026, 1, 2),
        "image": b"\x00",
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    report = import_files([tmp_path / "rows.parquet"], default_verifier="exact")
    assert report.problems[0].extra == {"avg@8_model": 0.5, "org/model": [{"a": True}, None], "day": "2026-01-02"}
    assert report.columns_dropped == {"image": 1}


def test_numbers_keep_the_text_they_have_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text(
        '{"prompt": "?", "answer": 1.10, "level": 2.50}\n{"prompt": "!", "answer": 123456789012345678901}\n'
    )
    first, second = import_files([path], default_verifier="exact").problems
    assert (first.answer, second.answer) == ("1.10", "123456789012345678901")
    assert first.extra == {"answer": 1.1, "level": 2.5}


def test_a_json_array_and_lines_named_json_are_both_read(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]
    array, lines = tmp_path / "array.json", write_lines(tmp_path / "lines.json", rows)
    array.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=1).encode())
    assert list(read_rows(array)) == list(read_rows(lines)) == list(enumerate(rows, start=1))


def test_large_strings_and_several_row_groups_of_parquet_are_read(tmp_path: Path) -> None:
    table = pa.table({"prompt": pa.array([f"{i}?" for i in range(600)], pa.large_string()), "answer": ["1"] * 600})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=250)
    rows = list(read_rows(tmp_path / "large.parquet"))
    assert [number for number, _ in rows] == list(range(1, 601))
    assert rows[599][1] == {"prompt": "599?", "answer": "1"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xml", b"<a/>", r"unknown extension '\.xml'; known: \.csv, \.json, \.jsonl"),
        ("rows.csv", b"a,b\n", "holds no rows"),
        ("rows.csv", b"a,a\n1,2\n", r"rows\.csv:1: two columns have the name 'a'"),
        ("rows.csv", b'a,b\n"1,2\n', r"rows\.csv:\d: not CSV"),
        ("rows.json", b'[{"a": 1}\n {}]', r"rows\.json:2: not JSON: expected ',' or '\]'"),
        ("rows.json", b"[] x", r"rows\.json:1: not JSON: the text goes on"),
        ("rows.json", b'[{"a": "\xff"}]', r"rows\.json: not JSON that can be read"),
        ("rows.json", b"[{]", r"rows\.json:1: not JSON"),
        ("rows.parquet", b"PAR1", "not a Parquet file"),
        ("rows.jsonl", b"\n\n", "holds no rows"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PoolError, match=message):
        import_files([tmp_path / name])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"none\.jsonl: cannot be read: No such file"):
        import_files([tmp_path / "none.jsonl"])


def test_a_broken_line_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_bytes(b'{"prompt": "1+1?", "answer": "2"}\n[1]\n\xff\n{"prompt": "2+')
    report = import_files([path], default_verifier="exact", max_refused_share=0.8)
    assert report.num_kept == 1
    assert [p.row for places in report.refused.values() for p in places] == [2, 3, 4]


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "answer": "2"}
    first = write_lines(tmp_path / "a.jsonl", [row, {**row, "index": 1}])
    second = write_lines(tmp_path / "b.jsonl", [row])
    report = import_files([first, second], default_verifier="exact")
    assert (report.num_rows, report.num_kept, report.num_duplicates) == (3, 1, 2)
    assert [f"{a.path.name}:{a.row} = {b.path.name}:{b.row}" for a, b in report.duplicates] == [
        "a.jsonl:2 = a.jsonl:1",
        "b.jsonl:1 = a.jsonl:1",
    ]


def test_one_id_with_two_contents_is_an_error_that_names_both(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": "x", "prompt": p, "answer": "2"} for p in ("1+1?", "0+2?")])
    with pytest.raises(PoolError, match=r"a\.jsonl:2: id 'x' is also the id of .*a\.jsonl:1"):
        import_files([path], default_verifier="exact")
