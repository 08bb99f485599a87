"""The slow oracle of the whole loss: one token after the other in plain floats, straight from the formulas.

Of every token the objective (to be maximised) and its derivative by the token's logprob are written down side by
side. Nothing is taken from the code under test but the names of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from stream_grpo.algo.loss import LossInputs
from stream_grpo.algo.recipe import Recipe

BOUND = 20.0
"""Of a log ratio."""


class Result(NamedTuple):
    """The loss, and its derivative by the logprob of every token."""

    value: float
    gradient: list[list[float]]
    size: float
    """Sum of the absolute terms of the value: what its rounding is measured against."""


class Term(NamedTuple):
    """The objective of one token, and its derivative by the token's logprob."""

    objective: float
    derivative: float


class Row(NamedTuple):
    """The trained tokens of one sequence."""

    columns: list[int]
    policy: list[float]
    proximal: list[float]
    behavior: list[float]
    reference: list[float]
    advantage: list[float]
    entropy: list[float]
    own_count: float
    regularized: bool


def loss(
    recipe: Recipe,
    inputs: LossInputs,
    *,
    denominator: float,
    kl_weight: float = 0.0,
    second_moment_bound: float | None = None,
) -> Result:
    """-(1/D) sum_i (1/c_i) sum_t (b m objective - kl_weight KL + entropy_weight H); D and c_i as counted beforehand."""
    terms: list[float] = []
    gradient = [[0.0] * inputs.mask_BT.shape[1] for _ in inputs.mask_BT]
    for i in range(len(gradient)):
        row = _row(recipe, inputs, i)
        if not row.columns:
            continue
        divisor = row.own_count * denominator
        kept = _kept(recipe, row, second_moment_bound)
        factors = [b * m for b, m in zip(_corrections(recipe, row), kept, strict=True)]
        for t, factor, term in zip(row.columns, factors, _objectives(recipe, row), strict=True):
            terms.append(-factor * term.objective / divisor)
            gradient[i][t] -= factor * term.derivative / divisor
        if not row.regularized:
            continue
        for k, t in enumerate(row.columns):
            if recipe.kl_place == "loss":
                kl = _KLS[recipe.kl](row, k)
                terms.append(kl_weight * kl.objective / divisor)
                gradient[i][t] += kl_weight * kl.derivative / divisor
            terms.append(-recipe.entropy_weight * row.entropy[k] / divisor)
    return Result(math.fsum(terms), gradient, math.fsum(map(abs, terms)))


def _row(recipe: Recipe, inputs: LossInputs, i: int) -> Row:
    columns = [t for t, is_trained in enumerate(inputs.mask_BT[i].tolist()) if is_trained]

    def of(tensor: Any) -> list[float]:
        return [] if tensor is None else [float(tensor[i, t]) for t in columns]

    policy, behavior = of(inputs.policy_logprobs_BT.detach()), of(inputs.behavior_logprobs_BT)
    if recipe.proximal == "behavior":
        proximal = behavior
    elif recipe.proximal == "recomputed":
        proximal = policy if inputs.start_logprobs_BT is None else of(inputs.start_logprobs_BT)
    else:
        # a = (d - 1) / d of the way from behavior to policy, and none of it at age 0.
        shares = [(age - 1) / age if age >= 1 else 0.0 for age in of(inputs.age_BT)]
        proximal = [b + a * (p - b) for a, b, p in zip(shares, behavior, policy, strict=True)]
    counts = {"sequences": inputs.tokens_B[i], "problems": inputs.problem_tokens_B[i]}
    return Row(
        columns,
        policy,
        proximal,
        behavior,
        behavior if recipe.kl_reference == "behavior" else of(inputs.reference_logprobs_BT),
        of(inputs.advantage_BT),
        of(inputs.entropy_BT) or [0.0] * len(columns),
        float(counts.get(recipe.aggregation, 1)),
        bool(inputs.regularized_B[i]),
    )


