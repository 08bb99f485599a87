"""Environments in worker processes: deadlines from outside, replay, what a death costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from stream_grpo.environments.instance import Call, Reply
from stream_grpo.environments.pool import EnvironmentPool, Limits
from stream_grpo.environments.protocol import Step, digest
from stream_grpo.environments.seat import Seat
from stream_grpo.errors import EnvironmentFailedError
from stream_grpo.registry.names import unknown
from stream_grpo.rewards.messages import ProblemRow

pytestmark = pytest.mark.slow

COUNTER = "python:tests.environments.worlds.Counter"
LONG_S = 60.0


def call(trajectory: str, *actions: str, seen: tuple[str, ...] = (), seed: int = 3) -> Call:
    problem = ProblemRow(problem_id="p", answer="", verifier="environment")
    return Call(trajectory=trajectory, problem=problem, seed=seed, actions=actions, seen=seen)


def replies(pool: EnvironmentPool, num: int) -> dict[str, Reply]:
    found: dict[str, Reply] = {}
    deadline = time.monotonic() + LONG_S
    while len(found) < num and time.monotonic() < deadline:
        found |= dict(pool.poll(1.0))
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def ask(pool: EnvironmentPool, asked: Call) -> Reply:
    pool.submit(asked)
    return replies(pool, 1)[asked.trajectory]


def step_of(reply: Reply) -> Step:
    assert reply.step is not None, reply.error
    return reply.step


def workers() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE and "stream_grpo.environments.worker" in p.cmdline()]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(COUNTER, num_workers=2, limits=Limits(step_s=LONG_S)) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient() -> Iterator[EnvironmentPool]:
    """For calls that hang; on a busy machine it may kill others too, which then are played again."""
    with EnvironmentPool(COUNTER, num_workers=2, limits=Limits(step_s=2.0, max_errors_in_row=None)) as pool:
        yield pool


def test_a_trajectory_goes_on_where_it_began(pool: EnvironmentPool) -> None:
    assert ask(pool, call("a")).start is not None
    one = step_of(ask(pool, call("a", "pid")))
    two = step_of(ask(pool, call("a", "pid", "pid", seen=(digest(one),))))
    assert one.evidence == two.evidence


def test_its_worker_is_given_the_newest_action_alone(pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, ...]] = []
    give = Seat.give

    def noted(seat: Seat, calls: Sequence[Mapping[str, Any]], *, most_steps: int) -> None:
        given.extend(plain["actions"] for plain in calls)
        give(seat, calls, most_steps=most_steps)

    monkeypatch.setattr(Seat, "give", noted)
    ask(pool, call("h"))
    one = step_of(ask(pool, call("h", "go")))
    assert step_of(ask(pool, call("h", "go", "go", seen=(digest(one),)))).observation == "2 of seed 3"
    assert given == [(), ("go",), ("go",)]


def test_a_tool_that_hangs_is_killed_and_holds_nobody_up(impatient: EnvironmentPool) -> None:
    for name in ("slow", "quick"):
        ask(impatient, call(name))
    before = impatient.status()
    impatient.submit(call("slow", "sleep 60"))
    impatient.submit(call("quick", "go"))
    first = replies(impatient, 1)
    assert step_of(first["quick"]).observation == "1 of seed 3"
    # Tried a second time, which hangs too: a deadline of one step, and one of a reset and a step.
    assert "not answered within 2 s" in replies(impatient, 1)["slow"].error
    more = {name: impatient.status()[name] - before[name] for name in ("num_kills", "num_retries", "num_errors")}
    # Both tries of the slow call at least; whatever else was killed was tried again.
    assert more["num_kills"] >= 2
    assert more["num_kills"] - more["num_retries"] == more["num_errors"] == 1


def test_a_later_step_has_no_later_deadline() -> None:
    with EnvironmentPool(COUNTER, num_workers=2, limits=Limits(step_s=2.0, max_retries=0)) as pool:
        ask(pool, call("old"))
        seen: tuple[str, ...] = ()
        for num in range(1, 4):
            seen += (digest(step_of(ask(pool, call("old", *["go"] * num, seen=seen)))),)
        pool.submit(call("old", "go", "go", "go", "sleep 60", seen=seen))
        # A reset and three steps: four times as long as the one step of the other.
        pool.submit(replace(call("new", "go", "go", "sleep 60"), open_loop=True))
        assert {name: reply.error[:12] for name, reply in replies(pool, 1).items()} == {"old": "not answered"}


def test_what_stands_behind_a_call_that_hangs_is_handed_out_anew(impatient: EnvironmentPool) -> None:
    # So many short calls that they are handed out several at once.
    names = [f"many{i}" for i in range(60)]
    for name in ["hangs", *names]:
        impatient.submit(call(name))
    starts = replies(impatient, 61)
    assert all(reply.start is not None for reply in starts.values())
    impatient.submit(call("hangs", "sleep 60"))
    for name in names:
        impatient.submit(call(name, "go"))
    found = replies(impatient, 60)
    assert {name: step_of(found[name]).observation for name in names} == dict.fromkeys(names, "1 of seed 3")
    assert "not answered" in replies(impatient, 1)["hangs"].error


def test_a_worker_that_is_killed_costs_a_replay_and_nothing_else(pool: EnvironmentPool, tmp_path: Path) -> None:
    ask(pool, call("b"))
    one = step_of(ask(pool, call("b", "go")))
    reply = ask(pool, call("b", "go", f"die-once {tmp_path / 'flag'}", seen=(digest(one),)))
    assert step_of(reply).observation == "2 of seed 3"
    assert reply.num_replayed == 1


def test_workers_killed_between_two_calls_are_replaced(pool: EnvironmentPool) -> None:
    ask(pool, call("c"))
    one = step_of(ask(pool, call("c", "go")))
    for worker in workers():
        worker.kill()
    assert step_of(ask(pool, call("c", "go", "go", seen=(digest(one),)))).observation == "2 of seed 3"


def test_a_megabyte_comes_back_cut(pool: EnvironmentPool) -> None:
    ask(pool, call("d"))
    observation = step_of(ask(pool, call("d", "big"))).observation
    assert len(observation) < (1 << 16) + 100
    assert "bytes left out" in observation


def test_an_exception_is_tried_again_and_is_then_an_error(pool: EnvironmentPool) -> None:
    ask(pool, call("e"))
    assert ask(pool, call("e", "raise")).error == "ValueError: broken on purpose"
    assert set(pool.status()["tools"]) >= {"start", "go"}
    assert unknown({"event": "status", "part": "sampler-0", "environment": pool.status()}) == []


def test_what_is_forgotten_gets_no_reply(pool: EnvironmentPool) -> None:
    ask(pool, call("f"))
    pool.submit(call("f", "sleep 0.3"))
    until(lambda: pool.status()["num_queued"] == 0)
    pool.forget("f")
    assert ask(pool, call("g")).start is not None
    until(lambda: pool.num_open == 0)
    assert pool.poll() == []


def test_errors_in_too_many_groups_in_a_row_end_it_with_one_of_them() -> None:
    limits = Limits(max_retries=0, max_errors_in_row=3)
    with EnvironmentPool("python:tests.environments.worlds.broken", limits=limits) as pool:
        for name in "abcdefgh":  # two groups of four
            pool.submit(call(name, seed=name > "d"))
        assert all("cannot be made" in reply.error for reply in replies(pool, 8).values())
        pool.submit(call("i", seed=2))
        with pytest.raises(EnvironmentFailedError, match=r"3 groups of the environment .* cannot be made"):
            replies(pool, 1)


def test_an_error_of_what_is_forgotten_is_none_in_a_row() -> None:
    limits = Limits(step_s=1.0, max_retries=0, max_errors_in_row=1)
    with EnvironmentPool(COUNTER, limits=limits) as pool:
        pool.submit(replace(call("f", "sleep 60"), open_loop=True))
        until(lambda: pool.status()["num_queued"] == 0)
        pool.forget("f")
        until(lambda: pool.num_open == 0)
        assert pool.status()["num_kills"] == 1
        assert pool.poll() == []


def test_an_environment_that_cannot_be_loaded_ends_it() -> None:
    with EnvironmentPool("python:tests.environments.worlds.missing") as pool:
        pool.submit(call("a"))
        with pytest.raises(EnvironmentFailedError, match=r"no worker .* starts"):
            replies(pool, 1)


def test_no_worker_outlives_its_pool() -> None:
    others = set(workers())
    with EnvironmentPool(COUNTER, num_workers=2) as pool:
        ask(pool, call("a"))
        mine = set(workers()) - others
    assert mine
    assert not mine & set(workers())
