"""A run's metrics as they come in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream_grpo.algo.statistics import AGE_EDGES, _labels
from stream_grpo.dashboard.lines import AGES, SWEEPS_A_CHUNK
from stream_grpo.dashboard.reading import MAX_DOMAINS, RunReader
from tests.dashboard.runs import WrittenRun


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


def test_the_age_buckets_are_those_of_the_statistics() -> None:
    assert list(AGES) == _labels(AGE_EDGES)


def test_steps_are_read_with_their_figures_and_lines_of_later_once_they_are_there(run: WrittenRun) -> None:
    reader = RunReader(run.path)
    assert reader.follow()
    assert len(reader.steps) == 0
    run.steps(1, 3)
    assert reader.follow()
    assert reader.steps.mean("reward_mean").tolist() == [0.01, 0.02, 0.03]
    assert reader.steps.total("trained at age/3-4").tolist() == [40, 40, 40]
    run.steps(4, 4)
    reader.follow()
    assert reader.steps.x().tolist() == [1, 2, 3, 4]


def test_a_line_that_is_still_written_is_read_once_it_is_whole_and_one_that_was_cut_never(run: WrittenRun) -> None:
    run.step(1)
    path = run.path / "metrics.jsonl"
    line = path.read_bytes()
    reader = RunReader(run.path)
    path.write_bytes(line + line[:90])
    reader.follow()
    assert (len(reader.steps), reader.follower.num_unreadable) == (1, 0)
    path.write_bytes(line + line[:90] + b"\n" + line.replace(b'"step": 1,', b'"step": 2,'))
    reader.follow()
    assert (reader.step, reader.follower.num_unreadable) == (2, 1)


def test_a_figure_that_is_null_or_missing_is_none(run: WrittenRun) -> None:
    run.step(1, reward_mean=None)
    reader = RunReader(run.path)
    reader.follow()
    assert np.isnan(reader.steps.mean("reward_mean")[0])
    assert np.isnan(reader.steps.mean("grad_norm")[0])


def test_a_step_that_is_made_again_replaces_what_a_crash_has_lost(run: WrittenRun) -> None:
    run.steps(1, 4)
    run.write("evaluation", step=2, heldout={"headline": {"pass_at_1": 0.2, "low": 0.1, "high": 0.3}})
    run.write("evaluation", step=4, heldout={"headline": {"pass_at_1": 0.4, "low": 0.3, "high": 0.5}})
    run.step(3, reward_mean=0.9)
    reader = RunReader(run.path)
    reader.follow()
    assert reader.steps.mean("reward_mean").tolist() == [0.01, 0.02, 0.9]
    assert reader.evaluations.x().tolist() == [2]


def evaluated(run: WrittenRun, step: int, rate: float, branch: int = 0) -> None:
    run.write("evaluation", version=[branch, step], step=step, heldout={"headline": {"pass_at_1": rate}})


def test_the_scores_of_an_earlier_evaluation_may_come_after_those_of_a_later_one(run: WrittenRun) -> None:
    run.steps(1, 50)
    for step, rate in ((10, 0.1), (30, 0.3), (40, 0.4), (20, 0.2)):
        evaluated(run, step, rate)
    reader = RunReader(run.path)
    reader.follow()
    assert reader.evaluations.x().tolist() == [10, 20, 30, 40]
    assert reader.evaluations.mean("pass_at_1").tolist() == [0.1, 0.2, 0.3, 0.4]


def test_an_evaluation_that_is_made_again_after_a_restore_replaces_those_of_the_lost_branch(run: WrittenRun) -> None:
    run.steps(1, 50)
    for step, rate in ((20, 0.2), (30, 0.3), (41, 0.4)):
        evaluated(run, step, rate)
    evaluated(run, 30, 0.9, branch=1)
    evaluated(run, 40, 0.8, branch=1)
    reader = RunReader(run.path)
    reader.follow()
    assert reader.evaluations.x().tolist() == [20, 30, 40]
    assert reader.evaluations.mean("pass_at_1").tolist() == [0.2, 0.9, 0.8]


def test_another_file_in_its_place_is_read_from_the_start(run: WrittenRun) -> None:
    run.steps(1, 3)
    reader = RunReader(run.path)
    reader.follow()
    begun = reader.start
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    reader.follow()
    assert (reader.step, reader.start) == (1, begun + 1)


def test_reading_stops_when_its_time_is_over_and_goes_on_from_there(run: WrittenRun) -> None:
    run.steps(1, 200)  # some hundred kilobytes: several chunks
    reader = RunReader(run.path, timer=iter(range(10_000)).__next__)
    assert not reader.follow(budget_s=0)
    assert 0 < reader.share_read < 1
    while not reader.follow(budget_s=0):
        pass
    assert (reader.share_read, reader.step) == (1, 200)
    assert len(reader.steps) == 200


def test_of_many_statuses_in_a_chunk_the_newest_is_among_those_read(run: WrittenRun) -> None:
    run.step(1)
    for seen in range(50):
        run.curator(seen=seen)
    reader = RunReader(run.path)
    reader.follow()
    assert len(reader.pool) <= SWEEPS_A_CHUNK + 1
    assert reader.pool.last("seen")[-1] == 49


def test_domains_that_turn_up_later_get_a_row_and_so_many_and_no_more(run: WrittenRun) -> None:
    run.curator(domain_rates={"add": 0.5})
    reader = RunReader(run.path)
    reader.follow()
    run.curator(domain_rates={f"d{i}": 0.1 for i in range(MAX_DOMAINS + 9)})
    reader.follow()
    rates = [name for name in reader.pool.names if name.startswith("rate/")]
    assert len(rates) == MAX_DOMAINS
    np.testing.assert_equal(reader.pool.last("rate/d0"), [np.nan, 0.1])


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("evaluation", {"step": 2, "heldout": {"headline": {"pass_at_1": "high"}}}),
        ("evaluation", {"step": 2, "heldout": {"headline": [0.5]}}),
        ("step", {"step": 2, "reward_mean": "0.5"}),
        ("step", {"step": -2}),
        ("step", {"step": 10**400}),
        ("step", {"step": 2, "tokens": {"generated": 10**30}}),
        ("status", {"part": "curator", "problems": "10"}),
        ("status", {"part": "sampler-0", "idle_s": [1.0]}),
    ],
)
def test_a_figure_of_a_wrong_type_costs_its_line_and_none_beside_it(
    run: WrittenRun, event: str, values: dict[str, Any]
) -> None:
    run.steps(1, 1)
    run.write(event, **values)
    run.steps(2, 3)
    evaluated(run, 3, 0.3)
    reader = RunReader(run.path)
    assert reader.follow()
    assert reader.steps.x().tolist() == [1, 2, 3]
    assert reader.evaluations.mean("pass_at_1").tolist() == [0.3]
    assert reader.follower.num_unreadable == (event != "status")


def test_metrics_that_cannot_be_read_are_said_to_be_so(run: WrittenRun) -> None:
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").mkdir()
    reader = RunReader(run.path)
    assert reader.follow()
    assert reader.follower.problem == "metrics.jsonl cannot be read: Is a directory"
    (run.path / "metrics.jsonl").rmdir()
    other = WrittenRun(run.path.with_name("other"))
    other.steps(1, 2)
    (other.path / "metrics.jsonl").rename(run.path / "metrics.jsonl")
    assert reader.follow()
    assert (reader.follower.problem, reader.step) == (None, 2)


def test_events_named_inside_a_message_are_no_lines(run: WrittenRun) -> None:
    run.write("warning", message='{"event": "step", "step": 9}', more={"event": "step", "step": 9})
    run.write("alarm", step=3, name="no_signal", sentence="Nothing is learnt.", cause="The problems are too hard.")
    reader = RunReader(run.path)
    reader.follow()
    assert (reader.step, reader.num_warnings, reader.num_alarms) == (0, 1, 1)
    assert reader.alarms[0].sentence == "Nothing is learnt."


def test_a_status_without_its_figures_gives_no_row_and_is_not_unreadable(run: WrittenRun) -> None:
    run.step(1)
    run.curator(seen=4)
    run.write("status", part="curator")
    run.write("status", part="curator", problems=10, domain_rates={})
    for part in ("sampler-0", "learner", "buffer"):
        run.write("status", part=part)
    reader = RunReader(run.path)
    reader.follow()
    assert reader.pool.last("seen").tolist() == [4]
    assert (reader.flow.as_fields()["sampler"]["num_samplers"], reader.follower.num_unreadable) == (0, 0)
