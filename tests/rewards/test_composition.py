"""Several verifiers as one reward, by hand: gates, tiers, scales, costs, tails, and what is missing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stream_grpo.config_composition import Asked, Composition
from stream_grpo.rewards.composition import (
    Usage,
    absent,
    chosen,
    compose,
    cost_of,
    part_row,
    plain_verifiers,
    tails,
    version_of,
)
from stream_grpo.types import Decision, RewardResult, StepScore
from tests.rewards.problem import FakeProblem

PASS, FAIL, UNKNOWN, ERROR = Decision.PASS, Decision.FAIL, Decision.UNKNOWN, Decision.ENV_ERROR
JUDGED: dict[str, Any] = {"verifier": "judge", "mean": 5.0, "spread": 2.0, "weight": 0.1, "decides": False}


def composition(components: dict[str, dict[str, Any]], **settings: Any) -> Composition:
    return Composition.model_validate({"components": components, **settings})


def result(decision: Decision, reward: float | None = None, **more: Any) -> RewardResult:
    given = {PASS: 1.0, FAIL: 0.0}.get(decision) if reward is None else reward
    return RewardResult(decision=decision, reward=given, verifier="v", verifier_version="1", evidence="why", **more)


def composed(of: Composition, seconds: dict[str, RewardResult] | None = None, usage: Usage | None = None,
             **results: RewardResult) -> RewardResult:  # fmt: skip
    return compose("compose:careful", "7", of, results, seconds or {}, usage or Usage())


SUM = composition({"answer": {"verifier": "math"}, "style": JUDGED})


def test_scores_count_by_given_weights_and_scales() -> None:
    # 1 x (1 - 0) / 1 + 0.1 x (8 - 5) / 2.
    got = composed(SUM, answer=result(PASS), style=result(FAIL, 8.0, components={"votes": 3.0}))
    assert got.reward == pytest.approx(1.15)
    assert got.components == pytest.approx({"answer": 1.0, "style": 8.0, "style.votes": 3.0, "score": 1.15})
    # Only the answer decides.
    assert (got.decision, got.verifier, got.verifier_version) == (PASS, "compose:careful", "7")
    assert got.evidence == "answer pass: why; style fail: why"


@pytest.mark.parametrize(("decisions", "expected"), [((PASS, PASS), PASS), ((PASS, FAIL), FAIL), ((FAIL, PASS), FAIL)])
def test_the_whole_passes_where_all_that_decide_do(decisions: tuple[Decision, Decision], expected: Decision) -> None:
    both = composition({"a": {"verifier": "math"}, "b": {"verifier": "regex"}})
    got = composed(both, a=result(decisions[0]), b=result(decisions[1]))
    # Each is worth its reward, whatever the whole is called.
    assert (got.decision, got.reward) == (expected, sum(d is PASS for d in decisions))


GATED = composition(
    {"form": {"verifier": "regex", "role": "gate"}, "answer": {"verifier": "math"}, "style": JUDGED},
    bounds=[0.0, 1.0],
    gate_reward=-0.5,
)


@given(st.floats(-1e6, 1e6), st.sampled_from([PASS, FAIL, UNKNOWN, ERROR]))
def test_nothing_buys_a_gate_back(style: float, answer: Decision) -> None:
    shut = composed(GATED, form=result(FAIL), answer=result(answer), style=result(PASS, style))
    assert (shut.decision, shut.reward) == (FAIL, -0.5)
    assert shut.evidence.startswith("gate form failed; form fail: why")
    opened = composed(GATED, form=result(PASS), answer=result(FAIL), style=result(PASS, style))
    assert opened.reward is not None
    assert opened.reward > -0.5


TIERS = composition(
    {"runs": {"verifier": "code", "role": "tier"}, "right": {"verifier": "exact", "role": "tier"}, "style": JUDGED},
    costs={"tokens": {"weight": 0.2, "free": 100, "per": 50, "limit": 0.7}, "tool_calls": {"weight": 0.1, "free": 1}},
    bounds=[-1.0, 0.0],
    tier_step=1.5,
)


def test_tiers_are_passed_in_their_order() -> None:
    # Score 0.1 x (5 - 5) / 2 = 0, no cost. A later tier does not count where an earlier one is failed.
    for runs, right, num in ((FAIL, FAIL, 0), (FAIL, PASS, 0), (PASS, FAIL, 1), (PASS, PASS, 2)):
        got = composed(TIERS, runs=result(runs), right=result(right), style=result(PASS, 5.0))
        assert (got.reward, got.components["tier"]) == (1.5 * num, num)
        assert got.decision is (PASS if num == 2 else FAIL)


def test_costs_are_taken_above_what_is_free_and_up_to_their_limit() -> None:
    # 150 tokens: 0.2 x 50 / 50; three calls: 0.1 x 2. Style 0.1 x (9 - 5) / 2 = 0.2.
    got = composed(
        TIERS, usage=Usage(num_tokens=150, num_tool_calls=3),
        runs=result(PASS), right=result(PASS), style=result(PASS, 9.0),
    )  # fmt: skip
    assert got.components["cost.tokens"] == pytest.approx(-0.2)
    assert got.components["cost.tool_calls"] == pytest.approx(-0.2)
    assert got.reward == pytest.approx(3.0 - 0.2)
    assert cost_of(100, TIERS.costs["tokens"]) == 0.0
    assert cost_of(10_000, TIERS.costs["tokens"]) == 0.7


RANKS = st.tuples(st.booleans(), st.booleans(), st.floats(-1e3, 1e3), st.integers(0, 5000), st.integers(0, 50))


@given(RANKS, RANKS)
def test_no_cheap_failure_beats_a_dear_success(one: Any, other: Any) -> None:
    ranked = []
    for runs, right, style, tokens, calls in (one, other):
        got = composed(
            TIERS, usage=Usage(num_tokens=tokens, num_tool_calls=calls),
            runs=result(PASS if runs else FAIL), right=result(PASS if right else FAIL), style=result(PASS, style),
        )  # fmt: skip
        ranked.append((runs + (runs and right), got.reward))
    (tier, reward), (other_tier, other_reward) = ranked
    if tier != other_tier:
        assert (tier > other_tier) == (reward > other_reward)


TAIL = composition({"judge": {"verifier": "judge", "spread": 2.0, "tail_above": 3.0, "tail_verifier": "second"}})


@pytest.mark.parametrize(
    ("reward", "second", "expected"),
    [
        (6.0, None, 3.0),  # 6 / 2 is not above 3: nobody is asked
        (8.0, PASS, 4.0),
        (8.0, FAIL, 0.0),  # not confirmed: what a mean response is worth
    ],
)
def test_an_extreme_score_counts_only_if_a_second_verifier_confirms_it(
    reward: float, second: Decision | None, expected: float
) -> None:
    results = {"judge": result(PASS, reward)}
    assert tails(TAIL, results) == ([] if second is None else ["judge"])
    got = composed(TAIL, {} if second is None else {"judge": result(second)}, **results)
    assert got.reward == expected


@pytest.mark.parametrize("second", [UNKNOWN, ERROR])
def test_a_second_verifier_that_cannot_tell_leaves_the_response_out(second: Decision) -> None:
    got = composed(TAIL, {"judge": result(second)}, judge=result(PASS, 8.0))
    assert (got.decision, got.reward) == (second, None)
    assert got.evidence.startswith("no reward from judge (tail); ")


def test_nobody_is_asked_of_the_tail_where_it_is_settled() -> None:
    both = composition(
        {"form": {"verifier": "regex", "role": "gate"}, "judge": TAIL.components["judge"].model_dump()},
        bounds=[0.0, 9.0],
        gate_reward=-1.0,
    )
    high = result(PASS, 8.0)
    assert tails(both, {"judge": high, "form": result(PASS)}) == ["judge"]
    assert tails(both, {"judge": high, "form": result(FAIL)}) == []
    assert tails(both, {"judge": high, "form": result(ERROR)}) == []


def test_the_whole_has_the_steps_of_the_part_that_gives_some() -> None:
    steps = (StepScore(3, 0.5),)
    assert composed(SUM, answer=result(PASS), style=result(FAIL, 8.0, steps=steps)).steps == steps
    assert composed(SUM, answer=result(PASS), style=result(FAIL, 8.0)).steps == ()


def test_what_is_missing_leaves_the_response_out_unless_it_is_optional() -> None:
    for style, decision in ((UNKNOWN, UNKNOWN), (ERROR, ERROR)):
        got = composed(SUM, answer=result(PASS), style=result(style))
        assert (got.decision, got.reward) == (decision, None)
        assert "no reward from style" in got.evidence
    # An error of the environment is named before a verifier that cannot tell.
    assert composed(SUM, answer=result(ERROR), style=result(UNKNOWN)).decision is ERROR
    optional = composition({"answer": {"verifier": "math"}, "style": JUDGED | {"optional": True, "decides": True}})
    got = composed(optional, answer=result(PASS), style=result(ERROR))
    # As if it were not there: not 0 of its own scale, which would be (0 - 5) / 2.
    assert (got.decision, got.reward, got.components) == (PASS, 1.0, {"answer": 1.0, "score": 1.0})


def test_a_fixed_reward_stands_in_for_an_optional_part_that_has_none() -> None:
    style = JUDGED | {"optional": True, "if_missing": 3.0}
    of = composition({"answer": {"verifier": "math"}, "style": style})
    results = {"answer": result(PASS), "style": result(UNKNOWN)}
    # 1 + 0.1 x (3 - 5) / 2; the weights stay as they are.
    assert composed(of, answer=results["answer"], style=results["style"]).reward == pytest.approx(0.9)
    assert absent(of, results) == ["style"]
    assert absent(of, results | {"style": result(FAIL, 8.0)}) == []


def test_an_optional_gate_that_says_nothing_is_open() -> None:
    gate = {"verifier": "regex", "role": "gate", "optional": True}
    of = composition({"form": gate, "answer": {"verifier": "math"}}, bounds=[0.0, 1.0], gate_reward=-1.0)
    assert composed(of, form=result(ERROR), answer=result(PASS)).reward == 1.0
    assert composed(of, form=result(FAIL), answer=result(PASS)).reward == -1.0


def test_a_part_reads_its_own_gold_and_columns() -> None:
    problem = FakeProblem(extra={"pattern": "x", "unit_tests": ["a"], "other": 1})
    same = part_row(problem, Asked(verifier="math"), "math", "answer")
    assert (same.problem_id, same.answer, same.verifier) == ("p1", "51", "math")
    own = part_row(problem, Asked(verifier="regex", gold="unit_tests", columns={"pattern": "y"}), "regex", "form")
    # A gold of its own has an id of its own: whether it verifies says nothing of the row's.
    assert (own.problem_id, own.answer) == ("p1#form", '["a"]')
    assert own.extra == {"pattern": "y", "unit_tests": ["a"], "other": 1}
    with pytest.raises(ValueError, match="problem p1 has no column 'label', the gold of form"):
        part_row(problem, Asked(verifier="exact", gold="label"), "exact", "form")


def test_a_row_finds_its_composition_by_name_or_by_the_verifier_that_is_replaced() -> None:
    careful = composition({"answer": {"verifier": "math"}, "form": JUDGED | TAIL_OF}, replaces=["math"])
    all_of = {"careful": careful, "sum": SUM}
    assert [chosen(name, all_of) for name in ("compose:sum", "math", "exact", "compose:none")] == [
        ("compose:sum", SUM), ("compose:careful", careful), None, None,
    ]  # fmt: skip
    assert plain_verifiers(["math", "exact"], all_of) == {"math", "judge", "second", "exact"}
    assert plain_verifiers(["compose:none"], all_of) == {"compose:none"}


TAIL_OF = {"tail_above": 3.0, "tail_verifier": "second"}


def test_the_version_follows_settings_and_verifiers() -> None:
    versions = {"math": "1", "judge": "1"}
    heavier = composition({"answer": {"verifier": "math", "weight": 2.0}, "style": JUDGED})
    found = {version_of(SUM, versions), version_of(SUM, versions | {"math": "2"}), version_of(heavier, versions)}
    assert len(found) == 3
    assert version_of(SUM, versions | {"regex": "9"}) in found


ANSWER, GATE, TIER = ({"verifier": "math", "role": role} for role in ("score", "gate", "tier"))


@pytest.mark.parametrize(
    ("components", "settings", "complaint"),
    [
        ({"a": {"verifier": "compose:b"}}, {}, "made of verifiers, not of compositions"),
        ({"a": GATE | {"weight": 2.0}}, {}, "weight = 2.0: a gate only passes or fails"),
        ({"a": ANSWER | {"weight": 0.0}}, {}, "asked for nothing"),
        ({"a": TIER | {"optional": True}}, {}, "unknown tier has no place"),
        ({"a": ANSWER | {"if_missing": 1.0}}, {}, "if_missing = 1: without its reward the response is left out"),
        ({"a": GATE | {"optional": True, "if_missing": 1.0}}, {}, "if_missing = 1.0: a gate only passes or fails"),
        ({"a": ANSWER | {"tail_above": 1.0}}, {}, "tail_above and tail_verifier need each other"),
        ({"a": ANSWER | {"tail_above": 1.0, "tail_verifier": "math"}}, {}, "the verifier that is in question"),
        ({"a": ANSWER | {"decides": False}}, {}, "none of them decides"),
        ({"a": ANSWER | {"optional": True}}, {}, "none of them decides"),
        ({"a": ANSWER, "g": GATE}, {"bounds": [0, 1]}, "gate_reward and components with role = gate need each other"),
        ({"a": ANSWER}, {"tier_step": 1.0}, "tier_step and components with role = tier need each other"),
        ({"a": ANSWER, "g": GATE}, {"gate_reward": -1.0}, "bounds is missing"),
        ({"a": ANSWER}, {"bounds": [1, 0]}, "the lower one comes first"),
        ({"a": ANSWER, "g": GATE}, {"bounds": [0, 1], "gate_reward": 0.0}, "a failed gate would pay"),
        ({"a": TIER}, {"bounds": [-1, 0], "tier_step": 1.0}, r"more than bounds\[1\] - bounds\[0\] = 1"),
        ({"A b": ANSWER}, {}, "String should match pattern"),
    ],
)
def test_a_composition_that_does_not_hold_what_it_says_is_refused(
    components: dict[str, Any], settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        composition(components, **settings)


def test_rewards_do_not_depend_on_the_order_of_the_answers() -> None:
    results = {"runs": result(PASS), "right": result(FAIL), "style": result(PASS, 6.0)}
    found = [composed(TIERS, **dict(order)) for order in itertools.permutations(results.items())]
    assert len({(one.reward, one.evidence) for one in found}) == 1
