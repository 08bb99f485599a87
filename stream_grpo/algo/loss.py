"""The policy loss: a recipe's pieces composed, a microbatch at a time, with statistics that add up.

B sequences, T tokens. L = -(1/D) sum sg(w b m) A log policy + beta KL - c entropy: w is the weight of the update's
ratio, b that of staleness, m the masks. Its gradient is that of the recipe's surrogate, and its value is too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.aggregate import aggregate
from stream_grpo.algo.behavior import behavior_weight
from stream_grpo.algo.kl import kl_loss
from stream_grpo.algo.log_ratio import LogRatio, log_ratio, proximal_logprobs
from stream_grpo.algo.mask import Rejected, trust_mask
from stream_grpo.algo.recipe import Recipe
from stream_grpo.algo.shapes import require_rank, require_same_shape
from stream_grpo.algo.statistics import Statistics, measure
from stream_grpo.algo.weight import Weighted, gradient_weight

CHUNK_TOKENS = 1 << 15
"""Weights are made for so many tokens at a time: intermediate tensors stay small and in the cache."""


class LossInputs(NamedTuple):
    """A microbatch as the maths sees it. Values under the mask may be anything, NaN included."""

    policy_logprobs_BT: Tensor
    """The one tensor with a gradient."""
    behavior_logprobs_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    """True where a token is trained."""
    tokens_B: Tensor
    """Trained tokens of the sequence, before any rejection."""
    problem_tokens_B: Tensor
    """Trained tokens of all sequences of its problem in this update, wherever they are."""
    age_BT: Tensor
    """Policy age of every token, in learner steps."""
    regularized_B: Tensor
    """True where KL and entropy act."""
    start_logprobs_BT: Tensor | None = None
    """The learner's at the start of the step; None where the policy is still there."""
    reference_logprobs_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    """With a gradient, where the recipe has an entropy bonus."""
    differs_BT: Tensor | None = None
    """True where the weights that sampled the token are known to differ from the learner's: what the guard looks at."""

    def rows(self, which: slice) -> LossInputs:
        """Some of the sequences, detached."""
        cut: dict[str, Any] = {name: None if x is None else x[which].detach() for name, x in self._asdict().items()}
        return LossInputs(**cut)


