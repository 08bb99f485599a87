"""The policy loss: a recipe's pieces composed, a microbatch at a time, with statistics that add up.

B sequences, T tokens. L = -(1/D) sum sg(w b m) A log policy + beta KL - c entropy: w is the weight of the update's
ratio, b that of staleness, m the masks. Its gradient is that of the recipe's surrogate, and its value is too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_grpo.algo.aggregate import aggregate, token_share
from stream_grpo.algo.behavior import behavior_weight
from stream_grpo.algo.choices import RatioLevel
from stream_grpo.algo.kl import kl_loss
from stream_grpo.algo.log_ratio import LogRatio, log_ratio, proximal_logprobs
from stream_grpo.algo.mask import Rejected, trust_mask
from stream_grpo.algo.recipe import Recipe
from stream_grpo.algo.shapes import require_rank, require_same_shape
from stream_grpo.algo.statistics import Measured, Ratio, Statistics, gather, measure
from stream_grpo.algo.weight import Weighted, gradient_weight

CHUNK_TOKENS = 1 << 17
"""Weights are made for so many tokens at a time: intermediate tensors stay small and in the cache."""
IMPOSSIBLE = -1e8
"""Stands for a logprob of -inf where it is subtracted: far beyond every bound, and no NaN comes of it."""

TOTAL: tuple[RatioLevel, str, str] = ("token", "policy", "behavior")
STALENESS: tuple[RatioLevel, str, str] = ("token", "proximal", "behavior")


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
    """Policy age of every token, in learner steps; 0 under the mask."""
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
        return LossInputs(*(None if x is None else x[which].detach() for x in self))  # type: ignore[arg-type]


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
    share_B1 = token_share(recipe.aggregation, inputs.mask_BT, **counts, denominator=denominator)
    share_B1 = share_B1.to(inputs.policy_logprobs_BT.dtype)
    gradient_BT = torch.empty_like(inputs.policy_logprobs_BT, requires_grad=False)
    value = gradient_BT.new_zeros(())
    parts: list[Measured] = []
    num_rows = max(1, CHUNK_TOKENS // max(1, inputs.mask_BT.shape[1]))
    with torch.no_grad():
        for start in range(0, len(inputs.mask_BT), num_rows):
            chunk = slice(start, start + num_rows)
            pull_BT, objective_BT, measured = _weigh(recipe, inputs.rows(chunk), second_moment_bound)
            torch.mul(pull_BT, -share_B1[chunk], out=gradient_BT[chunk])
            value -= (objective_BT.sum(dim=1, keepdim=True) * share_B1[chunk]).sum()
            parts.append(measured)
    loss: Tensor = _WithGradient.apply(inputs.policy_logprobs_BT, gradient_BT, value)  # type: ignore[no-untyped-call]
    for weight, term_BT in _regularizers(recipe, inputs, kl_weight):
        acts_BT = inputs.mask_BT & inputs.regularized_B.unsqueeze(1)
        term_BT = torch.where(acts_BT, term_BT, 0.0)
        loss = loss + weight * aggregate(recipe.aggregation, term_BT, inputs.mask_BT, **counts, denominator=denominator)
    return loss, gather(parts)


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient by the logprobs is known beforehand: no graph, and one product on the way back."""

    @staticmethod
    def forward(ctx: Any, logprobs_BT: Tensor, gradient_BT: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_BT)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient_BT,) = ctx.saved_tensors
        return upstream[0] * gradient_BT, None, None


