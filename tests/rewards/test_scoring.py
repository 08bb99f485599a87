"""Tests of scoring: what is checked here, what in the pool, and what is refused before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError, RewardError
from stream_grpo.rewards import sandbox
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.sandbox import Isolation
from stream_grpo.rewards.scoring import Scoring, check_verifiers, code_settings, scoring_version
from stream_grpo.types import Decision, EndReason, RewardResult

FAKE = "python:tests.rewards.fake_verifiers.obedient"
PASSED = RewardResult(decision=Decision.PASS, reward=1.0, verifier="math", verifier_version="1")


def problem(verifier: str = "exact", answer: str = "51") -> ProblemRow:
    return ProblemRow(problem_id="p1", answer=answer, verifier=verifier)


class FakePool:
    """Keeps what it is given; a test says what is finished."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.given, self.finished = list(names), list[tuple[Any, ...]](), list[tuple[str, RewardResult]]()
        self.waits, self.is_closed = list[float](), False

    def submit(self, task_id: str, verifier: str, text: str, problem: Any, *, is_cut: bool = False) -> None:
        self.given.append((task_id, verifier, text, is_cut))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        self.waits.append(timeout_s)
        finished, self.finished = self.finished, []
        return finished

    def status(self) -> dict[str, Any]:
        return {"exhausted_share": 0.25}

    def close(self) -> None:
        self.is_closed = True


class Pools:
    """Makes pools, and keeps them."""

    def __init__(self) -> None:
        self.made: list[FakePool] = []

    def __call__(self, rewards: Rewards, names: Sequence[str]) -> FakePool:
        self.made.append(FakePool(names))
        return self.made[-1]


def test_a_cheap_verifier_needs_no_pool_and_answers_in_the_next_poll() -> None:
    pools = Pools()
    scoring = Scoring(Rewards(), ["exact"], make_pool=pools)
    scoring.submit("a", problem(), "#### 51", EndReason.EOS)
    scoring.submit("b", problem(), "#### 50", EndReason.EOS)
    scoring.submit("c", problem(), "#### 51", EndReason.LENGTH)  # 512, for example
    assert scoring.num_open == 3
    assert [(task_id, result.reward) for task_id, result in scoring.poll(60.0)] == [("a", 1.0), ("b", 0.0), ("c", 0.0)]
    assert (scoring.num_open, scoring.poll(60.0), pools.made) == (0, [], [])
    assert scoring.status()["pool"] is None
    assert scoring.exhausted_share == 0.0
    scoring.submit("d", problem("choice", "B"), "\\boxed{B}", EndReason.EOS)
    assert ([result.reward for _, result in scoring.poll(60.0)], pools.made) == ([1.0], [])


def test_every_other_verifier_is_asked_in_a_pool_that_knows_what_to_load() -> None:
    pools = Pools()
    scoring = Scoring(Rewards(), ["regex", "exact", "choice", "math"], make_pool=pools)
    (pool,) = pools.made
    assert pool.names == ["math", "regex"]
    scoring.submit("a", problem("math"), "51", EndReason.EOS)
    scoring.submit("b", problem("math"), "5", EndReason.LENGTH)
    assert pool.given == [("a", "math", "51", False), ("b", "math", "5", True)]
    scoring.submit("c", problem(), "#### 51", EndReason.EOS)
    assert [task_id for task_id, _ in scoring.poll(9.0)] == ["c"]
    assert (scoring.num_open, scoring.poll(9.0)) == (2, [])
    assert pool.waits == [0.0, 9.0]  # no wait where there is a result already
    pool.finished = [("b", PASSED)]
    assert (scoring.poll(), scoring.num_open) == ([("b", PASSED)], 1)
    assert scoring.exhausted_share == 0.25
    scoring.close()
    assert pool.is_closed


def test_a_verifier_that_nobody_expected_starts_the_pool_when_it_comes() -> None:
    pools = Pools()
    scoring = Scoring(Rewards(functions=(FAKE,)), make_pool=pools)
    scoring.submit("a", problem(FAKE), "51", EndReason.EOS)
    scoring.submit("b", problem("regex"), "51", EndReason.EOS)
    (pool,) = pools.made
    assert [(name, verifier) for name, verifier, *_ in pool.given] == [("a", FAKE), ("b", "regex")]


@pytest.mark.parametrize("verifier", ["exact", "math"])
@pytest.mark.parametrize(
    ("end_reason", "decision"), [(EndReason.ABORT, Decision.UNKNOWN), (EndReason.ERROR, Decision.ENV_ERROR)]
)
def test_a_response_that_the_engine_did_not_end_is_given_to_no_verifier(
    verifier: str, end_reason: EndReason, decision: Decision
) -> None:
    pools = Pools()
    # However many there are: the engine is no verifier that fails.
    with Scoring(Rewards(max_errors_in_row=1), [verifier], make_pool=pools) as scoring:
        scoring.submit("a", problem(verifier), "#### 51", end_reason)
        ((_, result),) = scoring.poll()
    assert (result.decision, result.reward) == (decision, None)
    assert all(pool.given == [] for pool in pools.made)


