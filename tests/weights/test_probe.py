"""The gap between two sides' logprobs, and what of it is tolerated."""

from __future__ import annotations

import math

import pytest

from stream_grpo.errors import ProbeError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.probe import ProbeGap, Tolerance, check, gap, merged, tolerance

V12 = PolicyVersion(0, 12)


def test_the_gap_is_over_all_tokens_of_all_sequences() -> None:
    # |differences| 0.1, 0.0 and 0.5: mean 0.2, max 0.5, 3 tokens.
    found = gap([[-1.0, -2.0], [-3.0]], [[-1.1, -2.0], [-2.5]])
    assert found == pytest.approx(ProbeGap(0.2, 0.5, 3))


def test_a_logprob_that_is_not_finite_is_an_infinite_gap() -> None:
    assert gap([[float("nan")]], [[-1.0]]).max == math.inf
    assert gap([[-math.inf]], [[-math.inf]]).mean == math.inf


def test_sides_of_different_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="longer"):
        gap([[-1.0]], [[-1.0, -2.0]])
    with pytest.raises(ValueError, match="no probe tokens"):
        gap([[]], [[]])


def test_merging_weighs_by_tokens() -> None:
    # (0.1 * 10 + 0.4 * 30) / 40 = 13 / 40
    assert merged(ProbeGap(0.1, 0.2, 10), ProbeGap(0.4, 0.9, 30)) == pytest.approx(ProbeGap(0.325, 0.9, 40))


def test_float32_is_held_to_the_configured_tolerance() -> None:
    assert tolerance("float32", Tolerance(1e-4, 1e-3), ProbeGap(1.0, 1.0, 1)) == Tolerance(1e-4, 1e-3)


def test_bfloat16_is_held_to_three_times_its_first_gap_or_the_floor() -> None:
    configured = Tolerance(1e-4, 1e-3)
    assert tolerance("bfloat16", configured, None) == Tolerance(3e-2, 0.2)
    # 3 * 0.02 = 0.06 is above 3e-2; 3 * 0.05 = 0.15 is below 0.2.
    assert tolerance("bfloat16", configured, ProbeGap(0.02, 0.05, 9)) == pytest.approx(Tolerance(0.06, 0.2))


def test_a_gap_at_the_tolerance_passes_and_one_beyond_it_names_everything() -> None:
    check(ProbeGap(1e-4, 1e-3, 5), Tolerance(1e-4, 1e-3), V12)
    with pytest.raises(ProbeError, match=r"weights 0\.12: .* 0\.0002 .*tolerance 0\.0001.*0\.003.*0\.001.*5 tokens"):
        check(ProbeGap(2e-4, 3e-3, 5), Tolerance(1e-4, 1e-3), V12)
    with pytest.raises(ProbeError):
        check(ProbeGap(math.nan, math.nan, 5), Tolerance(1e-4, 1e-3), V12)
