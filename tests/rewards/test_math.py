r"""Tests of the verifier `math`: pairs of gold and answer, and where the answer is found."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.rewards import math_values
from stream_grpo.rewards.math import gold_parts, math
from stream_grpo.rewards.score import Scorer
from stream_grpo.types import Decision, EndReason
from tests.rewards.problem import FakeProblem

PAIRS = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "verifier_pairs.jsonl").read_text().splitlines()
]


def passes(gold: Any, answer: str) -> bool:
    """Whether the answer in a box passes; equivalence holds in both directions."""
    result = math(rf"So \boxed{{{answer}}}.", FakeProblem(answer=gold, verifier="math"))
    return result.decision is Decision.PASS


@pytest.mark.parametrize("pair", PAIRS, ids=[pair["note"] for pair in PAIRS])
def test_a_pair_of_gold_and_response_is_decided_as_expected(pair: dict[str, Any]) -> None:
    result = Scorer(["math"]).score(FakeProblem(answer=pair["gold"], verifier="math"), pair["response"], EndReason.EOS)
    assert (result.reward == 1.0) is pair["expected"], result.evidence
    if pair["gold"] == "":
        assert result.decision is Decision.ENV_ERROR  # the row is at fault, not the response
    else:
        assert result.decision in (Decision.PASS, Decision.FAIL)


EQUAL = {
    "numbers": [
        (r"\frac{1}{2}", "0.5"), ("0.1", r"\frac{1}{10}"), (r"-3\frac{1}{2}", "-3.5"), ("3 1/2", "7/2"), ("½", "0.5"),
        (r"0.1\overline{6}", r"\frac16"), ("1.2e3", "1200"), (r"1.2\times10^{-3}", "0.0012"),
        ("5 million", "5,000,000"),
        ("10 000", "10000"), (r"10{,}000", "10000"), ("seven", "7"), ("5!", "120"), (r"\binom{5}{2}", "10"),
        ("-0", "0"),
    ],
    "roots and constants": [
        (r"3\sqrt{2}", r"\sqrt{18}"), (r"\sqrt{50}+\sqrt{8}", r"7\sqrt2"), (r"\frac{1}{1+\sqrt2}", r"\sqrt2-1"),
        (r"\sqrt[3]{-8}", "-2"), (r"\sqrt{-4}", "2i"), ("(1+i)^2", "2i"), (r"\frac{\pi}{4}", "π/4"),
        ("√12", r"2\sqrt3"),
    ],
    "large powers": [
        (r"2^{100}", "1267650600228229401496703205376"), (r"2^{10^{10}}", r"4^{5\cdot10^9}"),
        (r"2^{10^{10}+1}", r"2\cdot 2^{10^{10}}"), (r"10^{10^{10^{10}}}", r"10^{10^{10^{10}}}"),
    ],
    "letters": [
        ("x^2-1", "(x-1)(x+1)"), (r"\frac{1}{x+1}+\frac{1}{x-1}", r"\frac{2x}{x^2-1}"), ("2^{n+1}", r"2\cdot 2^n"),
        (r"x^{-1}", r"\frac1x"), ("x_1", "x_{1}"), (r"\theta", "θ"), (r"\sqrt{x^2}", "|x|"),
    ],
    "functions": [
        (r"\sin 30^\circ", "1/2"), (r"\cos\frac{\pi}{3}", "0.5"), (r"\ln 4", r"2\ln 2"), (r"\log_2 8", "3"),
        (r"\frac12\ln 2", r"\ln\sqrt2"), (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"),
        (r"\ln(x+1)-\ln x", r"\ln\frac{x+1}{x}"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        (r"\sin^2 x+\cos^2 x", "1"), (r"\sin 2x", r"2\sin x\cos x"), (r"\arctan 1", r"\frac{\pi}{4}"),
    ],
    "units": [
        ("15 cm", "15 centimeters"), ("15 square centimeters", r"15\text{ cm}^2"), ("60 mph", "60 miles per hour"),
        ("5 m/s", r"5\,\frac{\text{m}}{\text{s}}"), ("9.8 m s^{-2}", r"9.8\,\mathrm{m}/\mathrm{s}^2"),
        ("$5", "5 dollars"), ("3 hours", "3 hrs"), ("20 minutes", r"20\ \text{min}"),
        ("20°C", "20 degrees Celsius"), ("12 square units", "12 cm^2"),
        ("50%", "0.5"), ("0.5", r"50\%"), ("50%", "50"), (r"\frac12", r"50\%"), ("120", "120 apples"),
    ],
    "several answers": [
        ("1,2", "2,1"), (r"\{1,2\}", "1, 2"), (r"1\pm\sqrt3", r"1+\sqrt3 \text{ and } 1-\sqrt3"), ("x=1 or x=2", "1,2"),
        ("(1,2),(3,4)", "(3,4), (1,2)"), ("100,200", "100, 200"), (["1", "2"], "2,1"), ('["1/2", "3"]', "3, 0.5"),
    ],
    "tuples and matrices": [
        ("(1,2)", "1,2"), ("(1,2)", "x=1,y=2"), (r"\langle 1,2\rangle", "(1,2)"), ("(1,2,3)", "[1,2,3]"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&\frac82\end{bmatrix}"),
    ],
    "intervals and inequalities": [
        (r"(-\infty,2)", "x<2"), ("x<2", "2>x"), ("[1,3)", r"1\le x<3"), ("(1,3)", r"x>1 \text{ and } x<3"),
        (r"(-\infty,1)\cup(3,\infty)", r"x<1\text{ or }x>3"), (r"\mathbb{R}", r"(-\infty,\infty)"),
        ("all real numbers", r"\mathbb R"), (r"\mathbb{R}\setminus\{0\}", r"x\neq0"), (r"[0,1]\cup[1,2]", "[0,2]"),
        (r"x\in[2,5]", "[2,5]"), (r"\emptyset", "no solution"), (r"\{x \mid x>2\}", r"(2,\infty)"), ("]0,1[", "(0,1)"),
        (r"[\frac12,\ln 3]", r"\frac12\le x\le\ln 3"), ("2x+y<3", "y<3-2x"),
    ],
    "equations": [
        ("y=2x+1", "y-2x-1=0"), ("y=2x+1", "2x+1"), ("2x+3y=6", "4x+6y=12"), ("x^2+y^2=1", "x^2+y^2-1=0"),
        ("5", "x=5"), ("5", "2+3=5"), ("5", "a+b=5"), ("f(x)=x^2", "x^2"), (r"\pi", r"\pi\approx3.14"),
        ("3.14", r"\pi\approx3.14"),
    ],
    "words and choices": [
        ("4210_5", r"4210_{\text{five}}"), ("B", "(B)"),
        ("B", r"\textbf{(B)}\ 42"), ("42", r"\textbf{(B)}\ 42"), ("Yes", r"\text{yes}"),
        ("1010_2", "1010"), ("3:4", "3/4"), (r"\text{even}", "even"),
    ],
}  # fmt: skip
UNEQUAL = {
    "numbers": [(r"-\infty", r"\infty"), ("0.1", "0.10000000000000001"), ("0.333", r"\frac13"), (r"\pi", "3.14159")],
    "large powers": [
        (r"2^{100}", "1267650600228229401496703205377"), (r"2^{10^{10}}", r"2^{10^{10}+1}"), ("7^{2024}-1", "7^{2024}"),
        ("10", r"10^{10^{10^{10}}}"), (r"2023^{2024}", r"2023^{2023}"), ("7", "10000000!"),
        ("10", r"\binom{10^9}{10^8}"), ("2,6", "26"),
        (r"\ln 3", r"\ln(10^{10^{10}})"),
    ],
    "letters": [("x^2-1", "(x-1)(x+2)"), (r"\sqrt{x^2}", "x"), ("x", "X"), ("5", r"\frac{x}{0}"), ("2^n", "2^{n+1}")],
    "functions": [(r"\ln 4", r"2\ln 3"), ("e^{x}", "e^{2x}"), (r"\sin x", r"\sin(x+2^{-200})")],
    "units": [
        ("15 cm", "15 mm"), ("15 cm^2", "15 cm"), ("100 cm", "1 m"), ("5 dollars", "5 cents"), ("28%", "28 cm"),
        ("120 apples", "120 oranges"), ("50%", "5"), ("20°C", "20°F"), ("90°", r"\frac{\pi}{2}"),
    ],
    "several answers": [("1,2", "1,2,3"), ("1,2", "1"), (r"\pm 5", "5"), ("(1,2),(3,4)", "(3,4)"), (["1", "2"], "1")],
    "tuples and matrices": [
        ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", r"\{1,2\}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ],
    "intervals and inequalities": [
        ("x<2", r"x\le2"), ("-1<x<2", "(-1,2]"), ("x>2", "y>2"), ("2x+y<3", "y>3-2x"), (r"\mathbb{R}", r"x\ne0"),
    ],
    "equations": [("y=2x+1", "y=2x+2"), ("5", "x+2=5"), ("x=3", "y=3"), ("2", "x^2=2")],
    "words and choices": [
        ("B", "C"), (r"\textbf{(B)} 42", "(C) 42"), ("Monday", "Tuesday"), ("True", "False"), ("1010_2", "1011_2"),
        ("3:4", "4:3"),
    ],
}  # fmt: skip


def _flat(groups: dict[str, list[tuple[Any, str]]]) -> list[Any]:
    return [pytest.param(*pair, id=f"{name}: {pair}") for name, pairs in groups.items() for pair in pairs]


@pytest.mark.parametrize(("gold", "answer"), _flat(EQUAL))
def test_equivalent_answers_pass(gold: Any, answer: str) -> None:
    assert passes(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), _flat(UNEQUAL))
def test_other_answers_fail(gold: Any, answer: str) -> None:
    assert not passes(gold, answer)


@settings(deadline=None)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_equal_exactly_when_their_numbers_are(a: Any, b: Any) -> None:
    latex = rf"\frac{{{b.numerator}}}{{{b.denominator}}}"
    assert passes(f"{a.numerator}/{a.denominator}", latex) is (a == b)
    assert passes(str(a), rf"\frac{{{-2 * a.numerator}}}{{{-2 * a.denominator}}}")


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(1, 10**30))
def test_thousands_may_have_commas(number: int, other: int) -> None:
    assert passes(str(number), f"{number:,}")
    assert not passes(str(number), f"{number + other:,}")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=r"\{}()[]^_$+-*/=<>,.;:| 0123x\frac\sqrt\pi", max_size=40))
def test_no_text_makes_the_verifier_raise(text: str) -> None:
    result = math(f"<answer>{text}</answer>", FakeProblem(answer="17"))
    assert result.decision in (Decision.PASS, Decision.FAIL)


@pytest.mark.parametrize(
    "hard",
    [
        "10^{10^{10^{10}}}",
        "(" * 900 + "1" + ")" * 900,
        "(x+1)^{10^9}",
        "1," * 900 + "1",
        "9" * 3000 + "!",
        "cm " * 600 + "5",
    ],
    ids=["tower", "brackets", "power of a sum", "list", "factorial", "words"],
)
def test_an_answer_made_to_hang_is_decided(hard: str) -> None:
    assert not passes("10", hard)


def test_the_result_is_the_same_in_the_main_thread_a_worker_thread_and_a_task() -> None:
    problem, response = FakeProblem(answer="1/3"), r"\boxed{\frac{1}{3}}"
    rewards = [math(response, problem).reward]
    thread = threading.Thread(target=lambda: rewards.append(math(response, problem).reward))
    thread.start()
    thread.join()

    async def task() -> None:
        rewards.append(math(response, problem).reward)
        rewards.append((await asyncio.to_thread(math, r"\boxed{2\ln 2}", FakeProblem(answer=r"\ln 4"))).reward)

    asyncio.run(task())
    assert rewards == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("gold", ["", "  ", "$$", r"\boxed{}", [], [""], "####"])
def test_an_empty_gold_is_refused(gold: Any) -> None:
    with pytest.raises(ValueError, match="problem p1 has an empty answer"):
        math(r"\boxed{}", FakeProblem(answer=gold))


def test_a_gold_may_be_a_solution_with_its_answer_marked() -> None:
    assert gold_parts("1000+300=1300\n#### 1,300") == ("1,300",)
    assert gold_parts(r"so $x=\boxed{5}$ and \boxed{6}") == ("5", "6")
    assert gold_parts('["a", "b"]') == ("a", "b")
    assert gold_parts("[1, 2]") == ("[1, 2]",)  # an interval


def test_the_evidence_shows_both_sides_or_why_there_is_no_answer() -> None:
    problem = FakeProblem(answer="7")
    assert math(r"\boxed{8}", problem).evidence == "answer '8', expected '7'"
    assert math(r"\boxed{7", problem).evidence == "no answer: an unterminated box"
    assert math("no idea,\nsorry", problem).evidence == "no answer: no box and no marked answer"


def test_a_missing_library_is_an_error_and_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(a: str, b: str) -> bool:
        raise ModuleNotFoundError("No module named 'math_verify'")

    monkeypatch.setattr(math_values, "_equal_trees", missing)
    result = Scorer(["math"]).score(FakeProblem(answer=r"\ln 3", verifier="math"), r"\boxed{\ln 5}", EndReason.EOS)
    assert (result.decision, result.reward) == (Decision.ENV_ERROR, None)
    assert result.evidence == "ModuleNotFoundError: No module named 'math_verify'"


MISSED = {11, 135, 142, 145, 150, 152, 159}
"""Lines of the unseen pairs that are decided otherwise: thin spaces in numbers, |x| < a, a scalar times a matrix, and
converted units, which the policy does not convert."""


def test_pairs_written_without_sight_of_the_code_are_right_but_for_the_named_ones() -> None:
    # 200 pairs by a writer who knew the policy alone: 193 right.
    file = Path(__file__).parent / "data" / "unseen_pairs.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 200
    decisions = [math(row["response"], FakeProblem(answer=row["gold"], verifier="math")).decision for row in rows]
    expected = [Decision.PASS if row["expected"] else Decision.FAIL for row in rows]
    wrong = {number for number, (is_, should) in enumerate(zip(decisions, expected, strict=True), 1) if is_ != should}
    assert wrong == MISSED
