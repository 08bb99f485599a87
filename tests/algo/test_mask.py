"""Every trust mask against a slow loop, their composition, and the bound on the second moment."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_grpo.algo.log_ratio import log_ratio
from stream_grpo.algo.mask import Rejected, outward, second_moment_bound, trust_mask

BOUNDS: dict[str, Any] = {
    "ratio_band": (0.5, 1.6),
    "tv": 0.15,
    "binary_kl": 0.05,
    "second_moment_bound": 0.7,
    "sequence_band": (0.8, 1.2),
    "sequence_k3": 0.1,
    "negative_kl": 0.3,
    "veto": (0.2, 4.0),
}
LOGPROB = st.floats(-3, -0.01)
Row = list[tuple[float, float, float, bool]]
"""Per token: logprobs of policy, proximal and behavior, and whether it is trained."""


def slow_tv(pi: float, mu: float, a: float) -> bool:
    return not ((a > 0 and pi - mu > 0.15) or (a < 0 and pi - mu < -0.15))


def slow_binary_kl(pi: float, mu: float, a: float) -> bool:
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return not (kl > 0.05 and ((a > 0 and pi > mu) or (a < 0 and pi < mu)))


def slow_second_moment(pi: float, mu: float, a: float) -> bool:
    r = pi / mu
    return not (abs(math.log(r)) > 0.7 and ((a > 0 and r > 1) or (a < 0 and r < 1)))


def slow_keep(name: str, row: Row, t: int, a: float) -> bool:
    """Whether the mask keeps trained token t of one sequence with advantage a."""
    trained = [(math.exp(p), math.exp(x), math.exp(q)) for p, x, q, m in row if m]
    pi, prox, mu = (math.exp(x) for x in row[t][:3])
    rhos = [x / q for _, x, q in trained]
    if name == "ratio_band":
        return 0.5 <= prox / mu <= 1.6
    if name == "sequence_band":
        return 0.8 <= math.prod(rhos) ** (1 / len(rhos)) <= 1.2
    if name == "sequence_k3":
        return sum(r - 1 - math.log(r) for r in rhos) / len(rhos) <= 0.1
    if name == "veto":
        return all(0.2 <= r <= 4.0 for r in rhos)
    if name == "negative_kl":
        return not (a < 0 and sum(math.log(q / p) for p, _, q in trained) / len(trained) > 0.3)
    slow = {"tv": slow_tv, "binary_kl": slow_binary_kl, "second_moment_bound": slow_second_moment}[name]
    return slow(pi, mu, a)


def masked(row: Row, a: float, **bounds: Any) -> Rejected:
    mask = torch.tensor([[m for *_, m in row]])
    policy, proximal, behavior = (
        torch.tensor([[x[i] for x in row]], dtype=torch.float64).masked_fill(~mask, torch.nan) for i in range(3)
    )
    advantage = torch.full_like(policy, a).masked_fill(~mask, torch.nan)
    log_rho = log_ratio("token", proximal, behavior, mask).log_ratio_BT
    log_total = log_ratio("token", policy, behavior, mask).log_ratio_BT
    return trust_mask(log_rho, log_total, policy, behavior, advantage, mask, **bounds)


@settings(deadline=None)
@given(
    st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, st.booleans()), min_size=1, max_size=6),
    st.floats(-2, 2),
    st.sampled_from(sorted(BOUNDS)),
)
def test_every_mask_equals_its_slow_loop(row: Row, a: float, name: str) -> None:
    got = masked(row, a, **{name: BOUNDS[name]})
    expected = [m and slow_keep(name, row, t, a) for t, (*_, m) in enumerate(row)]
    assert got.keep_BT[0].tolist() == expected


@settings(deadline=None)
@given(st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, st.booleans()), min_size=1, max_size=6), st.floats(-2, 2))
def test_masks_compose_by_and_and_give_their_reasons(row: Row, a: float) -> None:
    got = masked(row, a, **BOUNDS)
    assert len(got.reasons) == len(BOUNDS)
    trained = torch.tensor([[m for *_, m in row]])
    left = trained
    for name, bound in BOUNDS.items():
        alone = masked(row, a, **{name: bound})
        (reason,) = alone.reasons
        assert got.reasons[reason].tolist() == (trained & ~alone.keep_BT).tolist()
        left = left & alone.keep_BT
    assert got.keep_BT.tolist() == left.tolist()


def test_matched_policies_are_kept_whole() -> None:
    # Bounds at their tightest: rho and R are 1, so nothing has moved and nothing is rejected.
    row = [(-0.3, -0.3, -0.3, True), (-7.0, -7.0, -7.0, True), (0.0, 0.0, 0.0, True), (-1.0, -2.0, -3.0, False)]
    tight = {name: (1.0, 1.0) if isinstance(bound, tuple) else 0.0 for name, bound in BOUNDS.items()}
    for a in (1.0, -1.0):
        got = masked(row, a, **tight)
        assert got.keep_BT[0].tolist() == [True, True, True, False]
        assert all(not bool(reason.any()) for reason in got.reasons.values())


def test_masks_that_are_off_reject_nothing() -> None:
    got = masked([(-0.1, -5.0, -9.0, True)], 1.0)
    assert got.keep_BT.tolist() == [[True]]
    assert got.reasons == {}


def test_one_token_vetoes_its_sequence_and_no_other() -> None:
    log_rho = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    zeros, mask = torch.zeros_like(log_rho), torch.tensor([[True, True, False], [True, True, True]])
    got = trust_mask(log_rho, zeros, zeros, zeros, zeros, mask, veto=(0.2, 4.0))
    assert got.keep_BT.tolist() == [[False, False, False], [True, True, True]]
    assert int(got.reasons["veto"].sum()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_0_and_1_are_compared_without_nan(dtype: torch.dtype) -> None:
    # From mu = 1 to pi = 0 the KL is infinite, from 1 to 1 it is 0, from 1 - 1e-9 (rounding) to 1 it is 1e-9 or less.
    policy = torch.tensor([[-1e4, 0.0, 0.0]], dtype=dtype)
    behavior = torch.tensor([[0.0, 0.0, -1e-9]], dtype=dtype)
    total = (policy - behavior).clamp(-20, 20)
    advantage = torch.tensor([[-1.0, 1.0, 1.0]], dtype=dtype)
    mask = torch.ones_like(policy, dtype=torch.bool)
    got = trust_mask(torch.zeros_like(total), total, policy, behavior, advantage, mask, binary_kl=0.05, tv=0.15)
    assert got.keep_BT[0].tolist() == [False, True, True]


def slow_second_moment_bound(logs: list[float], tau: float) -> float:
    """M2PO: drop the largest until the mean of the rest is below tau; values of one size go together."""
    rest = sorted((abs(x) for x in logs), reverse=True)
    if not rest or sum(x * x for x in rest) / len(rest) < tau:
        return math.inf
    while rest and sum(x * x for x in rest) / len(rest) >= tau:
        rest = [x for x in rest if x < rest[0]]
    return rest[0] if rest else 0.0


@settings(deadline=None)
@given(
    st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 0.3, -0.3, 1.0, -1.0]), max_size=12),
    st.sampled_from([0.013, 0.041, 0.52]),
)
def test_the_second_moment_bound_equals_its_slow_loop(logs: list[float], tau: float) -> None:
    got = float(second_moment_bound(torch.tensor(logs, dtype=torch.float64), tau=tau))
    assert got == slow_second_moment_bound(logs, tau)
    kept = [x * x for x in logs if abs(x) <= got]
    assert not kept or got == 0 or sum(kept) / len(kept) < tau + 1e-12


def test_the_second_moment_bound_by_hand() -> None:
    # Squares 1, 0.09, 0.01, 0: mean 0.275. Without the first (0.09 + 0.01) / 3 = 0.033 < 0.04.
    logs = torch.tensor([0.1, -1.0, 0.3, 0.0], dtype=torch.float64)
    assert float(second_moment_bound(logs, tau=0.04)) == pytest.approx(0.3)
    assert float(second_moment_bound(logs, tau=0.3)) == math.inf
    assert float(second_moment_bound(logs[:0], tau=0.04)) == math.inf


def test_only_tokens_that_moved_with_their_advantage_are_outward() -> None:
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    assert outward(log_ratio, advantage).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"ratio_band": (1.1, 2.0)}, r"ratio_band \(1.1, 2.0\): expected 0 <= low <= 1 <= high"),
        ({"sequence_band": (0.5, 0.9)}, "sequence_band"),
        ({"veto": (-1.0, 2.0)}, "veto"),
        ({"tv": -0.1}, "tv -0.1: expected 0 or more"),
        ({"sequence_k3": math.nan}, "sequence_k3 nan"),
    ],
)
def test_bad_bounds_are_refused(bounds: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        trust_mask(zeros, zeros, zeros, zeros, zeros, torch.ones(1, 1, dtype=torch.bool), **bounds)


def test_bad_tensors_are_refused() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="tau 0: expected above 0"):
        second_moment_bound(torch.zeros(1), tau=0)
    with pytest.raises(ValueError, match="log_R has shape"):
        second_moment_bound(zeros, tau=0.04)
    with pytest.raises(ValueError, match="shapes differ"):
        trust_mask(zeros, zeros, zeros, zeros, zeros, torch.ones(1, 2, dtype=torch.bool))
