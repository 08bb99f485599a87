"""Every family of reasoning-gym: its gold passes, a corrupted gold does not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from stream_grpo.rewards.reasoning_gym import reasoning_gym, runs_code
from stream_grpo.types import Decision
from tests.rewards.problem import FakeProblem

pytestmark = pytest.mark.slow

rg = pytest.importorskip("reasoning_gym.factory")

FAMILIES = sorted(set(rg.DATASETS) - {"composite"})
SMALL = {"knight_swap": {"max_nodes": 6, "max_attempts": 100}, "rush_hour": {"max_moves": 1}, "figlet_font": {}}
EXAMPLES = {
    "graph_color": lambda metadata: json.dumps({str(k): v for k, v in metadata["possible_answer"].items()}),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Families whose entry has no answer, since many are right, but an example."""


def entry_of(family: str) -> dict[str, Any]:
    return dict(rg.create_dataset(family, size=1, seed=11, **SMALL.get(family, {}))[0])


def row(entry: dict[str, Any], *, as_text: bool) -> FakeProblem:
    """The entry as a row of a pool: metadata as JSON text, or as it is."""
    metadata = json.dumps(entry["metadata"]) if as_text else entry["metadata"]
    extra = {"question": entry["question"], "metadata": metadata}
    return FakeProblem(answer=entry["answer"] or "", verifier="reasoning_gym", extra=extra)


def tagged(answer: str) -> str:
    return f"<think>so</think>It is <answer>\n{answer}\n</answer>"


def passes(problem: FakeProblem, answer: str) -> bool:
    result = reasoning_gym(tagged(answer), problem)
    assert (result.reward == 1.0) == (result.decision is Decision.PASS)
    assert result.components["score"] <= 1.0
    return result.decision is Decision.PASS


def corrupted(answer: str) -> str:
    """Another answer of the same kind: every digit and letter moved on by one."""
    moved = {"9": "0", "z": "a", "Z": "A"}
    return "".join(moved.get(c, chr(ord(c) + 1)) if c.isascii() and c.isalnum() else c for c in answer) + " 1"


def gold_of(family: str, problem: FakeProblem, entry: dict[str, Any]) -> str:
    if entry["answer"] is not None:
        return str(entry["answer"])
    if family in EXAMPLES:
        return str(EXAMPLES[family](entry["metadata"]))
    if family == "rush_hour":  # one move solves it: the red car by 1 to 4 to the right
        return next(move for move in ("A+1", "A+2", "A+3", "A+4") if passes(problem, move))
    raise AssertionError(f"{family} has neither answer nor example")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "boxnet"])
def test_the_gold_of_a_family_passes_and_a_corrupted_gold_does_not(family: str) -> None:
    entry = entry_of(family)
    for as_text in (False, True):
        problem = row(entry, as_text=as_text)
        gold = gold_of(family, problem, entry)
        assert passes(problem, gold)
    assert not passes(problem, corrupted(gold))
    assert not passes(problem, "")


def test_boxnet_has_no_gold_and_takes_any_plan_that_lifts_every_box() -> None:
    # One box on the square of its target: a single agent lifts it. The family gives neither answer nor example.
    state = {"0.5_0.5": ["box_red", "target_red"], "0.5_1.5": []}
    problem = row({"question": "", "answer": None, "metadata": {"source_dataset": "boxnet", "initial_state": state}},
                  as_text=True)  # fmt: skip
    assert passes(problem, '[{"Agent[0.5, 0.5]": "move(box_red, target_red)"}]')
    assert not passes(problem, '[{"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])"}]')
    assert not passes(problem, "[1, 2]")  # the scorer raises on it


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("coin_flip", lambda gold: gold[:3]),  # "0.1" of "0.171875"
        ("game_of_life_halting", lambda gold: "False" if gold == "True" else "True"),
        ("letter_jumble", lambda gold: f"{gold} AND MORE"),
        ("spell_backward", lambda gold: f"{gold}\n{gold}"),
    ],
)
def test_wrong_answers_that_a_scorer_takes_for_right_fail(family: str, wrong: Callable[[str], str]) -> None:
    entry = entry_of(family)
    problem = row(entry, as_text=True)
    assert rg.get_score_answer_fn(family)(wrong(entry["answer"]), entry) >= 1  # the gap that is closed here
    assert not passes(problem, wrong(entry["answer"]))


def test_entries_of_a_composite_go_to_the_scorer_of_their_own_family() -> None:
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(name="leg_counting", weight=1, config={}), DatasetSpec(name="maze", weight=1, config={})]
    for entry in rg.create_dataset("composite", size=4, seed=5, datasets=specs):
        problem = row(entry, as_text=True)
        assert passes(problem, entry["answer"])
        assert not passes(problem, corrupted(entry["answer"]))


def test_the_hundred_and_six_families_are_all_there() -> None:
    assert len(FAMILIES) + 1 == 106


def test_a_scorer_that_raises_on_the_answer_alone_found_it_wrong() -> None:
    problem = row(entry_of("prime_factorization"), as_text=True)
    result = reasoning_gym(tagged("two times three"), problem)
    assert (result.decision, result.reward) == (Decision.FAIL, 0.0)
    assert "could not read the answer (ValueError)" in result.evidence


def test_a_row_on_which_the_scorer_raises_with_the_gold_is_an_error() -> None:
    problem = FakeProblem(answer="x", extra={"metadata": {"source_dataset": "prime_factorization"}})
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym(tagged("2"), problem)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "no metadata"),
        ({"metadata": "{"}, "not JSON"),
        ({"metadata": {}}, "names no family"),
        ({"metadata": {}, "family": "chess960"}, "no family 'chess960'"),
    ],
)
def test_a_row_without_what_the_scorer_needs_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reasoning_gym(tagged("2"), FakeProblem(extra=extra))


def test_answer_tags_come_first_then_the_whole_text() -> None:
    problem = row(entry_of("leg_counting"), as_text=True)
    assert reasoning_gym(f"1 <answer>7</answer> no <answer>{problem.answer}</answer>", problem).reward == 1.0
    assert reasoning_gym(problem.answer, problem).reward == 1.0
    unfinished = reasoning_gym(f"<answer>{problem.answer}", problem)
    assert (unfinished.reward, unfinished.evidence) == (0.0, "no answer: an unterminated answer tag")


@pytest.mark.parametrize(
    ("family", "answer", "is_code"),
    [
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", False),
        ("n_queens", "__import__('os').system('true')", True),
        ("spiral_matrix", "[1, 2, 3]", False),
        ("spiral_matrix", "[print(1)]", True),
        ("countdown", "(3 + 4) * 2.5", False),
        ("simple_integration", "x**2*sin(2*x)/2 + C", False),
        ("simple_integration", "().__class__", True),
        ("puzzle24", "open(3)", True),
        ("puzzle24", "(lambda: 24)()", True),
        ("leg_counting", "open(3)", False),  # compares text
    ],
)
def test_answers_that_a_scorer_would_run_as_code_are_told_apart(family: str, answer: str, is_code: bool) -> None:
    assert runs_code(family, answer) is is_code


def test_code_in_an_answer_is_not_run() -> None:
    result = reasoning_gym(tagged("print('never')"), row(entry_of("spiral_matrix"), as_text=True))
    assert (result.decision, result.reward) == (Decision.FAIL, 0.0)
    assert "would run the answer as code" in result.evidence
