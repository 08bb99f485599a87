"""What a loss says of itself: sums per sequence, kept by age and length, that add up over microbatches and ranks.

B sequences, T tokens, A age buckets, L length buckets. A sequence's age is the largest of its trained tokens, its
length the number of them. R = policy / behavior.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

AGE_EDGES = (0, 1, 2, 4, 8, 16, 32)
"""Upper ends of the age buckets, in learner steps; the last bucket has none."""
LENGTH_EDGES = (16, 64, 256, 1024, 4096)
"""Upper ends of the length buckets, in tokens; the last bucket has none."""
LOG_RATIO_RANGE, NUM_BINS = 4.0, 1600
"""The histogram of log R: from minus to plus this; what lies beyond is in the outer bins."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Detached sums over trained tokens; those of two parts added are those of the whole."""

    sums: Mapping[str, Tensor]
    """Name -> [A, L], float64."""
    histogram: Tensor
    """[NUM_BINS] tokens by log R, float64."""
    ratio_max: Tensor
    """Scalar: the largest ratio that a weight took."""
    num_clamped: Tensor
    """Scalar: log ratios beyond their bound."""

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of two parts together. Both come from the same recipe."""
        return Statistics(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            self.histogram + other.histogram,
            torch.maximum(self.ratio_max, other.ratio_max),
            self.num_clamped + other.num_clamped,
        )

    def total(self, name: str) -> float:
        """A sum over all buckets."""
        return float(self.sums[name].sum())

    def mean(self, name: str) -> float:
        """A sum over trained tokens, per token."""
        return self.total(name) / max(self.total("tokens"), 1.0)

    def metrics(self) -> dict[str, float]:
        """Plain numbers over all tokens.

        k1 and k3 estimate a KL per token from the sampler's own draws (joschu.net/blog/kl-approx.html): of behavior to
        policy with R = policy / behavior, k1 = -log R and k3 = R - 1 - log R. `chi_square` = mean R^2 - 1. `ess` is
        the effective share of the tokens, (sum R)^2 / (n sum R^2): 1 where both policies are one.
        """
        whole = {name: float(value.sum()) for name, value in self.sums.items()}
        return {
            **_shares(whole),
            "ratio_max": float(self.ratio_max),
            "num_clamped": float(self.num_clamped),
            **{f"ratio_p{round(100 * share):02d}": value for share, value in self._quantiles().items()},
        }

    def by_age(self) -> dict[str, dict[str, float]]:
        """The same numbers for every age bucket that has tokens."""
        return self._buckets(_labels(AGE_EDGES), dim=1)

    def by_length(self) -> dict[str, dict[str, float]]:
        """The same numbers for every length bucket that has tokens."""
        return self._buckets(_labels(LENGTH_EDGES), dim=0)

    def _buckets(self, labels: Iterable[str], dim: int) -> dict[str, dict[str, float]]:
        sums = {name: value.sum(dim).tolist() for name, value in self.sums.items()}
        rows = {label: {name: values[i] for name, values in sums.items()} for i, label in enumerate(labels)}
        return {label: _shares(row) | {"num_tokens": row["tokens"]} for label, row in rows.items() if row["tokens"]}

    def _quantiles(self) -> dict[float, float]:
        """Quantiles of R, to the width of a bin (0.5 %)."""
        cumulative = self.histogram.cumsum(0)
        if not float(cumulative[-1]):
            return {}
        bins = torch.searchsorted(cumulative, torch.tensor(QUANTILES, dtype=torch.float64) * cumulative[-1])
        middles = ((bins.double() + 0.5) / NUM_BINS * 2 - 1) * LOG_RATIO_RANGE
        return dict(zip(QUANTILES, middles.exp().tolist(), strict=True))


def measure(
    mask_BT: Tensor,
    age_B: Tensor,
    log_update_BT: Tensor,
    log_R_BT: Tensor,
    shares: Mapping[str, Tensor],
    divergences: Mapping[str, Tensor],
    *,
    num_clamped: Tensor,
    watched_BT: Tensor | None = None,
) -> Statistics:
    """The statistics of some sequences. All log ratios are 0 under the mask, and `shares` ([B, T] by name) are.

    `log_update_BT` is of the ratio that the weight takes, `divergences` of the policy to others by name. `watched_BT`
    marks the tokens whose log R should not be 0.
    """
    tokens_B, R_BT, ratio_BT = _sum(mask_BT), log_R_BT.exp(), log_update_BT.exp()
    unmasked_B = mask_BT.shape[1] - tokens_B  # where a ratio is exp(0)
    sums = {
        "tokens": tokens_B,
        "ratio": _sum(ratio_BT) - unmasked_B,
        "abs_log": _sum(log_R_BT.abs()),
        "k1": -_sum(log_R_BT),
        "k3": _sum(torch.expm1(log_R_BT) - log_R_BT),
        "weight": _sum(R_BT) - unmasked_B,
        "weight_square": _sum(R_BT.square()) - unmasked_B,
        **{name: _sum(values_BT) for name, values_BT in shares.items()},
    }
    for name, log_BT in divergences.items():
        # From the draws of (nearly) the policy: KL(policy || other), with x = log policy / other.
        sums |= {f"k1_{name}": _sum(log_BT), f"k3_{name}": _sum(torch.expm1(-log_BT) + log_BT)}
    if watched_BT is not None:
        watched_BT = watched_BT & mask_BT
        sums |= {
            "watched": _sum(watched_BT),
            "watched_exact": _sum(watched_BT & (log_R_BT == 0)),
            "watched_abs_log": _sum(torch.where(watched_BT, log_R_BT.abs(), 0.0)),
        }
    return Statistics(
        sums=_by_bucket(sums, age_B),
        histogram=_histogram(log_R_BT[mask_BT]),
        ratio_max=torch.where(mask_BT, ratio_BT, 0.0).amax().double().cpu(),
        num_clamped=num_clamped.double().cpu(),
    )


def _sum(values_BT: Tensor) -> Tensor:
    return values_BT.sum(dim=1, dtype=torch.float64)


def _by_bucket(sums: Mapping[str, Tensor], age_B: Tensor) -> dict[str, Tensor]:
    """Sums per sequence, [B] each, in their buckets, [A, L] each."""
    ages_B = torch.bucketize(age_B.cpu(), torch.tensor(AGE_EDGES))
    lengths_B = torch.bucketize(sums["tokens"].cpu(), torch.tensor(LENGTH_EDGES, dtype=torch.float64))
    shape = (len(AGE_EDGES) + 1, len(LENGTH_EDGES) + 1)
    rows = torch.stack(list(sums.values()), dim=1).cpu()  # [B, names]
    table = torch.zeros(shape[0] * shape[1], len(sums), dtype=torch.float64)
    table.index_add_(0, ages_B * shape[1] + lengths_B, rows)
    return {name: table[:, i].view(shape) for i, name in enumerate(sums)}


def _histogram(log_R: Tensor) -> Tensor:
    bound = LOG_RATIO_RANGE * (1 - 1 / NUM_BINS)
    bins = torch.histc(log_R.float().clamp(-bound, bound), NUM_BINS, -LOG_RATIO_RANGE, LOG_RATIO_RANGE)
    return bins.double().cpu()


_MEANS = {
    "clipped_low": "clip_share_low",
    "clipped_high": "clip_share_high",
    "clipped_dual": "clip_share_dual",
    "rejected": "mask_share",
    "ratio": "ratio_mean",
    "abs_log": "abs_log_ratio",
    "k1": "k1",
    "k3": "k3",
    "k1_proximal": "k1_proximal",
    "k3_proximal": "k3_proximal",
    "k1_reference": "k1_reference",
    "k3_reference": "k3_reference",
    "correction": "correction_mean",
}
"""Sums that are reported as means over trained tokens, under the names of the metrics."""


def _shares(sums: Mapping[str, float]) -> dict[str, float]:
    n = max(sums["tokens"], 1.0)
    result = {name: sums[key] / n for key, name in _MEANS.items() if key in sums}
    result |= {f"mask_share_{key[9:]}": value / n for key, value in sums.items() if key.startswith("rejected_")}
    if "weight" in sums:
        square = sums["weight_square"]
        result["chi_square"] = square / n - 1
        result["ess"] = sums["weight"] ** 2 / (n * square) if square else 0.0
    return result


def _labels(edges: tuple[int, ...]) -> list[str]:
    """A label for every bucket: "0", "1", "2", "3-4", ..., ">32"."""
    starts = (min(edges[0], 1), *(edge + 1 for edge in edges[:-1]))
    labels = [str(end) if start == end else f"{start}-{end}" for start, end in zip(starts, edges, strict=True)]
    return [*labels, f">{edges[-1]}"]
