"""The slow oracle: every recipe's loss token by token in plain floats, straight from the papers.

A flag changes one thing, as one peer does it. The gradient of a token is written down with its objective: both are
derived by hand from the formula, not from our weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from peers.batch import Batch, Result
from peers.ours import Constant, constant_of
from stream_grpo.algo.recipe import Recipe

Flags = frozenset[str]
BOUND = 20.0
"""Ours and verl's, of a log ratio."""


class Token(NamedTuple):
    """The objective of one token, to be maximised, and its derivative by the token's logprob."""

    objective: float
    derivative: float


def loss(recipe: Recipe, batch: Batch, flags: Flags = frozenset(), *, constant: Constant = "rollout_tokens") -> Result:
    """-(1/D) sum b keep objective, and its gradient."""
    num_rollouts, num_columns = batch.mask_BT.shape
    rows = [_Row(recipe, batch, i, flags) for i in range(num_rollouts)]
    divisors = _divisors(recipe, rows, flags, constant_of(constant, num_rollouts), num_columns)
    mean_correction = _mean_correction(rows) if "batch_normalized" in flags else 1.0
    value, gradient = 0.0, torch.zeros(num_rollouts, num_columns, dtype=torch.float64)
    for row, divisor in zip(rows, divisors, strict=True):
        factors = [b * keep / mean_correction for b, keep in zip(row.corrections(), row.kept, strict=True)]
        if "spreads_correction" in flags and factors:
            factors = [sum(factors) / len(factors)] * len(factors)
        for t, token, factor in zip(row.columns, row.tokens(), factors, strict=True):
            if factor:
                value -= factor * token.objective / divisor
                gradient[row.index, t] = -factor * token.derivative / divisor
    return Result(value, gradient)


class _Row:
    """One rollout: the log ratios of its trained tokens."""

    def __init__(self, recipe: Recipe, batch: Batch, index: int, flags: Flags) -> None:
        self.recipe, self.flags, self.index = recipe, flags, index
        self.advantage = float(batch.advantage_B[index])
        self.columns = [t for t, is_trained in enumerate(batch.mask_BT[index].tolist()) if is_trained]
        policy, proximal, behavior = (
            [x[index, t].item() for t in self.columns] for x in (batch.policy_BT, batch.proximal_BT, batch.behavior_BT)
        )
        self.policy, self.behavior = policy, behavior
        self.update = [a - b for a, b in zip(policy, proximal, strict=True)]
        self.staleness = [a - b for a, b in zip(proximal, behavior, strict=True)]
        self.total = [a - b for a, b in zip(policy, behavior, strict=True)]
        self.kept = _keep(recipe, self)

    def tokens(self) -> list[Token]:
        """Objective and derivative of every trained token."""
        recipe = self.recipe
        ratio = self.update if recipe.ratio_to == "proximal" else self.total
        if not ratio:
            return []
        if recipe.weight == "geometric":
            return _geometric(self, ratio)
        level = _level(recipe.ratio_level, ratio)
        if recipe.weight == "gamma":
            level = [self._log_product(level[0])] * len(level)
        if not self.flags & {"unbounded", "sequence_bound_10"}:
            level = [max(-BOUND, x) for x in level]
        return [_OBJECTIVES[recipe.weight](self, x, logprob) for x, logprob in zip(level, self.policy, strict=True)]

    def _log_product(self, log_product: float) -> float:
        """log W of the whole rollout. TRL puts its truncated or masked importance ratios into the product."""
        high, low = math.log(self.recipe_high), math.log(1e-8)
        if "truncates_inside_product" in self.flags:
            log_product = sum(self.update) + sum(min(x, high) for x in self.staleness)
        if "mask_collapses_product" in self.flags:
            log_product = sum(self.update) + sum(x if x <= high else low for x in self.staleness)
        return max(log_product, low) if self.flags else log_product

    @property
    def recipe_high(self) -> float:
        """The upper bound TRL is given in the cells whose recipe has no correction of its own."""
        return self.recipe.correction_high or 3.0

    def corrections(self) -> list[float]:
        """b of every trained token."""
        recipe, flags = self.recipe, self.flags
        if recipe.correction == "none" or not self.columns:
            return [1.0] * len(self.columns)
        low, high = recipe.correction_low or 0.0, recipe.correction_high or math.inf
        weights = []
        for x in _level(recipe.correction_level or "token", self.staleness):
            rho = math.exp(max(-BOUND, min(BOUND, x)))
            is_left = recipe.correction == "truncated" or low <= rho <= high
            rho = min(rho, high) if is_left else 0.0
            weights.append(max(rho, 0.5) if "floors_small_weights" in flags else rho)
        if "geometric_mean_correction" in flags:
            mean = sum(math.log(b + 1e-10) for b in weights) / len(weights)
            return [math.exp(mean)] * len(weights)
        return weights


