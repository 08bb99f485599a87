"""What is said of responses that never end and of verifiers that do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stream_grpo.sampler.alarms import Alarms
from stream_grpo.types import EndReason


@dataclass
class Share:
    exhausted_share: float


def alarms(said: list[str]) -> Alarms:
    return Alarms(said.append, max_new_tokens=16, time_limit_s=10.0)


@pytest.mark.parametrize(("num_cut", "num_said"), [(64, 1), (63, 0)])
def test_c41_a_run_whose_first_64_responses_are_all_cut_is_told_so(num_cut: int, num_said: int) -> None:
    said: list[str] = []
    watched = alarms(said)
    for reason in [EndReason.ABORT, *[EndReason.EOS] * (64 - num_cut), *[EndReason.LENGTH] * (num_cut + 100)]:
        watched.ended(reason)
    assert len(said) == num_said
    assert all("(100%) were cut off at sampler.max_new_tokens = 16" in message for message in said)


def test_a_verifier_that_runs_out_of_time_too_often_is_named_once() -> None:
    said: list[str] = []
    watched = alarms(said)
    watched.scored(Share(1.0), 63)  # too few to say
    watched.scored(Share(0.05), 1)
    assert said == []
    watched.scored(Share(0.08), 64)
    watched.scored(Share(0.5), 64)
    assert len(said) == 1
    assert said[0].startswith("on 8% of the responses the verifier ran out of time or memory")
    assert "rewards.time_limit_s = 10" in said[0]


@dataclass
class Watched:
    hidden_alarm: str | None


def test_a_gap_to_the_hidden_verifier_is_said_once() -> None:
    said: list[str] = []
    watched = alarms(said)
    for alarm in (None, "40% are decided otherwise", "50% are decided otherwise"):
        watched.compared(Watched(alarm))
    assert said == ["40% are decided otherwise"]
