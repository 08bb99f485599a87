"""Who waits for whom."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.dashboard.flow import Flow, Window, held_up_by
from stream_grpo.dashboard.lines import SamplerStatus, StepLine
from stream_grpo.dashboard.reading import RunReader
from stream_grpo.pace.bottleneck import Shares, bottleneck
from stream_grpo.pace.watch import PaceWatch
from tests.dashboard.runs import RECORDED, WrittenRun


def test_a_rate_is_what_was_gained_in_about_the_last_minute() -> None:
    window = Window(window_s=60)
    for minute in range(10):
        window.add(60.0 * minute, {"n": minute**2})
    # From minute 8 to 9: 81 - 64 in 60 s.
    assert window.rate("n") == pytest.approx(17 / 60)


def test_a_counter_that_goes_back_was_started_anew() -> None:
    window = Window()
    window.add(0.0, {"n": 100})
    window.add(2.0, {"n": 4})
    assert window.rate("n") is None
    window.add(4.0, {"n": 10})
    assert window.rate("n") == 3


share = st.floats(0, 1)
idle = st.dictionaries(st.sampled_from(["policy", "buffer", "curator", "rewards"]), share)


@given(share, share, idle, share)
def test_whatever_is_the_bottleneck_has_a_box(
    waited: float, published: float, idle: dict[str, float], stalled: float
) -> None:
    shares = Shares(learner_waited=waited, learner_published=published, sampler_idle=idle, sampler_stalled=stalled)
    sentence = bottleneck(shares)
    assert (held_up_by(sentence) != "") == ("is the bottleneck" in sentence)


@pytest.mark.parametrize(
    ("shares", "box"),
    [
        (Shares(learner_waited=0.6, sampler_idle={}), "sampler"),
        (Shares(learner_waited=0.6, sampler_idle={}, sampler_stalled=0.5), "sampler"),
        (Shares(sampler_idle={"rewards": 0.6}), "sampler"),
        (Shares(sampler_idle={"curator": 0.6}), "curator"),
        (Shares(sampler_idle={"buffer": 0.6}), "learner"),
        (Shares(sampler_idle={"buffer": 0.6}, learner_published=0.7), "learner"),
        (Shares(learner_waited=0.6, sampler_idle={"buffer": 0.5}), ""),  # they wait for each other
        (Shares(sampler_idle={}), ""),
    ],
)
def test_the_box_is_that_of_the_part_which_holds_up_the_others(shares: Shares, box: str) -> None:
    assert held_up_by(bottleneck(shares)) == box


def test_the_page_says_of_a_run_what_the_console_says(tmp_path: Path) -> None:
    run, watch = WrittenRun(tmp_path / "run"), PaceWatch(num_steps=100)
    run.recorded()
    for line in RECORDED:
        watch.take(line)
    pace, shares = watch.now(), watch.shares()
    reader = RunReader(run.path)
    reader.follow()
    flow = reader.flow.as_fields()
    assert pace is not None
    assert flow["sentence"].lower() == f"{pace.bottleneck}.".lower()
    assert flow["learner"]["wait_share"] == pytest.approx(shares.learner_waited)
    assert flow["sampler"]["stall_share"] == pytest.approx(shares.sampler_stalled)


def test_of_a_recorded_run_only_the_samplers_count_as_samplers(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.recorded()
    run.write("status", part="learner-1", busy_s=9.0, waited_s=0.0, version=[0, 9], waits_for=[])
    reader = RunReader(run.path)
    reader.follow()
    flow = reader.flow.as_fields()
    first, *_, last = [line for line in RECORDED if line.get("part") == "sampler-0" and line["time_s"] > 1796038900]
    assert (flow["sampler"]["num_samplers"], flow["versions"]) == (1, ["1.40"])
    # After its restart the run has gone on for 51 s, less than a window.
    seconds = last["time_s"] - first["time_s"]
    assert flow["sampler"]["busy_share"] == pytest.approx((last["busy_s"] - first["busy_s"]) / seconds)


def test_before_all_parts_have_said_something_twice_nothing_is_said_of_the_bottleneck(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.steps(1, 3)
    reader = RunReader(run.path)
    reader.follow()
    flow = reader.flow.as_fields()
    assert (flow["bottleneck"], flow["sentence"][:10]) == ("", "Too little")


def test_steps_of_many_minutes_at_once_leave_the_last_one_in_the_window() -> None:
    flow = Flow()
    lines = [StepLine(time_s=6.0 * i, step=i, num_groups=1 if i < 90 else 3) for i in range(100)]
    flow.add_steps(lines[:50])
    flow.add_steps(lines[50:])
    learner = flow.as_fields()["learner"]
    # The last ten steps: one every 6 s, of three groups each.
    assert learner["steps_per_minute"] == pytest.approx(10)
    assert learner["groups_per_s"] == pytest.approx(3 / 6)


def sampler_line(part: str, time_s: float, busy_s: float, num_tokens: int) -> SamplerStatus:
    return SamplerStatus(
        time_s=time_s, part=part, busy_s=busy_s, stall_s=0.0, idle_s={},
        num_tokens=num_tokens, num_groups_done=0, num_running=1, num_slots=2,
    )  # fmt: skip


def test_samplers_are_summed_and_their_busy_shares_averaged() -> None:
    flow = Flow()
    for seconds in (0, 10):
        flow.add_sampler(sampler_line("sampler-0", seconds, seconds, 100 * seconds))
        flow.add_sampler(sampler_line("sampler-1", seconds, 0.5 * seconds, 50 * seconds))
    sampler = flow.as_fields()["sampler"]
    assert (sampler["busy_share"], sampler["tokens_per_s"]) == (0.75, 150)
