"""The pool on a real LanceDB."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pytest

from curator.errors import PoolError
from curator.pool import Pool
from curator.schema import Problem, outcomes_from_batch, outcomes_to_batch
from tests.curator.fakes import make_outcome, make_pool, make_problems


def test_problems_come_back_as_they_were_in_the_order_of_their_ids(tmp_path: Path) -> None:
    messages = ({"role": "system", "content": "Kurz, bitte: ü"}, {"role": "user", "content": "1+1?"})
    problems = [
        Problem(problem_id="b", prompt="1+1?", answer="2", verifier="exact", extra={"avg@8": 0.5, "n": [None, {}]}),
        Problem(problem_id="a", prompt=messages, answer="2", verifier="exact", domain="add", source="s"),
    ]
    Pool.create(tmp_path / "pool", problems)
    pool = Pool.open(tmp_path / "pool")
    assert pool.problem_ids == ["a", "b"]
    assert pool.problems() == [problems[1], problems[0]]
    assert pool.take([1, 1, 0]) == [problems[0], problems[0], problems[1]]


def test_the_fingerprint_knows_content_and_not_order(tmp_path: Path) -> None:
    problems = make_problems(5)
    changed = Problem(problem_id="p0004", prompt="4+1=", answer="6", verifier="exact", domain="add")
    pools = [
        Pool.create(tmp_path / "a", problems),
        Pool.create(tmp_path / "b", reversed(problems)),
        Pool.create(tmp_path / "c", problems[:4]),
        Pool.create(tmp_path / "d", [*problems[:4], changed]),
    ]
    prints = [pool.fingerprint() for pool in pools]
    assert prints[0] == prints[1] == Pool.open(tmp_path / "a").fingerprint()
    assert len(set(prints)) == 3


def test_outcomes_do_not_change_the_version_of_the_problems(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    version, fingerprint = pool.version, pool.fingerprint()
    pool.append_outcomes(outcomes_to_batch([make_outcome(0)]))
    pool.close()
    opened = Pool.open(tmp_path / "pool")
    assert (opened.version, opened.fingerprint()) == (version, fingerprint)


def test_outcomes_are_appended_in_order_and_compacted(tmp_path: Path) -> None:
    pool = Pool.create(tmp_path / "pool", make_problems(2), compact_every=3)
    reader = Pool.open(tmp_path / "pool")
    assert reader.last_sequence() == -1
    outcomes = [make_outcome(i) for i in range(14)]
    for start in range(0, 14, 2):
        pool.append_outcomes(outcomes_to_batch(outcomes[start : start + 2]))
    assert pool.last_sequence() == reader.last_sequence() == 13
    assert [o for batch in reader.outcomes().to_batches() for o in outcomes_from_batch(batch)] == outcomes


@pytest.mark.parametrize("sequences", [[1], [0, 2], [0, 0], [-1]])
def test_a_gap_or_a_repeat_is_not_appended(tmp_path: Path, sequences: list[int]) -> None:
    pool = make_pool(tmp_path / "pool")
    with pytest.raises(PoolError, match="go on at sequence 0"):
        pool.append_outcomes(outcomes_to_batch([make_outcome(i) for i in sequences]))
    assert pool.last_sequence() == -1


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first, second = make_pool(tmp_path / "pool"), Pool.open(tmp_path / "pool")
    first.append_outcomes(outcomes_to_batch([make_outcome(0)]))
    with pytest.raises(PoolError, match="another process writes"):
        second.append_outcomes(outcomes_to_batch([make_outcome(1)]))
    first.close()
    second.append_outcomes(outcomes_to_batch([make_outcome(1)]))
    assert second.last_sequence() == 1


def test_a_pool_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> object:
        yield from make_problems(3)
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="gone"):
        Pool.create(tmp_path / "pool", broken())  # type: ignore[arg-type]
    # A file where the folder of the pool should be made: LanceDB cannot write there.
    (tmp_path / "file").touch()
    with pytest.raises(PoolError, match="cannot be created"):
        Pool.create(tmp_path / "file" / "pool", make_problems(1))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_a_pool_is_refused(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    with pytest.raises(PoolError, match="exists already"):
        make_pool(tmp_path / "pool")
    with pytest.raises(PoolError, match="two problems have the id 'p0000'"):
        Pool.create(tmp_path / "twice", make_problems(2) + make_problems(1))
    with pytest.raises(PoolError, match="no problems"):
        Pool.create(tmp_path / "empty", [])
    with pytest.raises(PoolError, match="no pool there"):
        Pool.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "folder").mkdir()
    with pytest.raises(PoolError, match="not a pool"):
        Pool.open(tmp_path / "folder")


def test_a_pool_of_another_schema_is_refused(tmp_path: Path) -> None:
    database = lancedb.connect(str(tmp_path / "pool"))
    database.create_table("problems", data=[{"problem_id": "a"}])
    with pytest.raises(PoolError, match="table problems is of schema"):
        Pool.open(tmp_path / "pool")


def test_a_further_table_is_what_it_was_until_it_is_what_it_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tmp_path / "pool")
    pool.keep_further_table("further", pa.table({"a": [1, 2]}))

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(lancedb.db.LanceDBConnection, "create_table", full)
        with pytest.raises(PoolError, match="cannot write the table further: no space left"):
            pool.keep_further_table("further", pa.table({"b": ["x"]}))
    assert pool.further_table("further") == pa.table({"a": [1, 2]})
    pool.keep_further_table("further", pa.table({"b": ["x"]}))
    assert Pool.open(pool.path).further_table("further") == pa.table({"b": ["x"]})


def test_a_table_whose_first_write_was_cut_off_is_not_there_and_stops_nothing(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    pool.keep_further_table("further", pa.table({"a": [1]}))
    pool.of_run("r").append_outcomes(outcomes_to_batch([make_outcome(0)]))
    # What a process leaves that dies before the first version of a table stands: its rows.
    for name in ("further", "outcomes-r"):
        shutil.rmtree(pool.path / f"{name}.lance" / "_versions")
    assert pool.further_table("further") is None
    pool.keep_further_table("further", pa.table({"a": [2]}))
    assert pool.further_table("further") == pa.table({"a": [2]})
    assert pool.of_run("r").last_sequence() == -1


def test_problems_that_runs_share_are_not_removed_under_them(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 3)
    first, second = pool.of_run("a"), pool.of_run("b")
    for each in (pool, first, second):
        with pytest.raises(PoolError, match="runs share these problems; remove from the pool opened anew"):
            each.remove(["p0000"])
    assert [each.index_of("p0001") for each in (pool, first, second)] == [1, 1, 1]
    alone = Pool.open(pool.path)
    alone.remove(["p0000"])
    assert (alone.problem_ids, alone.index_of("p0001")) == (["p0001", "p0002"], 0)


def test_the_client_loads_neither_lancedb_nor_the_state() -> None:
    code = "import sys, curator.client; print([m for m in ('lancedb', 'curator.curation') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
