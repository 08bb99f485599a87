"""Tests of what comes of responses that a worker did or did not survive, without a process."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.rewards.board import Board, Task
from stream_grpo.rewards.messages import ProblemRow, decode, result_to_plain
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.types import Decision, RewardResult

LENIENT = UnscoredPolicy(num_env_error_retries=0, max_env_errors_in_row=None)
PASS = result_to_plain(RewardResult(decision=Decision.PASS, reward=1.0, verifier="exact", verifier_version="1"))
QUICK = {"result": PASS, "version": "1", "seconds": 2**-9}


def board_with(*problem_ids: str, policy: UnscoredPolicy = LENIENT) -> Board:
    board = Board(policy)
    for number, problem_id in enumerate(problem_ids):
        row = ProblemRow(problem_id=problem_id, answer="7", verifier="exact")
        board.submit(str(number), f"#### {number}", row, False)
    return board


def take_one(board: Board, now_s: float = 0.0) -> Task:
    (task,) = board.take_batch(1, now_s)
    return task


def decisions(board: Board) -> dict[str, Decision]:
    return {task_id: result.decision for task_id, result in board.finished}


def test_the_first_of_a_verifier_goes_alone_and_short_ones_go_together() -> None:
    board = board_with(*["p"] * 101)
    task = take_one(board)
    board.answered(task, QUICK, 0.0)
    # 100 are left; after the first 99 wait, of which one of two workers takes at most ceil(99 / 4) = 25. At 2^-9 s
    # each, 50 ms hold 25 of them.
    assert len(board.take_batch(2, 0.0)) == 25
    # 75 are left: ceil(74 / 16) = 5 for one of eight workers.
    assert len(board.take_batch(8, 0.0)) == 5


def test_tasks_as_long_as_a_batch_go_alone() -> None:
    board = board_with(*["p"] * 10)
    board.answered(take_one(board), {**QUICK, "seconds": 0.05}, 0.0)
    assert len(board.take_batch(1, 0.0)) == 1


def test_out_of_time_waits_for_the_gold_which_is_next_and_is_tried_once_a_problem() -> None:
    board = board_with("p", "p", "p", "q")
    first, second = take_one(board), take_one(board)
    board.out_of_time(first, 1.0)
    board.out_of_time(second, 1.0)
    gold = take_one(board)
    assert gold.is_gold
    assert decode(gold.payload)["response"] == "#### 7\n"
    assert board.finished == []
    board.answered(gold, QUICK, 0.0)
    assert decisions(board) == {"0": Decision.FAIL, "1": Decision.FAIL}
    assert [result.reward for _, result in board.finished] == [0.0, 0.0]
    board.out_of_time(take_one(board), 1.0)  # the gold of p is known
    assert decisions(board)["2"] is Decision.FAIL
    board.out_of_time(take_one(board), 1.0)
    assert take_one(board).is_gold  # that of q is not
    assert board.status()["num_exhausted"] == {"time": 4}
    assert board.status()["num_exhausted_failed"] == 3


@pytest.mark.parametrize("how", ["out of time", "crashed", "error", "unknown", "lost"])
def test_a_gold_that_is_not_decided_makes_an_error_of_it_and_not_a_fail(how: str) -> None:
    board = board_with("p")
    board.answered(take_one(board), {"exhausted": "memory", "version": "1", "seconds": 2.0}, 0.0)
    gold = take_one(board)
    if how == "out of time":
        board.out_of_time(gold, 1.0)
    elif how == "crashed":
        board.crashed(gold, -11, 0.0)
    elif how == "error":
        board.answered(gold, {"error": "OSError", "traceback": "...", "seconds": 0.1}, 0.0)
    elif how == "unknown":
        unknown = {**PASS, "decision": "unknown", "reward": None}
        board.answered(gold, {**QUICK, "result": unknown}, 0.0)
    else:
        for _ in range(3):
            board.lost([gold], 0.0)
    ((_, result),) = board.finished
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert "ran out of memory, and the gold of this problem does not verify" in result.evidence
    assert board.status()["num_exhausted_failed"] == 0


def test_what_is_lost_without_guilt_is_next_in_its_order_three_times_at_most() -> None:
    board = board_with("p", "q", "r")
    lost = [take_one(board), take_one(board)]
    for _ in range(2):
        board.lost(lost, 0.0)
        assert [take_one(board), take_one(board)] == lost
    board.lost(lost, 0.0)
    assert decisions(board) == {"0": Decision.ENV_ERROR, "1": Decision.ENV_ERROR}
    assert take_one(board).task_id == "2"


def test_an_error_is_tried_again_after_the_time_of_the_policy() -> None:
    policy = UnscoredPolicy(num_env_error_retries=1, retry_after_s=5.0)
    board = board_with("p", policy=policy)
    error = {"error": "OSError: gone", "traceback": "...", "version": "1", "seconds": 0.0}
    board.answered(take_one(board), error, 10.0)
    assert board.take_batch(1, 14.9) == []
    assert board.next_retry_at() == 15.0
    board.answered(take_one(board, 15.0), error, 15.0)
    assert decisions(board) == {"0": Decision.ENV_ERROR}
    assert board.finished[0][1].evidence == "OSError: gone"


FATES: dict[str, Any] = {
    "pass": lambda board, task: board.answered(task, QUICK, 0.0),
    "error": lambda board, task: board.answered(task, {"error": "e", "version": "1", "seconds": 0.0}, 0.0),
    "memory": lambda board, task: board.answered(task, {"exhausted": "memory", "version": "1", "seconds": 0.0}, 0.0),
    "time": lambda board, task: board.out_of_time(task, 1.0),
    "crash": lambda board, task: board.crashed(task, -9, 0.0),
    "not loaded": lambda board, task: board.not_loaded(task, 1.0),
    "lost": lambda board, task: board.lost([task], 0.0),
}


@settings(deadline=None)
@given(st.lists(st.sampled_from("pqr"), min_size=1, max_size=12), st.data())
def test_every_response_is_finished_once_and_has_a_reward_only_where_it_was_decided(
    problem_ids: list[str], data: st.DataObject
) -> None:
    policy = UnscoredPolicy(num_env_error_retries=1, retry_after_s=0.0, max_env_errors_in_row=None)
    board = board_with(*problem_ids, policy=policy)
    while batch := board.take_batch(1, 0.0):
        for task in batch:
            FATES[data.draw(st.sampled_from(sorted(FATES)))](board, task)
    assert sorted(task_id for task_id, _ in board.finished) == sorted(map(str, range(len(problem_ids))))
    assert board.num_open == 0
    for _, result in board.finished:
        assert (result.reward is None) == (result.decision is Decision.ENV_ERROR)