def _level(level: str, log_ratios: list[float]) -> list[float]:
    n = len(log_ratios)
    if level == "sequence_mean":
        return [sum(log_ratios) / n] * n
    if level == "sequence_sum":
        return [sum(log_ratios)] * n
    return log_ratios


def _ppo(row: _Row, log_ratio: float, _: float) -> Token:
    """min(r A, clip(r) A), with dual clip max(that, c A) for A < 0; dr/dlogprob = r, as GSPO-token has it.

    Beyond its bound r is a constant.
    """
    recipe, A = row.recipe, row.advantage
    low, high, dual = recipe.clip_low or 0.0, recipe.clip_high or 0.0, recipe.dual_clip
    bound = _bound(row.flags)
    is_beyond, log_ratio = log_ratio > bound, min(log_ratio, bound)
    r = math.exp(log_ratio)
    clipped = min(max(r, 1 - low), 1 + high)
    objective, derivative = (r * A, r * A) if r * A <= clipped * A else (clipped * A, 0.0)
    if dual is not None and A < 0 and dual * A > objective:
        objective, derivative = dual * A, 0.0
    return Token(objective, 0.0 if is_beyond else derivative)


def _bound(flags: Flags) -> float:
    return math.inf if "unbounded" in flags else 10.0 if "sequence_bound_10" in flags else BOUND


def _cispo(row: _Row, log_ratio: float, logprob: float) -> Token:
    """sg(min(r, cap)) A log pi."""
    weight = min(math.exp(log_ratio), row.recipe.cap or math.inf)
    if "cispo_floor" in row.flags:
        weight = max(weight, 0.8)
    return Token(weight * row.advantage * logprob, weight * row.advantage)


def _soft(row: _Row, log_ratio: float, _: float) -> Token:
    """(4 / tau) sigmoid(tau (r - 1)) A."""
    A, r = row.advantage, math.exp(log_ratio)
    tau = row.recipe.soft_positive if A > 0 else row.recipe.soft_negative
    assert tau is not None
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return Token(4 / tau * s * A, 4 * s * (1 - s) * r * A)


def _gamma(row: _Row, log_ratio: float, logprob: float) -> Token:
    """sg(W^k exp(lambda (1 - W))) A log pi, W the ratio of the whole sequence."""
    A, W = row.advantage, math.exp(log_ratio)
    assert row.recipe.gamma_positive is not None
    assert row.recipe.gamma_negative is not None
    k, rate = row.recipe.gamma_positive if A >= 0 else row.recipe.gamma_negative
    weight = W**k * math.exp(rate * (1 - W))
    return Token(weight * A * logprob, weight * A)


def _reinforce(row: _Row, _: float, logprob: float) -> Token:
    """A log pi."""
    return Token(row.advantage * logprob, row.advantage)