def _bounded(x: float) -> float:
    return min(max(x, -BOUND), BOUND)


def _logs(numerator: list[float], denominator: list[float]) -> list[float]:
    return [p - q for p, q in zip(numerator, denominator, strict=True)]


def _at_level(level: str, logs: list[float]) -> list[float]:
    """The log ratio that each token takes, bounded."""
    if level == "sequence_mean":
        return [_bounded(sum(logs) / len(logs))] * len(logs)
    if level == "sequence_sum":
        return [_bounded(sum(logs))] * len(logs)
    bounded = [_bounded(x) for x in logs]
    if level == "prefix_min":
        return [_bounded(x + (min(bounded[:t]) if t else 0.0)) for t, x in enumerate(bounded)]
    return bounded


def _corrections(recipe: Recipe, row: Row) -> list[float]:
    """b of every token."""
    if recipe.correction == "none":
        return [1.0] * len(row.columns)
    low, high = recipe.correction_low or 0.0, float(recipe.correction_high or 0.0)
    weights = [math.exp(x) for x in _at_level(str(recipe.correction_level), _logs(row.proximal, row.behavior))]
    if recipe.correction == "truncated":
        return [min(w, high) for w in weights]
    if recipe.correction == "masked":
        return [w if low <= w <= high else 0.0 for w in weights]
    return [min(w, high) if low <= w else 0.0 for w in weights]


def _kept(recipe: Recipe, row: Row, second_moment_bound: float | None) -> list[bool]:
    """m of every token."""
    rho = [_bounded(x) for x in _logs(row.proximal, row.behavior)]
    total = [_bounded(x) for x in _logs(row.policy, row.behavior)]
    n = len(rho)
    kept = [True] * n
    for k in range(n):
        a = row.advantage[k]
        pi, mu = math.exp(row.policy[k]), math.exp(row.behavior[k])
        if recipe.mask_ratio is not None:
            kept[k] &= recipe.mask_ratio[0] <= math.exp(rho[k]) <= recipe.mask_ratio[1]
        if recipe.mask_tv is not None:
            kept[k] &= not ((a > 0 and pi - mu > recipe.mask_tv) or (a < 0 and pi - mu < -recipe.mask_tv))
        if recipe.mask_binary_kl is not None:
            rest_pi, rest_mu = max(1 - pi, 1e-8), max(1 - mu, 1e-8)
            kl = mu * (row.behavior[k] - row.policy[k]) + rest_mu * math.log(rest_mu / rest_pi)
            kept[k] &= not (kl > recipe.mask_binary_kl and a * (pi - mu) > 0)
        if second_moment_bound is not None:
            kept[k] &= not (abs(total[k]) > second_moment_bound and a * total[k] > 0)
        if recipe.mask_negative_kl is not None:
            kept[k] &= not (a < 0 and -sum(total) / n > recipe.mask_negative_kl)
    whole = True
    if recipe.mask_sequence is not None:
        whole &= recipe.mask_sequence[0] <= math.exp(sum(rho) / n) <= recipe.mask_sequence[1]
    if recipe.mask_sequence_k3 is not None:
        whole &= sum(math.exp(x) - 1 - x for x in rho) / n <= recipe.mask_sequence_k3
    if recipe.mask_veto is not None:
        low, high = recipe.mask_veto
        whole &= all(low <= math.exp(x) <= high for x in rho)
    return [keep and whole for keep in kept]


def _objectives(recipe: Recipe, row: Row) -> list[Term]:
    logs = _logs(row.policy, row.behavior if recipe.ratio_to == "behavior" else row.proximal)
    if recipe.weight == "geometric":
        return _geometric(recipe, row, [_bounded(x) for x in logs])
    level = _at_level(recipe.ratio_level, logs)
    return [
        _OBJECTIVES[recipe.weight](recipe, x, a, log_pi)
        for x, a, log_pi in zip(level, row.advantage, row.policy, strict=True)
    ]


