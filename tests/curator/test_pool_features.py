"""Features of a pool read by columns: as those of its problems, and kept texts as those made anew."""

from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from curator import pool_features
from curator.embedding import hashed_ngrams
from curator.estimators.features import Features, features_of
from curator.pool import Pool
from curator.pool_features import TEXT_TABLE, features_of_pool
from curator.schema import Problem


def make_mixed_pool(path: Path, num: int = 60) -> Pool:
    """Texts and messages, with and without offline rates, in no order."""
    problems = []
    for i in range(num):
        messages = ({"role": "system", "content": "short"}, {"role": "user", "content": f"What is {i}, ü?"})
        extra = {"offline_pass_rate": (i % 9) / 8} if i % 4 else {"note": "offline_pass_rate"}
        problems.append(
            Problem(
                problem_id=f"{(i * 37) % num:03d}", prompt=messages if i % 3 == 0 else f"{i}+{i}=", answer="1",
                verifier="exact", domain=("add", "", "ask")[i % 5 % 3], extra=extra,
            )
        )  # fmt: skip
    return Pool.create(path, problems)


def assert_same(left: Features, right: Features) -> None:
    np.testing.assert_array_equal(left.domain_P, right.domain_P)
    # Products of blocks of other sizes are rounded differently.
    np.testing.assert_allclose(left.number_PX, right.number_PX, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(left.is_vector_X, right.is_vector_X)
    np.testing.assert_array_equal(left.expected_weight_X, right.expected_weight_X)
    assert left.expected_bias == right.expected_bias


def test_features_by_columns_are_those_of_the_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_features, "_ROWS", 16)
    pool = make_mixed_pool(tmp_path / "pool")
    assert_same(features_of_pool(pool, 8), features_of(pool.problems(), embed=hashed_ngrams, num_vector=8))
    assert_same(features_of_pool(pool, 0), features_of(pool.problems()))


def test_numbers_of_texts_are_made_once_and_found_again_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_mixed_pool(tmp_path / "pool")
    features_of_pool(pool, 8)
    assert pool.further_table(TEXT_TABLE) is None  # who only reads writes nothing
    pool.become_writer()
    first = features_of_pool(pool, 8)
    pool.remove(pool.problem_ids[:5])

    def never(texts: object) -> None:
        raise AssertionError("texts are hashed again")

    monkeypatch.setattr(pool_features, "hashed_ngrams", never)
    np.testing.assert_array_equal(features_of_pool(pool, 8).number_PX[:, -8:], first.number_PX[5:, -8:])
    # Another number of them is another table.
    with pytest.raises(AssertionError, match="hashed again"):
        features_of_pool(pool, 4)


def test_numbers_of_texts_that_lack_a_problem_or_are_half_written_are_made_again(tmp_path: Path) -> None:
    pool = make_mixed_pool(tmp_path / "pool")
    pool.become_writer()
    whole = features_of_pool(pool, 8)
    database = lancedb.connect(str(pool.path))
    kept = database.open_table(TEXT_TABLE).to_arrow()
    database.drop_table(TEXT_TABLE)
    database.create_table(TEXT_TABLE, pa.table(kept.slice(1)))
    assert_same(features_of_pool(pool, 8), whole)
    database.drop_table(TEXT_TABLE)
    (pool.path / f"{TEXT_TABLE}.lance").mkdir()
    assert_same(features_of_pool(pool, 8), whole)
    assert_same(features_of_pool(pool, 8), whole)
