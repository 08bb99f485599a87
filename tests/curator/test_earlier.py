"""A run that starts from what another has learned."""

from pathlib import Path

import numpy as np
import pytest

from curator.curation import Curation
from curator.earlier import earlier_outcomes
from curator.errors import PoolError
from curator.pool import Pool
from tests.curator.fakes import make_outcome, make_pool


def make_run(path: Path, *, start_from: Path | None = None, num: int = 40) -> Curation:
    """Of ten problems the first five always pass, the others never."""
    curation = Curation(make_pool(path / "pool", 10), group_size=4, start_from=start_from)
    first = curation.position().next_sequence
    curation.report(
        [
            make_outcome(i, f"p{i % 10:04d}", passed=4 * (i % 10 < 5), failed=4 * (i % 10 >= 5))
            for i in range(first, num)
        ]
    )
    return curation


def test_a_run_begins_with_what_another_learned_less_sure_of_it_and_goes_its_own_way(tmp_path: Path) -> None:
    other = make_run(tmp_path / "a")
    known = other.belief()
    other.close()
    began = Curation(make_pool(tmp_path / "b" / "pool", 12), group_size=4, start_from=tmp_path / "a")
    belief = began.belief()
    np.testing.assert_array_less(belief.quantile_P(0.05)[:5], known.quantile_P(0.05)[:5])
    assert belief.mean_P[:5].min() > belief.mean_P[5:10].max() + 0.2
    # Its own outcomes count from 0, and what was copied stays after a restart, without the other run.
    assert began.position() == (0, 0)
    assert (began.stats()["earlier_groups"], began.stats()["scored_groups"]) == (40, 0)
    began.report([make_outcome(0, "p0000")])
    began.close()
    (tmp_path / "a").rename(tmp_path / "gone")
    again = Curation(Pool.open(tmp_path / "b" / "pool"), group_size=4, start_from=tmp_path / "a")
    assert again.stats()["earlier_groups"] == 40
    np.testing.assert_array_equal(again.belief().mean_P, began.belief().mean_P)
    again.close()


def test_what_came_before_the_other_run_comes_along_on_branches_of_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "a", num=20).close()
    make_run(tmp_path / "b", start_from=tmp_path / "a", num=30).close()
    third = Curation(make_pool(tmp_path / "c", 10), group_size=4, start_from=tmp_path / "b" / "pool")
    assert third.stats()["earlier_groups"] == 50
    third.close()
    branches = [outcome.branch for outcome in earlier_outcomes(Pool.open(tmp_path / "c"))]
    assert branches == [-2] * 20 + [-1] * 30


@pytest.mark.parametrize("estimator", ["sliding_rate", "last_mean", "beta"])
def test_every_estimator_can_start_from_another_run(tmp_path: Path, estimator: str) -> None:
    make_run(tmp_path / "a").close()
    pool = make_pool(tmp_path / "b", 10)
    began = Curation(pool, group_size=4, start_from=tmp_path / "a", estimator=estimator)
    assert began.belief().mean_P[:5].min() > began.belief().mean_P[5:].max()


def test_a_beginning_that_comes_late_or_says_nothing_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a").close()
    make_run(tmp_path / "b", num=1).close()
    with pytest.raises(PoolError, match="has outcomes already"):
        Curation(Pool.open(tmp_path / "b" / "pool"), group_size=4, start_from=tmp_path / "a")
    make_pool(tmp_path / "empty").close()
    with pytest.raises(PoolError, match="nothing to start from"):
        Curation(make_pool(tmp_path / "c"), group_size=4, start_from=tmp_path / "empty")
    with pytest.raises(PoolError, match="no pool there"):
        Curation(make_pool(tmp_path / "d"), group_size=4, start_from=tmp_path / "nowhere")
