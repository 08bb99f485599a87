"""Advantages over batches of groups against hand-computed numbers, slow loops and exact enumeration."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_grpo.algo.advantage import (
    BASELINES,
    GROUP_BASELINES,
    GROUP_SCALES,
    SCALES,
    Baseline,
    Scale,
    Std,
    check_choices,
    group_advantage,
    running_mean,
    running_quantile,
)

NAN = float("nan")
CHOICES = [(b, s) for b in BASELINES for s in SCALES if b in GROUP_BASELINES or s not in GROUP_SCALES]
ROWS = st.lists(
    st.tuples(st.floats(0, 10) | st.sampled_from([0.0, 1.0]), st.booleans(), st.integers(0, 3)), min_size=1, max_size=16
)


def spread_of(values: list[float], std: str) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - (std == "sample")))


def slow_baseline(baseline: str, i: int, rows: list[tuple[float, bool, int]], prior: float) -> float:
    mine = [r for r, v, g in rows if v and g == rows[i][2]]
    others = [r for j, (r, v, g) in enumerate(rows) if v and g == rows[i][2] and j != i]
    batch = [r for r, v, _ in rows if v]
    table = {
        "group_mean": lambda: math.fsum(mine) / len(mine),
        "leave_one_out": lambda: math.fsum(others) / len(others) if others else mine[0],
        "group_median": lambda: statistics.median(mine),
        "batch_mean": lambda: math.fsum(batch) / len(batch),
        "none": lambda: 0.0,
    }
    return table.get(baseline, lambda: prior)()


def slow_mad(values: list[float], floor: float) -> float:
    median = statistics.median(values)
    distances = [abs(v - median) for v in values]
    mad = 1.4826 * statistics.median(distances)
    return mad if mad >= floor else 1.2533 * math.fsum(distances) / len(distances)


def slow_group_advantage(
    rows: list[tuple[float, bool, int]],
    baseline: str,
    scale: str,
    tolerance: float,
    floor: float,
    std: str,
    prior: float,
) -> list[float]:
    deviations = []
    for i, (r, valid, group) in enumerate(rows):
        mine = [q for q, v, g in rows if v and g == group]
        signal = len(mine) >= 2 and max(mine) - min(mine) > tolerance
        acts = valid and (signal or baseline not in ("group_mean", "leave_one_out", "group_median"))
        deviations.append(r - slow_baseline(baseline, i, rows, prior) if acts else 0.0)
    result = []
    for (_, valid, group), deviation in zip(rows, deviations, strict=True):
        mine = [q for q, v, g in rows if v and g == group]
        if not valid:
            result.append(0.0)
            continue
        scales = {
            "none": lambda: 1.0,
            "group_std": lambda mine=mine: max(spread_of(mine, std), floor),
            "batch_std": lambda: max(
                spread_of([d for d, (_, v, _) in zip(deviations, rows, strict=True) if v], std), floor
            ),
            "batch_reward_std": lambda: max(spread_of([q for q, v, _ in rows if v], std), floor),
            "group_mean": lambda mine=mine: max(math.fsum(mine) / len(mine), floor),
            "group_mad": lambda mine=mine: max(slow_mad(mine, floor), floor),
        }
        result.append(deviation / scales[scale]())
    return result


def batch(rows: list[tuple[float, bool, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([r if v else NAN for r, v, _ in rows], dtype=torch.float64),
        torch.tensor([v for _, v, _ in rows], dtype=torch.bool),
        torch.tensor([g for *_, g in rows], dtype=torch.int64),
    )


@given(ROWS, st.sampled_from(CHOICES), st.sampled_from(["population", "sample"]), st.floats(-1, 1))
def test_every_choice_equals_its_slow_loop(
    rows: list[tuple[float, bool, int]], choice: tuple[Baseline, Scale], std: Std, prior: float
) -> None:
    baseline, scale = choice
    got = group_advantage(
        *batch(rows), baseline=baseline, scale=scale, signal_tolerance=1e-6, scale_floor=0.01, std=std, prior=prior
    )
    expected = slow_group_advantage(rows, baseline, scale, 1e-6, 0.01, std, prior)
    assert got.advantage_B.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert got.advantage_B.dtype == torch.float64
    valid = [v for _, v, _ in rows]
    baselines = [slow_baseline(baseline, i, rows, prior) if v else 0.0 for i, v in enumerate(valid)]
    assert got.baseline_B.tolist() == pytest.approx(baselines, rel=1e-9, abs=1e-9)
    assert bool((got.scale_B > 0).all())


@given(ROWS, st.sampled_from(GROUP_BASELINES), st.sampled_from(["none", *GROUP_SCALES]), st.randoms())
def test_a_group_knows_neither_its_neighbours_nor_its_place(
    rows: list[tuple[float, bool, int]], baseline: Baseline, scale: Scale, random: object
) -> None:
    choices = {"baseline": baseline, "scale": scale, "signal_tolerance": 1e-6}
    whole = group_advantage(*batch(rows), **choices).advantage_B.tolist()  # type: ignore[arg-type]
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = [(rows[i][0], rows[i][1], 7 - 3 * rows[i][2]) for i in order]
    moved = group_advantage(*batch(shuffled), **choices).advantage_B.tolist()  # type: ignore[arg-type]
    assert moved == pytest.approx([whole[i] for i in order], rel=1e-9, abs=1e-9)
    for group in {g for *_, g in rows}:
        alone = group_advantage(*batch([row for row in rows if row[2] == group]), **choices)  # type: ignore[arg-type]
        mine = [a for a, row in zip(whole, rows, strict=True) if row[2] == group]
        assert alone.advantage_B.tolist() == pytest.approx(mine, rel=1e-9, abs=1e-9)


@given(ROWS)
def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_1(rows: list[tuple[float, bool, int]]) -> None:
    out, mean = (
        group_advantage(*batch(rows), baseline=b, scale="none", signal_tolerance=1e-6).advantage_B.tolist()
        for b in ("leave_one_out", "group_mean")
    )
    n = [sum(v and g == group for _, v, g in rows) for *_, group in rows]
    expected = [a * k / max(k - 1, 1) for a, k in zip(mean, n, strict=True)]
    assert out == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_filtering_groups_without_spread_scales_the_gradient_and_no_more(p: float) -> None:
    # One parameter with p = sigmoid(theta): d log prob(r) / d theta = r - p; true gradient dp / d theta = p (1 - p).
    # All 16 outcomes of four rollouts, weighed by their probability: E[g] = P_mixed E[g | mixed] = p (1 - p).
    expected_all, expected_mixed, p_mixed = 0.0, 0.0, 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=4):
        probability = math.prod(p if r else 1 - p for r in rewards)
        unguarded = [r - (sum(rewards) - r) / 3 for r in rewards]
        expected_all += probability * sum(a * (r - p) for a, r in zip(unguarded, rewards, strict=True)) / 4
        got = group_advantage(
            *batch([(r, True, 0) for r in rewards]), baseline="leave_one_out", scale="none", signal_tolerance=1e-6
        )
        if bool(got.has_signal_B.all()):
            p_mixed += probability
            pairs = zip(got.advantage_B.tolist(), rewards, strict=True)
            expected_mixed += probability * sum(a * (r - p) for a, r in pairs) / 4
    given_mixed = expected_mixed / p_mixed
    assert p_mixed == pytest.approx(1 - p**4 - (1 - p) ** 4, rel=1e-12)
    assert expected_all == pytest.approx(p_mixed * given_mixed, rel=1e-12)
    assert expected_all == pytest.approx(p * (1 - p), rel=1e-12)


@pytest.mark.parametrize("baseline", GROUP_BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_without_spread_is_exactly_zero(baseline: Baseline, scale: Scale) -> None:
    # The mean of seven 0.1 is not exactly 0.1. Group 1 has one valid rollout, group 2 none, group 3 a spread of 1e-7.
    rows = [(0.1, True, 0)] * 7 + [
        (1.0, True, 1),
        (0.0, False, 1),
        (0.0, False, 2),
        (0.1, True, 3),
        (0.1 + 1e-7, True, 3),
    ]
    got = group_advantage(*batch(rows), baseline=baseline, scale=scale, signal_tolerance=1e-6)
    assert got.advantage_B.tolist() == [0.0] * len(rows)
    assert not bool(got.has_signal_B.any())


@pytest.mark.parametrize("baseline", ["running_mean", "running_quantile", "batch_mean", "none"])
def test_other_baselines_keep_groups_without_spread(baseline: Baseline) -> None:
    # Group 0 all right, group 1 all wrong: tracked so far 0.25, mean of the batch 0.5.
    rows = [(1.0, True, 0), (1.0, True, 0), (0.0, True, 1), (0.0, True, 1)]
    got = group_advantage(*batch(rows), baseline=baseline, scale="none", signal_tolerance=1e-6, prior=0.25)
    value = {"batch_mean": 0.5, "none": 0.0}.get(baseline, 0.25)
    assert got.advantage_B.tolist() == pytest.approx([1 - value] * 2 + [-value] * 2)
    assert not bool(got.has_signal_B.any())


def test_a_missing_reward_is_left_out_and_is_not_zero() -> None:
    # Report C05: [1, missing, 0, 0]. Mean of the three 1/3; leave-one-out 1 - 0 = 1 and 0 - 1/2 = -1/2.
    rows = [(1.0, True, 0), (NAN, False, 0), (0.0, True, 0), (0.0, True, 0)]
    mean, out = (
        group_advantage(*batch(rows), baseline=b, scale="none", signal_tolerance=1e-6)
        for b in ("group_mean", "leave_one_out")
    )
    assert mean.advantage_B.tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert out.advantage_B.tolist() == pytest.approx([1, 0, -0.5, -0.5])
    assert out.has_signal_B.tolist() == [True] * 4


def test_a_group_that_lost_a_rollout_does_not_shift_the_others() -> None:
    # Report C08: A = [1, 0, 0] after a drop, B = [1, 1, 0, 0], one flat list: baselines 1/3 and 1/2.
    rows = [(r, True, 11) for r in (1.0, 0.0, 0.0)] + [(r, True, 12) for r in (1.0, 1.0, 0.0, 0.0)]
    got = group_advantage(*batch(rows), baseline="group_mean", scale="none", signal_tolerance=1e-6)
    assert got.baseline_B.tolist() == pytest.approx([1 / 3] * 3 + [1 / 2] * 4)
    assert got.advantage_B.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, 0.5, -0.5, -0.5])


def test_hand_computed_scales() -> None:
    # Rewards 1, 0, 0, 0: mean 1/4. Population std sqrt(3)/4 = 0.4330, sample std 1/2. MaxRL: 0.75 / 0.25 = 3 and -1.
    # Median 0, MAD 0, mean deviation 1/4: 1 / (1.2533 / 4) = 3.1916.
    rows = [(1.0, True, 0), (0.0, True, 0), (0.0, True, 0), (0.0, True, 0)]
    cases: list[tuple[Baseline, Scale, Std, list[float]]] = [
        ("group_mean", "group_std", "population", [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("group_mean", "group_std", "sample", [1.5, -0.5, -0.5, -0.5]),
        ("group_mean", "group_mean", "population", [3, -1, -1, -1]),
        ("group_median", "group_mad", "population", [3.1915742, 0, 0, 0]),
    ]
    for baseline, scale, std, expected in cases:
        got = group_advantage(*batch(rows), baseline=baseline, scale=scale, signal_tolerance=1e-6, std=std)
        assert got.advantage_B.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_rewards_is_kept(dtype: torch.dtype) -> None:
    rewards, valid, groups = batch([(1.0, True, 0), (0.0, True, 0), (0.0, True, 1), (0.0, False, 1)])
    for baseline, scale in CHOICES:
        choices = {"baseline": baseline, "scale": scale, "signal_tolerance": 1e-6, "prior": 0.5}
        got = group_advantage(rewards.to(dtype), valid, groups, **choices)  # type: ignore[arg-type]
        assert {got.advantage_B.dtype, got.baseline_B.dtype, got.scale_B.dtype} == {dtype}


def test_the_two_batch_scales_differ_by_the_spread_between_groups() -> None:
    # Groups [1, 0] and [11, 10]: deviations +-1/2, std 1/2. Rewards 1, 0, 11, 10: mean 5.5, squares 20.25, 30.25 twice
    # each, std sqrt(25.25) = 5.0249.
    rows = [(1.0, True, 0), (0.0, True, 0), (11.0, True, 1), (10.0, True, 1)]
    for scale, size in (("batch_std", 1.0), ("batch_reward_std", 0.5 / math.sqrt(25.25))):
        got = group_advantage(*batch(rows), baseline="group_mean", scale=scale, signal_tolerance=1e-6)  # type: ignore[arg-type]
        assert got.advantage_B.tolist() == pytest.approx([size, -size, size, -size])


def test_a_small_spread_stays_small_under_the_floor() -> None:
    # std 0.0005 is below the floor 0.01: +-0.0005 / 0.01 = +-0.05, where an epsilon would give +-1.
    rows = [(0.5, True, 0), (0.501, True, 0)]
    got = group_advantage(*batch(rows), baseline="group_mean", scale="group_std", signal_tolerance=1e-6)
    assert got.advantage_B.tolist() == pytest.approx([-0.05, 0.05])


def test_a_batch_without_valid_rollouts_is_zero() -> None:
    rows = [(0.0, False, 0), (0.0, False, 1)]
    for baseline, scale in CHOICES:
        got = group_advantage(*batch(rows), baseline=baseline, scale=scale, signal_tolerance=1e-6, prior=0.5)
        assert got.advantage_B.tolist() == [0.0, 0.0]


def test_running_baselines_move_towards_what_is_seen() -> None:
    # 0.9 x 0.5 + 0.1 x 2/3 = 0.516667. Share at or below 0.5 is 1/3: 0.5 + 0.1 (0.7 - 1/3) = 0.536667.
    rewards, valid, _ = batch([(1.0, True, 0), (0.0, True, 0), (1.0, True, 0), (0.0, False, 0)])
    assert running_mean(0.5, rewards, valid, decay=0.9) == pytest.approx(0.9 * 0.5 + 0.1 * 2 / 3)
    assert running_quantile(0.5, rewards, valid, quantile=0.7, step=0.1) == pytest.approx(0.5 + 0.1 * (0.7 - 1 / 3))
    nothing = torch.zeros_like(valid)
    assert running_mean(0.5, rewards, nothing, decay=0.9) == 0.5
    assert running_quantile(0.5, rewards, nothing, quantile=0.7, step=0.1) == 0.5


def test_a_running_quantile_finds_the_quantile() -> None:
    # Rewards 0.00 to 0.99: 80 of 100 lie at or below 0.79, so it settles between 0.79 and 0.80, to within a step.
    rewards, valid = torch.arange(100, dtype=torch.float64) / 100, torch.ones(100, dtype=torch.bool)
    tracked = 0.0
    for _ in range(300):
        tracked = running_quantile(tracked, rewards, valid, quantile=0.8, step=0.05)
    assert 0.78 <= tracked <= 0.81


def test_bad_choices_of_a_batch_are_refused() -> None:
    rows = [(1.0, True, 0), (0.0, True, 0)]
    rewards, valid, groups = batch(rows)
    plain = {"baseline": "leave_one_out", "scale": "none", "signal_tolerance": 1e-6}
    for change, message in [
        ({"baseline": "best"}, "baseline 'best': expected group_mean"),
        ({"scale": "best"}, "scale 'best': expected none"),
        ({"scale": "group_std", "std": "best"}, "std 'best': expected population or sample"),
        ({"scale": "group_std", "baseline": "none"}, "divided by the floor of its own spread"),
        ({"baseline": "running_mean"}, "prior None with baseline 'running_mean'"),
        ({"scale": "group_std", "scale_floor": 0.0}, "scale_floor 0.0: expected above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            group_advantage(rewards, valid, groups, **(plain | change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a reward of -1\.0 with scale 'group_mean'"):
        group_advantage(rewards - 1, valid, groups, **(plain | {"scale": "group_mean"}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not finite"):
        group_advantage(rewards / 0, valid, groups, **plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a floating-point one"):
        group_advantage(valid, valid, groups, **plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shapes differ"):
        group_advantage(rewards, valid, groups[:1], **plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decay 1"):
        running_mean(0.0, rewards, valid, decay=1.0)
    with pytest.raises(ValueError, match="quantile 1"):
        running_quantile(0.0, rewards, valid, quantile=1.0, step=0.1)
    with pytest.raises(ValueError, match="step 0"):
        running_quantile(0.0, rewards, valid, quantile=0.5, step=0.0)
    check_choices("group_median", "group_mad")