@pytest.mark.parametrize("verifier", ["exakt", FAKE])
def test_a_verifier_that_is_not_of_the_run_is_an_error_and_no_reward(verifier: str) -> None:
    scoring = Scoring(Rewards())
    scoring.submit("a", problem(verifier), "51", EndReason.EOS)
    ((_, result),) = scoring.poll()
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert f"verifier {verifier!r} is not one of this run" in result.evidence


def test_too_many_errors_in_a_row_end_the_run_with_the_first() -> None:
    scoring = Scoring(Rewards(max_errors_in_row=3))
    for answer in ("", "", "51", "", ""):
        scoring.submit("a", problem(answer=answer), "#### 51", EndReason.EOS)
    with pytest.raises(RewardError, match=r"3 responses in a row .*\n.*problem p1 has an empty answer"):
        scoring.submit("a", problem(answer=""), "#### 51", EndReason.EOS)


def test_a_function_of_the_user_is_scored_in_worker_processes() -> None:
    rewards = Rewards(functions=(FAKE,), time_limit_s=20.0)
    with Scoring(rewards, [FAKE]) as scoring:
        scoring.submit("a", problem(FAKE, answer="51"), "51", EndReason.EOS)
        results = []
        while scoring.num_open:
            results += scoring.poll(1.0)
    assert [(task_id, result.reward, result.verifier) for task_id, result in results] == [("a", 1.0, FAKE)]


def test_the_settings_of_code_reach_the_workers() -> None:
    # No test can pass within the total, and the evidence names the limit.
    rewards = Rewards(code_time_limit_s=7.0, code_total_s=3.0, allow_weaker_sandbox=True)
    settings = code_settings(rewards)
    assert (settings.limits.wall_s, settings.total_s, settings.allow_weaker) == (7.0, 3.0, True)
    row = ProblemRow(problem_id="p1", answer="", verifier="code", extra={"tests": [{"input": "1\n", "output": "2\n"}]})
    program = "```python\nimport time\ntime.sleep(1000)\n```"
    with Scoring(Rewards(code_time_limit_s=1.0, allow_weaker_sandbox=True), ["code"]) as scoring:
        scoring.submit("a", row, program, EndReason.EOS)
        results = []
        while scoring.num_open:
            results += scoring.poll(1.0)
    ((_, result),) = results
    assert (result.decision, result.reward) == (Decision.FAIL, 0.0)
    assert "stopped at the time limit of 1 s" in result.evidence


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exakt", "no verifier is called 'exakt'; known: choice, .*exact"),
        ("python:os.system", "rewards.functions lists; it lists none"),
    ],
)
def test_what_no_run_can_score_is_refused_before_it_starts(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_verifiers(["exact", name], Rewards(), 120.0)
    with pytest.raises(ConfigError, match=reason):
        Scoring(Rewards(), [name])


def test_a_function_that_is_not_there_is_refused() -> None:
    name = "python:no_such_module_of_mine.reward"
    with pytest.raises(ConfigError, match="there is no module 'no_such_module_of_mine'"):
        check_verifiers([name], Rewards(functions=(name,)), 120.0)


def test_a_function_is_found_in_its_folder_and_its_source_is_a_rule(tmp_path: Path) -> None:
    name = "python:my_scoring_rules.reward"
    rewards = Rewards(functions=(name,), function_dir=tmp_path)
    versions = []
    for text in ("def reward(completions): return [1]", "def reward(completions): return [0]"):
        (tmp_path / "my_scoring_rules.py").write_text(text)
        check_verifiers([name], rewards, 120.0)
        versions.append(scoring_version(rewards))
    assert versions[0] != versions[1]


def test_code_needs_isolation_and_tickets_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation("process", ("network",), "no user namespaces"))
    with pytest.raises(ConfigError, match=r"cannot isolate network .*\(no user namespaces\).*allow_weaker_sandbox"):
        check_verifiers(["code"], Rewards(), 120.0)
    check_verifiers(["code"], Rewards(allow_weaker_sandbox=True), 120.0)
    # 2 x (30 + 10).
    with pytest.raises(ConfigError, match=r"sample_deadline_s = 80: .* = 80 s; use more"):
        check_verifiers(["code"], Rewards(allow_weaker_sandbox=True), 80.0)


@pytest.mark.parametrize(
    ("change", "is_rule"),
    [
        ({"time_limit_s": 3.0}, True),
        ({"memory_limit_bytes": 1 << 30}, True),
        ({"code_total_s": 3.0}, True),
        ({"allow_weaker_sandbox": True}, True),
        ({"functions": (FAKE,)}, True),
        ({"num_workers": 3}, False),
        ({"max_retries": 3}, False),
    ],
)
def test_what_can_change_a_reward_is_in_the_version_of_the_scoring(change: dict[str, Any], is_rule: bool) -> None:
    assert (scoring_version(Rewards(**change)) != scoring_version(Rewards())) is is_rule
