"""Service and client over real sockets on loopback."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from curator.client import Curator, Found, Picked, Positioned, Refused, Reported
from curator.curation import Curation
from curator.errors import PoolError
from curator.pool import Pool
from curator.service import CuratorService
from curator.wire import Client, RemoteError, WireError
from tests.curator.fakes import make_outcome, make_pool


@contextmanager
def running(pool: Pool, address: str = "tcp://127.0.0.1:*", *, flush_outcomes: int = 512) -> Iterator[CuratorService]:
    service = CuratorService(Curation(pool, group_size=4, flush_outcomes=flush_outcomes, seed=1), address)
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    try:
        yield service
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def connect() -> Iterator[Callable[[CuratorService], Curator]]:
    curators: list[Curator] = []

    def make(service: CuratorService) -> Curator:
        curators.append(Curator(service.address, name="test", timeout_s=5, resend_s=0.1))
        return curators[-1]

    yield make
    for curator in curators:
        curator.close()


Connect = Callable[[CuratorService], Curator]


def test_picks_and_outcomes_cross_the_wire(tmp_path: Path, connect: Connect) -> None:
    pool = make_pool(tmp_path / "pool", 10)
    with running(pool) as service:
        curator = connect(service)
        picks = curator.next(["a", "b"])
        assert [p.group_id for p in picks] == ["a", "b"]
        assert all(p.problem in pool.problems() for p in picks)
        assert curator.next(["b", "a"]) == picks[::-1]
        outcomes = [make_outcome(0, picks[0].problem.problem_id, group_id="a")]
        assert curator.report(outcomes) == 1
        assert curator.report(outcomes) == 1
        assert curator.position() == (1, 0)
        assert curator.stats()["in_flight"] == 1
        assert curator.flush() == 1
        assert curator.position() == (1, 1)


def test_a_sampler_asks_without_waiting(tmp_path: Path, connect: Connect) -> None:
    with running(make_pool(tmp_path / "pool", 10)) as service:
        curator = connect(service)
        asked = curator.post_next(["a", "b"])
        # Until the first answer there is one credit.
        assert not curator.has_credit
        with pytest.raises(WireError, match="no credit"):
            curator.post_next(["c"])
        (picked,) = curator.poll(5)
        assert isinstance(picked, Picked)
        assert (picked.id, [p.group_id for p in picked.picks]) == (asked, ["a", "b"])
        reported, gap = curator.post_report([make_outcome(0)]), curator.post_report([make_outcome(5)])
        answers = curator.poll(5)
        while len(answers) < 2:
            answers += curator.poll(5)
        assert answers == [Reported(reported, 1), Refused(gap, "expected outcome 1, received 5")]


def test_a_gap_is_refused_with_both_numbers_and_position_tells_where_to_go_on(tmp_path: Path, connect: Connect) -> None:
    outcomes = [make_outcome(i) for i in range(5)]
    with running(make_pool(tmp_path / "pool")) as service:
        curator = connect(service)
        with pytest.raises(RemoteError, match="expected outcome 0, received 2"):
            curator.report(outcomes[2:])
        start, _ = curator.position()
        assert curator.report(outcomes[start:]) == 5


def test_a_restarted_service_goes_on_at_its_address(tmp_path: Path, connect: Connect) -> None:
    pool = make_pool(tmp_path / "pool", 50)
    with running(pool) as service:
        curator, address = connect(service), service.address
        curator.report([make_outcome(0), make_outcome(1, "p0001")])
        first = curator.next(["a", "b", "c"])
        before = curator.stats()
    with running(Pool.open(pool.path), address):
        assert curator.position() == (2, 2)
        # Nothing was learned in between and nothing is in flight, as at the first draw: it is the same draw.
        assert curator.next(["a", "b", "c"]) == first
        after = curator.stats()
        # It has them from the file of the state.
        assert after.pop("state")["restored"] == 2
        assert after == {name: value for name, value in before.items() if name != "state"} | {"durable_sequence": 2}


def test_bad_requests_are_refused_and_the_service_lives(tmp_path: Path, connect: Connect) -> None:
    with running(make_pool(tmp_path / "pool")) as service:
        client = Client(service.address, name="stranger", peer="curator")
        requests: list[tuple[str, dict[str, Any], tuple[bytes, ...], str]] = [
            ("dance", {}, (), "unknown kind 'dance'; known: next, get, report"),
            ("next", {}, (), "group_ids: expected a list"),
            ("next", {"group_ids": []}, (), "group_ids: 0 of them"),
            ("next", {"group_ids": ["a", 1]}, (), "group_ids: expected a list"),
            ("get", {"problem_ids": [""]}, (), "problem_ids: expected a list"),
            ("report", {}, (), "report: expected one body, received 0"),
            ("report", {}, (b"rubbish",), "not an Arrow stream"),
            ("report", {}, (b"",), "Arrow|one record batch"),
        ]
        for kind, fields, body, reason in requests:
            with pytest.raises(RemoteError, match=reason):
                client.call(kind, fields, body, timeout_s=5)
        client.close()
        assert service.num_refused == 8
        assert len(connect(service).next(["a"])) == 1


def test_a_stop_flushes_and_frees_the_pool(tmp_path: Path, connect: Connect) -> None:
    pool = make_pool(tmp_path / "pool")
    with running(pool) as service:
        connect(service).report([make_outcome(0)])
        assert Pool.open(pool.path).last_sequence() == -1
    opened = Pool.open(pool.path)
    assert opened.last_sequence() == 0
    opened.become_writer()


def test_status_is_that_of_the_loop_and_at_most_a_second_old(tmp_path: Path) -> None:
    """It is asked for from other threads, and the state is of one thread alone."""
    now = [0.0]
    pool = make_pool(tmp_path / "pool", 10)
    service = CuratorService(Curation(pool, group_size=4), "tcp://127.0.0.1:*", timer=lambda: now[0])
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    curator = Curator(service.address, name="test", timeout_s=5)
    assert service.status()["picks"] == 0
    curator.next(["a"])
    curator.next(["b"])
    assert service.status() is service.status()
    assert service.status()["picks"] == 0
    now[0] = 1.0
    curator.next(["c"])
    curator.next(["d"])
    assert service.status()["picks"] >= 2
    stop.set()
    thread.join(10)
    curator.close()
    assert service.status()["picks"] == 4


def test_problems_are_found_by_id_and_nothing_is_picked_by_it(tmp_path: Path, connect: Connect) -> None:
    pool = make_pool(tmp_path / "pool", 10)
    with running(pool) as service:
        curator = connect(service)
        by_id = {problem.problem_id: problem for problem in pool.problems()}
        assert curator.get(["p0007", "p0002"]) == [by_id["p0007"], by_id["p0002"]]
        with pytest.raises(RemoteError, match="2 problems are not in the pool, first: 'x'"):
            curator.get(["p0001", "x", "y"])
        asked = curator.post_get(["p0003", "x"])
        assert curator.poll(5) == [Found(asked, [by_id["p0003"]])]
        assert (curator.stats()["picks"], curator.stats()["in_flight"]) == (0, 0)


def test_picks_are_given_again_and_not_remembered(tmp_path: Path, connect: Connect) -> None:
    with running(make_pool(tmp_path / "pool", 10)) as service:
        curator = connect(service)
        assert curator.next(["a", "b"]) == curator.next(["a", "b"])
        curator.position()
        assert len(service._server._answers) == 1


def test_the_position_is_asked_without_waiting(tmp_path: Path, connect: Connect) -> None:
    with running(make_pool(tmp_path / "pool")) as service:
        curator = connect(service)
        curator.report([make_outcome(0)])
        asked = curator.post_position()
        assert curator.poll(5) == [Positioned(asked, 1, 0)]


def test_several_runs_share_a_service_each_with_outcomes_and_a_posterior_of_its_own(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 6)
    first = Curation(pool.of_run("a"), group_size=4)
    first.report([make_outcome(number, f"p{number % 3:04d}", passed=4, failed=0) for number in range(12)])
    first.flush()
    second = Curation(pool.of_run("b"), group_size=4, start_from=pool.of_run("a"))
    service = CuratorService({"a": first, "b": second}, "tcp://127.0.0.1:*")
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    a, b, nobody = (Curator(service.address, run=run, timeout_s=5, resend_s=0.1) for run in ("a", "b", "c"))
    try:
        # The groups of two runs may have the same ids, and their outcomes the same numbers.
        assert a.next(["g1"])[0].group_id == b.next(["g1"])[0].group_id == "g1"
        assert (a.report([make_outcome(12, "p0005")]), b.report([make_outcome(0, "p0005")])) == (13, 1)
        assert (a.stats()["scored_groups"], b.stats()["scored_groups"]) == (13, 1)
        assert (a.stats()["earlier_groups"], b.stats()["earlier_groups"]) == (0, 12)
        with pytest.raises(RemoteError, match="run = 'c': not here; known: 'a', 'b'"):
            nobody.position()
        assert service.status().keys() == {"a", "b"}
    finally:
        for curator in (a, b, nobody):
            curator.close()
        stop.set()
        thread.join(10)
    # Both have been written, and the pool is free.
    opened = Pool.open(pool.path)
    assert [opened.of_run(run).last_sequence() for run in ("a", "b")] == [12, 0]
    assert opened.last_sequence() == -1
    assert Curation(opened.of_run("b"), group_size=4).stats()["earlier_groups"] == 12


def test_the_lock_of_a_pool_is_held_until_the_last_of_its_runs_ends(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 2)
    curations = [Curation(pool.of_run(run), group_size=4) for run in ("a", "b")]
    for curation in curations:
        with pytest.raises(PoolError, match="another process writes"):
            Pool.open(pool.path).become_writer()
        curation.close()
    Pool.open(pool.path).become_writer()
    with pytest.raises(PoolError, match="run 'a b': expected"):
        pool.of_run("a b")