def _ppo(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """min(r A, clip(r) A), and at least dual_clip A where A < 0."""
    r = math.exp(x)
    clipped = min(max(r, 1 - float(recipe.clip_low or 0)), 1 + float(recipe.clip_high or 0))
    if recipe.dual_clip is not None and a < 0 and r > recipe.dual_clip:
        return Term(recipe.dual_clip * a, 0.0)
    if clipped * a < r * a:
        return Term(clipped * a, 0.0)
    return Term(r * a, r * a if x < BOUND else 0.0)


def _plain(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """r A."""
    return Term(math.exp(x) * a, math.exp(x) * a if x < BOUND else 0.0)


def _cispo(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """sg(min(r, cap)) A log pi."""
    w = min(math.exp(x), float(recipe.cap or 0))
    return Term(w * a * log_pi, w * a)


def _topr(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """sg(1 or min(r, 1)) A log pi."""
    w = 1.0 if a >= 0 else min(math.exp(x), 1.0)
    return Term(w * a * log_pi, w * a)


def _gamma(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """sg(r^k exp(lambda (1 - r))) A log pi."""
    k, rate = (recipe.gamma_positive if a >= 0 else recipe.gamma_negative) or (0.0, 0.0)
    w = math.exp(k * x + rate * (1 - math.exp(x)))
    return Term(w * a * log_pi, w * a)


def _reinforce(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """A log pi."""
    return Term(a * log_pi, a)


def _soft(recipe: Recipe, x: float, a: float, log_pi: float) -> Term:
    """(4 / tau) sigmoid(tau (r - 1)) A; its derivative is 4 s (1 - s) r A."""
    tau, r = float((recipe.soft_positive if a > 0 else recipe.soft_negative) or 0), math.exp(x)
    e = math.exp(-min(tau * (r - 1), 700.0))
    s = 1 / (1 + e)
    return Term(4 / tau * s * a, 4 * s * (e * s) * r * a)


def _geometric(recipe: Recipe, row: Row, logs: list[float]) -> list[Term]:
    """exp(mean_t c_t) A with c_t bounded on the side that A pulls to; times 1/T its gradient, which the mean has."""
    low, high = -float(recipe.clip_low or 0), float(recipe.clip_high or 0)
    bounded = [min(x, high) if a > 0 else max(x, low) if a < 0 else x for x, a in zip(logs, row.advantage, strict=True)]
    w = math.exp(sum(bounded) / len(bounded))
    return [Term(w * a, w * a if c == x else 0.0) for c, x, a in zip(bounded, logs, row.advantage, strict=True)]


_OBJECTIVES: dict[str, Callable[[Recipe, float, float, float], Term]] = {
    "ppo": _ppo,
    "plain": _plain,
    "cispo": _cispo,
    "topr": _topr,
    "gamma": _gamma,
    "reinforce": _reinforce,
    "soft": _soft,
}


def _k2(row: Row, k: int) -> Term:
    """x^2 / 2."""
    x = row.policy[k] - row.reference[k]
    return Term(_bounded(x) ** 2 / 2, x if abs(x) <= BOUND else 0.0)


def _k3(row: Row, k: int) -> Term:
    """exp(-x) - 1 + x."""
    x = row.policy[k] - row.reference[k]
    y = _bounded(x)
    return Term(math.exp(-y) - 1 + y, 1 - math.exp(-x) if abs(x) <= BOUND else 0.0)


def _k3_off_policy(row: Row, k: int) -> Term:
    """R k3, gradient through both."""
    k3, log_R = _k3(row, k), row.policy[k] - row.behavior[k]
    R = math.exp(_bounded(log_R))
    through_R = R * k3.objective if abs(log_R) <= BOUND else 0.0
    return Term(R * k3.objective, through_R + R * k3.derivative)


_KLS: dict[str, Callable[[Row, int], Term]] = {"k2": _k2, "k3": _k3, "k3_off_policy": _k3_off_policy}
