"""Which evaluations of runs are compared, how seeds count together, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from stream_grpo.cli import app
from stream_grpo.comparison.compare import Comparison, compare, label_of
from stream_grpo.comparison.paired import paired_difference
from stream_grpo.comparison.runs import read_run
from stream_grpo.evaluation import ProblemScore, paired_rise
from tests.comparison.folders import evaluation, make_run, step


def compared(*paths: Path) -> Comparison:
    return compare([read_run(path) for path in paths])


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def score(problem_id: str, num_passed: int, num_scored: int = 4) -> ProblemScore:
    return ProblemScore(problem_id=problem_id, domain="d", num_scored=num_scored, num_passed=num_passed)


def test_two_runs_are_paired_by_problem_with_the_first(tmp_path: Path) -> None:
    first = make_run(tmp_path, "grpo", {"a1": 2, "a2": 0}, weight="ppo")
    other = make_run(tmp_path, "cispo", {"a1": 3, "a2": 1}, weight="cispo", num_tokens=1040)
    found = compared(first, other)
    # Both problems rise by 1/4: so does every resample.
    difference = found.rows[1].difference
    assert difference is not None
    assert (difference.mean, difference.low, difference.high, difference.num_problems) == (0.25, 0.25, 0.25, 2)
    assert found.rows[0].difference is None
    assert found.rows[1].differs == ("algo.weight = cispo",)
    assert [row.pass_at_1 for row in found.rows] == [0.25, 0.5]
    assert found.is_same_budget  # 1,000 and 1,040 tokens are 4 % apart
    assert found.sentence == "after training, at 1,000 to 1,040 sampled tokens"


def test_a_picture_that_cannot_be_written_is_one_error_after_the_table(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, {"a": 1}, weight=name) for name in ("ppo", "cispo")]
    result = call(*runs, "--picture", "/proc/picture.svg")
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "--picture /proc/picture.svg: " in " ".join(result.output.split())


def test_seeds_of_one_configuration_are_one_row(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"grpo-s{seed}", {"a": 1, "b": 1 + seed}, seed=seed, w=1) for seed in range(2)]
    runs += [make_run(tmp_path, f"gspo-s{seed}", {"a": 3, "b": 3}, seed=seed, w=2) for seed in range(2)]
    found = compared(*runs)
    assert [(row.label, len(row.runs)) for row in found.rows] == [("grpo", 2), ("gspo", 2)]
    # grpo: (1 + 1 + 1 + 2) / 16 = 0.3125 over seeds and problems; gspo 0.75.
    assert found.rows[0].by_seed == [0.25, 0.375]
    assert found.rows[1].difference is not None
    assert found.rows[1].difference.mean == pytest.approx(0.4375)
    # The worst resample for gspo has the better seed of grpo and only problem b: 0.75 - 0.5; the best 0.75 - 0.25.
    assert 0.25 <= found.rows[1].difference.low < 0.4375 < found.rows[1].difference.high <= 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 99))
def test_with_one_seed_a_side_the_difference_is_the_paired_rise(passed: list[tuple[int, int]], seed: int) -> None:
    first = {f"p{i:02}": score(f"p{i:02}", a) for i, (a, _) in enumerate(passed)}
    other = {f"p{i:02}": score(f"p{i:02}", b) for i, (_, b) in enumerate(passed)}
    found = paired_difference([first], [other], seed)
    expected = paired_rise(list(first.values()), list(other.values()), seed)
    assert found.num_problems == expected.num_problems
    np.testing.assert_allclose(
        (found.mean, found.low, found.high), (expected.mean, expected.low, expected.high), atol=1e-12
    )


def test_a_problem_without_a_score_in_any_run_is_left_out() -> None:
    first = {"a": score("a", 0), "b": score("b", 0, 0)}
    other = {"a": score("a", 2), "b": score("b", 4)}
    found = paired_difference([first], [other], 0)
    assert (found.mean, found.num_problems) == (0.5, 1)
    with pytest.raises(ValueError, match="no problem was scored in every run"):
        paired_difference([{"b": first["b"]}], [{"b": other["b"]}], 0)


def test_budgets_that_differ_are_met_by_evaluations_during_training(tmp_path: Path) -> None:
    short = [step(5, 500), evaluation(5, {"a": 1}), step(10, 980), evaluation(10, {"a": 2})]
    long = [step(n, 210 * n) for n in range(1, 11)]
    long += [evaluation(n, {"a": passed}) for n, passed in ((2, 0), (5, 3), (10, 4))]
    found = compared(
        make_run(tmp_path, "short", {"a": 2}, num_tokens=1000, lines=short, w=1),
        make_run(tmp_path, "long", {"a": 4}, num_tokens=2100, lines=long, w=2),
    )
    # The least of the last evaluations is at 980 tokens; of long the nearest is step 5, at 1,050, 7 % off.
    assert found.is_same_budget
    assert [(row.at[0].step, row.at[0].num_tokens, row.pass_at_1) for row in found.rows] == [
        (10, 980, 0.5),
        (5, 1050, 0.75),
    ]
    assert found.sentence.startswith("during training, at 980 to 1,050 sampled tokens")


def test_budgets_that_cannot_be_met_are_said_to_differ(tmp_path: Path) -> None:
    found = compared(
        make_run(tmp_path, "short", {"a": 2}, num_tokens=1000, w=1),
        make_run(tmp_path, "long", {"a": 4}, num_tokens=2100, w=2),
    )
    assert not found.is_same_budget
    assert found.sentence.startswith("after training, although the budgets differ: short 1,000, long 2,100 sampled")


def test_steps_that_a_restore_made_again_count_with_their_last_tokens(tmp_path: Path) -> None:
    lines = [step(1, 100), step(2, 200), evaluation(2, {"a": 4}), step(2, 300, branch=1)]
    lines += [evaluation(2, {"a": 1}, branch=1), step(3, 400, branch=1)]
    run = read_run(make_run(tmp_path, "r", {"a": 2}, lines=lines))
    assert [(e.step, e.num_tokens, e.pass_at_1) for e in run.during] == [(2, 300, 0.25)]
    # At the end those of the last step, and not the 1,000 that were sampled until the samplers stopped.
    assert run.after.num_tokens == 400


def test_only_the_headlines_domains_count(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, "r", {"a": 2, "b": 2}, domains=["a"]))
    assert list(run.after.scores) == ["a"]


def test_other_heldout_problems_are_refused_with_what_would_be_right(tmp_path: Path) -> None:
    result = call(make_run(tmp_path, "x", {"a": 1, "b": 1}), make_run(tmp_path, "y", {"a": 1, "c": 1}))
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "x and y: their held-out problems differ: 2 are of one alone, first 'b'" in words
    assert "the same evaluation.problems_seed" in words


def test_a_run_that_has_not_ended_is_refused(tmp_path: Path) -> None:
    ended, going = make_run(tmp_path, "x", {"a": 1}), make_run(tmp_path, "y", {"a": 1})
    (going / "summary.json").unlink()
    assert "y: the run has not come to its end" in call(ended, going).output
    assert "no run there" in call(ended, tmp_path / "none").output
    assert "name at least two runs" in call(ended).output
    (ended / "evaluation-after.json").unlink()
    assert "nothing was evaluated after training" in call(ended, make_run(tmp_path, "z", {"a": 1})).output


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    lines = [step(5, 500), evaluation(5, {"a": 1, "b": 0}), step(10, 1000)]
    runs = [make_run(tmp_path, f"{name}-s0", {"a": 2, "b": n}, lines=lines, w=n) for n, name in enumerate("xy")]
    result = call(*runs, "--picture", tmp_path / "p.svg")
    assert result.exit_code == 0, result.output
    assert "y-s0\t1\t1,000\t0.000\t0.375\t\t+0.125\t+0.000 to +0.250\talgo.w = 1" in result.output
    assert "Held-out pass@1 after training, at 1,000 sampled tokens." in result.output
    assert "<svg" in (tmp_path / "p.svg").read_text()
    found = json.loads(call(*runs, "--json").stdout)
    assert found["configurations"][1]["difference"]["num_problems"] == 2
    assert found["same_budget"] is True


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["one"], "one"),
        (["base-s0", "base-s1"], "base"),
        (["base-s10", "base-s11"], "base"),
        (["age-4_seed1", "age-4_seed2"], "age-4"),
        (["x1", "y1"], "x1"),
    ],
)
def test_runs_of_one_configuration_are_called_by_what_their_names_share(names: list[str], label: str) -> None:
    assert label_of(names) == label


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("manifest.json", '{"seed": "x"}', "not those of a finished run"),
        ("manifest.json", '{"seed": 1, "identities": 3}', "not those of a finished run"),
        ("summary.json", "{}", "not those of a finished run"),
        ("metrics.jsonl", '{"event": "step"}\n', "not those of a finished run"),
        ("evaluation-after.json", '[{"problem_id": "a", "domain": "d", "num_scored": 4, "num_passed": 9}]', "9 of 4"),
        ("evaluation-after.json", '[{"problem_id": "a", "domain": "d", "num_scored": 4, "num_passed": -1}]', "-1 of 4"),
        ("evaluation-after.json", "[3]", "no scores in it"),
    ],
)
def test_files_that_are_not_a_runs_are_refused_in_a_sentence(
    tmp_path: Path, file: str, text: str, message: str
) -> None:
    run = make_run(tmp_path, "r", {"a": 2})
    (run / file).write_text(text)
    answer = call(run, make_run(tmp_path, "other", {"a": 2}))
    assert answer.exit_code == 2
    assert message in answer.output


def test_a_run_is_no_second_seed_of_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r", {"a": 2})
    answer = call(run, tmp_path / "x" / ".." / "r")
    assert answer.exit_code == 2
    assert "the same run twice" in answer.output
