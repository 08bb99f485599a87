"""Tests of the verifiers and of how they are run."""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.errors import ConfigError
from stream_grpo.rewards.score import Scorer, rewards_version
from stream_grpo.rewards.verifiers import MAX_EVIDENCE_CHARACTERS, VERIFIERS, VerifiableProblem, Verifier, exact
from stream_grpo.types import Decision, EndReason, RewardResult


@dataclass(frozen=True)
class FakeProblem:
    answer: str = "51"
    verifier: str = "exact"
    extra: Mapping[str, Any] = field(default_factory=dict)
    problem_id: str = "p1"


def crash(response_text: str, problem: VerifiableProblem, is_cut: bool) -> RewardResult:
    raise RuntimeError(f"sandbox of {problem.problem_id} is gone")


WITH_CRASH = {**VERIFIERS, "crash": Verifier("crash", "7", crash)}


@pytest.mark.parametrize(
    ("response", "decision"),
    [
        ("2+9=11, so #### 51", Decision.PASS),
        ("####51", Decision.PASS),
        ("####51\n", Decision.PASS),
        ("#### 51 \nand more", Decision.PASS),  # up to the end of the line
        ("#### 50 no, #### 51", Decision.PASS),  # the last marker counts
        ("#### 51 no, #### 50", Decision.FAIL),
        ("####\n51", Decision.FAIL),  # the answer stands on the marker's line
        ("#### 051", Decision.FAIL),  # as text, not as a number
        ("#### 51.", Decision.FAIL),
        ("#### 5 1", Decision.FAIL),
        ("####", Decision.FAIL),
        ("51", Decision.FAIL),
        ("", Decision.FAIL),
    ],
)
def test_exact_compares_the_text_after_the_last_marker(response: str, decision: Decision) -> None:
    result = exact(response, FakeProblem())
    assert result.decision is decision
    assert result.reward == (1.0 if decision is Decision.PASS else 0.0)
    assert (result.verifier, result.verifier_version) == ("exact", "1")


def test_exact_takes_the_marker_of_the_problem() -> None:
    problem = FakeProblem(extra={"answer_prefix": "Answer:"})
    assert exact("Answer: 51", problem).decision is Decision.PASS
    assert exact("#### 51", problem).decision is Decision.FAIL


def test_exact_says_what_it_compared() -> None:
    assert exact("#### 50", FakeProblem()).evidence == "answer '50', expected '51'"
    assert exact("50", FakeProblem()).evidence == "no answer marker"


def test_evidence_of_a_long_answer_is_cut() -> None:
    # Two cut texts with quotes, dots and the words between them: well under three times the limit.
    evidence = exact("####" + "9" * 10_000, FakeProblem()).evidence
    assert len(evidence) < 3 * MAX_EVIDENCE_CHARACTERS


@given(st.text(), st.text(min_size=1).filter(lambda text: text.strip() and not set(text) & set("#\n")))
def test_exact_passes_whatever_precedes_the_marked_answer(before: str, answer: str) -> None:
    assert exact(f"{before}\n#### {answer}", FakeProblem(answer=answer)).decision is Decision.PASS


@given(st.text().filter(lambda text: text.strip() and "####" not in text))
def test_exact_never_passes_without_a_marker(text: str) -> None:
    assert exact(text, FakeProblem(answer=text)).decision is Decision.FAIL


@pytest.mark.parametrize("answer", ["", "  ", "\n"])
def test_an_empty_gold_never_equals_an_empty_answer(answer: str) -> None:
    result = Scorer(["exact"]).score(FakeProblem(answer=answer), "####", EndReason.EOS)
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert result.evidence == "ValueError: problem p1 has an empty answer"


def test_an_empty_marker_is_an_error_of_the_problem() -> None:
    result = Scorer(["exact"]).score(FakeProblem(extra={"answer_prefix": ""}), "51", EndReason.EOS)
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)


def test_what_a_verifier_raises_is_never_a_reward() -> None:
    scorer = Scorer(["crash"], WITH_CRASH)
    result = scorer.score(FakeProblem(verifier="crash"), "#### 51", EndReason.EOS)
    assert result == RewardResult(
        decision=Decision.ENV_ERROR,
        reward=None,
        verifier="crash",
        verifier_version="7",
        evidence="RuntimeError: sandbox of p1 is gone",
    )


def test_a_response_cut_in_its_answer_fails_since_more_might_have_come() -> None:
    scorer = Scorer(["exact"])
    cut = scorer.score(FakeProblem(), "#### 51", EndReason.LENGTH)  # of 512, for example
    assert (cut.reward, cut.evidence) == (0.0, "cut off at answer '51'")
    assert scorer.score(FakeProblem(), "#### 51\nand so", EndReason.LENGTH).reward == 1.0
    assert scorer.score(FakeProblem(), "2+9=11", EndReason.LENGTH).reward == 0.0


@pytest.mark.parametrize(
    ("end_reason", "decision"), [(EndReason.ABORT, Decision.UNKNOWN), (EndReason.ERROR, Decision.ENV_ERROR)]
)
def test_a_response_that_the_engine_did_not_end_has_no_reward(end_reason: EndReason, decision: Decision) -> None:
    result = Scorer(["exact"]).score(FakeProblem(), "#### 51", end_reason)
    assert (result.decision, result.reward) == (decision, None)


def test_an_unknown_verifier_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"'exakt'; known: choice, .*crash, environment, exact"):
        Scorer(["exakt", "crash"], WITH_CRASH)


def test_a_problem_whose_verifier_is_not_of_the_run_has_no_reward() -> None:
    result = Scorer(["exact"]).score(FakeProblem(verifier="math"), "#### 51", EndReason.EOS)
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert result.evidence == "verifier 'math' is not one of this run: exact"


def test_the_rewards_version_names_every_verifier_once_in_order() -> None:
    assert rewards_version(["exact", "crash", "exact"], WITH_CRASH) == "crash=7,exact=1"
    with pytest.raises(ConfigError):
        rewards_version(["exakt"])


def test_the_registry_loads_no_library_of_a_verifier_before_its_first_check() -> None:
    heavy = ("sympy", "math_verify", "latex2sympy2_extended", "reasoning_gym", "jsonschema", "torch")
    code = (
        "import sys; from stream_grpo.rewards.verifiers import VERIFIERS\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert output.stdout.strip() == "[]"


def test_every_verifier_of_the_registry_gives_results_of_its_own_name_and_version() -> None:
    problems = {
        "choice": FakeProblem(answer="B"),
        "exact": FakeProblem(),
        "json_schema": FakeProblem(answer="true"),
        "math": FakeProblem(),
        "reasoning_gym": FakeProblem(extra={"metadata": {"source_dataset": "leg_counting"}}),
        "regex": FakeProblem(),
    }
    assert problems.keys() <= VERIFIERS.keys()
    for name, problem in problems.items():
        verifier = pickle.loads(pickle.dumps(VERIFIERS[name]))  # as a worker process gets it
        result = verifier.check("{", problem, False)
        assert (result.decision, result.reward) == (Decision.FAIL, 0.0)
        assert (result.verifier, result.verifier_version) == (name, VERIFIERS[name].version)
