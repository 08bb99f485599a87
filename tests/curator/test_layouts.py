"""One file of each layout that public pools have: what is read from where, and what the report says of it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curator.errors import RowRefused
from curator.ingest.fields import COLUMNS
from curator.ingest.layouts import LAYOUTS, UNKNOWN, lookup, recognise
from curator.ingest.report import import_files
from curator.ingest.rows import to_problem

PAGE = (Path(__file__).parents[2] / "docs" / "pools.md").read_text(encoding="utf-8")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Case(NamedTuple):
    """A row of a layout, the file it stands in, and what is read of it."""

    layout: str
    suffix: str
    row: Any
    prompt: Any
    answer: str
    verifier: str = "given"
    domain: str = ""
    source: str = ""
    problem_id: str | None = None
    """None: made of prompt and gold."""
    kept: Sequence[str] = ()
    """Some columns that are passed on to the reward function."""
    rates: Sequence[str] = ()
    """Columns that are named as pass rates and not taken."""


CODE_TESTS = json.dumps({"inputs": ["1 2"], "outputs": ["3"]})

CASES = {
    "verl": Case(
        "verl",
        ".parquet",
        {
            "data_source": "openai/gsm8k",
            "prompt": [user("1+1?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 7, "answer": "so #### 2", "question": "1+1?"},
        },
        ({"role": "user", "content": "1+1?"},),
        "2",
        "openai/gsm8k",
        "math",
        "openai/gsm8k",
        "openai/gsm8k/train/7",
        kept=("reward_model", "extra_info"),
    ),
    "DAPO": Case(
        "verl",
        ".parquet",
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve. Last line: Answer: $Answer", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b"},
        },
        ({"role": "user", "content": "Solve. Last line: Answer: $Answer"},),
        "34",
        "math_dapo",
        "MATH",
        "math_dapo",
        "math_dapo/9a9b",
    ),
    "Skywork": Case(
        "Skywork-OR1",
        ".parquet",
        {
            "data_source": "train-math-numina",
            "prompt": [user("?")],
            "ability": "math",
            "reward_model": {"ground_truth": '["12"]', "style": "rule"},
            "extra_info": {"index": 3, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": 16}},
        },
        ({"role": "user", "content": "?"},),
        "12",
        "train-math-numina",
        "math",
        "train-math-numina",
        "train-math-numina/3",
    ),
    "Eurus code": Case(
        "verl",
        ".parquet",
        {
            "data_source": "taco",
            "prompt": [{"role": "system", "content": "Think."}, user("Add.")],
            "ability": "code",
            "reward_model": {"ground_truth": CODE_TESTS, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
        },
        ({"role": "system", "content": "Think."}, {"role": "user", "content": "Add."}),
        CODE_TESTS,
        "taco",
        "code",
        "taco",
        "taco/train/0",
    ),
    "DeepScaleR": Case(
        "problem, answer",
        ".json",
        {"problem": "1+1?", "answer": "2", "solution": "It is \\boxed{2}."},
        "1+1?",
        "2",
        kept=("solution",),
    ),
    "Polaris": Case(
        "problem, answer, difficulty",
        ".jsonl",
        {"problem": "1+1?", "answer": "2", "difficulty": "5/8"},
        "1+1?",
        "2",
        kept=("difficulty",),
        rates=("difficulty",),
    ),
    "Big-Math": Case(
        "Big-Math",
        ".parquet",
        {
            "problem": "1+1?",
            "answer": "2",
            "source": "cn_k12",
            "domain": ["Mathematics -> Algebra", "Mathematics -> Logic"],
            "llama8b_solve_rate": 0.75,
        },
        "1+1?",
        "2",
        domain="Mathematics -> Algebra",
        source="cn_k12",
        kept=("domain", "llama8b_solve_rate"),
        rates=("llama8b_solve_rate",),
    ),
    "NuminaMath": Case(
        "NuminaMath-1.5",
        ".parquet",
        {
            "problem": "1+1?",
            "solution": "so \\boxed{2}",
            "answer": "2",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
            "source": "olympiads",
            "synthetic": False,
        },
        "1+1?",
        "2",
        domain="Algebra",
        source="olympiads",
        kept=("question_type", "synthetic"),
    ),
    "OpenR1": Case(
        "OpenR1-Math",
        ".parquet",
        {
            "problem": "1+1?",
            "answer": "2",
            "problem_type": "Algebra",
            "source": "amc",
            "uuid": "u-1",
            "generations": ["2", "3"],
            "correctness_math_verify": [True, None],
            "correctness_count": 1,
            "messages": [user("1+1?"), {"role": "assistant", "content": "<think>...</think> 2"}],
        },
        ({"role": "user", "content": "1+1?"},),
        "2",
        domain="Algebra",
        source="amc",
        problem_id="u-1",
        kept=("generations", "correctness_math_verify", "messages"),
    ),
    "DeepMath": Case(
        "DeepMath",
        ".parquet",
        {"question": "1+1?", "final_answer": "2", "difficulty": 4.5, "topic": "Algebra", "r1_solution_1": "2"},
        "1+1?",
        "2",
        domain="Algebra",
        kept=("difficulty", "r1_solution_1"),
        rates=("difficulty",),
    ),
    "SYNTHETIC-1": Case(
        "SYNTHETIC or INTELLECT-2",
        ".parquet",
        {
            "source": "stackexchange",
            "task_type": "verifiable_math",
            "in_source_id": "1",
            "prompt": "1+1?",
            "gold_standard_solution": "It is two.",
            "verification_info": "{'ground_truth': '2'}",
            "metadata": "{}",
            "problem_id": "vfm_1",
        },
        "1+1?",
        "2",
        "verifiable_math",
        "verifiable_math",
        "stackexchange",
        "vfm_1",
        kept=("gold_standard_solution", "verification_info", "metadata"),
    ),
    "SYNTHETIC-1 code": Case(
        "SYNTHETIC or INTELLECT-2",
        ".jsonl",
        {
            "task_type": "verifiable_code",
            "prompt": "Add.",
            "gold_standard_solution": "print(1)",
            "verification_info": "{'language': 'python', 'test_cases': [{'input': '1', 'output': '1'}]}",
            "problem_id": "vfc_1",
        },
        "Add.",
        '{"language": "python", "test_cases": [{"input": "1", "output": "1"}]}',
        "verifiable_code",
        "verifiable_code",
        problem_id="vfc_1",
    ),
    "SYNTHETIC-2": Case(
        "SYNTHETIC or INTELLECT-2",
        ".parquet",
        {
            "problem_id": "p1",
            "prompt": "1+1?",
            "verification_info": '{"ground_truth": "2"}',
            "org/model_responses": ["2"],
            "org/model_avg_reward": 0.5,
        },
        "1+1?",
        "2",
        problem_id="p1",
        kept=("org/model_responses", "org/model_avg_reward"),
        rates=("org/model_avg_reward",),
    ),
    "INTELLECT-2": Case(
        "SYNTHETIC or INTELLECT-2",
        ".parquet",
        {
            "problem_id": "p2",
            "task_type": "verifiable_math",
            "prompt": "1+1?",
            "verification_info": '{"ground_truth": "2"}',
            "solve_rate_qwen_r1_distill_7b": 0.25,
        },
        "1+1?",
        "2",
        "verifiable_math",
        "verifiable_math",
        problem_id="p2",
        rates=("solve_rate_qwen_r1_distill_7b",),
    ),
    "INTELLECT-3 code": Case(
        "INTELLECT-3",
        ".parquet",
        {"question": "Add.", "info": '{"tests": "[]"}', "avg@8_qwen3_4b_instruct_2507": 0.5},
        "Add.",
        '{"tests": "[]"}',
        kept=("avg@8_qwen3_4b_instruct_2507",),
        rates=("avg@8_qwen3_4b_instruct_2507",),
    ),
    "INTELLECT-3 science": Case(
        "INTELLECT-3",
        ".parquet",
        {"question": "Why?", "answer": "2", "info": {"domain": "physics"}, "avg@16_x": 0.5},
        "Why?",
        "2",
        domain="physics",
        rates=("avg@16_x",),
    ),
    "NeMo Gym": Case(
        "NeMo Gym",
        ".jsonl",
        {
            "responses_create_params": {"input": [user("1+1?")], "temperature": 1.0},
            "agent_ref": {"type": "responses_api_agents", "name": "math_agent"},
            "expected_answer": "2",
            "id": 5,
        },
        ({"role": "user", "content": "1+1?"},),
        "2",
        "math_agent",
        problem_id="5",
        kept=("responses_create_params", "agent_ref"),
    ),
    "OpenMathReasoning": Case(
        "OpenMathReasoning",
        ".parquet",
        {
            "problem": "1+1?",
            "expected_answer": "2",
            "problem_type": "has_answer_extracted",
            "problem_source": "aops",
            "pass_rate_72b_tir": "0.5",
            "generated_solution": "2",
        },
        "1+1?",
        "2",
        domain="has_answer_extracted",
        source="aops",
        kept=("pass_rate_72b_tir", "generated_solution"),
        rates=("pass_rate_72b_tir",),
    ),
    "RLVR": Case(
        "RLVR",
        ".parquet",
        {"messages": [user("1+1?")], "ground_truth": "2", "dataset": "gsm8k", "constraint": None},
        ({"role": "user", "content": "1+1?"},),
        "2",
        "gsm8k",
        kept=("constraint",),
    ),
    "Dolci": Case(
        "Dolci",
        ".parquet",
        {
            "ground_truth": ["2"],
            "dataset": ["math"],
            "prompt": "user: 1+1?",
            "source_prompt": [user("1+1?")],
            "id": "d1",
            "difficulty": 3,
            "data_source": "dolci",
            "passrate": 0.5,
            "total_rollouts": 8,
            "input_ids_prompt": [1, 2],
        },
        "user: 1+1?",
        "2",
        "math",
        "dolci",
        "dolci",
        "d1",
        kept=("source_prompt", "ground_truth", "input_ids_prompt"),
        rates=("difficulty", "passrate"),
    ),
    "ORZ": Case(
        "question and gold as two turns",
        ".json",
        [
            {"from": "human", "value": "1+1?"},
            {"from": "assistant", "ground_truth": {"value": "2", "pass_at_n": 0.5}},
        ],
        "1+1?",
        "2",
        kept=("conversations",),
    ),
    "DeepCoder": Case(
        "code with tests",
        ".parquet",
        {"problem": "Add.", "solutions": ["print(1)"], "tests": CODE_TESTS, "starter_code": "", "metadata": "{}"},
        "Add.",
        CODE_TESTS,
        kept=("solutions", "starter_code", "metadata"),
    ),
    "TACO": Case(
        "code with tests",
        ".parquet",
        {"question": "Add.", "input_output": CODE_TESTS, "solutions": "[]", "difficulty": "EASY"},
        "Add.",
        CODE_TESTS,
        kept=("solutions", "difficulty"),
        rates=("difficulty",),
    ),
    "TRL": Case(
        "prompt and columns for the reward function",
        ".jsonl",
        {"prompt": "1+1?", "solution": "\\boxed{2}", "level": 3},
        "1+1?",
        "2",
        kept=("solution", "level"),
    ),
    "Alpaca": Case(
        "instruction",
        ".json",
        {"instruction": "Add.", "input": "1 1", "answer": 2},
        "Add.\n\n1 1",
        "2",
        kept=("instruction", "input"),
    ),
    "CSV": Case(
        "question, answer",
        ".csv",
        {"question": 'Say "1, 2"\nplease', "answer": "so #### 1,200", "note": ""},
        'Say "1, 2"\nplease',
        "1200",
        kept=("answer", "note"),
    ),
}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        quoted = [[f'"{text}"' for text in (cell.replace('"', '""') for cell in row.values())] for row in rows]
        path.write_text("\r\n".join([",".join(rows[0]), *map(",".join, quoted)]) + "\r\n", newline="")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_each_layout_is_read_with_the_right_report(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    report = import_files([write(tmp_path / f"pool{case.suffix}", [case.row, case.row])], default_verifier="given")
    assert (report.num_rows, report.num_kept, report.num_duplicates, report.num_refused) == (2, 1, 1, 0)
    assert report.layouts == {case.layout: 2}
    (found,) = report.problems
    assert (found.prompt, found.answer) == (case.prompt, case.answer)
    assert (found.verifier, found.domain, found.source) == (case.verifier, case.domain, case.source)
    if case.problem_id is not None:
        assert found.problem_id == case.problem_id
    assert set(case.kept) <= found.extra.keys()
    assert report.ignored_pass_rates() == list(case.rates)


@pytest.mark.parametrize("field", COLUMNS)
def test_the_page_lists_the_columns_in_their_order(field: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {field} |")]
    named = [name for name in re.findall(r"`([\w.]+)`", line) if name in COLUMNS[field]]
    assert named == list(COLUMNS[field])


def test_every_layout_is_among_the_files() -> None:
    covered = {case.layout for case in CASES.values()}
    # Exports are read back in the tests of the command, plain turns below.
    assert {layout.name for layout in LAYOUTS} - covered == {"export of a pool", "turns with from and value"}


def test_an_unknown_layout_is_named_so_and_read_by_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path / "labels.jsonl", [{"query": "1+1?", "label": "2"}])
    report = import_files([path], default_verifier="exact", mapping={"prompt": "query", "answer": "label"})
    assert (report.num_kept, report.layouts) == (1, {UNKNOWN.name: 1})


def test_turns_of_several_questions_stay_messages() -> None:
    turns = [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2"},
    ]
    found = to_problem({"conversations": turns, "answer": "2"}, default_verifier="v")
    assert found.prompt == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"})
    assert recognise({"conversations": turns}).name == "turns with from and value"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "proof", "problem_is_valid": "Yes"}, "the answer is 'proof', which is no gold"),
        ({"answer": "notfound", "problem_is_valid": None}, "the answer is 'notfound', which is no gold"),
        ({"answer": "2", "problem_is_valid": "Incomplete"}, "the column 'problem_is_valid' is not Yes"),
        ({"verification_info": "see the book"}, "neither JSON nor a Python literal"),
        ({"verification_info": "{}"}, "what checks the answer has no keys; looked for ground_truth"),
        ({"info": {"domain": "physics"}}, "what checks the answer has domain; looked for"),
        ({"tests": []}, "list without elements"),
        ({"conversations": [{"from": "human", "value": "?"}]}, "the last turn has no ground_truth"),
    ],
)
def test_golds_that_a_layout_does_not_have(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        to_problem({"prompt": "?", **row}, default_verifier="v")


def test_a_row_that_says_proof_in_another_layout_is_no_mark() -> None:
    assert to_problem({"prompt": "Opposite of a claim?", "answer": "proof"}, default_verifier="exact").answer == "proof"


def test_c49_content_as_text_and_as_parts_is_one_prompt() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "input_text", "text": "i"}]}]
    as_text, as_parts = (to_problem({"prompt": p, "answer": "2"}, default_verifier="v") for p in ([user("Hi")], parts))
    assert as_text.prompt == as_parts.prompt
    assert as_text.problem_id == as_parts.problem_id
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(RowRefused, match="a part of type 'image_url'; only text can be sampled from"):
        to_problem({"prompt": image, "answer": "2"}, default_verifier="v")


def test_messages_as_json_text_are_messages_and_other_brackets_are_text() -> None:
    text = json.dumps([user("1+1?")])
    assert to_problem({"prompt": text, "answer": "2"}, default_verifier="v").prompt == (user("1+1?"),)
    for plain in ("[1, 2] sorted?", '["role"]', '[{"role": "x"}] what is this?'):
        assert to_problem({"prompt": plain, "answer": "2"}, default_verifier="v").prompt == plain


def test_a_path_looks_into_objects_and_lists_and_a_column_of_that_name_comes_first() -> None:
    row = {"a": {"b.c": 1, "d": [{"e": 2}]}, "a.d": 3}
    assert (lookup(row, "a.b.c"), lookup(row, "a.d.0.e"), lookup(row, "a.d")) == (1, 2, 3)
    assert recognise({"a": 1}) == UNKNOWN
