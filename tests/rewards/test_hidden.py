"""The gap between a reward and a verifier that is no part of it, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from stream_grpo.config_rewards import Hidden
from stream_grpo.rewards.hidden import Gap, HiddenGap
from stream_grpo.types import Decision, RewardResult


def said(passes: bool | None, reward: float | None = None) -> RewardResult:
    decision = Decision.UNKNOWN if passes is None else Decision.PASS if passes else Decision.FAIL
    given = reward if reward is not None else None if passes is None else float(passes)
    return RewardResult(decision=decision, reward=given, verifier="v", verifier_version="1")


def gap_of(pairs: list[tuple[bool | None, bool | None]], **hidden: Any) -> HiddenGap:
    gap = HiddenGap(Hidden(verifier="math", **({"window": 16} | hidden)))
    for shown, watched in pairs:
        gap.add(said(shown), said(watched))
    return gap


def test_the_gap_by_hand() -> None:
    # Of four pairs two differ, one of them a pass that should not be: (1 - 0 + 0 - 1 + 0 + 0) / 4 = 0.
    gap = gap_of([(True, False), (False, True), (True, True), (False, False)])
    assert gap.now() == Gap(num_pairs=4, disagreement=0.5, overrated=0.25, mean_difference=0.0)
    assert gap.status()["hidden_reward_mean"] == 0.5  # of 0, 1, 1 and 0


def test_a_pair_without_a_reward_says_nothing() -> None:
    gap = gap_of([(None, True), (True, None)])
    assert (gap.now(), gap.num_unscored) == (None, 2)
    assert gap.status() == {
        "disagreement": None, "overrated": None, "mean_difference": None, "hidden_reward_mean": None,
        "num_pairs": 0, "num_unscored": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("num_wrong", "is_said"), [(4, True), (3, False)])
def test_the_alarm_looks_at_a_full_window(num_wrong: int, is_said: bool) -> None:
    # 4 / 16 is above 20%, 3 / 16 is not.
    pairs: list[tuple[bool | None, bool | None]] = [(True, False)] * num_wrong + [(True, True)] * (15 - num_wrong)
    gap = gap_of(pairs)
    assert gap.alarm is None
    gap.add(said(True), said(True))
    assert (gap.alarm is not None) is is_said
    if gap.alarm is not None:
        assert "25% are decided otherwise" in gap.alarm
        assert "(25% pass and should not)" in gap.alarm
        assert "'math'" in gap.alarm
    # What is older than the window is forgotten.
    for _ in range(16):
        gap.add(said(True), said(True))
    assert gap.alarm is None


def test_the_alarm_of_the_difference_is_off_unless_asked_for() -> None:
    for maximum, is_said in ((None, False), (0.5, True)):
        gap = HiddenGap(Hidden(verifier="math", window=16, max_difference=maximum))
        for _ in range(16):
            gap.add(said(True, 3.0), said(True))
        assert (gap.alarm is not None) is is_said
