"""Guard sets: which scores are theirs, and when a fall is an alarm."""

from stream_grpo.config_problems import Guard
from stream_grpo.evaluation import ProblemScore
from stream_grpo.guards import alarms, guard_lines, guarded_id, judge, split

SAFETY = Guard.model_validate({"name": "safety", "files": ["s.jsonl"], "max_drop": 0.1})


def score(problem_id: str, num_passed: int, num_scored: int = 4) -> ProblemScore:
    return ProblemScore(problem_id=problem_id, domain="d", num_scored=num_scored, num_passed=num_passed)


def scores(*passed: int, guard: str = "safety") -> list[ProblemScore]:
    return [score(guarded_id(guard, f"p{index}"), count) for index, count in enumerate(passed)]


def test_scores_of_guards_are_told_by_their_ids() -> None:
    heldout, guarded = [score("p0", 4)], scores(4)
    assert split([*guarded, *heldout]) == (heldout, guarded)


def test_a_fall_of_every_problem_beyond_the_bound_is_an_alarm() -> None:
    # Every problem falls from 1 to 3/4: the interval is -0.25 to -0.25, below -0.1.
    found = judge([SAFETY], scores(4, 4, 4), scores(3, 3, 3), seed=0)
    assert found["safety"]["rise"] == {"mean": -0.25, "low": -0.25, "high": -0.25, "num_problems": 3}
    assert (found["safety"]["before"]["pass_at_1"], found["safety"]["after"]["pass_at_1"]) == (1.0, 0.75)
    (alarm,) = alarms(found, step=80)
    assert (alarm["name"], alarm["step"]) == ("guard:safety", 80)
    assert "pass@1 fell from 1.000 to 0.750, by 0.250 to 0.250 (95% over 3 problems)" in alarm["sentence"]
    assert alarm["cause"]
    assert guard_lines(found) == ["guard    safety: -0.250 [-0.250, -0.250], DROPPED"]


def test_a_fall_within_the_bound_or_of_few_problems_is_none() -> None:
    small = judge([SAFETY.model_copy(update={"max_drop": 0.25})], scores(4, 4), scores(3, 3), seed=0)
    # One of three falls from 1 to 0: the mean is -1/3, but a resample without it does not fall.
    unsure = judge([SAFETY], scores(4, 4, 4), scores(0, 4, 4), seed=0)
    assert not alarms(small, 1)
    assert not alarms(unsure, 1)
    assert unsure["safety"]["rise"]["high"] == 0.0


def test_each_guard_is_judged_on_its_own_problems() -> None:
    other = SAFETY.model_copy(update={"name": "other"})
    before, after = scores(4, 4) + scores(4, guard="other"), scores(4, 4) + scores(0, guard="other")
    assert [alarm["name"] for alarm in alarms(judge([SAFETY, other], before, after, seed=0), 1)] == ["guard:other"]


def test_a_guard_without_scored_samples_has_no_rise_and_is_no_alarm() -> None:
    unscored = [score(guarded_id("safety", "p0"), 0, num_scored=0)]
    found = judge([SAFETY], unscored, unscored, seed=0)
    assert found["safety"]["rise"] is None
    assert found["safety"]["before"]["pass_at_1"] is None
    assert guard_lines(found) == ["guard    safety: nothing scored on both sides"]
    assert not alarms(found, 1)
