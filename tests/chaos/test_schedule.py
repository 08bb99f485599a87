"""Who is killed is drawn from a seed, and every part gets its share."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kills.schedule import ENDS_THE_RUN, PARTS, RAY_PARTS, schedule, victim_of

from stream_grpo.failpoints import POINTS

ALL = (*PARTS, *RAY_PARTS)


@pytest.mark.parametrize("seed", range(20))
def test_half_of_the_kills_are_at_points_and_each_part_is_killed_twice(seed: int) -> None:
    kills = schedule(24, seed, ALL, max_delay_s=1.0)
    assert len(kills) == 24
    assert sum(bool(kill.point) for kill in kills) == 12
    assert all(count >= 2 for count in Counter(kill.who for kill in kills).values())
    assert {kill.who for kill in kills} == set(ALL)
    assert any(kill.point.startswith("checkpoint.") for kill in kills)


@pytest.mark.parametrize("num_kills", [24, 500])
def test_no_start_of_the_run_loses_a_server_more_often_than_it_is_started_again(num_kills: int) -> None:
    for seed in range(20):
        losses: Counter[str] = Counter()
        for kill in schedule(num_kills, seed, ALL, max_delay_s=1.0):
            losses[kill.who] += 1
            if kill.who in ENDS_THE_RUN:
                losses.clear()
            assert max(losses["buffer"], losses["curator"]) <= 3  # what `launch` grants


def test_the_same_seed_gives_the_same_kills() -> None:
    assert schedule(100, 7, ALL, max_delay_s=1.0) == schedule(100, 7, ALL, max_delay_s=1.0)
    assert schedule(100, 7, ALL, max_delay_s=1.0) != schedule(100, 8, ALL, max_delay_s=1.0)


def test_many_kills_reach_every_point_and_name_who_passes_it() -> None:
    kills = [kill for kill in schedule(100, 0, PARTS, max_delay_s=1.0) if kill.point]
    assert {kill.point for kill in kills} == set(POINTS)
    assert all(kill.who == victim_of(kill.point) for kill in kills)


def test_too_few_kills_are_refused() -> None:
    with pytest.raises(ValueError, match="8 kills are too few: half of them at points and each of 9 parts twice"):
        schedule(8, 0, ALL, max_delay_s=1.0)