class _Ratios:
    """The ratios of some sequences, each made once and only where it is asked for."""

    def __init__(self, recipe: Recipe, rows: LossInputs) -> None:
        self._mask_BT = rows.mask_BT
        self._logprobs = {"policy": rows.policy_logprobs_BT, "behavior": rows.behavior_logprobs_BT}
        self._proximal = "proximal"
        """Whose logprobs those of the proximal policy are."""
        if recipe.proximal == "behavior":
            self._proximal = "behavior"
        elif recipe.proximal == "interpolated":
            self._logprobs["proximal"] = proximal_logprobs(
                recipe.proximal,
                behavior_BT=rows.behavior_logprobs_BT,
                policy_BT=rows.policy_logprobs_BT,
                age_BT=rows.age_BT,
                mask_BT=rows.mask_BT,
            )
        elif rows.start_logprobs_BT is None:
            self._proximal = "policy"
        else:
            self._logprobs["proximal"] = rows.start_logprobs_BT
        self._logs: dict[tuple[RatioLevel, str, str], LogRatio] = {}
        self._ratios: dict[tuple[RatioLevel, str, str], Ratio] = {}

    def log(self, level: RatioLevel, numerator: str, denominator: str) -> LogRatio:
        """log (numerator / denominator), two of policy, proximal and behavior."""
        key = self._key(level, numerator, denominator)
        if key not in self._logs:
            self._logs[key] = self._staleness() if key == STALENESS else self._made(*key)
        return self._logs[key]

    def __call__(self, level: RatioLevel, numerator: str, denominator: str) -> Ratio:
        """The same with its exp."""
        key = self._key(level, numerator, denominator)
        if key not in self._ratios:
            log_BT = self.log(level, numerator, denominator).log_ratio_BT
            self._ratios[key] = Ratio(log_BT, log_BT.exp())
        return self._ratios[key]

    def _made(self, level: RatioLevel, numerator: str, denominator: str) -> LogRatio:
        return log_ratio(level, self._logprobs[numerator], self._logprobs[denominator], self._mask_BT)

    def _staleness(self) -> LogRatio:
        """log (proximal / behavior) from two log ratios that are there anyway, where no bound has acted on them."""
        total, update = self.log(*TOTAL), self.log("token", "policy", "proximal")
        if int(total.num_clamped) or int(update.num_clamped):
            return self._made(*STALENESS)
        log_rho_BT = total.log_ratio_BT - update.log_ratio_BT
        return LogRatio(log_rho_BT, total.num_clamped)

    def _key(self, level: RatioLevel, numerator: str, denominator: str) -> tuple[RatioLevel, str, str]:
        above, below = (self._proximal if name == "proximal" else name for name in (numerator, denominator))
        return level, above, below


def _weigh(recipe: Recipe, rows: LossInputs, second_moment_bound: float | None) -> tuple[Tensor, Tensor, Measured]:
    """(w b m A, the objective's value, statistics) of some sequences; the first two 0 where nothing is trained."""
    kept_BT = rows.mask_BT
    undrawable_BT = rows.policy_logprobs_BT.isneginf()
    if int(torch.count_nonzero(undrawable_BT)):
        # A token that the policy cannot draw (its logits are filtered) has no logprob to raise: it gets no gradient.
        kept_BT = kept_BT & ~undrawable_BT
        rows = rows._replace(policy_logprobs_BT=rows.policy_logprobs_BT.clamp(min=IMPOSSIBLE))
    rows = rows._replace(advantage_BT=torch.where(rows.mask_BT, rows.advantage_BT, 0.0))
    ratios = _Ratios(recipe, rows)
    update = ratios(recipe.ratio_level, "policy", recipe.ratio_to)
    weighted = gradient_weight(
        recipe.weight,
        update.log_BT,
        rows.advantage_BT,
        rows.mask_BT,
        ratio_BT=update.ratio_BT,
        clip_low=recipe.clip_low,
        clip_high=recipe.clip_high,
        dual_clip=recipe.dual_clip,
        cap=recipe.cap,
        soft_positive=recipe.soft_positive,
        soft_negative=recipe.soft_negative,
        gamma_positive=recipe.gamma_positive,
        gamma_negative=recipe.gamma_negative,
        policy_logprobs_BT=rows.policy_logprobs_BT,
    )
    pull_BT, objective_BT = weighted.weight_BT * rows.advantage_BT, weighted.surrogate_BT
    shares = _clip_shares(recipe, weighted)
    if recipe.has_mask:
        rejected = _reject(recipe, rows, ratios, second_moment_bound)
        kept_BT = kept_BT & rejected.keep_BT
        shares |= _mask_shares(rejected, rows)
    if recipe.correction_level is not None:
        rho_BT = ratios.log(recipe.correction_level, "proximal", "behavior").log_ratio_BT
        weight_BT = behavior_weight(
            recipe.correction, rho_BT, rows.mask_BT, low=recipe.correction_low, high=recipe.correction_high
        )
        pull_BT, objective_BT = pull_BT * weight_BT, objective_BT * weight_BT
        shares["correction"] = weight_BT
    if kept_BT is not rows.mask_BT:
        pull_BT, objective_BT = (torch.where(kept_BT, x_BT, 0.0) for x_BT in (pull_BT, objective_BT))
    return pull_BT, objective_BT, _measure(recipe, rows, ratios, shares)


