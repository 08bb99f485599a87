"""The closed loop: sequences of steps by hand, and what holds whatever is measured."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.config_stream import Control, Stream
from stream_grpo.learner.control import Change, Controller, Observed, Settings, has_margin, looser, tighter

CONTROL = Control(enabled=True, min_ess=0.8, max_behavior_kl=0.1, interval=2, patience=2, min_learning_rate_scale=0.5)
STREAM = Stream(max_policy_age=4, publish_interval=2)
GOOD, POOR, BETWEEN = {"ess": 0.99, "k3": 0.001}, {"ess": 0.5, "k3": 0.001}, {"ess": 0.85, "k3": 0.001}


def controller(stream: Stream = STREAM, **changes: Any) -> Controller:
    return Controller(CONTROL.model_copy(update=changes), stream)


def run(controller: Controller, metrics: dict[str, float], num_steps: int) -> list[tuple[int, Change]]:
    """The changes and the steps they came at; weights are published whenever the interval has passed."""
    found = []
    for step in range(1, num_steps + 1):
        if (change := controller.step(metrics)) is not None:
            found.append((step, change))
        controller.published()
    return found


def test_too_little_is_effective_the_interval_is_lowered_first_then_the_target_then_the_learning_rate() -> None:
    changes = run(controller(), POOR, 60)
    # Interval 2 -> 1. Target 4 -> 3 -> 2 -> 1 -> 0 by a quarter, at least 1. Rate 1 -> 0.7 -> 0.5, its floor.
    assert [(change.setting, change.after) for _, change in changes] == [
        ("publish_interval", 1),
        ("target_policy_age", 3),
        ("target_policy_age", 2),
        ("target_policy_age", 1),
        ("target_policy_age", 0),
        ("learning_rate_scale", 0.7),
        ("learning_rate_scale", 0.5),
    ]
    # Two steps are averaged, and before that as many left out as tokens may be old: target + interval, which is
    # 4 + 2, 4 + 1, 3 + 1, 2 + 1, 1 + 1, 0 + 1: 2, then 6 + 2 later, 5 + 2, 4 + 2, 3 + 2, 2 + 2, 1 + 2.
    assert [step for step, _ in changes] == [2, 10, 17, 23, 28, 32, 35]
    assert changes[0][1].reason == "effective share of the tokens 0.500 is below min_ess = 0.8"


def test_a_kl_above_its_ceiling_tightens_too() -> None:
    ((_, change), *_) = run(controller(), {"ess": 1.0, "k3": 0.2}, 4)
    assert change == Change(
        setting="publish_interval",
        before=2,
        after=1,
        reason="KL to the behavior policy 0.2 is above max_behavior_kl = 0.1",
    )


def test_with_a_margin_all_is_taken_back_in_the_other_order() -> None:
    steered = controller()
    run(steered, POOR, 60)
    changes = run(steered, GOOD, 200)
    assert [(change.setting, round(change.after, 3)) for _, change in changes] == [
        ("learning_rate_scale", 0.714),  # 0.5 / 0.7
        ("learning_rate_scale", 1.0),
        *(("target_policy_age", target) for target in (1, 2, 3, 4)),
        ("publish_interval", 2),
    ]
    assert steered.settings == Settings(target_policy_age=4, publish_interval=2)


def test_between_bound_and_margin_nothing_happens() -> None:
    steered = controller()
    run(steered, POOR, 20)
    before = steered.settings
    assert not run(steered, BETWEEN, 100)
    assert steered.settings == before
    # Margin 1/2: from 0.8 half the way to 1 is 0.9, and half of the ceiling is 0.05.
    assert has_margin(Observed(0.9, 0.05), CONTROL)
    assert not has_margin(Observed(0.89, 0.05), CONTROL)
    assert not has_margin(Observed(0.9, 0.051), CONTROL)


def test_a_setting_that_is_one_too_loose_is_tried_ever_more_seldom() -> None:
    steered = controller(Stream(max_policy_age=4, publish_interval=1))
    steps = []
    for clock in range(1, 400):
        # Up to an age of 2 all is well, above it is not: a loop without memory would try 3 for ever at one pace.
        change = steered.step(POOR if steered.settings.target_policy_age > 2 else GOOD)
        if change is not None and (change.before, change.after) == (2, 3):
            steps.append(clock)
    # Each try costs some ten steps that are left out or averaged; before it are 4, 8, 16, 32 averages of two steps.
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert [later - earlier for earlier, later in pairwise(gaps)][:3] == [8, 16, 32]


def test_a_lower_interval_holds_from_the_next_publish_and_the_target_waits_for_it() -> None:
    steered = controller(Stream(max_policy_age=4, publish_interval=4), interval=1)
    assert (change := steered.step(POOR)) is not None
    assert (change.setting, change.after) == ("publish_interval", 2)
    assert steered.publish_interval == 4
    # Weights may still lag by 3: no lower target while the interval of 4 is in effect.
    assert tighter(Settings(target_policy_age=4, publish_interval=1), CONTROL, 4) == ("target_policy_age", 3)
    assert tighter(Settings(target_policy_age=3, publish_interval=1), CONTROL, 4) == ("learning_rate_scale", 0.7)
    steered.published()
    assert steered.publish_interval == 2


def test_steps_that_say_nothing_are_passed_over() -> None:
    steered = controller(interval=1)
    assert not run(steered, {}, 5)
    assert not run(steered, {"ess": math.nan, "k3": 0.0}, 5)
    assert not run(controller(enabled=False), POOR, 50)


def test_a_restored_loop_goes_on_as_if_nothing_had_been() -> None:
    whole, first = controller(), controller()
    run(whole, POOR, 30)
    run(first, POOR, 30)
    second = controller()
    second.restore(first.state())
    assert (second.settings, second.state()) == (whole.settings, whole.state())
    # Averages that were under way begin anew: an even number of steps goes on alike.
    assert [change for _, change in run(second, GOOD, 40)] == [change for _, change in run(whole, GOOD, 40)]


def test_a_restore_keeps_within_todays_bounds() -> None:
    first = controller(Stream(max_policy_age=8, publish_interval=1))
    steered = controller(Stream(max_policy_age=2, publish_interval=1))
    steered.restore(first.state())
    assert steered.settings.target_policy_age == 2
    untouched = controller(enabled=False)
    untouched.restore({**first.state(), "target_policy_age": 0})
    assert untouched.settings.target_policy_age == 4


@given(
    max_age=st.integers(1, 12),
    interval=st.integers(1, 6),
    steps=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=150),
)
def test_whatever_is_measured_every_weight_in_use_gets_tickets(
    max_age: int, interval: int, steps: list[tuple[float, float, bool]]
) -> None:
    stream = Stream(max_policy_age=max_age, publish_interval=min(interval, max_age + 1))
    steered = controller(stream, interval=1, patience=1, min_learning_rate_scale=0.3)
    for ess, kl, publishes in steps:
        before = steered.settings
        change = steered.step({"ess": ess, "k3": kl})
        now = steered.settings
        assert (
            sum(getattr(before, name) != getattr(now, name) for name in ("target_policy_age", "publish_interval")) <= 1
        )
        assert max(now.publish_interval, steered.publish_interval) - 1 <= now.target_policy_age <= max_age
        assert 1 <= now.publish_interval <= stream.publish_interval
        assert 0.3 <= now.learning_rate_scale <= 1.0
        assert (change is None) == (before == now)
        if publishes:
            steered.published()


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_there_is_an_end_to_either_side(scale: float) -> None:
    lowest = Settings(target_policy_age=0, publish_interval=1, learning_rate_scale=scale)
    control = CONTROL.model_copy(update={"min_learning_rate_scale": scale})
    assert tighter(lowest, control, 1) is None
    assert looser(Settings(target_policy_age=4, publish_interval=2), STREAM) is None
