"""What a loss says of itself: sums per sequence, kept by age and length, that add up over microbatches and ranks.

B sequences, T tokens, A age buckets, L length buckets. A sequence's age is the largest of its trained tokens, its
length the number of them. R = policy / behavior.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    def entropy_by_position(self) -> dict[str, float]:
        """Mean entropy of the tokens at each place of a response, in the buckets of lengths; empty where not measured.

        The first token has place 1.
        """
        found: dict[str, float] = {}
        for label in _labels(LENGTH_EDGES):
            if f"tokens_at_{label}" in self.sums and (num_tokens := self.total(f"tokens_at_{label}")):
                found[label] = self.total(f"entropy_at_{label}") / num_tokens
        return found

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


class Ratio(NamedTuple):
    """A log ratio and its exp, both [B, T]; 0 and 1 under the mask."""

    log_BT: Tensor
    ratio_BT: Tensor


class Measured(NamedTuple):
    """The statistics of some sequences, not yet in their buckets."""

    sums: dict[str, Tensor]
    """Name -> [B]."""
    age_B: Tensor
    histogram: Tensor
    """[NUM_BINS] tokens by log R."""
    ratio_max: Tensor
    num_clamped: Tensor


def measure(
    mask_BT: Tensor,
    age_B: Tensor,
    update: Ratio,
    total: Ratio,
    shares: Mapping[str, Tensor],
    divergences: Mapping[str, Ratio],
    *,
    num_clamped: Tensor,
    watched_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> Measured:
    """The statistics of some sequences. `update` is the ratio that the weight takes, `total` is R.

    `shares` are [B, T] by name and 0 under the mask, `divergences` the ratios of the policy to others by name.
    `watched_BT` marks the tokens whose log R should not be 0. `entropy_BT` is that of the policy at each token.
    """
    tokens_B, distance_BT = _sum(mask_BT), total.log_BT.abs()
    # Sums of ratios less 1: without rounding where policies match, and with nothing to add up under the mask.
    above_BT = total.ratio_BT - 1
    above_B = _sum(above_BT)
    update_above_B = above_B if update is total else _sum(update.ratio_BT - 1)
    k1_B = -_sum(total.log_BT)
    sums = {
        "tokens": tokens_B,
        "ratio": tokens_B + update_above_B,
        "abs_log": _sum(distance_BT),
        "k1": k1_B,
        "k3": above_B + k1_B,
        "weight": tokens_B + above_B,
        "weight_square": tokens_B + 2 * above_B + _sum(above_BT.square()),
        **{name: _sum(values_BT) for name, values_BT in shares.items()},
    }
    for name, other in divergences.items():
        # From the draws of (nearly) the policy: KL(policy || other), with x = log policy / other.
        k1_B = _sum(other.log_BT)
        sums |= {f"k1_{name}": k1_B, f"k3_{name}": _sum(other.ratio_BT.reciprocal() - 1) + k1_B}
    if watched_BT is not None:
        watched_BT = watched_BT & mask_BT
        sums |= {"watched": _sum(watched_BT), "watched_abs_log": _sum(distance_BT * watched_BT)}
    if entropy_BT is not None:
        sums |= _entropy(entropy_BT, mask_BT)
    return Measured(
        sums=sums,
        age_B=age_B,
        histogram=_histogram(total.log_BT, torch.count_nonzero(mask_BT)),
        ratio_max=_largest(update.ratio_BT, mask_BT),
        num_clamped=num_clamped,
    )


def _sum(values_BT: Tensor) -> Tensor:
    """Over the tokens of a sequence, [B] in float64."""
    # Booleans are added up as int32: as the default int64 it takes twice as long.
    dtype = torch.int32 if values_BT.dtype == torch.bool else None
    return values_BT.sum(dim=1, dtype=dtype).double()


def gather(parts: Sequence[Measured]) -> Statistics:
    """The statistics of all parts of a microbatch, every sequence in its buckets."""
    names = parts[0].sums
    rows = {name: torch.cat([part.sums[name] for part in parts]).cpu() for name in names}
    ages_B = torch.bucketize(torch.cat([part.age_B for part in parts]).cpu(), torch.tensor(AGE_EDGES))
    lengths_B = torch.bucketize(rows["tokens"], torch.tensor(LENGTH_EDGES, dtype=torch.float64))
    shape = (len(AGE_EDGES) + 1, len(LENGTH_EDGES) + 1)
    table = torch.zeros(shape[0] * shape[1], len(names), dtype=torch.float64)
    table.index_add_(0, ages_B * shape[1] + lengths_B, torch.stack(list(rows.values()), dim=1))
    return Statistics(
        sums={name: table[:, i].view(shape) for i, name in enumerate(names)},
        histogram=torch.stack([part.histogram for part in parts]).sum(dim=0).double().cpu(),
        ratio_max=torch.stack([part.ratio_max for part in parts]).amax().double().cpu(),
        num_clamped=torch.stack([part.num_clamped for part in parts]).sum().double().cpu(),
    )


def _entropy(entropy_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """Entropy of the trained tokens in all, and by their place in the response, each [B]."""
    running_BT = torch.where(mask_BT, entropy_BT, 0.0).cumsum(1, dtype=torch.float64)
    place_BT = mask_BT.cumsum(1, dtype=torch.int32)
    edges_L = torch.tensor(LENGTH_EDGES, dtype=torch.int32, device=mask_BT.device)
    # Places only rise: up to where one is beyond an edge, all before it is in its bucket or an earlier one.
    ends_BL = torch.searchsorted(place_BT, edges_L.expand(len(mask_BT), -1).contiguous(), right=True)
    up_to_BL = running_BT.gather(1, (ends_BL - 1).clamp(min=0)) * (ends_BL > 0)
    zero_B1, all_B1 = torch.zeros_like(running_BT[:, :1]), running_BT[:, -1:]
    at_BL = torch.cat([zero_B1, up_to_BL, all_B1], dim=1).diff(dim=1)
    tokens_B1 = place_BT[:, -1:].double()
    tokens_BL = torch.cat([zero_B1, tokens_B1.clamp(max=edges_L.double()), tokens_B1], dim=1).diff(dim=1)
    sums = {"entropy": all_B1[:, 0]}
    for i, label in enumerate(_labels(LENGTH_EDGES)):
        sums |= {f"entropy_at_{label}": at_BL[:, i], f"tokens_at_{label}": tokens_BL[:, i]}
    return sums


def _histogram(log_R_BT: Tensor, num_tokens: Tensor) -> Tensor:
    """Tokens by log R, [NUM_BINS]; the tokens under the mask, which all are in the bin of 0, are taken out of it."""
    per_unit = NUM_BINS / (2 * LOG_RATIO_RANGE)
    # A NaN among trained tokens is in the loss, which is checked.
    bins_BT = (log_R_BT * per_unit).add_(NUM_BINS / 2).clamp_(0, NUM_BINS - 1).nan_to_num_(0).to(torch.int16)
    counts = torch.bincount(bins_BT.flatten(), minlength=NUM_BINS)
    counts[NUM_BINS // 2] -= log_R_BT.numel() - num_tokens
    return counts


def _largest(ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The largest ratio of a trained token, a scalar; 0 where nothing is trained."""
    largest = ratio_BT.amax()
    if float(largest) > 1:  # no token under the mask has it
        return largest
    return torch.where(mask_BT, ratio_BT, 0.0).amax()


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
    "entropy": "entropy",
}
"""Sums that are reported as means over trained tokens, under the names of the metrics."""


def _shares(sums: Mapping[str, float]) -> dict[str, float]:
    n = max(sums["tokens"], 1.0)
    result = {name: sums[key] / n for key, name in _MEANS.items() if key in sums}
    result |= {f"mask_share_{key[9:]}": value / n for key, value in sums.items() if key.startswith("rejected_")}
    if "weight" in sums:
        square = sums["weight_square"]
        result["chi_square"] = square / n - 1 if sums["tokens"] else 0.0
        result["ess"] = sums["weight"] ** 2 / (n * square) if square else 0.0
    return result


def _labels(edges: tuple[int, ...]) -> list[str]:
    """A label for every bucket: "0", "1", "2", "3-4", ..., ">32"."""
    starts = (min(edges[0], 1), *(edge + 1 for edge in edges[:-1]))
    labels = [str(end) if start == end else f"{start}-{end}" for start, end in zip(starts, edges, strict=True)]
    return [*labels, f">{edges[-1]}"]
