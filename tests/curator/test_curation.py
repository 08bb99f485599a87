"""The curator's state: choices repeat, outcomes fold, a restart changes nothing."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator import curation as curation_module
from curator.curation import Curation
from curator.difficulty import SlidingRate
from curator.errors import PoolError, SequenceError
from curator.pool import Pool
from curator.schema import Outcome
from tests.curator.fakes import make_curation, make_outcome, make_pool


def ids(picks: list[Any]) -> list[str]:
    return [pick.problem.problem_id for pick in picks]


def test_a_group_keeps_its_problem_however_often_it_asks(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 20))
    first = curation.next(["a", "b", "c"])
    assert [pick.group_id for pick in first] == ["a", "b", "c"]
    assert curation.next(["c", "a"]) == [first[2], first[0]]
    assert curation.next(["b", "d"])[0] == first[1]
    curation.report([make_outcome(0, ids(first)[0], group_id="a")])
    assert curation.next(["a"]) == [first[0]]
    assert curation.stats()["picks"] == 4
    # a has ended and does not come back into flight: b, c and d are left.
    assert curation.stats()["in_flight"] == 3


def test_the_probability_and_the_signal_of_a_pick_are_those_of_its_draw(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 5))
    (pick,) = curation.next(["a"])
    # All unseen at 0.5, G = 4: signal 1 - 2/16 each; so 1/5 each.
    assert pick.probability == pytest.approx(0.2)
    assert pick.expected_signal == 0.875
    (second,) = curation.next(["b"])
    # One is in flight: 1/4 each.
    assert second.probability == pytest.approx(0.25)


def test_problems_in_flight_are_not_picked_and_come_back_with_their_outcome(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 4))
    picked = ids(curation.next(["a", "b", "c"]))
    assert len(set(picked)) == 3
    (last,) = ids(curation.next(["d"]))
    assert last not in picked
    curation.report([make_outcome(0, picked[1], group_id="b", fate="stale")])
    assert ids(curation.next(["e"])) == [picked[1]]


def test_a_ticket_that_ended_without_a_group_frees_its_problem_and_says_nothing_of_it(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 2))
    picked = ids(curation.next(["a", "b"]))
    # One whose sampler had said which problem it had, one of which nobody knows.
    named = make_outcome(0, picked[0], group_id="a", passed=0, failed=0, fate="stale")
    curation.report([named, make_outcome(1, "", group_id="b", passed=0, failed=0, fate="stale")])
    stats = curation.stats()
    assert (stats["in_flight"], stats["seen"], stats["unknown_problems"]) == (0, 0, 0)
    assert sorted(ids(curation.next(["c", "d"]))) == sorted(picked)


def test_a_requeued_problem_is_picked_first_and_once(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 40)
    curation = make_curation(pool)
    picked = ids(curation.next(["a", "b", "c"]))
    curation.report([make_outcome(0, picked[1], group_id="b", fate="stale")])
    curation.report([make_outcome(1, picked[1], group_id="b", passed=0, failed=0, fate="requeued")])
    curation.report([make_outcome(2, "unknown", passed=0, failed=0, fate="requeued")])
    assert curation.stats()["requeued"] == 1
    first, second = curation.next(["d", "e"])
    assert (first.problem.problem_id, first.probability) == (picked[1], 1.0)
    assert second.problem.problem_id not in picked
    assert curation.stats()["requeued"] == 0
    assert curation.stats()["fates"] == {"stale": 1, "requeued": 2}
    # Neither said anything of the problem.
    assert curation.stats()["seen"] == 0


def test_requeues_are_picked_in_order_and_known_after_a_restart_until_a_group_has_come(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 40))
    for sequence, problem in enumerate(("p0003", "p0001", "p0002")):
        curation.report([make_outcome(sequence, problem, passed=0, failed=0, fate="requeued")])
    assert ids(curation.next(["a"])) == ["p0003"]
    # A group of p0001 that was in flight already comes in: its problem had its turn.
    curation.report([make_outcome(3, "p0001")])
    curation.close()
    restarted = make_curation(Pool.open(tmp_path / "pool"))
    # That p0003 was picked is forgotten, as every pick is.
    assert ids(restarted.next(["b", "c"])) == ["p0003", "p0002"]


def test_a_small_pool_does_not_stall(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 3))
    picked = ids(curation.next([f"g{i}" for i in range(7)]))
    # Each problem twice before any three times, though all are in flight.
    assert sorted(picked.count(p) for p in set(picked)) == [2, 2, 3]
    assert len(set(ids(curation.next(["x", "y", "z"])))) == 3


def test_problems_without_signal_are_picked_before_any_is_picked_twice(tmp_path: Path) -> None:
    curation = Curation(
        make_pool(tmp_path / "pool", 2), group_size=4, estimator="sliding_rate", rate_step=1.0, exploration=0.0
    )
    curation.report([make_outcome(0, "p0001", passed=4, failed=0, fate="no_signal")])
    assert ids(curation.next(["a", "b"])) == ["p0000", "p0001"]


def test_c29_a_pool_without_any_signal_is_still_sampled_and_shows_why(tmp_path: Path) -> None:
    curation = Curation(
        make_pool(tmp_path / "pool", 3), group_size=4, estimator="sliding_rate", rate_step=1.0, exploration=0.0
    )
    curation.report([make_outcome(i, f"p000{i}", passed=0, failed=4, fate="no_signal") for i in range(3)])
    assert sorted(ids(curation.next(["a", "b", "c"]))) == ["p0000", "p0001", "p0002"]
    stats = curation.stats()
    assert stats["no_signal"] == {"all_right": 0, "all_wrong": 3, "truncated": 0, "same_reward": 0}
    assert (stats["too_hard"], stats["mean_expected_signal"]) == (3, 0.0)


def test_c50_a_solved_problem_keeps_a_floor_and_comes_back(tmp_path: Path) -> None:
    curation = Curation(
        make_pool(tmp_path / "pool", 4), group_size=4, estimator="sliding_rate", rate_step=1.0, exploration=0.2
    )
    curation.report([make_outcome(0, "p0003", passed=4, failed=0, fate="no_signal")])
    probabilities = {}
    for number in itertools.count(1):
        (pick,) = curation.next([f"x{number}"])
        probabilities[pick.problem.problem_id] = pick.probability
        curation.report([make_outcome(number, fate="stale", group_id=f"x{number}")])
        if len(probabilities) == 4:
            break
    # Signal of p0003 is 0, of the others equal: 0.2/4, and 0.8/3 + 0.2/4.
    assert probabilities["p0003"] == pytest.approx(0.05)
    assert probabilities["p0000"] == pytest.approx(0.8 / 3 + 0.05)
    curation.report([make_outcome(number + 1, "p0003", passed=1, failed=3)])
    assert curation.rate.rate_P[3] == 0.25


def test_unknown_fates_and_problems_move_nothing_but_the_sequence(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 2))
    assert curation.report([make_outcome(0, "elsewhere"), make_outcome(1, "", fate="stale")]) == 2
    stats = curation.stats()
    assert (stats["seen"], stats["unknown_problems"], stats["mean_rate"]) == (0, 1, None)
    assert stats["fates"] == {"accepted": 1, "stale": 1}


def test_a_gap_is_refused_whole_and_repeats_are_ignored(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool"))
    assert curation.report([make_outcome(0), make_outcome(1)]) == 2
    before = curation.stats()
    assert curation.report([make_outcome(0), make_outcome(1)]) == 2
    with pytest.raises(SequenceError, match="expected outcome 2, received 3"):
        curation.report([make_outcome(3)])
    with pytest.raises(SequenceError, match="expected outcome 3, received 4"):
        curation.report([make_outcome(1), make_outcome(2), make_outcome(4)])
    assert curation.stats() == before
    assert curation.report([make_outcome(1), make_outcome(2)]) == 3


def test_stats_are_json_and_count_by_hand(tmp_path: Path) -> None:
    curation = Curation(make_pool(tmp_path / "pool", 4), group_size=2, rate_step=1.0)
    curation.report(
        [
            make_outcome(0, "p0000", passed=2, failed=0, fate="no_signal"),
            make_outcome(1, "p0001", passed=0, failed=2, truncated=2, fate="no_signal"),
            make_outcome(2, "p0002", passed=1, failed=1),
            make_outcome(3, "p0002", passed=0, failed=0, unscored=2, fate="invalid"),
        ]
    )
    stats = json.loads(json.dumps(curation.stats()))
    # Rates 1, 0, 0.5, and the domain's for the unseen one: the mean of 0.5, 1, 0 and 0.5.
    # With G = 2 the signal 2 p (1 - p) is 0, 0, 0.5, 0.5; the mean 0.25.
    assert stats["problems"] == 4
    assert (stats["seen"], stats["solved"], stats["useful"], stats["too_hard"]) == (3, 1, 1, 1)
    assert stats["mean_rate"] == 0.5
    assert stats["mean_expected_signal"] == pytest.approx(0.25, abs=1e-12)
    assert stats["scored_groups"] == 3
    assert stats["no_signal_share"] == {
        "all_right": pytest.approx(1 / 3),
        "all_wrong": 0,
        "truncated": pytest.approx(1 / 3),
        "same_reward": 0,
    }


def test_outcomes_become_durable_in_batches_and_on_close(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    curation = make_curation(pool, flush_outcomes=4)
    curation.report([make_outcome(i) for i in range(3)])
    assert curation.position() == (3, 0)
    curation.report([make_outcome(3), make_outcome(4)])
    assert curation.position() == (5, 5)
    curation.report([make_outcome(5)])
    assert curation.position() == (6, 5)
    curation.close()
    assert make_curation(Pool.open(pool.path)).position() == (6, 6)


def test_outcomes_that_were_never_flushed_are_asked_for_again(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    curation = make_curation(pool, flush_outcomes=4)
    outcomes = [make_outcome(i) for i in range(6)]
    curation.report(outcomes[:4])
    curation.report(outcomes[4:])
    pool.close()  # Without a flush: as if killed.
    again = make_curation(Pool.open(pool.path), flush_outcomes=4)
    assert again.position() == (4, 4)
    with pytest.raises(SequenceError, match="expected outcome 4, received 5"):
        again.report(outcomes[5:])
    assert again.report(outcomes[2:]) == 6


def test_a_failed_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(tmp_path / "pool")
    curation = make_curation(pool, flush_outcomes=2)
    table = pool._outcome_table

    class Full:
        """A table whose disk is full; what was added is committed the second time all the same."""

        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(table, name)

        def add(self, data: Any) -> None:
            Full.calls += 1
            if Full.calls == 2:
                table.add(data)
            raise OSError("no space left on device")

    monkeypatch.setattr(pool, "_outcome_table", Full())
    for _ in range(2):
        with pytest.raises(PoolError, match="no space left"):
            curation.report([make_outcome(0), make_outcome(1)])
    assert curation.position() == (2, 0)
    monkeypatch.setattr(pool, "_outcome_table", table)
    assert curation.report([make_outcome(2)]) == 3
    assert curation.flush() == 3
    assert pool.outcomes()["sequence"].to_pylist() == [0, 1, 2]


def test_a_second_curator_on_a_pool_is_refused(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    make_curation(pool)
    with pytest.raises(PoolError, match="another process writes"):
        make_curation(Pool.open(pool.path))


def test_memory_of_groups_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curation_module, "MAX_OPEN_GROUPS", 3)
    monkeypatch.setattr(curation_module, "MAX_ENDED_GROUPS", 2)
    curation = make_curation(make_pool(tmp_path / "pool", 30))
    picks = curation.next([f"g{i}" for i in range(10)])
    assert len(picks) == 10
    assert list(curation._open) == ["g7", "g8", "g9"]
    assert list(curation._ended) == ["g5", "g6"]
    assert curation._num_in_flight_P.sum() == 3


def state(curation: Curation) -> tuple[bytes, ...]:
    rate: SlidingRate = curation.rate
    arrays = (rate.rate_P, rate.num_groups_P, rate.num_scored_P, rate.last_step_P)
    passing = ("picks", "picks_by_size", "in_flight", "durable_sequence", "state")
    figures = {k: v for k, v in curation.stats().items() if k not in passing}
    return (*(a.tobytes() for a in arrays), json.dumps(figures).encode())


@st.composite
def histories(draw: Callable[..., Any]) -> tuple[list[Outcome], list[tuple[int, int, str]]]:
    """Outcomes, and how they are sent: (new ones, repeated ones, what happens to the curator before)."""
    outcomes = []
    for sequence in range(draw(st.integers(0, 25))):
        passed = draw(st.integers(0, 4))
        unscored = draw(st.integers(0, 4 - passed))
        fate = draw(st.sampled_from(["accepted", "no_signal", "stale", "invalid", "refused"]))
        outcomes.append(
            make_outcome(
                sequence, f"p000{draw(st.integers(0, 6))}", passed=passed, failed=4 - passed - unscored,
                unscored=unscored, fate=fate,
            )
        )  # fmt: skip
    event = st.sampled_from(["goes on", "is killed", "is stopped"])
    return outcomes, draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), event), max_size=8))


@pytest.fixture(scope="module")
def empty_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pool(tmp_path_factory.mktemp("pools") / "pool", 6).path


@settings(max_examples=20, deadline=None)
@given(history=histories())
def test_a_restarted_curator_is_the_one_that_was_never_interrupted(
    empty_pool: Path,
    tmp_path_factory: pytest.TempPathFactory,
    history: tuple[list[Outcome], list[tuple[int, int, str]]],
) -> None:
    outcomes, sends = history
    root = tmp_path_factory.mktemp("restart")
    paths = [Path(shutil.copytree(empty_pool, root / name)) for name in ("whole", "parts")]
    whole = make_curation(Pool.open(paths[0]))
    whole.report(outcomes)

    pool = Pool.open(paths[1])
    parts = make_curation(pool, flush_outcomes=3)
    for num_new, num_repeated, event in [*sends, (len(outcomes), 0, "goes on")]:
        if event != "goes on":
            parts.close() if event == "is stopped" else pool.close()
            pool = Pool.open(paths[1])
            parts = make_curation(pool, flush_outcomes=3)
        start = parts.position().next_sequence
        parts.report(outcomes[max(0, start - num_repeated) : start + num_new])
    assert state(parts) == state(whole)
    assert ids(parts.next(["n", "m", "o"])) == ids(whole.next(["n", "m", "o"]))
    parts.close()
    whole.close()


def test_rates_fold_the_same_bits_in_one_go_and_over_the_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pool = make_pool(tmp_path / "pool", 3)
    curation = make_curation(pool, flush_outcomes=7)
    outcomes = [make_outcome(i, f"p000{rng.integers(3)}", mean=float(rng.random())) for i in range(100)]
    curation.report(outcomes)
    curation.close()
    assert state(make_curation(Pool.open(pool.path)))[:4] == state(curation)[:4]


@pytest.mark.parametrize("estimator", ["last_mean", "beta", "item_response"])
@pytest.mark.parametrize("choice", ["signal", "worth"])
def test_every_estimator_and_choice_learns_and_survives_a_restart(tmp_path: Path, estimator: str, choice: str) -> None:
    rules: dict[str, Any] = {"estimator": estimator, "choice": choice, "signal": "centered", "group_size": 4}
    curation = Curation(make_pool(tmp_path / "pool", 30), **rules)
    for number in range(20):
        (pick,) = curation.next([f"g{number}"])
        solves = int(pick.problem.problem_id[1:]) < 15
        passed = 4 if solves else number % 3
        outcome = make_outcome(
            number, pick.problem.problem_id, passed=passed, failed=4 - passed, group_id=pick.group_id,
            fate="no_signal" if passed in (0, 4) else "accepted",
        )  # fmt: skip
        curation.report([outcome])
    belief = curation.belief()
    seen = curation.rate.num_groups_P > 0
    assert belief.mean_P[:15][seen[:15]].mean() > belief.mean_P[15:][seen[15:]].mean() + 0.2
    curation.flush()
    curation.close()
    again = Curation(Pool.open(tmp_path / "pool"), **rules)
    np.testing.assert_array_equal(again.belief().mean_P, belief.mean_P)
    assert again.next(["x", "y"]) == curation.next(["x", "y"])


def test_odds_of_a_large_pool_count_the_candidates_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curator.chooser.MAX_CANDIDATES", 10)
    curation = make_curation(make_pool(tmp_path / "pool", 1000))
    (pick,) = curation.next(["a"])
    # All alike: whatever the candidates, each of the 1,000 has the same chance.
    assert pick.probability == pytest.approx(1 / 1000)
    assert len(set(ids(curation.next([f"g{i}" for i in range(40)])))) == 40


def test_a_problem_that_fails_among_solved_ones_is_listed_for_review(tmp_path: Path) -> None:
    curation = Curation(make_pool(tmp_path / "pool", 12), group_size=8, estimator="item_response", choice="worth")
    outcomes = [
        make_outcome(number, f"p{number % 12:04d}", passed=0 if number % 12 == 7 else 8,
                     failed=8 if number % 12 == 7 else 0, fate="no_signal")
        for number in range(36)
    ]  # fmt: skip
    curation.report(outcomes)
    assert curation.suspects() == ["p0007"]
    assert curation.stats()["suspects"] == ["p0007"]


def test_problems_that_left_the_pool_are_named_or_left_out(tmp_path: Path) -> None:
    curation = make_curation(make_pool(tmp_path / "pool", 3))
    assert [problem.problem_id for problem in curation.find(["p0002", "gone", "p0000"])] == ["p0002", "p0000"]
    with pytest.raises(PoolError, match="1 problems are not in the pool, first: 'gone'"):
        curation.get(["p0002", "gone"])


KILLED = """
import os, signal, sys
from pathlib import Path
from curator.curation import Curation
from curator.pool import Pool
from tests.curator.test_curation import run_of_outcomes
curation = Curation(Pool.open(Path(sys.argv[1])), group_size=4, flush_outcomes=8, estimator="item_response")
for outcome in run_of_outcomes()[:45]:
    curation.report([outcome])
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_of_outcomes() -> list[Outcome]:
    rng = np.random.default_rng(0)
    return [
        make_outcome(number, f"p{rng.integers(9):04d}", passed=passed, failed=4 - passed)
        for number, passed in enumerate(rng.integers(0, 5, 60).tolist())
    ]


def test_after_kill_9_in_a_run_of_outcomes_the_state_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Curation(make_pool(tmp_path / "whole", 9), group_size=4, estimator="item_response")
    whole.report(run_of_outcomes())
    make_pool(tmp_path / "pool", 9).close()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "pool")], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    again = Curation(Pool.open(tmp_path / "pool"), group_size=4, estimator="item_response")
    # 45 were taken, five times eight of them are on disk.
    assert again.position() == (40, 40)
    again.report(run_of_outcomes()[40:])
    assert state(again) == state(whole)
    np.testing.assert_array_equal(again.belief().mean_P, whole.belief().mean_P)
    np.testing.assert_array_equal(again.belief().quantile_P(0.1), whole.belief().quantile_P(0.1))
