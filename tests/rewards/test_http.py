"""Judges behind URLs as a run uses them: what hangs holds nothing else up, and what fails is no reward."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from stream_grpo.config_http import JUDGES, ScoreModel
from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError, RewardError
from stream_grpo.rewards.gathering import Place
from stream_grpo.rewards.http import HttpRewards
from stream_grpo.rewards.judging import Answer
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.policy import UnscoredPolicy
from stream_grpo.rewards.scoring import Scoring, check_scores_alone, check_verifiers, scoring_version
from stream_grpo.types import Decision, EndReason, RewardResult
from tests.rewards.http_server import JudgeServer, Reply, in_turn, says

FAST = {"backoff_s": 0.01, "max_retries": 1, "timeout_s": 5.0, "total_s": 5.0}


def row(name: str, answer: str = "42") -> ProblemRow:
    return ProblemRow(problem_id="p1", answer=answer, verifier=f"http:{name}", prompt="6*7=")


def model(server: JudgeServer, **more: Any) -> dict[str, Any]:
    return {"kind": "score", "url": server.url, **FAST, **more}


def judge(server: JudgeServer, **more: Any) -> dict[str, Any]:
    return {"kind": "chat", "url": server.url, "model": "m", **FAST, **more}


def rewards(**judges: dict[str, Any]) -> Rewards:
    return Rewards.model_validate({"http": judges})


def results_of(scoring: Scoring, num: int, within_s: float = 20.0) -> dict[str, RewardResult]:
    found: dict[str, RewardResult] = {}
    deadline = time.monotonic() + within_s
    while len(found) < num and time.monotonic() < deadline:
        found |= dict(scoring.poll(0.5))
    assert len(found) == num, found
    return found


def by_response(score: Callable[[str], Any]) -> Callable[[Any], Reply]:
    return lambda body: Reply({"score": score(body["response"])})


def test_every_response_gets_the_score_of_its_own() -> None:
    with (
        JudgeServer(by_response(float)) as server,
        Scoring(rewards(rm=model(server)), ["http:rm"]) as scoring,
    ):
        for i in range(20):
            scoring.submit(f"t{i}", row("rm"), f"{i / 20}", EndReason.EOS)
        assert scoring.num_open == 20
        found = results_of(scoring, 20)
        assert {name: result.reward for name, result in found.items()} == {f"t{i}": i / 20 for i in range(20)}
        assert scoring.num_open == 0
        status = scoring.status()
    assert status["pool"] is None
    assert status["http"]["decisions"]["pass"] == 10  # from 0.5 on
    assert status["http"]["times"]["http:rm"]["num"] == 20
    assert status["http"]["requests"]["http:rm"] == {"num_queued": 0, "num_running": 0, "num_retries": 0}
    assert server.bodies[0].keys() == {"prompt", "response", "gold"}


def test_a_judge_that_hangs_holds_up_no_other() -> None:
    with (
        JudgeServer(in_turn(Reply({}, after_s=60.0))) as hanging,
        JudgeServer(in_turn(says("9"))) as other,
        Scoring(rewards(slow=model(hanging, max_concurrent=1), fast=judge(other)), ["http:slow"]) as scoring,
    ):
        for i in range(8):
            scoring.submit(f"slow{i}", row("slow"), "42", EndReason.EOS)
            scoring.submit(f"fast{i}", row("fast"), "42", EndReason.EOS)
            scoring.submit(
                f"here{i}", ProblemRow(problem_id="p", answer="42", verifier="exact"), "#### 42", EndReason.EOS
            )
        found = results_of(scoring, 16)
        assert {name[:4] for name in found} == {"fast", "here"}
        status = scoring.status()["http"]
        assert (scoring.num_open, status["requests"]["http:slow"]["num_running"]) == (8, 1)
        assert status["num_queued"] == 7
        started = time.monotonic()
    # Closing waits for nobody: the server would have answered after a minute.
    assert time.monotonic() - started < 30


def test_what_is_unreachable_is_an_error_with_the_url_and_no_reward() -> None:
    with JudgeServer(in_turn(Reply({}))) as server:
        url = server.url
    with Scoring(rewards(rm={"kind": "score", "url": url, **FAST}), ["http:rm"]) as scoring:
        scoring.submit("a", row("rm"), "42", EndReason.EOS)
        result = results_of(scoring, 1)["a"]
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert result.evidence.startswith(f"{url}: ConnectError")
    assert result.evidence.endswith("after 2 attempts")


@pytest.mark.parametrize(
    ("reply", "decision", "evidence"),
    [
        (Reply({"score": 0.25}), Decision.FAIL, "score 0.25, pass from 0.5"),
        (Reply({"score": None}), Decision.UNKNOWN, "score None is no number from 0 to 1"),
        (Reply({"score": 7}), Decision.UNKNOWN, "score 7 is no number from 0 to 1"),
        (Reply({"score": "0.5"}), Decision.UNKNOWN, "score '0.5' is no number"),
        (Reply({"result": 1}), Decision.ENV_ERROR, "the reply has no 'score'; it has 'result'"),
        (Reply(b"<html>"), Decision.ENV_ERROR, "the reply is not JSON"),
    ],
)
def test_what_is_no_score_is_no_reward(reply: Reply, decision: Decision, evidence: str) -> None:
    with JudgeServer(in_turn(reply)) as server, Scoring(rewards(rm=model(server))) as scoring:
        scoring.submit("a", row("rm"), "42", EndReason.EOS)
        result = results_of(scoring, 1)["a"]
    assert (result.decision, result.reward) == (decision, 0.25 if decision is Decision.FAIL else None)
    assert evidence in result.evidence


def failure_of(http: HttpRewards) -> str:
    try:
        http.poll(0.2)
    except RewardError as error:
        return str(error)
    return ""


def test_too_many_errors_in_a_row_end_the_run_with_the_first() -> None:
    url = "http://127.0.0.1:9/"
    judges = {"rm": ScoreModel(kind="score", url=url, max_retries=0, total_s=5.0)}
    with HttpRewards(judges, policy=UnscoredPolicy(max_env_errors_in_row=3)) as http:
        for i in range(3):
            http.submit("http:rm", row("rm"), [Answer(f"t{i}", "42")])
        while not (failure := failure_of(http)):
            pass
        assert re.match(r"3 responses in a row .*\nhttp:rm: http://127.0.0.1:9/: ", failure)
        with pytest.raises(RewardError):
            http.submit("http:rm", row("rm"), [Answer("v", "42")])


def test_what_was_aborted_is_given_to_no_judge() -> None:
    with JudgeServer(by_response(float)) as server, Scoring(rewards(rm=model(server))) as scoring:
        scoring.submit("a", row("rm"), "1", EndReason.ABORT)
        scoring.submit("b", row("rm"), "1", EndReason.ERROR)
        found = results_of(scoring, 2)
    assert [found[name].decision for name in "ab"] == [Decision.UNKNOWN, Decision.ENV_ERROR]
    assert server.bodies == []


def pair_server(body: Any) -> Reply:
    """Prefers the longer response."""
    first, second = body["messages"][0]["content"].split("|")
    return says("[[A]]" if len(first) > len(second) else "[[B]]")


def test_a_group_is_compared_once_all_its_responses_are_there() -> None:
    pairwise = {"kind": "pairwise", "model": "m", "prompt": "{first}|{second}", **FAST}
    with (
        JudgeServer(pair_server) as server,
        Scoring(rewards(pair={**pairwise, "url": server.url}), ["http:pair"]) as scoring,
    ):
        place = Place("g0@1", 4)
        for name, text in (("a", "xx"), ("b", "xxx"), ("c", "x")):
            scoring.submit(name, row("pair"), text, EndReason.EOS, place)
        assert (scoring.poll(0.1), scoring.num_open, server.bodies) == ([], 3, [])
        # The last of the group was aborted: it is unknown, and the others are compared without it.
        scoring.submit("d", row("pair"), "", EndReason.ABORT, place)
        found = results_of(scoring, 4)
        assert found["d"].decision is Decision.UNKNOWN
        b, a, c = (found[name].reward or 0.0 for name in "bac")
        assert b > a > c > 0
        assert len(server.bodies) == 6  # 3 pairs in both orders
        # A group whose ticket is issued again leaves nothing behind.
        scoring.submit("e", row("pair"), "x", EndReason.EOS, Place("g1@1", 4))
        assert scoring.num_open == 1
        scoring.forget("g1@1")
        assert scoring.num_open == 0
        scoring.submit("f", row("pair"), "x", EndReason.EOS)
        assert "nothing to compare" in results_of(scoring, 1)["f"].evidence


def test_a_column_that_no_message_can_hold_is_an_error_of_the_row() -> None:
    odd = ProblemRow(problem_id="p1", answer="42", verifier="http:rm", extra={"x": {1, 2}})
    with JudgeServer(by_response(float)) as server, Scoring(rewards(rm=model(server))) as scoring:
        scoring.submit("a", odd, "1", EndReason.EOS)
        assert "problem p1: a column cannot be handed" in results_of(scoring, 1)["a"].evidence


def test_a_judge_that_is_not_configured_is_refused_before_anything_starts() -> None:
    chosen = rewards(rm={"kind": "score", "url": "http://h/", "api_key_env": "NO_SUCH_KEY"})
    with pytest.raises(ConfigError, match=r"no verifier is called 'http:rn'; known: .*http:rm"):
        check_verifiers(["http:rn"], chosen, 120.0)
    with pytest.raises(ConfigError, match=r"rewards.http.rm.api_key_env = 'NO_SUCH_KEY': .* not set"):
        check_verifiers(["http:rm"], chosen, 120.0)
    with pytest.raises(ConfigError, match=r"rewards.http.rm.api_key_env = 'NO_SUCH_KEY'"):
        Scoring(chosen, ["http:rm"])
    check_verifiers(["exact"], chosen, 120.0)  # nobody asks it
    Scoring(chosen, ["exact"]).close()
    late = rewards(rm={"kind": "score", "url": "http://h/", "total_s": 120.0})
    with pytest.raises(ConfigError, match=r"rewards.http.rm.total_s = 120: .*sample_deadline_s = 120 is no longer"):
        check_verifiers(["http:rm"], late, 120.0)


def test_a_judge_of_groups_is_refused_for_held_out_problems() -> None:
    chosen = rewards(
        pair={"kind": "pairwise", "url": "http://h/v1/chat/completions", "model": "m"},
        rm={"kind": "score", "url": "http://h/"},
    )
    check_scores_alone(["exact", "http:rm"], chosen)
    with pytest.raises(ConfigError, match=r"evaluation\.files: verifier 'http:pair' compares the responses"):
        check_scores_alone(["exact", "http:pair"], chosen)


@pytest.mark.parametrize(
    ("change", "is_rule"),
    [
        ({"high": 2.0}, True),
        ({"model": "other"}, True),
        ({"score_field": "s"}, True),
        ({"url": "http://elsewhere/"}, False),
        ({"timeout_s": 1.0}, False),
        ({"max_concurrent": 3}, False),
        ({"api_key_env": "KEY"}, False),
    ],
)
def test_what_decides_a_reward_is_in_the_version_of_the_scoring(change: dict[str, Any], is_rule: bool) -> None:
    base = {"kind": "score", "url": "http://h/", "model": "rm"}
    assert (scoring_version(rewards(rm={**base, **change})) != scoring_version(rewards(rm=base))) is is_rule


def test_a_model_without_a_name_is_known_by_its_address() -> None:
    one, other = ({"kind": "score", "url": f"http://h/{i}"} for i in range(2))
    assert scoring_version(rewards(rm=one)) != scoring_version(rewards(rm=other))


def test_the_example_of_the_page_loads_and_its_tables_name_every_kind() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards_http.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    chosen = rewards(**tomllib.loads(example)["rewards"]["http"]).http
    assert {name: judge.kind for name, judge in chosen.items()} == {
        "helpful": "chat",
        "prm": "process",
        "better": "pairwise",
    }
    assert not [judge for judge in JUDGES if f"| `{get_args(judge.model_fields['kind'].annotation)[0]}` |" not in page]
