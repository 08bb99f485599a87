"""Graded problems: each question once, in one of the two files, and every gold passes its verifier."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from make_smollm2_problems import GRADES, NUM_SHOTS, Grade, split

from curator.dedup import normalised
from curator.errors import PoolError
from curator.ingest.rows import RowReader
from stream_grpo.rewards.reasoning_gym import reasoning_gym
from stream_grpo.types import Decision

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SMALL = {
    "sum": Grade(family="chain_sum", settings=ONE_DIGIT, num_pool=147, num_heldout=50),
    "product": Grade(family="products", settings=ONE_DIGIT, num_pool=20, num_heldout=5),
}


def test_every_question_is_in_one_of_the_two_files_once() -> None:
    pool, heldout = split(SMALL)
    asked = [normalised(row["prompt"][-1]["content"]) for row in [*pool, *heldout]]
    # 2 x 10 x 10 sums and differences of one digit, less the 3 that are shown, and 25 products.
    assert len(asked) == len(set(asked)) == 197 + 25
    assert [row["domain"] for row in heldout] == ["sum"] * 50 + ["product"] * 5


def test_what_a_prompt_shows_is_asked_nowhere() -> None:
    pool, heldout = split(SMALL)
    asked = {row["prompt"][-1]["content"] for row in [*pool, *heldout]}
    for row in [*pool, *heldout]:
        system, *turns, question = row["prompt"]
        assert (system["role"], question["role"]) == ("system", "user")
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * NUM_SHOTS
        assert not {turn["content"] for turn in turns[::2]} & asked


def test_the_same_seeds_give_the_same_problems() -> None:
    assert json.dumps(split(SMALL)) == json.dumps(split(SMALL))


def test_a_grade_of_too_few_contents_is_refused() -> None:
    # 10 x 10 products of one digit, 3 of them shown: 101 - 3 = 98 are too many.
    grade = Grade(family="products", settings=ONE_DIGIT, num_pool=97, num_heldout=1)
    with pytest.raises(PoolError, match="product: 100 different problems in 5050 draws, not 101"):
        split({"product": grade})


@pytest.mark.parametrize("domain", GRADES)
def test_the_golds_of_every_grade_pass_and_another_answer_does_not(domain: str) -> None:
    grade = GRADES[domain]
    few = Grade(family=grade.family, settings=grade.settings, num_pool=3, num_heldout=1)
    reader = RowReader()
    for row in split({domain: few})[0]:
        problem = reader.read(json.loads(json.dumps(row))).problem
        assert problem.domain == domain
        assert reasoning_gym(problem.answer, problem).decision == Decision.PASS
        assert reasoning_gym(f"{problem.answer}1", problem).decision == Decision.FAIL
