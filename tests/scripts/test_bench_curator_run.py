"""What the measurement of a real run makes of its evaluations and outcomes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_curator_run as bench

from curator.schema import outcomes_to_batch
from stream_grpo import arithmetic
from tests.curator.fakes import make_outcome, make_pool


def run_of(*points: tuple[int, float]) -> Any:
    first, *middle, last = (SimpleNamespace(num_tokens=tokens, pass_at_1=score) for tokens, score in points)
    return SimpleNamespace(before=first, during=middle, after=last)


def test_the_target_is_reached_on_the_line_between_two_evaluations() -> None:
    run = run_of((0, 0.5), (100, 0.6), (200, 0.55), (300, 0.7))
    assert bench.tokens_to(run, 0.5) == 0
    assert bench.tokens_to(run, 0.6) == 100
    # A third of the way up from 0.6; then two thirds from 0.55 to 0.7, as the score had fallen in between.
    assert abs((bench.tokens_to(run, 0.65) or 0) - (200 + 100 * 2 / 3)) < 1e-9
    assert bench.tokens_to(run, 0.71) is None


def test_groups_are_counted_once_with_their_tokens(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "run" / "pool")
    ends = [make_outcome(0), make_outcome(1, fate="no_signal"), make_outcome(2, fate="stale")]
    pool.append_outcomes(outcomes_to_batch(ends))
    pool.close()
    tokens, has_signal = bench.groups_of(tmp_path / "run")
    assert (tokens.tolist(), has_signal.tolist()) == ([10, 10, 10], [True, False, False])


def test_the_graded_pool_has_three_thousand_problems_most_of_them_out_of_reach() -> None:
    rows = arithmetic.rows(bench.COUNTS, seed=0, held_out=False)
    assert len(rows) == 3000
    assert sum(row["digits"] > 5 for row in rows) > 1500
