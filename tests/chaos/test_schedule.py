"""Who is killed is drawn from a seed, and every part gets its share."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kills.schedule import ENDS_THE_RUN, PARTS, RAY_PARTS, least_kills, schedule, victim_of

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


@pytest.mark.parametrize(("parts", "least"), [(PARTS, 16), (ALL, 21)])
def test_the_fewest_kills_have_a_schedule_and_so_has_every_larger_number(parts: tuple[str, ...], least: int) -> None:
    """Of 16, 8 fall at points: 3 of the buffer, 3 of the learner, 1 of curator and sampler each.

    The other 8 are 1 of each of the last two and 2 of reward worker, launcher and all. Of 15, 7 fall at points, none of
    the sampler, and 9 are left for 8 places. Raylet and GCS take 4 more: of 21, 10 at points leave 11 places, for the
    second of the sampler and 10 others.
    """
    assert least_kills(parts) == least
    for num_kills in range(least, 2 * least):
        counts = Counter(kill.who for kill in schedule(num_kills, 0, parts, max_delay_s=1.0))
        assert counts.total() == num_kills
        assert all(counts[part] >= 2 for part in parts)


def test_too_few_kills_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8 kills are too few: half .* each of 9 parts 2 times takes at least 21"):
        schedule(8, 0, ALL, max_delay_s=1.0)


@pytest.mark.parametrize("kills", ["15", "0", "-1"])
def test_the_program_refuses_too_few_in_one_sentence(kills: str) -> None:
    command = [sys.executable, "scripts/chaos.py", "--fake", "--kills", kills]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"--kills {kills}: too few, since half of them fall at points" in done.stderr
    assert "at least 16" in done.stderr
    assert "Traceback" not in done.stderr
