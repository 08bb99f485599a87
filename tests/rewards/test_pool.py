"""Tests of the worker processes: limits from outside, replacement, what a verifier's end means."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stream_grpo.errors import RewardError
from stream_grpo.rewards.limits import Limits
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.pool import RewardPool
from stream_grpo.types import Decision, RewardResult

pytestmark = pytest.mark.slow

FAKE = "python:tests.rewards.fake_verifiers.obedient"
HANGS = "python:tests.rewards.fake_verifiers.always_hangs"
NO_RETRY = UnscoredPolicy(num_env_error_retries=0, max_env_errors_in_row=None)
LONG_S = 60.0


def problem(verifier: str = FAKE, answer: str = "ok") -> ProblemRow:
    return ProblemRow(problem_id="p1", answer=answer, verifier=verifier)


def score(pool: RewardPool, *responses: str, verifier: str = FAKE, answer: str = "ok") -> list[RewardResult]:
    """The results of these responses, in their order."""
    for place, response in enumerate(responses):
        pool.submit(str(place), verifier, response, problem(verifier, answer))
    found: dict[str, RewardResult] = {}
    deadline = time.monotonic() + LONG_S
    while len(found) < len(responses) and time.monotonic() < deadline:
        found |= dict(pool.poll(1.0))
    return [found[str(place)] for place in range(len(responses))]


def drain(pool: RewardPool) -> None:
    while pool.num_open:
        pool.poll(LONG_S)


def workers() -> set[psutil.Process]:
    """All processes of the pools of this process that are not about to be reaped."""
    found = psutil.Process().children(recursive=True)
    return {p for p in found if p.status() != psutil.STATUS_ZOMBIE and "stream_grpo.rewards.worker" in p.cmdline()}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, Limits(wall_s=0.5, memory_bytes=1 << 30), policy=NO_RETRY) as pool:
        yield pool


def test_results_come_back_under_their_ids(pool: RewardPool) -> None:
    results = score(pool, *["ok" if i % 3 else "wrong" for i in range(200)])
    assert [r.reward for r in results] == [float(bool(i % 3)) for i in range(200)]
    assert results[0].evidence == "score 0, pass from 0.5"


@pytest.mark.parametrize("response", ["hang", "spin"])
def test_a_response_that_hangs_the_verifier_fails_where_the_gold_verifies(pool: RewardPool, response: str) -> None:
    before = pool.status()
    hung, normal = score(pool, response, "ok")
    assert (hung.decision, hung.reward) == (Decision.FAIL, 0.0)
    assert hung.evidence == "the verifier ran out of time on this response; the gold verifies within the limits"
    assert hung.verifier_version == normal.verifier_version != ""
    assert normal.decision is Decision.PASS
    after = pool.status()
    assert after["num_kills"] == before["num_kills"] + 1
    assert after["num_exhausted"]["time"] == before["num_exhausted"].get("time", 0) + 1


def test_a_verifier_that_hangs_on_the_gold_too_is_an_error(pool: RewardPool) -> None:
    kills = pool.status()["num_kills"]
    (result,) = score(pool, "ok", verifier=HANGS)
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert "the gold of this problem does not verify" in result.evidence
    assert pool.status()["num_kills"] == kills + 2  # the response, and the gold
    score(pool, "ok", verifier=HANGS)
    assert pool.status()["num_kills"] == kills + 3  # the gold is not tried twice


@pytest.mark.parametrize(("response", "what"), [("eat", "memory"), ("recurse", "stack")])
def test_out_of_memory_is_out_of_time(pool: RewardPool, response: str, what: str) -> None:
    result, *others = score(pool, response, *["ok"] * 20)
    assert result.decision is Decision.FAIL
    assert {other.decision for other in others} == {Decision.PASS}
    assert f"ran out of {what}" in result.evidence


@pytest.mark.parametrize(
    ("response", "evidence"),
    [
        ("exit 0", "the worker ended with status 0 during the check"),
        ("exit 64", "the worker ended with status 64 during the check"),
        ("segfault", "the worker ended by signal 11 during the check"),
        ("quit", "SystemExit: 3"),
        ("raise p1", "OSError: the disk of p1 is gone"),
    ],
)
def test_a_verifier_that_ends_or_raises_is_an_error_and_others_go_on(
    pool: RewardPool, response: str, evidence: str
) -> None:
    results = score(pool, "ok", response, *["ok"] * 20)
    assert [r.decision for r in results] == [Decision.PASS, Decision.ENV_ERROR, *[Decision.PASS] * 20]
    assert results[1].evidence == evidence


def test_what_a_verifier_prints_is_no_result(pool: RewardPool) -> None:
    assert [r.decision for r in score(pool, "print", "ok")] == [Decision.FAIL, Decision.PASS]


def test_a_verifier_that_is_not_there_is_an_error_with_its_name(pool: RewardPool) -> None:
    (result,) = score(pool, "ok", verifier="no_such")
    assert result.decision is Decision.ENV_ERROR
    assert "no verifier is called 'no_such'" in result.evidence


def test_what_a_killed_verifier_has_started_ends_with_it(pool: RewardPool, tmp_path: Path) -> None:
    score(pool, f"child {tmp_path / 'pid'}")
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + LONG_S
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_texts_and_columns_arrive_as_they_were(pool: RewardPool) -> None:
    text = "line\nnext \ud800 \x00 ∞ " + "x" * 300_000
    row = ProblemRow(problem_id="p", answer=text, verifier=FAKE, extra={"a": (1, 2)}, prompt=({"role": "user"},))
    pool.submit("long", FAKE, text, row)
    assert [(name, r.decision) for name, r in pool.poll(LONG_S)] == [("long", Decision.PASS)]


def test_a_column_that_no_worker_can_be_given_is_an_error_that_names_the_problem(pool: RewardPool) -> None:
    pool.submit("odd", FAKE, "ok", ProblemRow(problem_id="p9", answer="ok", verifier=FAKE, extra={"x": object()}))
    ((_, result),) = pool.poll(LONG_S)
    assert result.decision is Decision.ENV_ERROR
    assert result.evidence.startswith("problem p9: a column cannot be handed to a worker")


@pytest.fixture(scope="module")
def math_pool() -> Iterator[RewardPool]:
    with RewardPool(2, Limits(wall_s=5.0), policy=NO_RETRY, preload=["math"]) as pool:
        yield pool


def test_the_same_scores_from_main_thread_worker_thread_and_event_loop(math_pool: RewardPool) -> None:
    """C37: a limit that hangs on an alarm of the main thread scores everything 0 elsewhere."""

    def a_third() -> float | None:
        (result,) = score(math_pool, "\\boxed{\\frac{1}{3}}", verifier="math", answer="1/3")
        return result.reward

    async def in_a_task() -> float | None:
        return a_third()

    async def beside_the_loop() -> float | None:
        return await asyncio.to_thread(a_third)

    in_thread: list[float | None] = []
    thread = threading.Thread(target=lambda: in_thread.append(a_third()))
    thread.start()
    thread.join()
    assert [a_third(), *in_thread, asyncio.run(in_a_task()), asyncio.run(beside_the_loop())] == [1.0] * 4


def test_a_tower_of_powers_is_wrong_and_holds_nobody_up(math_pool: RewardPool) -> None:
    """C38, with the verifier itself."""
    results = score(math_pool, *["\\boxed{10^{10^{10^{10}}}}"] * 10, "\\boxed{10}", verifier="math", answer="10")
    assert [r.decision for r in results] == [Decision.FAIL] * 10 + [Decision.PASS]


def test_ten_hanging_answers_hold_a_normal_one_up_for_their_limits_only() -> None:
    """C38: 2 workers, 10 answers that hang, a limit of 1 s, then a normal one: five rounds of a limit each."""
    with RewardPool(2, Limits(wall_s=1.0, memory_bytes=1 << 30), policy=NO_RETRY) as pool:
        score(pool, "ok", "ok")
        begun = time.monotonic()
        results = score(pool, *["spin"] * 10, "ok")
        seconds = time.monotonic() - begun
        status = pool.status()
    assert [r.decision for r in results] == [Decision.FAIL] * 10 + [Decision.PASS]
    assert status["num_exhausted"] == {"time": 10}
    assert (status["num_kills"], status["num_restarts"]) == (10, 10)
    assert 5.0 <= seconds < 30.0  # about 6 s where the machine has nothing else to do


def test_an_error_leaves_its_sample_out_and_a_row_of_them_stops_the_run() -> None:
    """C40: results 1, OSError, 0, 0; then OSError without end."""
    policy = UnscoredPolicy(num_env_error_retries=1, retry_after_s=0.01, max_env_errors_in_row=3)
    with RewardPool(1, Limits(memory_bytes=1 << 30), policy=policy) as pool:
        results = score(pool, "ok", "raise two", "wrong", "wrong")
        assert [r.reward for r in results] == [1.0, None, 0.0, 0.0]
        status = pool.status()
        assert (status["num_left_out"], status["num_retries"]) == (1, 1)
        score(pool, "ok")  # ends the row that the retried sample began
        for place in range(3):
            pool.submit(str(place), FAKE, f"raise {place}", problem())
        with pytest.raises(RewardError, match=r"(?s)3 responses in a row .*Traceback.*the disk of 0 is gone"):
            drain(pool)
        with pytest.raises(RewardError):
            pool.submit("4", FAKE, "ok", problem())


def test_a_retry_that_works_is_as_good_as_a_first_try(tmp_path: Path) -> None:
    policy = UnscoredPolicy(num_env_error_retries=1, retry_after_s=0.05)
    with RewardPool(1, Limits(memory_bytes=1 << 30), policy=policy) as pool:
        (result,) = score(pool, f"once {tmp_path / 'mark'}")
        assert result.decision is Decision.FAIL
        assert pool.status()["num_retries"] == 1


def test_nothing_is_left_of_a_closed_pool() -> None:
    before = workers()
    pool = RewardPool(2, Limits(wall_s=LONG_S, memory_bytes=1 << 30))
    for place in range(4):
        pool.submit(str(place), FAKE, "hang", problem())
    time.sleep(0.2)
    pool.close()
    pool.close()
    assert workers() == before
    with pytest.raises(RewardError, match="closed"):
        pool.poll()


def test_a_worker_that_is_killed_from_outside_is_replaced(pool: RewardPool) -> None:
    for worker in workers():
        if worker.ppid() == os.getpid():
            worker.kill()
    assert [r.decision for r in score(pool, "ok", "ok", "ok")] == [Decision.PASS] * 3


def test_the_workers_of_a_process_that_is_killed_end_with_it(tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(
        "import time\n"
        "from stream_grpo.rewards.messages import ProblemRow\n"
        "from stream_grpo.rewards.pool import RewardPool\n"
        "pool = RewardPool(1)\n"
        f"row = ProblemRow(problem_id='p', answer='ok', verifier={FAKE!r})\n"
        f"pool.submit('1', {FAKE!r}, 'ok', row)\n"
        "assert pool.poll(60)\n"
        f"pool.submit('2', {FAKE!r}, 'hang', row)\n"
        "print('hangs', flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "hangs\n"
        left = psutil.Process(owner.pid).children(recursive=True)
        assert len(left) >= 2  # the one that keeps, and its child
        owner.kill()
    _, alive = psutil.wait_procs(left, timeout=LONG_S)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    "head", ["", "import threading, time\nthreading.Thread(target=time.sleep, args=(1e4,)).start()\n"]
)
def test_modules_of_the_user_are_found_in_their_folder_with_threads_or_without(tmp_path: Path, head: str) -> None:
    (tmp_path / "my_rewards.py").write_text(head + "def f(completions, **columns):\n    return [0.5]\n")
    name = "python:my_rewards.f"
    limits = Limits(memory_bytes=1 << 30)
    with RewardPool(1, limits, policy=NO_RETRY, preload=[name], paths=[str(tmp_path)]) as pool:
        assert [r.reward for r in score(pool, "a", "b", verifier=name)] == [0.5, 0.5]


def test_a_pool_whose_workers_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said = "no reward worker starts: the last of 3 ended before it was ready"
    with RewardPool(1, Limits(memory_bytes=1 << 30)) as pool, pytest.raises(RewardError, match=said):
        score(pool, "ok")


def test_a_pool_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="num_workers is 0"):
        RewardPool(0)
