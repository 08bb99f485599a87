"""The points of scripts/picture_noise lie on the formula's lines."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from statistics import correlation, stdev

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import picture_noise
from picture_noise import BY_NOISE, Line, measured

from stream_grpo.environments.instance import Call, Instances

NUM_PAIRS = 1000


@pytest.mark.parametrize(
    ("line", "num_replicas", "expected"),
    [
        # Phi(-1 / (2 sqrt(2 (1 - rho) / M))) at a gap of 1 and a noise of 2.
        (Line("", "", 0.9, has_one_seed=False), 1, 0.3618),  # Phi(-0.3536)
        (Line("", "", 0.9, has_one_seed=True), 1, 0.1318),  # Phi(-1.1180)
        (Line("", "", 0.5, has_one_seed=True), 4, 0.1587),  # Phi(-1)
        (Line("", "", 0.0, has_one_seed=True), 4, 0.2398),  # Phi(-0.7071): a seed decides nothing in common
    ],
)
def test_the_share_of_wrong_pairs_is_that_of_the_formula(line: Line, num_replicas: int, expected: float) -> None:
    share = measured(line, 2.0, NUM_PAIRS, num_replicas)
    assert picture_noise.formula(line, 2.0, num_replicas) == pytest.approx(expected, abs=1e-4)
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / NUM_PAIRS)


def test_where_one_seed_decides_all_no_pair_is_wrong() -> None:
    assert measured(BY_NOISE[-1], 4.0, 200, 1) == 0.0


def test_the_environment_has_the_variance_and_the_common_share_that_it_says() -> None:
    environments = Instances(partial(picture_noise.Noisy, std=3.0, common=0.8))

    def played(action: str, seed: int) -> float:
        call = Call(trajectory="t", problem=picture_noise._PROBLEM, seed=seed, actions=(action,), open_loop=True)
        step = environments.answer(call).step
        assert step is not None
        assert step.score is not None
        return step.score

    ones, twos = ([played(action, seed) for seed in range(NUM_PAIRS)] for action in ("1", "2"))
    # Standard errors: 3 / sqrt(2 x 1000) = 0.067 of the deviation, (1 - 0.8^2) / sqrt(1000) = 0.011 of the correlation.
    assert stdev(ones) == pytest.approx(3.0, abs=4 * 0.067)
    assert correlation(ones, twos) == pytest.approx(0.8, abs=4 * 0.012)


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["picture_noise", str(tmp_path / "a" / "b.png"), "--pairs", "5"])
    assert picture_noise.main() == 0
    assert (tmp_path / "a" / "b.png").read_bytes().startswith(b"\x89PNG")