def policy_loss(
    recipe: Recipe,
    inputs: LossInputs,
    *,
    denominator: float,
    kl_weight: float = 0.0,
    second_moment_bound: float | None = None,
) -> tuple[Tensor, Statistics]:
    """This part's share of the loss (scalar) and its statistics.

    `second_moment_bound` is `mask.second_moment_bound` of the whole batch. Raises ValueError for shapes and for what
    the recipe needs and does not get.
    """
    _check(recipe, inputs, second_moment_bound)
    counts = {"tokens_B": inputs.tokens_B, "problem_tokens_B": inputs.problem_tokens_B}
    # A token that the policy cannot draw (its logits are filtered) has no logprob to raise: it gets no gradient.
    has_gradient_BT = inputs.mask_BT & ~inputs.policy_logprobs_BT.isneginf()
    policy_BT = torch.where(has_gradient_BT, inputs.policy_logprobs_BT, 0.0)
    coefficient_BT = torch.empty_like(policy_BT, requires_grad=False)
    value = policy_BT.new_zeros(())
    parts: list[Statistics] = []
    num_rows = max(1, CHUNK_TOKENS // max(1, policy_BT.shape[1]))
    for start in range(0, len(policy_BT), num_rows):
        chunk = slice(start, start + num_rows)
        rows = inputs.rows(chunk)
        coefficient_BT[chunk], surrogate_BT, statistics = _weigh(recipe, rows, second_moment_bound)
        parts.append(statistics)
        own_counts = {name: count_B[chunk] for name, count_B in counts.items()}
        value -= aggregate(recipe.aggregation, surrogate_BT, rows.mask_BT, **own_counts, denominator=denominator)

    def total(loss_BT: Tensor) -> Tensor:
        return aggregate(recipe.aggregation, loss_BT, inputs.mask_BT, **counts, denominator=denominator)

    linear = total(-coefficient_BT * policy_BT)
    loss = linear - linear.detach() + value
    if recipe.kl_place == "loss":
        loss = loss + kl_weight * total(_kl(recipe, inputs))
    if recipe.entropy_weight:
        assert inputs.entropy_BT is not None
        loss = loss - recipe.entropy_weight * total(_where_regularized(inputs, inputs.entropy_BT))
    return loss, sum(parts[1:], parts[0])


def _weigh(recipe: Recipe, rows: LossInputs, second_moment_bound: float | None) -> tuple[Tensor, Tensor, Statistics]:
    """(sg(w b m) A, the surrogate's value, statistics) of some sequences, nothing with a gradient."""
    mask_BT, advantage_BT = rows.mask_BT, rows.advantage_BT
    policy_BT, behavior_BT = rows.policy_logprobs_BT, rows.behavior_logprobs_BT
    proximal_BT = _proximal(recipe, rows)
    update = log_ratio(
        recipe.ratio_level, policy_BT, behavior_BT if recipe.ratio_to == "behavior" else proximal_BT, mask_BT
    )
    staleness = log_ratio("token", proximal_BT, behavior_BT, mask_BT)
    total = log_ratio("token", policy_BT, behavior_BT, mask_BT)
    weighted = gradient_weight(
        recipe.weight,
        update.log_ratio_BT,
        advantage_BT,
        mask_BT,
        clip_low=recipe.clip_low,
        clip_high=recipe.clip_high,
        dual_clip=recipe.dual_clip,
        cap=recipe.cap,
        soft_positive=recipe.soft_positive,
        soft_negative=recipe.soft_negative,
        gamma_positive=recipe.gamma_positive,
        gamma_negative=recipe.gamma_negative,
        policy_logprobs_BT=policy_BT,
    )
    rejected = trust_mask(
        staleness.log_ratio_BT,
        total.log_ratio_BT,
        policy_BT,
        behavior_BT,
        advantage_BT,
        mask_BT,
        ratio_band=recipe.mask_ratio,
        tv=recipe.mask_tv,
        binary_kl=recipe.mask_binary_kl,
        second_moment_bound=second_moment_bound,
        sequence_band=recipe.mask_sequence,
        sequence_k3=recipe.mask_sequence_k3,
        negative_kl=recipe.mask_negative_kl,
        veto=recipe.mask_veto,
    )
    factor_BT = rejected.keep_BT.to(weighted.weight_BT.dtype)
    if recipe.correction_level is not None:
        rho = log_ratio(recipe.correction_level, proximal_BT, behavior_BT, mask_BT)
        factor_BT = factor_BT * behavior_weight(
            recipe.correction, rho.log_ratio_BT, mask_BT, low=recipe.correction_low, high=recipe.correction_high
        )
    coefficient_BT = torch.where(mask_BT, weighted.weight_BT * factor_BT * advantage_BT, 0.0)
    statistics = _statistics(rows, proximal_BT, update, total, weighted, rejected, factor_BT)
    return coefficient_BT, weighted.surrogate_BT * factor_BT, statistics


def _proximal(recipe: Recipe, rows: LossInputs) -> Tensor:
    start_BT = rows.policy_logprobs_BT if rows.start_logprobs_BT is None else rows.start_logprobs_BT
    return proximal_logprobs(
        recipe.proximal,
        recomputed_BT=start_BT,
        behavior_BT=rows.behavior_logprobs_BT,
        policy_BT=rows.policy_logprobs_BT,
        age_BT=rows.age_BT,
        mask_BT=rows.mask_BT,
    )


def _kl(recipe: Recipe, inputs: LossInputs) -> Tensor:
    """The KL term per token, [B, T], with its gradient; 0 where it does not act."""
    reference_BT = _reference(recipe, inputs)
    # Tokens come from the behavior policy: against it the off-policy form is unbiased.
    estimate = kl_loss(recipe.kl, inputs.policy_logprobs_BT, inputs.behavior_logprobs_BT, reference_BT, inputs.mask_BT)
    return _where_regularized(inputs, estimate.kl_BT)


def _reference(recipe: Recipe, inputs: LossInputs) -> Tensor:
    if recipe.kl_reference == "behavior":
        return inputs.behavior_logprobs_BT
    if inputs.reference_logprobs_BT is None:
        raise ValueError(f"kl {recipe.kl!r} to a {recipe.kl_reference} reference: its logprobs are missing")
    return inputs.reference_logprobs_BT


def _where_regularized(inputs: LossInputs, values_BT: Tensor) -> Tensor:
    return torch.where(inputs.mask_BT & inputs.regularized_B.unsqueeze(1), values_BT, 0.0)


def _statistics(
    rows: LossInputs,
    proximal_BT: Tensor,
    update: LogRatio,
    total: LogRatio,
    weighted: Weighted,
    rejected: Rejected,
    factor_BT: Tensor,
) -> Statistics:
    mask_BT = rows.mask_BT
    rejected_BT = mask_BT & ~rejected.keep_BT
    shares = {
        "clipped_low": weighted.clipped_low_BT & mask_BT,
        "clipped_high": weighted.clipped_high_BT & mask_BT,
        "clipped_dual": weighted.clipped_dual_BT & mask_BT,
        "rejected": rejected_BT,
        "rejected_positive": rejected_BT & (rows.advantage_BT > 0),
        "rejected_negative": rejected_BT & (rows.advantage_BT < 0),
        "correction": torch.where(mask_BT, factor_BT, 0.0),
        **{f"rejected_{name}": where_BT for name, where_BT in rejected.reasons.items()},
    }
    against = {"proximal": proximal_BT if rows.start_logprobs_BT is not None else None}
    against["reference"] = rows.reference_logprobs_BT
    divergences = {
        name: log_ratio("token", rows.policy_logprobs_BT, other_BT, mask_BT).log_ratio_BT
        for name, other_BT in against.items()
        if other_BT is not None
    }
    return measure(
        mask_BT,
        torch.where(mask_BT, rows.age_BT, 0).amax(dim=1),
        update.log_ratio_BT,
        total.log_ratio_BT,
        shares,
        divergences,
        num_clamped=update.num_clamped + total.num_clamped,
        watched_BT=rows.differs_BT,
    )


def _check(recipe: Recipe, inputs: LossInputs, second_moment_bound: float | None) -> None:
    tensors = {name: getattr(inputs, name) for name in LossInputs._fields}
    by_token = {name: x for name, x in tensors.items() if name.endswith("_BT") and x is not None}
    by_sequence = {name: x for name, x in tensors.items() if name.endswith("_B")}
    require_rank(2, **by_token)
    require_same_shape(**by_token)
    require_rank(1, **by_sequence)
    require_same_shape(**by_sequence, mask_B=inputs.mask_BT[:, 0])
    if not len(inputs.mask_BT):
        raise ValueError("a microbatch without sequences")
    if (second_moment_bound is None) != (recipe.mask_second_moment is None):
        raise ValueError(
            f"second_moment_bound {second_moment_bound} with mask_second_moment {recipe.mask_second_moment}: expected "
            f"the batch's bound where the mask is on, and only there"
        )
    if recipe.entropy_weight and inputs.entropy_BT is None:
        raise ValueError(f"entropy_weight {recipe.entropy_weight}: entropy_BT is missing")