def _reject(recipe: Recipe, rows: LossInputs, ratios: _Ratios, second_moment_bound: float | None) -> Rejected:
    total = ratios.log(*TOTAL)
    # With proximal = behavior no mask looks at proximal / behavior.
    staleness = total if recipe.proximal == "behavior" else ratios.log(*STALENESS)
    return trust_mask(
        staleness.log_ratio_BT,
        total.log_ratio_BT,
        rows.policy_logprobs_BT,
        rows.behavior_logprobs_BT,
        rows.advantage_BT,
        rows.mask_BT,
        ratio_band=recipe.mask_ratio,
        tv=recipe.mask_tv,
        binary_kl=recipe.mask_binary_kl,
        second_moment_bound=second_moment_bound,
        sequence_band=recipe.mask_sequence,
        sequence_k3=recipe.mask_sequence_k3,
        negative_kl=recipe.mask_negative_kl,
        veto=recipe.mask_veto,
    )


def _regularizers(recipe: Recipe, inputs: LossInputs, kl_weight: float) -> Iterator[tuple[float, Tensor]]:
    """The terms of the loss besides the surrogate, each its weight and [B, T] with a gradient."""
    if recipe.kl_place == "loss":
        yield kl_weight, _kl(recipe, inputs)
    if recipe.entropy_weight:
        assert inputs.entropy_BT is not None
        yield -recipe.entropy_weight, inputs.entropy_BT


def _kl(recipe: Recipe, inputs: LossInputs) -> Tensor:
    """The KL term per token, [B, T], with its gradient."""
    policy_BT, behavior_BT = inputs.policy_logprobs_BT, inputs.behavior_logprobs_BT
    # Tokens come from the behavior policy: against it the off-policy form is unbiased.
    can_act_BT = inputs.mask_BT & ~policy_BT.isneginf()
    return kl_loss(recipe.kl, policy_BT, behavior_BT, _reference(recipe, inputs), can_act_BT).kl_BT


def _reference(recipe: Recipe, inputs: LossInputs) -> Tensor:
    if recipe.kl_reference == "behavior":
        return inputs.behavior_logprobs_BT
    if inputs.reference_logprobs_BT is None:
        raise ValueError(f"kl {recipe.kl!r} to a {recipe.kl_reference} reference: its logprobs are missing")
    return inputs.reference_logprobs_BT


def _clip_shares(recipe: Recipe, weighted: Weighted) -> dict[str, Tensor]:
    """Where the bounds that the recipe has acted, each [B, T]."""
    shares: dict[str, Tensor] = {}
    if recipe.clip_low is not None:
        shares["clipped_low"] = weighted.clipped_low_BT
    if recipe.clip_high is not None or recipe.cap is not None:
        shares["clipped_high"] = weighted.clipped_high_BT
    if recipe.dual_clip is not None:
        shares["clipped_dual"] = weighted.clipped_dual_BT
    return shares


def _mask_shares(rejected: Rejected, rows: LossInputs) -> dict[str, Tensor]:
    """What the masks took: in all, by sign of the advantage, by mask."""
    rejected_BT = rows.mask_BT & ~rejected.keep_BT
    return {
        "rejected": rejected_BT,
        "rejected_positive": rejected_BT & (rows.advantage_BT > 0),
        "rejected_negative": rejected_BT & (rows.advantage_BT < 0),
        **{f"rejected_{name}": where_BT for name, where_BT in rejected.reasons.items()},
    }


def _measure(recipe: Recipe, rows: LossInputs, ratios: _Ratios, shares: Mapping[str, Tensor]) -> Measured:
    divergences: dict[str, Ratio] = {}
    if rows.start_logprobs_BT is not None and recipe.proximal == "recomputed":
        divergences["proximal"] = ratios("token", "policy", "proximal")
    if rows.reference_logprobs_BT is not None:
        reference = log_ratio("token", rows.policy_logprobs_BT, rows.reference_logprobs_BT, rows.mask_BT)
        divergences["reference"] = Ratio(reference.log_ratio_BT, reference.log_ratio_BT.exp())
    update = (recipe.ratio_level, "policy", recipe.ratio_to)
    return measure(
        rows.mask_BT,
        rows.age_BT.amax(dim=1),
        ratios(*update),
        ratios(*TOTAL),
        shares,
        divergences,
        num_clamped=ratios.log(*update).num_clamped + ratios.log(*TOTAL).num_clamped,
        watched_BT=rows.differs_BT,
        entropy_BT=rows.entropy_BT,
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
