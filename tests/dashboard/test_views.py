"""What the page is sent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stream_grpo.dashboard import facts, views
from stream_grpo.dashboard.views import RunView
from stream_grpo.evaluation import ProblemScore, summarize
from tests.dashboard.runs import BEGUN_S, WrittenRun


def merged(known: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """As the page does it."""
    columns = {}
    for name, values in sent["columns"].items():
        before = known.get("columns", {}).get(name, [])[: sent["from"]]
        columns[name] = before + [None] * (sent["from"] - len(before)) + values
    return {"x": known.get("x", [])[: sent["from"]] + sent["x"], "columns": columns}


def test_deltas_put_together_are_the_whole(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    view, cursor, known = RunView("run", run.path), "", dict[str, Any]()
    # Past 1000 steps buckets merge; step 1100 is made again; a domain turns up late.
    for first, last in ((1, 300), (301, 1150), (1100, 1200)):
        run.steps(first, last)
        run.curator(domain_rates={f"from-{first}": 0.25})
        run.write("evaluation", step=last, heldout={"headline": {"pass_at_1": 0.5, "low": None, "high": 0.75}})
        complete = False
        while not complete:
            sent = view.update(cursor, 1.0)
            cursor, complete = sent["cursor"], sent["complete"]
            known = {name: merged(known.get(name, {}), sent[name]) for name in ("steps", "pool", "evaluations")}
    whole = view.update("", 1.0)
    assert known == {name: merged({}, whole[name]) for name in known}
    assert known["steps"]["x"][-1] == 1200
    assert 500 <= len(known["steps"]["x"]) <= 1000


def test_a_page_that_has_all_is_sent_next_to_nothing(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.steps(1, 500)
    view = RunView("run", run.path)
    sent = view.update("", 10.0)
    again = view.update(sent["cursor"], 10.0)
    assert len(sent["steps"]["x"]) == 500
    assert len(again["steps"]["x"]) == 1
    assert len(msgspec.json.encode(again)) < 4000


@pytest.mark.parametrize(
    "cursor", ["", "x", "0-1.2", "0-1.2-3.4-..", "0-٣.1-0.0-0.0", "9-0.1-0.1-0.1", "0-0.-1-0.0-0.0"]
)
def test_a_cursor_that_is_none_of_ours_gets_the_whole(tmp_path: Path, cursor: str) -> None:
    run = WrittenRun(tmp_path / "run")
    run.steps(1, 3)
    assert RunView("run", run.path).update(cursor, 10.0)["steps"]["x"] == [1, 2, 3]


def test_a_run_without_a_line_has_a_view_too(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    sent = RunView("run", run.path).update("", 1.0)
    assert (sent["step"], sent["complete"], sent["state"], sent["settings"]["num_steps"]) == (0, True, "stopped", 50)


SCORES = [
    *(ProblemScore(problem_id=f"a{n}", domain="add", num_scored=4, num_passed=n) for n in range(5)),
    ProblemScore(problem_id="c", domain="carry", num_scored=4, num_passed=4),
    ProblemScore(problem_id="unscored", domain="add", num_scored=0, num_passed=0),
]


def write_scores(run_dir: Path, scores: Sequence[ProblemScore]) -> None:
    (run_dir / "evaluation-before.json").write_bytes(msgspec.json.encode(scores))


def test_before_the_summary_the_first_evaluation_is_read_from_its_scores(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    write_scores(run.path, SCORES)
    before = RunView("run", run.path).update("", 1.0)["heldout"]["before"]
    # The headline is of domain add: (0/4 + 1/4 + ... + 4/4) / 5; a problem without a scored sample has no rate.
    assert (before["pass_at_1"], before["num_problems"]) == (0.5, 5)


def test_the_first_evaluation_has_the_interval_that_the_summary_will_have(tmp_path: Path) -> None:
    write_scores(tmp_path, SCORES[::-1])
    (tmp_path / "config.toml").write_text('[run]\nseed = 7\n[evaluation]\ndomains = ["add"]')
    found = facts.heldout(facts.Files(tmp_path), None, facts.Settings.read(tmp_path))["before"]
    assert found == pytest.approx(summarize(SCORES, 7, ["add"])["headline"].as_dict())


def test_a_bootstrap_is_drawn_once_for_each_content_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def rate_of(problems: list[Any], *given: Any) -> dict[str, Any]:
        drawn.append(len(problems))
        return {"pass_at_1": 0.5}

    monkeypatch.setattr(facts, "rate_of", rate_of)
    files, settings = facts.Files(tmp_path), facts.Settings.read(tmp_path)
    for scores in (SCORES, SCORES[:3]):
        write_scores(tmp_path, scores)
        for _ in range(5):
            assert facts.heldout(files, None, settings) == {"before": {"pass_at_1": 0.5}}
    assert drawn == [len(SCORES), 3]


@pytest.mark.parametrize(
    ("summary", "silent_s", "is_locked", "state"),
    [
        (None, 5, True, "running"),
        (None, 500, True, "quiet"),
        (None, 500, False, "stopped"),
        ({"steps": 7}, 500, False, "finished"),
        ({"steps": 6}, 500, False, "stopped"),  # it went on after that summary, and died
    ],
)
def test_a_run_lives_while_its_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: Any, silent_s: float, is_locked: bool, state: str
) -> None:
    monkeypatch.setattr(facts, "is_locked", lambda path: is_locked)
    assert facts.state_of(tmp_path, summary, 7, BEGUN_S, BEGUN_S + silent_s) == state


def test_a_long_run_is_shown_from_some_of_its_lines_until_all_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "SAMPLED_ABOVE_BYTES", 100_000)
    monkeypatch.setattr(views, "NUM_SAMPLES", 4)
    run = WrittenRun(tmp_path / "run")
    run.steps(1, 900)  # about 700 kB
    run.write("alarm", step=900, name="no_signal", sentence="Nothing is learnt.")
    view = RunView("run", run.path)
    first = view.update("", 0.0)
    # The newest lines are among the samples, and so are steps from all over the run.
    assert (first["complete"], first["step"], first["num_alarms"]) == (False, 900, 1)
    assert 50 < len(first["steps"]["x"]) < 600
    assert first["steps"]["x"][0] == 1
    sent = view.update(first["cursor"], 60.0)
    assert (sent["complete"], sent["share_read"]) == (True, 1.0)
    assert sent["steps"]["from"] == 0
    assert sent["steps"]["x"] == list(range(1, 901))


def test_reading_ahead_leaves_nothing_to_read(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.steps(1, 300)
    view = RunView("run", run.path)
    view.read_ahead()
    assert view.update("", 0.0)["step"] == 300
