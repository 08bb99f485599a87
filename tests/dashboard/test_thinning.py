"""Rows in bounded memory: what the buckets say is what all rows would have said."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.dashboard.thinning import Cursor, Thinned

NAN = float("nan")


def table(values: list[float], capacity: int = 4) -> Thinned:
    found = Thinned(("a",), capacity)
    found.add(np.arange(len(values), dtype=float), np.array(values, float)[:, None])
    return found


def test_buckets_merge_in_pairs_once_there_are_more_than_may_be() -> None:
    found = table([1, 3, 5, 7, 9])
    # 5 rows of 1 in at most 4 buckets: two rows each, the last one open.
    assert found.mean("a").tolist() == [2, 6, 9]
    assert found.low("a").tolist() == [1, 5, 9]
    assert found.high("a").tolist() == [3, 7, 9]
    assert found.last("a").tolist() == [3, 7, 9]
    assert found.x().tolist() == [1, 3, 4]


def test_a_row_without_a_figure_does_not_count_for_it() -> None:
    found = table([NAN, 4, NAN, NAN, 6])
    np.testing.assert_equal(found.mean("a"), [4, NAN, 6])
    np.testing.assert_equal(found.high("a"), [4, NAN, 6])
    np.testing.assert_equal(found.total("a"), [4, 0, 6])


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3) | st.just(NAN), max_size=9), max_size=9),
    st.integers(2, 6),
)
def test_however_rows_come_in_the_buckets_are_those_of_a_slow_loop(batches: list[list[float]], capacity: int) -> None:
    found, rows = Thinned(("a",), capacity), list[float]()
    for batch in batches:
        found.add(np.arange(len(rows), len(rows) + len(batch), dtype=float), np.array(batch, float).reshape(-1, 1))
        rows += batch
    width = 1
    while -(-len(rows) // width) > capacity:
        width *= 2
    parts = [rows[i : i + width] for i in range(0, len(rows), width)]
    known = [[value for value in part if value == value] for part in parts]
    np.testing.assert_allclose(found.mean("a"), [sum(part) / len(part) if part else NAN for part in known], atol=1e-9)
    np.testing.assert_equal(found.high("a"), [max(part, default=NAN) for part in known])
    np.testing.assert_equal(found.last("a"), [part[-1] for part in parts])


def test_what_is_dropped_is_made_again_from_there() -> None:
    found = table([1, 2, 3])
    found.drop_from(1)
    found.add(np.array([1.0]), np.array([[20.0]]))
    assert found.last("a").tolist() == [1, 20]


def test_a_bucket_that_the_drop_lies_within_stays_whole() -> None:
    found = table([1, 3, 5, 7, 9])
    found.drop_from(3)  # of the bucket of x = 2 and 3
    assert found.x().tolist() == [1, 3]


def test_a_reader_lacks_the_open_bucket_and_what_came_after() -> None:
    found = table([1, 2])
    cursor = found.cursor
    found.add(np.array([2.0]), np.array([[3.0]]))
    assert found.start_of(cursor) == 1
    found.add(np.arange(3.0, 6.0), np.ones((3, 1)))
    assert found.start_of(cursor) == 0  # the buckets have merged


@pytest.mark.parametrize("cursor", [None, Cursor(7, 1)])
def test_a_reader_of_nothing_or_of_another_time_is_sent_all(cursor: Cursor | None) -> None:
    assert table([1, 2]).start_of(cursor) == 0


def test_figures_that_come_later_are_missing_before() -> None:
    found = table([1, 2])
    found.with_names(("a", "b"))
    found.add(np.array([2.0]), np.array([[3.0, 5.0]]))
    np.testing.assert_equal(found.mean("b"), [NAN, NAN, 5])
    np.testing.assert_equal(found.low("b"), [NAN, NAN, 5])
