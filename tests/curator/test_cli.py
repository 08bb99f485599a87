"""The `curator` command on small files and real pools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lancedb
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from curator.cli import app
from curator.pool import Pool
from curator.schema import OFFLINE_PASS_RATE, Problem, outcomes_to_batch
from tests.curator.fakes import make_outcome, make_pool, make_problems

ROWS = [
    {"id": "a", "problem": "What is 1+1?", "answer": "2", "difficulty": "5/8", "tags": ["x"]},
    {"id": "b", "problem": "What is 2+2?", "answer": "4", "difficulty": "8/8", "tags": []},
    {"id": "b", "problem": "What is 2+2?", "answer": "4", "difficulty": "8/8", "tags": []},
    {"id": "c", "problem": "what is  1+1?", "answer": "two", "difficulty": "0/8", "tags": []},
    {"id": "d", "problem": " ", "answer": "4", "difficulty": "0/8", "tags": []},
]


def call(*arguments: str | Path | float) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_import_reports_and_writes(tmp_path: Path) -> None:
    file, pool = lines(tmp_path / "polaris.jsonl", ROWS), tmp_path / "pools" / "p"
    options = ("--pass-rate", "difficulty", "--pass-rate-scale", "k/n", "--pass-rate-of", "success")
    result = call("import", file, "--pool", pool, "--verifier", "math", "--max-refused-share", 0.2, "--yes", *options)
    assert result.exit_code == 0, result.stderr
    told = result.stdout
    assert "5 rows: 2 kept, 1 refused, 1 duplicates, 1 removed" in told
    assert "layout: problem, answer, difficulty (4)" in told
    assert "offline_pass_rate from difficulty (4)" in told
    assert f"1 refused: empty prompt in column 'problem' ({file}:5)" in told
    assert f"1 duplicates of the same id: {file}:3 = {file}:2" in told
    assert f"1 removed, exact: {file}:4 c ~ a (exact 1, golds differ)" in told
    first, second = Pool.open(pool).problems()
    assert first.extra == {"difficulty": "5/8", "tags": ["x"], OFFLINE_PASS_RATE: 0.625}
    assert (second.problem_id, second.extra[OFFLINE_PASS_RATE]) == ("b", 1.0)
    assert [path.name for path in pool.parent.iterdir()] == ["p"]


def test_import_writes_nothing_in_a_dry_run_or_when_nobody_can_be_asked(tmp_path: Path) -> None:
    file, pool = lines(tmp_path / "a.jsonl", ROWS[:2]), tmp_path / "sub" / "p"
    result = call("import", file, "--pool", pool, "--verifier", "math", "--dry-run", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["rows"], report["kept"], report["pass_rates_not_taken"]) == (2, 2, ["difficulty"])
    asked = call("import", file, "--pool", pool, "--verifier", "math")
    assert asked.exit_code == 2
    assert "choose --dry-run to report alone, or --yes to write" in asked.stderr
    assert not pool.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pass-rate", "difficulty"], "say what it means with --pass-rate-scale"),
        (["--pass-rate-of", "success"], "say of which column with --pass-rate COLUMN"),
        (["--map", "gold=answer"], "mapping of 'gold': no field of a problem; known: prompt, answer"),
        (["--map", "prompt"], "--map prompt: expected NAME=VALUE"),
        (["--reasoning-gym", "chain_sum"], "name files, or a family with --reasoning-gym; not both"),
        (["--near", "2"], "near = 2: expected a similarity above 0 and at most 1"),
        (["--semantic", "0.9", "--embedding", "minilm"], "embedding 'minilm': unknown; known: hashed"),
        (["--max-prompt-tokens", "5"], "tokens are counted with --tokenizer FOLDER"),
        (["--tokenizer", "nowhere"], "no tokenizer.json there"),
        ([], "5 rows refused, more than the allowed share of 0.05"),
    ],
)
def test_import_refuses_before_anything_is_written(tmp_path: Path, arguments: list[str], message: str) -> None:
    file = lines(tmp_path / "a.jsonl", ROWS)
    result = call("import", file, "--pool", tmp_path / "p", "--yes", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "p").exists()


def test_two_rows_of_one_id_are_reported_and_nothing_is_written(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], "id": "a"}])
    result = call("import", file, "--pool", tmp_path / "p", "--verifier", "v", "--yes")
    assert result.exit_code == 2
    assert "2 rows: 1 kept, 0 refused, 0 duplicates, 1 with the id of another" in result.stdout
    assert f"{file}:2: id 'a' is also the id of {file}:1, whose prompt, gold or verifier differs" in result.stderr
    assert not (tmp_path / "p").exists()


def test_import_does_not_touch_a_pool_that_is_there(tmp_path: Path) -> None:
    make_pool(tmp_path / "p")
    result = call("import", lines(tmp_path / "a.jsonl", ROWS[:1]), "--pool", tmp_path / "p", "--yes")
    assert (result.exit_code, "exists already" in result.stderr) == (2, True)


def test_columns_may_be_left_out(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", ROWS[:1])
    call("import", file, "--pool", tmp_path / "p", "--verifier", "v", "--yes", "--drop", "ta*", "--drop", "difficulty")
    assert Pool.open(tmp_path / "p").problems()[0].extra == {}


def test_the_report_is_a_file_too(tmp_path: Path) -> None:
    file, out = lines(tmp_path / "a.jsonl", ROWS[:4]), tmp_path / "report.json"
    call("import", file, "--pool", tmp_path / "p", "--verifier", "v", "--dry-run", "--report", out)
    report = json.loads(out.read_text())
    assert report["duplicates"] == [[f"{file}:3", f"{file}:2"]]
    assert [entry["collides_with"] for entry in report["removed"]] == ["a"]


def test_heldout_problems_leave_the_pool(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", ROWS[:2])
    heldout = lines(tmp_path / "h.jsonl", [{"question": "WHAT is 2+2?"}])
    result = call("import", file, "--pool", tmp_path / "p", "--verifier", "v", "--yes", "--heldout", heldout)
    assert f"1 removed, heldout-exact: {file}:2 b ~ {heldout}:1 (heldout-exact 1)" in result.stdout
    assert Pool.open(tmp_path / "p").problem_ids == ["a"]


def test_reasoning_gym_problems_are_a_range_of_seeds(tmp_path: Path) -> None:
    options = ("--config", '{"min_digits": 3, "max_digits": 3}', "--yes")
    call("import", "--reasoning-gym", "chain_sum", "--size", 6, "--seed", 10, "--pool", tmp_path / "p", *options)
    call("import", "--reasoning-gym", "chain_sum", "--size", 2, "--seed", 14, "--pool", tmp_path / "q", *options)
    first, second = Pool.open(tmp_path / "p"), Pool.open(tmp_path / "q")
    assert [problem_id.rpartition("/")[2] for problem_id in first.problem_ids] == [str(i) for i in range(10, 16)]
    # Entry 4 of seed 10 is entry 0 of seed 14.
    assert first.take([4])[0].prompt == second.take([0])[0].prompt
    assert first.problem_ids[4:] == second.problem_ids
    problem = second.take([0])[0]
    assert (problem.verifier, problem.domain, problem.source) == ("reasoning_gym", "chain_sum", "reasoning-gym")
    assert problem.extra["metadata"]["source_dataset"] == "chain_sum"


def test_show_tells_a_problem_with_its_history_and_a_pool_in_figures(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "p", 3)
    pool.append_outcomes(outcomes_to_batch([make_outcome(0, passed=3), make_outcome(1, "p0001", fate="stale")]))
    pool.close()
    shown = json.loads(call("show", "p0000", "--pool", tmp_path / "p", "--json").stdout)
    assert (shown["prompt"], shown["groups"], shown["passed"], shown["failed"]) == ("0+1=", 1, 3, 1)
    assert shown["last"] == [{"step": 0.0, "passed": 3, "failed": 1, "unscored": 0, "fate": "accepted"}]
    figures = json.loads(call("show", "--pool", tmp_path / "p", "--json").stdout)
    assert (figures["problems"], figures["outcomes"], figures["verifiers"]) == (3, 2, {"exact": 3})
    unknown = call("show", "it's", "--pool", tmp_path / "p")
    assert (unknown.exit_code, "no problem has the id 'it's'" in unknown.stderr) == (2, True)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_comes_back_as_it_was(tmp_path: Path, suffix: str) -> None:
    messages = ({"role": "system", "content": "Kurz: ü"}, {"role": "user", "content": "1+1?"})
    problems = [
        Problem(
            problem_id="a", prompt="[1] or [2]?", answer="", verifier="v", extra={"answer": "raw", "n": [None, 1.5]}
        ),
        Problem(problem_id="b", prompt=messages, answer="2", verifier="v", domain="d", source="s"),
    ]
    Pool.create(tmp_path / "p", problems)
    file = tmp_path / f"out{suffix}"
    assert call("export", tmp_path / "p", file).exit_code == 0
    result = call("import", file, "--pool", tmp_path / "q", "--yes")
    assert "layout: export of a pool (2)" in result.stdout
    assert Pool.open(tmp_path / "q").problems() == problems
    same = call("diff", tmp_path / "p", tmp_path / "q")
    assert (same.exit_code, same.stdout) == (0, "2 equal\n")
    again = call("export", tmp_path / "p", file)
    assert (again.exit_code, "cannot be written: File exists" in again.stderr) == (2, True)


def test_outcomes_are_exported_as_a_table_that_pyarrow_reads(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "p", 1)
    pool.append_outcomes(outcomes_to_batch([make_outcome(0), make_outcome(1, passed=0, failed=0, unscored=2)]))
    call("export", tmp_path / "p", tmp_path / "o.parquet", "--outcomes")
    call("export", tmp_path / "p", tmp_path / "o.jsonl", "--outcomes")
    assert pq.read_table(tmp_path / "o.parquet")["num_unscored"].to_pylist() == [0, 2]
    assert [json.loads(line)["mean_reward"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == [0.5, None]


def test_diff_names_what_is_in_one_alone_and_what_differs(tmp_path: Path) -> None:
    problems = make_problems(3)
    changed = Problem(problem_id="p0001", prompt="1+1=", answer="3", verifier="exact", domain="sum")
    Pool.create(tmp_path / "a", problems)
    Pool.create(tmp_path / "b", [problems[0], changed, Problem(problem_id="x", prompt="?", answer="1", verifier="v")])
    result = call("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "1 only left: p0002",
        "1 only right: x",
        "1 content differs: p0001 (answer, domain)",
        "1 equal",
    ]
    plain = json.loads(call("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert plain["changed"] == {"p0001": ["answer", "domain"]}


def test_clean_makes_a_new_version_and_the_old_one_can_be_read(tmp_path: Path) -> None:
    rows = [*make_problems(3), Problem(problem_id="z'z", prompt=" 2+1= ", answer="3", verifier="exact")]
    before = Pool.create(tmp_path / "p", rows).version
    result = call("clean", tmp_path / "p", "--yes")
    assert result.exit_code == 0, result.stderr
    assert "1 removed, exact: z'z ~ p0002 (exact 1)" in result.stdout
    after = Pool.open(tmp_path / "p")
    assert after.problem_ids == ["p0000", "p0001", "p0002"]
    assert after.version > before
    assert len(Pool.open(tmp_path / "p", version=before).problem_ids) == 4
    assert "4 rows" in call("export", tmp_path / "p", tmp_path / "old.jsonl", "--version", before).stderr
    assert call("clean", tmp_path / "p", "--dry-run").stdout.startswith("3 rows: 3 kept, 0 refused")
    assert call("compact", tmp_path / "p", "--keep-minutes", 0).exit_code == 0
    lost = call("export", tmp_path / "p", tmp_path / "older.jsonl", "--version", before)
    assert (lost.exit_code, f"version {before} of the problems is not kept" in lost.stderr) == (2, True)


def test_a_pool_in_use_is_not_cleaned(tmp_path: Path) -> None:
    twin = Problem(problem_id="q", prompt="0+1=", answer="1", verifier="v")
    user = Pool.create(tmp_path / "p", [*make_problems(1), twin])
    user.become_writer()
    result = call("clean", tmp_path / "p", "--yes")
    assert (result.exit_code, "another process writes to this pool" in result.stderr) == (2, True)


def test_a_pool_opens_without_this_project(tmp_path: Path) -> None:
    make_pool(tmp_path / "p", 2)
    table = lancedb.connect(str(tmp_path / "p")).open_table("problems")
    assert table.search().where("answer = '2'").to_list()[0]["problem_id"] == "p0001"
    assert table.to_arrow().column_names[:3] == ["problem_id", "prompt", "prompt_is_messages"]
