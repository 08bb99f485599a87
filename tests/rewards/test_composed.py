"""Scoring by several verifiers: what is asked, when the whole is there, and that the hidden verifier stays hidden."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from pydantic import ValidationError

from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError, RewardError
from stream_grpo.rewards.composed import ComposedScoring
from stream_grpo.rewards.gathering import Place
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.scoring import check_verifiers, scoring_version, versions
from stream_grpo.types import Decision, EndReason, RewardResult
from tests.rewards.test_scoring import Pools

CAREFUL: dict[str, Any] = {
    "components": {
        "form": {"verifier": "regex", "role": "gate", "columns": {"pattern": "####"}},
        "answer": {"verifier": "exact"},
    },
    "costs": {"tokens": {"weight": 0.25, "free": 10, "per": 10}},
    "bounds": [-1.0, 1.0],
    "gate_reward": -2.0,
}
TAIL: dict[str, Any] = {
    "components": {"answer": {"verifier": "exact", "tail_above": 0.5, "tail_verifier": "math"}},
}
HIDDEN: dict[str, Any] = {"verifier": "math", "share": 1.0, "gold": "hidden_gold", "window": 16}


def rewards(**sections: Any) -> Rewards:
    return Rewards.model_validate(sections)


def row(verifier: str = "compose:careful", **extra: Any) -> ProblemRow:
    return ProblemRow(problem_id="p1", answer="51", verifier=verifier, extra=extra)


def said(decision: Decision, verifier: str = "regex") -> RewardResult:
    reward = {Decision.PASS: 1.0, Decision.FAIL: 0.0}.get(decision)
    return RewardResult(decision=decision, reward=reward, verifier=verifier, verifier_version="1", evidence="why")


def test_the_whole_is_there_when_its_last_part_is() -> None:
    pools = Pools()
    scoring = ComposedScoring(rewards(compose={"careful": CAREFUL}), ["compose:careful"], make_pool=pools)
    (pool,) = pools.made
    assert pool.names == ["regex"]
    scoring.submit("a", row(), "#### 51", EndReason.EOS, num_tokens=30)
    scoring.submit("b", row("exact"), "#### 50", EndReason.EOS)
    ((part_id, *asked),) = pool.given
    assert asked == ["regex", "#### 51", False]
    # The plain row is answered at once, the part of the other is not shown.
    assert [(task_id, result.reward) for task_id, result in scoring.poll()] == [("b", 0.0)]
    assert scoring.num_open == 1
    pool.finished = [(part_id, said(Decision.PASS))]
    ((task_id, result),) = scoring.poll()
    # 1 - 0.25 x (30 - 10) / 10.
    assert (task_id, result.decision, result.reward) == ("a", Decision.PASS, 0.5)
    assert result.components == {"form": 1.0, "answer": 1.0, "cost.tokens": -0.5, "score": 0.5}
    assert result.evidence == "form pass: why; answer pass: answer '51', expected '51'"
    assert (scoring.num_open, scoring.poll()) == (0, [])


def test_a_second_verifier_is_asked_after_the_first_and_only_in_the_tail() -> None:
    pools = Pools()
    scoring = ComposedScoring(rewards(compose={"twice": TAIL}), ["compose:twice"], make_pool=pools)
    (pool,) = pools.made
    scoring.submit("low", row("compose:twice"), "#### 50", EndReason.EOS)
    scoring.submit("high", row("compose:twice"), "#### 51", EndReason.EOS)
    assert pool.given == []
    assert [(task_id, result.reward) for task_id, result in scoring.poll()] == [("low", 0.0)]
    ((part_id, *asked),) = pool.given
    assert asked == ["math", "#### 51", False]
    pool.finished = [(part_id, said(Decision.FAIL, "math"))]
    ((task_id, result),) = scoring.poll()
    assert (task_id, result.reward) == ("high", 0.0)
    assert "answer (tail) fail: why" in result.evidence


def test_what_an_optional_part_does_not_give_is_counted() -> None:
    parts = {"answer": {"verifier": "exact"}, "form": {"verifier": "regex", "optional": True, "if_missing": 0.5}}
    pools = Pools()
    scoring = ComposedScoring(rewards(compose={"x": {"components": parts}}), ["compose:x"], make_pool=pools)
    for task_id, decision in (("a", Decision.UNKNOWN), ("b", Decision.PASS), ("c", Decision.ENV_ERROR)):
        scoring.submit(task_id, row("compose:x"), "#### 51", EndReason.EOS)
        pools.made[0].finished = [(pools.made[0].given[-1][0], said(decision))]
        ((_, result),) = scoring.poll()
        assert result.reward == (2.0 if decision is Decision.PASS else 1.5)
    assert scoring.status()["absent"] == {"compose:x": {"form": 2}}


def test_a_verifier_that_is_replaced_is_scored_by_the_composition() -> None:
    settings = rewards(compose={"short": CAREFUL | {"replaces": ["exact"]}})
    pools = Pools()
    scoring = ComposedScoring(settings, ["exact"], make_pool=pools)
    assert pools.made[0].names == ["regex"]
    scoring.submit("a", row("exact"), "#### 51", EndReason.EOS)
    pools.made[0].finished = [(pools.made[0].given[0][0], said(Decision.PASS))]
    ((_, result),) = scoring.poll()
    assert (result.verifier, result.verifier_version) == ("compose:short", versions(["exact"], settings)["exact"])


@pytest.mark.parametrize(
    ("end_reason", "decision"), [(EndReason.ABORT, Decision.UNKNOWN), (EndReason.ERROR, Decision.ENV_ERROR)]
)
def test_what_the_engine_did_not_finish_is_given_to_no_verifier(end_reason: EndReason, decision: Decision) -> None:
    pools = Pools()
    settings = rewards(compose={"careful": CAREFUL}, hidden=HIDDEN, max_errors_in_row=1)
    scoring = ComposedScoring(settings, ["compose:careful"], make_pool=pools)
    scoring.submit("a", row(), "#### 51", end_reason, may_be_trained=True)
    ((_, result),) = scoring.poll()
    assert (result.decision, result.reward, pools.made[0].given) == (decision, None, [])


def test_a_row_without_the_column_of_a_part_is_an_error_that_counts() -> None:
    parts = {"a": {"verifier": "exact", "gold": "label"}}
    scoring = ComposedScoring(rewards(compose={"x": {"components": parts}}, max_errors_in_row=2))
    scoring.submit("a", row("compose:x"), "#### 51", EndReason.EOS)
    ((_, result),) = scoring.poll()
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert "problem p1 has no column 'label', the gold of a" in result.evidence
    with pytest.raises(RewardError, match=r"2 responses in a row .*\n.*no column 'label'"):
        scoring.submit("b", row("compose:x"), "#### 51", EndReason.EOS)


class FakeJudges:
    """In place of judges behind URLs: keeps what it is asked."""

    def __init__(self) -> None:
        self.asked, self.finished = list[tuple[str, list[str]]](), list[tuple[str, RewardResult]]()

    def submit(self, verifier: str, problem: Any, answers: list[Any]) -> None:
        self.asked.append((verifier, [answer.text for answer in answers]))
        self.finished += [(answer.task_id, said(Decision.PASS, verifier)) for answer in answers]

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, RewardResult]]:
        finished, self.finished = self.finished, []
        return finished


JUDGE = {"kind": "pairwise", "url": "http://127.0.0.1:1/v1/chat/completions", "model": "m"}
RANKED: dict[str, Any] = {
    "components": {"answer": {"verifier": "exact"}, "rank": {"verifier": "http:j", "weight": 0.5, "decides": False}},
}


def judged() -> tuple[ComposedScoring, FakeJudges]:
    scoring, judges = ComposedScoring(rewards(compose={"ranked": RANKED}, http={"j": JUDGE})), FakeJudges()
    scoring._http = judges  # type: ignore[assignment]
    return scoring, judges


def test_a_part_that_compares_waits_for_its_group() -> None:
    scoring, judges = judged()
    for i, text in enumerate(("#### 51", "#### 50")):
        assert scoring.poll() == []
        scoring.submit(f"g0/{i}@0", row("compose:ranked"), text, EndReason.EOS, Place("g0@0", 2))
    assert judges.asked == [("http:j", ["#### 51", "#### 50"])]
    results = scoring.poll()
    assert [(name, result.reward) for name, result in results] == [("g0/0@0", 1.5), ("g0/1@0", 0.5)]
    assert scoring.num_open == 0


def test_a_group_that_is_forgotten_is_not_waited_for() -> None:
    scoring, judges = judged()
    scoring.submit("g0/0@0", row("compose:ranked"), "#### 51", EndReason.EOS, Place("g0@0", 2))
    scoring.submit("h0/0@0", row("exact"), "#### 51", EndReason.EOS, Place("h0@0", 2))
    scoring.forget("g0@0")
    assert [name for name, _ in scoring.poll()] == ["h0/0@0"]
    assert (scoring.num_open, judges.asked) == (0, [])


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden": {"verifier": "http:j"}},
        {"compose": {"x": {"components": {"a": TAIL["components"]["answer"] | {"tail_verifier": "http:j"}}}}},
    ],
)
def test_a_judge_that_compares_is_not_asked_about_a_sample(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="compares whole groups"):
        rewards(http={"j": JUDGE}, **settings)


# -- the hidden verifier ----------------------------------------------------------------------------------------------


def both(task_ids: list[str], hidden: dict[str, Any] | None) -> tuple[list[tuple[str, RewardResult]], ComposedScoring]:
    """Right answers by `exact`, each of which the hidden verifier fails, if there is one."""
    pools = Pools()
    scoring = ComposedScoring(rewards(hidden=hidden), ["exact"], make_pool=pools)
    for task_id in task_ids:
        scoring.submit(task_id, row("exact", hidden_gold="7"), "#### 51", EndReason.EOS, may_be_trained=True)
    results = scoring.poll()
    for pool in pools.made:
        pool.finished = [(part_id, said(Decision.FAIL, "math")) for part_id, *_ in pool.given]
    if hidden:
        scoring.submit("later", row("exact"), "#### 51", EndReason.EOS)
        scoring.poll()  # it takes what the hidden verifier has said meanwhile
    return results, scoring


def test_the_hidden_verifier_changes_no_result_and_holds_none_up() -> None:
    task_ids = [f"g0/{i}@0" for i in range(20)]
    watched, scoring = both(task_ids, HIDDEN)
    plain, _ = both(task_ids, None)
    # Field by field: reward, components and evidence too.
    assert [(name, dataclasses.asdict(result)) for name, result in watched] == [
        (name, dataclasses.asdict(result)) for name, result in plain
    ]
    assert scoring.num_open == 0
    assert scoring.status()["hidden"] == {
        "disagreement": 1.0, "overrated": 1.0, "mean_difference": 1.0, "num_pairs": 20, "num_unscored": 0,
        "hidden_reward_mean": 0.0,
    }  # fmt: skip
    assert scoring.hidden_alarm is not None
    assert "100% are decided otherwise" in scoring.hidden_alarm


def test_the_hidden_sample_is_seeded_and_of_what_may_be_trained() -> None:
    task_ids = [f"g{g}/{i}@0" for g in range(50) for i in range(4)]

    def seen(**hidden: Any) -> list[str]:
        pools = Pools()
        scoring = ComposedScoring(rewards(hidden=HIDDEN | hidden), ["exact"], make_pool=pools)
        for task_id in task_ids:
            scoring.submit(task_id, row("exact", hidden_gold="7"), "", EndReason.EOS, may_be_trained=True)
        scoring.submit("eval/0/0", row("exact", hidden_gold="7"), "", EndReason.EOS)
        return [part_id.rpartition("#")[0] for part_id, *_ in pools.made[0].given]

    assert seen() == task_ids
    # A quarter of 200 within five standard deviations of 6.1.
    assert 20 < len(seen(share=0.25)) < 80
    assert seen(share=0.25) == seen(share=0.25) != seen(share=0.25, seed=1)


def test_a_row_without_the_hidden_gold_is_not_compared() -> None:
    scoring = ComposedScoring(rewards(hidden=HIDDEN), make_pool=Pools())
    scoring.submit("g0/0@0", row("exact"), "#### 51", EndReason.EOS, may_be_trained=True)
    assert [result.reward for _, result in scoring.poll()] == [1.0]
    assert scoring.gap is not None
    assert (scoring.gap.num_pairs, scoring.gap.num_unscored) == (0, 1)


# -- what is refused, and what is in the hash -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "settings", "reason"),
    [
        (["compose:none"], {"compose": {"careful": CAREFUL}}, "'compose:none'; known: .*compose:careful"),
        (["compose:x"], {"compose": {"x": {"components": {"a": {"verifier": "maths"}}}}}, "no verifier is called 'ma"),
        (["exact"], {"hidden": {"verifier": "maths"}}, "no verifier is called 'maths'"),
        (["exact"], {"hidden": {"verifier": "exact"}}, "'exact': it also makes rewards, and would watch itself"),
        (["compose:careful"], {"compose": {"careful": CAREFUL}, "hidden": {"verifier": "regex"}}, "also makes rewards"),
    ],
)
def test_what_no_run_can_score_is_refused(names: list[str], settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_verifiers(names, rewards(**settings), 120.0)


def test_a_composition_is_a_rule_and_the_hidden_verifier_is_none() -> None:
    plain, composed = scoring_version(rewards()), scoring_version(rewards(compose={"careful": CAREFUL}))
    heavier = scoring_version(rewards(compose={"careful": CAREFUL | {"gate_reward": -3.0}}))
    assert len({plain, composed, heavier}) == 3
    assert scoring_version(rewards(hidden=HIDDEN)) == plain


# -- with its real worker processes ------------------------------------------------------------------------------------


def test_a_users_own_verifier_and_a_hidden_one_run_in_worker_processes() -> None:
    own = "python:tests.rewards.fake_verifiers.obedient"
    settings = rewards(
        functions=[own],
        compose={"both": {"components": {"answer": {"verifier": "exact"}, "own": {"verifier": own, "gold": "text"}}}},
        hidden={"verifier": "regex", "share": 1.0, "window": 16},
        max_retries=0,
        time_limit_s=5.0,
    )
    texts = {"right": "#### 51", "wrong": "#### 51 ", "down": "raise it", "killed": "exit 3"}
    results: dict[str, RewardResult] = {}
    with ComposedScoring(settings, ["compose:both"]) as scoring:
        for task_id, text in texts.items():
            problem = row("compose:both", text="#### 51")
            scoring.submit(task_id, problem, text, EndReason.EOS, may_be_trained=True)
        deadline = time.monotonic() + 60
        while (len(results) < 4 or _num_compared(scoring) < 4) and time.monotonic() < deadline:
            results |= dict(scoring.poll(0.2))
        status = scoring.status()
    # `exact` ignores the white space, the user's own does not; what it raises or dies of is no reward.
    assert {task_id: result.reward for task_id, result in results.items()} == {
        "right": 2.0, "wrong": 1.0, "down": None, "killed": None,
    }  # fmt: skip
    assert results["wrong"].components == {"answer": 1.0, "own": 0.0, "score": 1.0}
    assert "OSError: the disk of it is gone" in results["down"].evidence
    # The hidden verifier finds 51 in both responses that have a reward: it passes the one that the whole fails.
    assert (status["hidden"]["num_pairs"], status["hidden"]["num_unscored"]) == (2, 2)
    assert (status["hidden"]["disagreement"], status["hidden"]["overrated"]) == (0.5, 0.0)
    assert {own, "regex"} <= status["pool"]["times"].keys()
    assert status["pool"]["num_restarts"] == 1


def _num_compared(scoring: ComposedScoring) -> int:
    assert scoring.gap is not None
    return scoring.gap.num_pairs + scoring.gap.num_unscored
