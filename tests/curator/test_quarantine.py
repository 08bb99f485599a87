"""Problems that look broken: listed, put aside, not drawn, put back."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from curator.cli import app
from curator.curation import Curation
from curator.errors import PoolError
from curator.pool import Pool
from curator.quarantine import put_aside, put_back, quarantined, quarantined_ids
from curator.schema import outcomes_to_batch
from tests.curator.fakes import make_curation, make_outcome, make_pool

BROKEN = "p0007"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_broken_pool(path: Path) -> Path:
    """Twelve problems, three groups of eight each: all pass but those of one."""
    pool = make_pool(path, 12)
    outcomes = [
        make_outcome(number, f"p{number % 12:04d}", passed=passed, failed=8 - passed, fate="no_signal")
        for number in range(36)
        for passed in (0 if f"p{number % 12:04d}" == BROKEN else 8,)
    ]
    pool.append_outcomes(outcomes_to_batch(outcomes))
    pool.close()
    return path


def test_what_looks_broken_is_listed_put_aside_and_put_back(tmp_path: Path) -> None:
    pool = make_broken_pool(tmp_path / "pool")
    listed = call("quarantine", pool)
    assert listed.exit_code == 0, listed.stderr
    assert listed.stdout.startswith(f"suspects: 1\n  {BROKEN}  0 of 24 passed, expected ")
    assert "gold 8  7+1=\nput aside: 0" in listed.stdout
    fingerprint = Pool.open(pool).fingerprint()
    removed = json.loads(call("quarantine", pool, "--remove-suspects", "--remove", "p0001", "--json").stdout)
    assert removed["suspects"] == []
    by_hand, broken = removed["quarantined"]
    assert (by_hand["problem_id"], by_hand["scored"]) == ("p0001", 0)
    assert (broken["problem_id"], broken["groups"], broken["scored"]) == (BROKEN, 3, 24)
    assert broken["expected_rate"] >= 0.3
    assert broken["surprise"] <= 0.01
    # The run that began with this pool still knows it.
    assert Pool.open(pool).fingerprint() == fingerprint
    assert [entry.problem_id for entry in quarantined(Pool.open(pool))] == ["p0001", BROKEN]
    restored = call("quarantine", pool, "--restore", BROKEN)
    assert f"suspects: 1\n  {BROKEN}" in call("quarantine", pool).stdout
    assert "1 problems put back" in restored.stderr
    assert quarantined_ids(Pool.open(pool)) == ["p0001"]


def test_what_is_put_aside_is_not_drawn_and_not_a_suspect_until_it_is_put_back(tmp_path: Path) -> None:
    path = make_broken_pool(tmp_path / "pool")
    pool = Pool.open(path)
    put_aside(pool, ["p0001", BROKEN, "p0001"])
    curation = Curation(pool, group_size=8, estimator="item_response", choice="worth")
    # Ten are left, each the more likely for it: all ten come before one comes twice.
    picks = curation.next([f"g{i}" for i in range(10)])
    assert len({pick.problem.problem_id for pick in picks} - {"p0001", BROKEN}) == 10
    curation.report([make_outcome(36, BROKEN, fate="requeued", passed=0, failed=0)])
    assert curation.next(["again"])[0].problem.problem_id != BROKEN
    assert (curation.stats()["quarantined"], curation.suspects()) == (2, [])
    # A group of it that was in flight still counts.
    curation.report([make_outcome(37, BROKEN, passed=4, failed=4)])
    assert curation.rate.num_groups_P[7] == 4
    curation.close()
    opened = Pool.open(path)
    assert put_back(opened, [BROKEN, "p0001"]) == 2
    assert make_curation(opened).stats()["quarantined"] == 0


def test_the_probability_of_a_pick_is_over_what_may_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curator.chooser.MAX_CANDIDATES", 10)
    pool = make_pool(tmp_path / "pool", 1000)
    put_aside(pool, [f"p{i:04d}" for i in range(0, 1000, 2)])
    picks = make_curation(pool).next([f"g{i}" for i in range(10)])
    assert all(int(pick.problem.problem_id[1:]) % 2 for pick in picks)
    # All alike: each of the 500 has the same chance, whatever the candidates.
    assert picks[0].probability == pytest.approx(1 / 500)


def test_what_cannot_be_put_aside_or_back_is_refused_by_name(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 3)
    with pytest.raises(PoolError, match="no problem has the id 'gone'"):
        put_aside(pool, ["p0000", "gone"])
    with pytest.raises(PoolError, match="leave one to draw"):
        put_aside(pool, ["p0000", "p0001", "p0002"])
    with pytest.raises(PoolError, match="'p0001' is not in quarantine"):
        put_back(pool, ["p0001"])
    assert quarantined_ids(pool) == []
    busy = call("quarantine", pool.path, "--remove", "p0000")
    assert (busy.exit_code, "another process writes to this pool" in busy.stderr) == (2, True)
    pool.close()
    both = call("quarantine", pool.path, "--remove", "p0000", "--restore", "p0000")
    assert (both.exit_code, "choose one" in both.stderr) == (2, True)
