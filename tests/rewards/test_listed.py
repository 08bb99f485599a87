"""A list of verifiers in a row: what it stands for, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curator.schema import VerifierItem, verifier_items, verifier_text
from stream_grpo.config_rewards import Rewards
from stream_grpo.errors import ConfigError
from stream_grpo.rewards.composed import ComposedScoring
from stream_grpo.rewards.composition import Usage, chosen, compose, plain_verifiers
from stream_grpo.rewards.listed import listed
from stream_grpo.rewards.messages import ProblemRow
from stream_grpo.rewards.scoring import check_verifiers, versions
from stream_grpo.types import Decision, EndReason, RewardResult
from tests.rewards.test_scoring import Pools

PASS, FAIL = Decision.PASS, Decision.FAIL


def said(decision: Decision, reward: float | None = None) -> RewardResult:
    given = {PASS: 1.0, FAIL: 0.0}.get(decision) if reward is None else reward
    return RewardResult(decision=decision, reward=given, verifier="v", verifier_version="1", evidence="why")


def whole(entries: list[Any], *results: RewardResult) -> RewardResult:
    found = chosen(json.dumps(entries), {})
    assert found is not None
    by_name = dict(zip(found.composition.components, results, strict=True))
    return compose(found.name, "1", found.composition, by_name, {}, Usage())


def test_without_weights_all_count_the_same() -> None:
    got = whole(["math", "exact", "python:a.b"], said(PASS), said(FAIL), said(PASS, 0.5))
    # (1 + 0 + 0.5) / 3.
    assert got.reward == pytest.approx(0.5)
    assert (got.decision, got.verifier) == (FAIL, "math+exact+python_a_b")


def test_weights_are_taken_as_they_are_given() -> None:
    entries = [{"verifier": "math", "weight": 2}, {"verifier": "regex", "weight": 0.5}]
    assert whole(entries, said(PASS), said(PASS)).reward == 2.5


def test_nothing_buys_a_gate_back() -> None:
    entries = [
        {"verifier": "regex", "gate": True},
        {"verifier": "math", "weight": 3},
        {"verifier": "exact", "weight": 1},
    ]
    # The weights sum to 4: the sum is held within 0 and 4, and a failed gate is worth -4.
    assert whole(entries, said(PASS), said(PASS), said(PASS)).reward == 4.0
    assert whole(entries, said(PASS), said(PASS, 9.0), said(PASS)).reward == 4.0
    assert whole(entries, said(PASS), said(FAIL, -9.0), said(FAIL)).reward == 0.0
    assert whole(entries, said(FAIL), said(PASS, 9.0), said(PASS)).reward == -4.0


def test_what_one_of_them_cannot_score_is_left_out() -> None:
    got = whole(["math", "exact"], said(PASS), said(Decision.UNKNOWN))
    assert (got.decision, got.reward) == (Decision.UNKNOWN, None)


def test_components_have_names_of_their_own() -> None:
    composition = listed('["python:a.b", "python:a_b", "9"]')
    assert composition is not None
    assert list(composition.components) == ["python_a_b", "python_a_b-1", "v9"]
    assert plain_verifiers(['["math", "http:j"]', "exact"], {}) == {"math", "http:j", "exact"}


def test_a_row_with_a_list_is_scored_by_all_of_it() -> None:
    pools, name = Pools(), '["exact", "regex"]'
    scoring = ComposedScoring(Rewards(), [name], make_pool=pools)
    assert pools.made[0].names == ["regex"]
    row = ProblemRow(problem_id="p1", answer="51", verifier=name)
    scoring.submit("a", row, "#### 51", EndReason.EOS)
    pools.made[0].finished = [(pools.made[0].given[0][0], said(FAIL))]
    ((task_id, result),) = scoring.poll()
    assert (task_id, result.decision, result.reward) == ("a", FAIL, 0.5)
    assert (result.verifier, result.verifier_version) == ("exact+regex", versions([name], Rewards())[name])


def test_what_a_list_names_must_be_known_before_the_run() -> None:
    check_verifiers(['["exact", "regex"]'], Rewards(), 120.0)
    with pytest.raises(ConfigError, match="no verifier is called 'maths'"):
        check_verifiers(['["exact", "maths"]'], Rewards(), 120.0)
    with pytest.raises(ConfigError, match="a row may name only functions"):
        check_verifiers(['["exact", "python:a.b"]'], Rewards(), 120.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "not the JSON of a list"),
        ("[]", "an empty list: one verifier at least must make the reward"),
        ('[{"verifier": "regex", "gate": true}]', "only gates"),
        ("[1]", r"\[0\] = 1: expected a name, or an object of verifier, weight, gate"),
        ('["math", ""]', r"\[1\]\.verifier = '': expected the name of one verifier"),
        ('["math", "compose:x"]', r"\[1\]\.verifier = 'compose:x'"),
        ('["math", {"weight": 1}]', r"\[1\]\.verifier = None"),
        ('["math", {"verifier": "exact", "weigth": 1}]', r"\[1\]\.weigth: unknown; known: verifier, weight, gate"),
        ('[{"verifier": "exact", "weight": 0}]', r"\[0\]\.weight = 0: expected a number above 0"),
        ('[{"verifier": "exact", "weight": true}]', r"\[0\]\.weight = True: expected a number above 0"),
        ('[{"verifier": "exact", "weight": 1e999}]', r"\[0\]\.weight = inf: expected a number above 0"),
        ('["math", {"verifier": "exact", "gate": 1}]', r"\[1\]\.gate = 1: expected true or false"),
        ('["math", {"verifier": "exact", "gate": true, "weight": 1}]', "a gate only passes or fails"),
        ('["math", "math"]', "'math' stands in it twice"),
        ('["math", {"verifier": "exact", "weight": 1}]', "some have a weight and some have none"),
    ],
)
def test_a_list_that_is_none_is_refused_with_its_entry(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        listed(text)


SCORE = st.builds(VerifierItem, verifier=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1))


@given(st.lists(SCORE, min_size=1, unique_by=lambda item: item.verifier), st.none() | st.floats(0.1, 10))
def test_the_text_of_a_list_reads_back(items: list[VerifierItem], weight: float | None) -> None:
    given = tuple(VerifierItem(verifier=item.verifier, weight=weight) for item in items)
    found = verifier_items(verifier_text(given))
    # One without a weight is a plain name.
    assert found == (None if len(given) == 1 and weight is None else given)
