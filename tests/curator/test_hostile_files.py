"""Files, options and folders that are wrong: one clear error or a refused row, never a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from curator.cli import app
from curator.errors import PoolError, RowRefused
from curator.ingest.account import ImportReport
from curator.ingest.importer import ImportPlan, prepare
from curator.ingest.reading import Source, file_sources
from curator.ingest.reasoning_gym import reasoning_gym_source
from curator.ingest.report import import_files
from curator.ingest.rows import RowReader, to_problem
from curator.ingest.staging import Staging
from curator.leftovers import locked_folder
from curator.pool import Pool
from tests.curator.fakes import make_pool

ROW = {"prompt": "1+1?", "answer": "2"}
NOT_UTF8 = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe"))


def call(*arguments: str | Path | float) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def reasons(path: Path, **options: Any) -> list[str]:
    report = import_files([path], default_verifier="exact", max_refused_share=1, **options)
    return list(report.refused)


def test_the_staged_rows_are_read_once_however_many_rows_are_in_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    batches = Staging.batches
    monkeypatch.setattr(Staging, "batches", lambda self, keep=None: reads.append(1) or batches(self, keep))

    def reads_with(num_rows: int) -> int:
        reads.clear()
        rows = enumerate(({"id": "a", "prompt": f"{i}+1?", "answer": "2"} for i in range(num_rows)), start=1)
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        plan = ImportPlan(sources=[Source(Path("rows"), iter(rows))], reader=RowReader(default_verifier="exact"))
        assert len(prepare(plan, folder).report.conflicts) == num_rows - 1
        return len(reads)

    assert reads_with(2000) == reads_with(20)


@pytest.mark.parametrize(
    ("column", "kept"),
    [
        (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
        (pa.array([5], pa.time64("ns")), "00:00:00.000000005"),
        (pa.array([10**15], pa.duration("s")), "1000000000000000"),
        (pa.array([10**9], pa.date32()), "<value out of range: 1000000000>"),
        (pa.array([float("nan")]), None),
    ],
)
def test_values_of_parquet_that_python_cannot_hold_are_kept_as_text(tmp_path: Path, column: Any, kept: Any) -> None:
    pq.write_table(pa.table({**{k: [v] for k, v in ROW.items()}, "when": column}), tmp_path / "a.parquet")
    (problem,) = import_files([tmp_path / "a.parquet"], default_verifier="exact").problems
    assert problem.extra == {"when": kept}


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (NOT_UTF8, "column 'x' of type string holds a value that cannot"),
        (pa.array([0], pa.timestamp("us", tz="Foo/Bar")), "to go without the column, leave it out with --drop 'x'"),
        (pa.array([float("inf")]), "column 'x': an infinite number, which JSON cannot hold"),
    ],
)
def test_values_of_parquet_that_are_none_refuse_their_row_and_no_other(
    tmp_path: Path, column: Any, reason: str
) -> None:
    bad = pa.table({**{k: [v] for k, v in ROW.items()}, "x": column})
    pq.write_table(pa.concat_tables([bad, bad.set_column(2, "x", pa.nulls(1, column.type))]), tmp_path / "a.parquet")
    report = import_files([tmp_path / "a.parquet"], default_verifier="exact", max_refused_share=1)
    assert (report.num_kept, report.num_refused) == (1, 1)
    assert reason in next(iter(report.refused))


@pytest.mark.parametrize(("depth", "num_refused"), [(99, 0), (101, 1), (900, 1), (20_000, 1)])
def test_a_row_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int, num_refused: int) -> None:
    deep = "[" * depth + "]" * depth
    path = lines(tmp_path / "a.jsonl", json.dumps(ROW), f'{{"prompt": "1?", "answer": "2", "x": {deep}}}')
    assert len(reasons(path)) == num_refused
    fields = dict.fromkeys(("problem_id", "prompt", "answer", "verifier", "domain", "source"), "a")
    exported = json.dumps(fields | {"extra": f'{{"x": {deep}}}'})
    assert len(reasons(lines(tmp_path / "b.jsonl", exported))) == num_refused


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_has_no_word_for_refuse_their_row(tmp_path: Path, constant: str) -> None:
    bad = f'{{"prompt": "a?", "answer": "2", "x": {{"y": [{constant}]}}}}'
    assert reasons(lines(tmp_path / "a.jsonl", json.dumps(ROW), bad)) == [
        f"not JSON: {constant} is no number of JSON; write null where there is none"
    ]
    # In an array the elements behind it are read all the same.
    array = lines(tmp_path / "a.json", f"[{bad}, {json.dumps(ROW)}]")
    report = import_files([array], default_verifier="exact", max_refused_share=1)
    assert (report.num_kept, [str(p[0]) for p in report.refused.values()]) == (1, [f"{array}:1"])


def test_a_number_beyond_floats_and_a_gold_that_is_none_are_refused(tmp_path: Path) -> None:
    assert reasons(lines(tmp_path / "a.jsonl", '{"prompt": "a?", "answer": "2", "x": 1e999}')) == [
        "column 'x': an infinite number, which JSON cannot hold"
    ]
    with pytest.raises(RowRefused, match="the gold is NaN or infinite"):
        to_problem({"prompt": "a?", "answer": float("nan")}, default_verifier="exact")


def test_two_columns_of_one_name_in_parquet_are_refused_with_the_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a?"]), pa.array(["b?"]), pa.array(["2"])], ["prompt", "prompt", "answer"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(PoolError, match=r"a\.parquet: two columns have the name 'prompt'; rename one of them"):
        import_files([tmp_path / "a.parquet"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--map", "domain=topik"),
            "--map domain=topik (mapping.domain): no row has such a column; the nearest is 'topic'",
        ),
        (("--map", "source=meta.origim"), "no row has such a column; the nearest is 'meta.origin'"),
        (
            ("--pass-rate", "rats", "--pass-rate-scale", "0..1", "--pass-rate-of", "success"),
            "--pass-rate rats: no row has such a column; the nearest is 'rate'",
        ),
        (
            ("--rename-verifier", "gsm=math"),
            "--rename-verifier gsm: no row names such a verifier; the nearest is 'gsm8k'",
        ),
    ],
)
def test_a_name_that_no_row_has_is_refused_with_the_nearest(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    row = ROW | {"topic": "sums", "meta": {"origin": "web"}, "rate": None, "data_source": "gsm8k"}
    result = call("import", lines(tmp_path / "a.jsonl", json.dumps(row)), "--pool", tmp_path / "p", "--yes", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "p").exists()


def test_a_column_that_one_row_of_many_has_is_no_slip(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", json.dumps(ROW), json.dumps({"prompt": "2?", "answer": "2", "topic": None}))
    assert import_files([path], default_verifier="exact", mapping={"domain": "topic"}).num_kept == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "a setting is refused: expected .*received {}"),
        ({"datasets": []}, "expected"),
        ({"datasets": "chain_sum"}, "expected"),
        ({"datasets": ["chain_sum"]}, "part 1 of 'datasets': expected name, weight and config"),
        ({"datasets": [{"name": "chain_sum"}, {"nam": "chain_sum"}]}, "part 2 of 'datasets': expected name"),
        ({"datasets": [{"name": "chain_sum", "weight": "2"}]}, "a weight of '2'; expected a number above 0"),
        ({"datasets": [{"name": "chain_sum", "weight": -1}]}, "a weight of -1"),
        ({"datasets": [{"name": "chain_sum", "config": [1]}]}, r"a config of \[1\]; expected an object"),
        ({"datasets": [{"name": "chain_summ"}]}, "a setting is refused"),
        ({"datasets": [{"name": "chain_sum", "config": {"min_terms": "a"}}]}, "a setting is refused"),
    ],
)
def test_a_composite_that_is_wrong_is_told_with_its_part(config: Any, message: str) -> None:
    with pytest.raises(PoolError, match=f"--reasoning-gym composite: .*{message}|{message}"):
        reasoning_gym_source("composite", seed=0, size=1, config=config)


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "POOL", "FILE", "--version", "-1"),
        ("export", "POOL", "FILE", "--version", str(1 << 70)),
        ("compact", "POOL", "--keep-minutes", "1e300"),
        ("compact", "POOL", "--keep-minutes", "nan"),
        ("import", "FILE", "--pool", "NEW", "--yes", "--max-refused-share", "nan"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    make_pool(tmp_path / "pool")
    places = {"POOL": str(tmp_path / "pool"), "FILE": str(tmp_path / "a.jsonl"), "NEW": str(tmp_path / "new")}
    result = call(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    with pytest.raises(PoolError, match="version -1 of the problems is not kept"):
        Pool.open(tmp_path / "pool", version=-1)


@pytest.mark.parametrize("what", ["delete", "cut", "garble"])
def test_a_damaged_pool_is_told_as_such_by_every_command(tmp_path: Path, what: str) -> None:
    pool = tmp_path / "pool"
    make_pool(pool)
    for path in (pool / "problems.lance" / "data").iterdir():
        data = path.read_bytes()
        if what == "delete":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if what == "cut" else bytes(255 - byte for byte in data))
    commands = [
        ("show", "--pool", pool),
        ("show", "p0001", "--pool", pool),
        ("export", pool, tmp_path / "a.parquet"),
        ("diff", pool, pool),
        ("clean", pool, "--dry-run"),
    ]
    for command in commands:
        result = call(*command)
        assert result.exit_code == 2, command
        assert f"error: {pool}: damaged, a table cannot be read" in result.stderr


KILLED = """
import sys, time
from pathlib import Path
from curator.leftovers import locked_folder
with locked_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "rows").write_text("x")
    print("made", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_import_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path: Path) -> None:
    prefixes = (".curator-", ".p.building-")
    for prefix in prefixes:
        with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, prefix], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 2
    with locked_folder(tmp_path, ".curator-") as in_use:
        file = lines(tmp_path / "a.jsonl", json.dumps(ROW))
        result = call("import", file, "--pool", tmp_path / "p", "--verifier", "exact", "--yes")
        assert result.exit_code == 0, result.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "p", in_use.name}


def test_ids_that_differ_in_their_unicode_form_alone_are_counted_and_told(tmp_path: Path) -> None:
    ids = ["caf\u00e9", "cafe\u0301", "cafe", "\u212a", "K", "cafe\u0301"]
    rows = [json.dumps({"id": name, "prompt": f"{name}{i % 5}?", "answer": "2"}) for i, name in enumerate(ids)]
    rows[-1] = rows[1]
    path = lines(tmp_path / "a.jsonl", *rows)
    report: ImportReport = prepare(
        ImportPlan(sources=file_sources([path]), reader=RowReader(default_verifier="exact")), tmp_path
    ).report
    # The second is the first in another form, K the Kelvin sign; the sixth row is a duplicate of the second.
    assert report.as_plain()["id_forms"] == [[f"{path}:2", f"{path}:1"], [f"{path}:5", f"{path}:4"]]
    assert "2 ids differ from an earlier one in their Unicode form (NFC) alone" in report.text()
    assert (report.num_kept, report.num_duplicates) == (5, 1)
