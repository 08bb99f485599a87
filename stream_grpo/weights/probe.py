"""The proof of new weights: the gap between a sampler's logprobs and the learner's on the published probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stream_grpo.errors import ProbeError
from stream_grpo.types import PolicyVersion

_BF16_FLOOR = (3e-2, 0.2)
_BF16_FACTOR = 3.0


class ProbeGap(NamedTuple):
    """|sampler logprob - learner logprob| over probe tokens; infinite where a logprob is not finite."""

    mean: float
    max: float
    num_tokens: int


class Tolerance(NamedTuple):
    """Largest mean and largest single gap that proved weights may have."""

    mean: float
    max: float


def gap(mine: Sequence[Sequence[float]], learners: Sequence[Sequence[float]]) -> ProbeGap:
    """Compare logprobs sequence by sequence, token by token.

    Raises ValueError where numbers or lengths of sequences differ, or there is no token at all.
    """
    gaps: list[float] = []
    for mine_T, learners_T in zip(mine, learners, strict=True):
        for a, b in zip(mine_T, learners_T, strict=True):
            gaps.append(abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf)
    if not gaps:
        raise ValueError("no probe tokens to compare")
    return ProbeGap(math.fsum(gaps) / len(gaps), max(gaps), len(gaps))


def merged(a: ProbeGap, b: ProbeGap) -> ProbeGap:
    """The gap over the tokens of both."""
    num_tokens = a.num_tokens + b.num_tokens
    return ProbeGap((a.mean * a.num_tokens + b.mean * b.num_tokens) / num_tokens, max(a.max, b.max), num_tokens)


def tolerance(dtype: str, configured: Tolerance, start: ProbeGap | None) -> Tolerance:
    """What is tolerated of weights of `dtype`.

    float32: as configured. bfloat16, where the gap is rounding and grows with the model: three times the gap of the
    run's first proof, and at least 3e-2 (mean) and 0.2 (max), which is all that holds for the first proof itself.
    """
    if dtype == "float32":
        return configured
    mean, largest = _BF16_FLOOR
    if start is not None:
        mean, largest = max(mean, _BF16_FACTOR * start.mean), max(largest, _BF16_FACTOR * start.max)
    return Tolerance(mean, largest)


def check(found: ProbeGap, allowed: Tolerance, version: PolicyVersion) -> None:
    """Raises ProbeError naming version, gap and tolerance where the gap is beyond it."""
    if not (found.mean <= allowed.mean and found.max <= allowed.max):
        raise ProbeError(
            f"weights {version}: probe logprobs differ from the learner's by {found.mean:.3g} in the mean (tolerance "
            f"{allowed.mean:.3g}) and {found.max:.3g} at most (tolerance {allowed.max:.3g}), over {found.num_tokens} "
            f"tokens"
        )
