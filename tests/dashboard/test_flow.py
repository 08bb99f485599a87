"""Who waits for whom."""

import pytest

from stream_grpo.dashboard.flow import Flow, Window, bottleneck
from stream_grpo.dashboard.lines import SamplerStatus, StepLine


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


@pytest.mark.parametrize(
    ("waits", "idle", "where", "begins"),
    [
        (0.61, 0.1, "sampler", "Sampling is the bottleneck: the learner waited 61% of the last minute"),
        (0.05, 0.4, "learner", "Learning is the bottleneck: the samplers were idle 40% of the last minute"),
        (0.1, 0.1, "", "Sampling and learning keep up with each other"),
        (None, 0.1, "", "Too little"),
    ],
)
def test_the_bottleneck_is_the_side_that_the_other_waits_for(
    waits: float | None, idle: float | None, where: str, begins: str
) -> None:
    found, sentence = bottleneck(waits, idle)
    assert found == where
    assert sentence.startswith(begins)


def test_steps_of_many_minutes_at_once_leave_the_last_one_in_the_window() -> None:
    flow = Flow()
    lines = [StepLine(time_s=6.0 * i, step=i, step_s=2.0, waited_s=4.0 if i < 90 else 1.0) for i in range(100)]
    flow.add_steps(lines[:50])
    flow.add_steps(lines[50:])
    learner = flow.as_fields()["learner"]
    # The last ten steps: one every 6 s, of which the learner computes 2 s and waits 1 s.
    assert learner["steps_per_minute"] == pytest.approx(10)
    assert learner["busy_share"] == pytest.approx(2 / 6)
    assert learner["wait_share"] == pytest.approx(1 / 6)


def test_samplers_are_summed_and_their_busy_shares_averaged() -> None:
    flow = Flow()
    for time_s in (0.0, 10.0):
        flow.add_sampler(SamplerStatus(time_s=time_s, part="a", busy_s=time_s, num_tokens=int(100 * time_s)))
        flow.add_sampler(SamplerStatus(time_s=time_s, part="b", busy_s=0.5 * time_s, num_tokens=int(50 * time_s)))
    sampler = flow.as_fields()["sampler"]
    assert (sampler["busy_share"], sampler["tokens_per_s"]) == (0.75, 150)
