"""Tests of what is done with responses that got no reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.errors import RewardError
from stream_grpo.rewards.policy import UnscoredCount, UnscoredPolicy
from stream_grpo.types import Decision, RewardResult

DECISIONS = st.sampled_from(list(Decision))


def result(decision: Decision, evidence: str = "") -> RewardResult:
    reward = {Decision.PASS: 1.0, Decision.FAIL: 0.0}.get(decision)
    return RewardResult(decision=decision, reward=reward, verifier="v", verifier_version="1", evidence=evidence)


def test_retries_are_as_many_and_as_late_as_the_policy_says() -> None:
    policy = UnscoredPolicy(num_env_error_retries=2, num_unknown_retries=1, retry_after_s=5.0)
    count = UnscoredCount(policy)
    # num_tries is the number of tries made: with 2 retries the third is the last.
    assert [count.retry_at(Decision.ENV_ERROR, num_tries=n, now_s=10.0) for n in (1, 2, 3)] == [15.0, 15.0, None]
    assert [count.retry_at(Decision.UNKNOWN, num_tries=n, now_s=0.0) for n in (1, 2)] == [5.0, None]
    assert count.retry_at(Decision.PASS, num_tries=1, now_s=0.0) is None
    assert count.retry_at(Decision.FAIL, num_tries=1, now_s=0.0) is None
    assert count.status()["num_retries"] == 3


def test_errors_in_a_row_stop_the_run_with_the_first_traceback() -> None:
    count = UnscoredCount(UnscoredPolicy(max_env_errors_in_row=3))
    count.settle(result(Decision.ENV_ERROR), "Traceback of an earlier row")
    count.settle(result(Decision.PASS))
    count.settle(result(Decision.ENV_ERROR), "Traceback: the first")
    count.settle(result(Decision.ENV_ERROR), "Traceback: the second")
    with pytest.raises(RewardError, match=r"3 responses in a row .*\nv: Traceback: the first"):
        count.settle(result(Decision.ENV_ERROR), "Traceback: the third")


def test_a_verifier_that_is_down_is_not_hidden_by_one_that_works() -> None:
    count = UnscoredCount(UnscoredPolicy(max_env_errors_in_row=3))
    down = RewardResult(decision=Decision.ENV_ERROR, reward=None, verifier="http:judge", verifier_version="1")
    for _ in range(2):
        count.settle(down, "no connection")
        count.settle(result(Decision.PASS))
    assert count.status()["num_env_errors_in_row"] == 2
    with pytest.raises(RewardError, match=r"3 responses in a row .*\nhttp:judge: no connection"):
        count.settle(down, "no connection")


def test_without_a_limit_no_number_of_errors_stops() -> None:
    count = UnscoredCount(UnscoredPolicy(max_env_errors_in_row=None))
    for _ in range(1000):
        count.settle(result(Decision.ENV_ERROR))
    assert count.status()["num_left_out"] == 1000


@given(st.lists(DECISIONS, max_size=60), st.integers(1, 5))
def test_it_stops_exactly_at_the_first_row_that_is_too_long(decisions: list[Decision], limit: int) -> None:
    count, row = UnscoredCount(UnscoredPolicy(max_env_errors_in_row=limit)), 0
    for number, decision in enumerate(decisions):
        row = row + 1 if decision is Decision.ENV_ERROR else 0
        if row == limit:
            with pytest.raises(RewardError):
                count.settle(result(decision))
            return
        count.settle(result(decision))
        status = count.status()
        assert status["num_env_errors_in_row"] == row
        assert sum(status["decisions"].values()) == number + 1
        unscored = [d for d in decisions[: number + 1] if d in (Decision.UNKNOWN, Decision.ENV_ERROR)]
        assert status["num_left_out"] == len(unscored)