def _geometric(row: _Row, ratio: list[float]) -> list[Token]:
    """(prod_t clipped r_t)^(1/n) A for the sequence, clipped on the side the advantage pulls to.

    A token has 1/n of it; the divisor of sequence means brings the n.
    """
    low, high, A = row.recipe.clip_low or 0.0, row.recipe.clip_high or 0.0, row.advantage
    bound = _bound(row.flags)
    ratio = [max(-bound, min(bound, x)) for x in ratio]
    clipped = [min(x, high) if A > 0 else max(x, -low) if A < 0 else x for x in ratio]
    mean = math.exp(sum(clipped) / len(ratio))
    return [Token(mean * A, mean * A if x == y else 0.0) for x, y in zip(ratio, clipped, strict=True)]


_OBJECTIVES: dict[str, Callable[[_Row, float, float], Token]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "soft": _soft,
    "gamma": _gamma,
    "reinforce": _reinforce,
}


def _keep(recipe: Recipe, row: _Row) -> list[bool]:
    """Which trained tokens every mask of the recipe keeps."""
    if not row.columns or not _keeps_sequence(recipe, row):
        return [False] * len(row.columns)
    tokens = zip(row.staleness, row.policy, row.behavior, strict=True)
    return [_keeps_token(recipe, row, *token) for token in tokens]


def _keeps_sequence(recipe: Recipe, row: _Row) -> bool:
    n, rhos = len(row.columns), [math.exp(x) for x in row.staleness]
    mean_k3 = sum(rho - 1 - math.log(rho) for rho in rhos) / n
    return (
        (recipe.mask_sequence is None or _inside(math.exp(sum(row.staleness) / n), recipe.mask_sequence, row.flags))
        and (recipe.mask_veto is None or all(_inside(rho, recipe.mask_veto, row.flags) for rho in rhos))
        and (recipe.mask_sequence_k3 is None or mean_k3 <= recipe.mask_sequence_k3)
        and (recipe.mask_negative_kl is None or row.advantage >= 0 or -sum(row.total) / n <= recipe.mask_negative_kl)
    )


def _keeps_token(recipe: Recipe, row: _Row, log_rho: float, log_pi: float, log_mu: float) -> bool:
    pi, mu, A = math.exp(log_pi), math.exp(log_mu), row.advantage
    kl = mu * (log_mu - log_pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return (
        (recipe.mask_ratio is None or _inside(math.exp(log_rho), recipe.mask_ratio, row.flags))
        and (recipe.mask_tv is None or A == 0 or math.copysign(1, A) * (pi - mu) <= recipe.mask_tv)
        and (recipe.mask_binary_kl is None or A * (pi - mu) <= 0 or kl <= recipe.mask_binary_kl)
    )


def _inside(rho: float, band: tuple[float, float], flags: Flags) -> bool:
    low, high = (1 / band[1], 1 / band[0]) if "inverted_band" in flags else band
    return low <= rho <= high


def _divisors(recipe: Recipe, rows: list[_Row], flags: Flags, constant: int, num_columns: int) -> list[float]:
    """What the objectives of every rollout are divided by."""
    counts = [sum(row.kept) if "survivor_denominator" in flags else len(row.columns) for row in rows]
    if recipe.aggregation == "constant":
        return [float(len(rows) * num_columns if "padded_width" in flags else constant)] * len(rows)
    if recipe.aggregation == "sequences" or "ignores_aggregation" in flags:
        counts_all = "counts_masked_rollouts" in flags or "ignores_aggregation" in flags
        num_sequences = len(rows) if counts_all else sum(bool(row.columns) for row in rows)
        return [float(n * num_sequences) for n in counts]
    if "microbatch_denominator" in flags:
        half = len(rows) // 2
        return [2.0 * max(1, sum(counts[:half]))] * half + [2.0 * max(1, sum(counts[half:]))] * half
    return [float(max(1, sum(counts)))] * len(rows)


def _mean_correction(rows: list[_Row]) -> float:
    weights = [b for row in rows for b in row.corrections()]
    return sum(weights) / len(weights)
