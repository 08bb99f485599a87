"""Tests of the addition problems."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo import arithmetic
from stream_grpo.arithmetic import draw, is_held_out, prompt_of, response_of, rows


@st.composite
def operands(draw_value: st.DrawFn) -> tuple[int, int]:
    digits = draw_value(st.integers(1, 6))
    one = st.integers(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)
    return draw_value(one), draw_value(one)


def answer_of(response: str) -> str:
    return response.rpartition(arithmetic.MARKER)[2]


def test_a_sum_is_written_digit_by_digit_from_the_right() -> None:
    # 12 + 39: 2 + 9 = 11, carry 1 digit 1; then 1 + 3 + 1 = 5, carry 0 digit 5; read backwards 51.
    assert prompt_of(12, 39) == "12+39="
    assert response_of(12, 39, random.Random(0)) == "2+9=11,1+3=05,#51"


def test_a_last_carry_becomes_the_leading_digit() -> None:
    # 9 + 8 = 17: carry 1, digit 7.
    assert response_of(9, 8, random.Random(0)) == "9+8=17,#17"


@given(operands(), st.integers(0, 1000))
def test_a_teacher_without_errors_is_always_right(pair: tuple[int, int], seed: int) -> None:
    a, b = pair
    assert answer_of(response_of(a, b, random.Random(seed))) == str(a + b)


@given(operands(), st.integers(0, 1000))
def test_after_an_error_the_teacher_goes_on_from_what_was_written(pair: tuple[int, int], seed: int) -> None:
    a, b = pair
    scratchpad, _, answer = response_of(a, b, random.Random(seed), error_rate=0.5).rpartition(arithmetic.MARKER)
    steps = scratchpad.removesuffix(",").split(",")
    carries, digits = [s[-2] for s in steps], [s[-1] for s in steps]
    assert answer == ("1" if carries[-1] == "1" else "") + "".join(reversed(digits))
    assert [s[0] for s in steps] == list(reversed(str(a)))
    assert [s[2] for s in steps] == list(reversed(str(b)))


@given(operands(), st.integers(0, 1000))
def test_an_error_rate_of_one_makes_the_first_step_wrong(pair: tuple[int, int], seed: int) -> None:
    a, b = pair
    first = response_of(a, b, random.Random(seed), error_rate=1.0).partition(",")[0]
    assert int(first.partition("=")[2]) != a % 10 + b % 10


def test_the_error_rate_is_per_step() -> None:
    # Both of 2 steps are right with 0.88^2 = 0.774; an error that a second one cancels adds under 0.001.
    # 4000 draws: standard error sqrt(0.774 * 0.226 / 4000) = 0.0066, so 0.03 is over four of them.
    rng = random.Random(0)
    right = sum(answer_of(response_of(57, 68, rng, error_rate=0.12)) == "125" for _ in range(4000))
    assert abs(right / 4000 - 0.774) < 0.03


def test_operands_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="5 and 12"):
        response_of(5, 12, random.Random(0))


@given(operands())
def test_a_problem_and_its_commuted_form_are_on_one_side(pair: tuple[int, int]) -> None:
    a, b = pair
    assert is_held_out(a, b) == is_held_out(b, a)


def test_the_held_out_side_is_fixed_and_about_a_tenth() -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    # 4095 pairs at 0.1: standard error sqrt(0.09 / 4095) = 0.0047, so 0.02 is over four of them.
    assert abs(sum(is_held_out(a, b) for a, b in pairs) / len(pairs) - 0.1) < 0.02
    # Written down from the hash: a change of these would move problems across the split of existing folders.
    one_digit = [(a, b) for a in range(10) for b in range(a, 10) if is_held_out(a, b)]
    assert one_digit == [(0, 4), (1, 5), (1, 6), (2, 7), (3, 4), (3, 7), (4, 4), (4, 9), (5, 6), (5, 8)]


@given(st.integers(1, 6), st.integers(0, 1000), st.booleans())
def test_a_drawn_pair_has_the_asked_length_and_side(digits: int, seed: int, held_out: bool) -> None:
    a, b = draw(digits, random.Random(seed), held_out=held_out)
    assert len(str(a)) == len(str(b)) == digits
    assert is_held_out(a, b) == held_out


def test_pool_and_held_out_set_are_disjoint_up_to_commutation() -> None:
    pool = rows(arithmetic.POOL_COUNTS, seed=0, held_out=False)
    held_out = rows(arithmetic.HELD_OUT_COUNTS, seed=0, held_out=True)

    def pairs(some: list[arithmetic.Row]) -> set[frozenset[str]]:
        return {frozenset(row["prompt"].removesuffix("=").split("+")) for row in some}

    assert not pairs(pool) & pairs(held_out)


def test_rows_are_distinct_counted_per_domain_and_right() -> None:
    pool = rows({1: 1000, 2: 30, 5: 20}, seed=0, held_out=False)
    domains = [row["domain"] for row in pool]
    # Of one digit there are 100 ordered pairs, of which those held out are missing.
    num_one_digit = sum(not is_held_out(a, b) for a in range(10) for b in range(10))
    assert {d: domains.count(d) for d in set(domains)} == {"add-1": num_one_digit, "add-2": 30, "add-5": 20}
    assert len({row["id"] for row in pool}) == len({row["prompt"] for row in pool}) == len(pool)
    for row in pool:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == str(int(a) + int(b))
        assert row["digits"] == len(a)
        assert row["domain"] == f"add-{len(a)}"


def test_rows_depend_on_the_seed_alone() -> None:
    assert rows({2: 20, 3: 20}, seed=1, held_out=True) == rows({2: 20, 3: 20}, seed=1, held_out=True)
    assert rows({2: 20, 3: 20}, seed=1, held_out=True) != rows({2: 20, 3: 20}, seed=2, held_out=True)


def test_more_rows_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than population"):
        rows({2: 8101}, seed=0, held_out=False)


def test_a_row_names_its_verifier_and_marker() -> None:
    (row,) = rows({3: 1}, seed=0, held_out=False)
    assert (row["verifier"], row["answer_prefix"]) == ("exact", "#")
