"""A recipe: one row of choices of the off-policy maths. Data only, no torch.

Every first-order method is a gradient weight per token, L = -(1/D) sum sg(w) A log policy + beta KL. A recipe says
where A, w, D and KL come from. Numbers that no chosen piece reads are None: what stands in a recipe acts.

Three policies: `behavior` sampled, `proximal` is where the learner step started (or the behavior policy), `policy` is
trained. policy / proximal is the update, proximal / behavior is staleness and engine mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stream_grpo.algo.choices import (
    GROUP_BASELINES,
    GROUP_SCALES,
    KL,
    AdvantageKind,
    Aggregation,
    Baseline,
    Correction,
    KLPlace,
    ProximalMethod,
    RatioLevel,
    Scale,
    Std,
    StepAggregation,
    WeightKind,
)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Band = tuple[NotNegative, Positive]


class Recipe(BaseModel):
    """The choices by name; the functions behind them are in the files of this folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    advantage: AdvantageKind = "reward"
    """`reward`: of a rollout, its reward less a baseline; `gae`: of each token, by a critic that is trained beside the
    policy and takes the place of the baseline."""
    gae_gamma: Annotated[float, Field(gt=0, le=1)] | None = None
    """gae: what a token later counts of a reward."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """gae: 1: what really came; 0: what the critic expects after the next token; in between a mean of both."""
    gae_whiten: bool | None = None
    """gae: whether the mean of all tokens of a batch is taken from the advantages, and their spread divides them."""
    value_clip: Positive | None = None
    """gae: how far a value may move in a learner step before it gets no gradient. None: any way."""
    critic_rate: Positive | None = None
    """gae: learning rate of the critic over that of the policy (after warmup, before any scale of it)."""
    baseline: Baseline = "leave_one_out"
    """What is taken from a reward: of its group, of the run so far, or of the batch."""
    baseline_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """running_mean: how much of the earlier mean a batch leaves."""
    baseline_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """running_quantile: the quantile that is tracked."""
    baseline_step: Positive | None = None
    """running_quantile: how far one batch may move it."""
    scale: Scale = "none"
    """What the difference is divided by."""
    std: Std | None = None
    """group_std, batch_std, batch_reward_std: divided by n or by n - 1."""
    scale_floor: Positive | None = None
    """The scale is never below this, so that rewards that hardly differ are not blown up."""
    signal_tolerance: NotNegative = 1e-6
    """A group whose rewards differ by no more than this has no signal."""
    robust: Literal["none", "clip", "winsorize"] = "none"
    """What is done to rewards before their baseline."""
    robust_low: float | None = None
    """clip: lower bound of a reward."""
    robust_high: float | None = None
    """clip: upper bound of a reward."""
    robust_share: Annotated[float, Field(gt=0, lt=0.5)] | None = None
    """winsorize: share of each tail of a group that is pulled in to its quantile."""
    step_rewards: StepAggregation | Literal["none", "position"] = "none"
    """What the scores of a rollout's steps do beside its reward, where its verifier gives them: made into one number
    and added to it (weighted: by the tokens of each step), or `position`: added to the advantage of each token, which
    gets those of the steps that end after it. A group where a valid rollout has none is taken by its rewards alone."""
    step_weight: Positive | None = None
    """step_rewards: what they count."""
    outcome_weight: NotNegative | None = None
    """step_rewards: what the reward itself counts then; 0: the steps alone."""
    length_deviation: NotNegative = 0.0
    """Taken from the normalised advantage per relative deviation from the group's mean length. 0: off."""
    length_without_signal: bool | None = None
    """Whether the length term acts in groups without signal."""

    ratio_to: Literal["proximal", "behavior"] = "behavior"
    """Denominator of the ratio that the weight takes."""
    ratio_level: RatioLevel = "token"
    """Of the ratio that the weight takes: per token, geometric mean or product of the sequence, times the smallest
    earlier ratio."""
    proximal: ProximalMethod = "behavior"
    """The learner's own logprobs at the start of the step, the sampler's, or between sampler's and policy's by age."""
    weight: WeightKind = "ppo"
    """How the ratio becomes the weight of a token's gradient; `plain`: the ratio itself, `reinforce`: 1."""
    clip_low: NotNegative | None = None
    """ppo: ratios below 1 - clip_low get no gradient where the advantage is negative; geometric: bound of -log."""
    clip_high: NotNegative | None = None
    """ppo: ratios above 1 + clip_high get no gradient where the advantage is positive; geometric: bound of log."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo: ratio above which a negative advantage gets no gradient. None: off."""
    cap: Positive | None = None
    """cispo: the ratio counts up to this."""
    soft_positive: Positive | None = None
    """soft: temperature of the gate where the advantage is positive."""
    soft_negative: Positive | None = None
    """soft: temperature of the gate elsewhere."""
    gamma_positive: tuple[Positive, Positive] | None = None
    """gamma: k and lambda where the advantage is positive."""
    gamma_negative: tuple[Positive, Positive] | None = None
    """gamma: k and lambda where the advantage is negative."""

    mask_ratio: Band | None = None
    """Tokens whose proximal / behavior lies outside are rejected. None here and below: off."""
    mask_tv: Positive | None = None
    """Tokens that have moved from the behavior policy by more than this probability, outward, are rejected."""
    mask_binary_kl: Positive | None = None
    """Tokens with a larger binary KL(behavior || policy) that move outward are rejected."""
    mask_second_moment: Positive | None = None
    """The tokens whose policy / behavior has moved outward the furthest are rejected until the mean squared log of the
    others is below this, over the whole batch as the step starts."""
    mask_sequence: Band | None = None
    """Sequences whose geometric mean of proximal / behavior lies outside are rejected."""
    mask_sequence_k3: Positive | None = None
    """Sequences whose mean k3 of proximal / behavior is larger are rejected."""
    mask_negative_kl: Positive | None = None
    """Sequences with a negative advantage and a mean log(behavior / policy) above this are rejected."""
    mask_veto: Band | None = None
    """Sequences with any token whose proximal / behavior lies outside are rejected."""

    correction: Correction = "none"
    """The weight of proximal / behavior: its minimum with the upper bound, 0 outside the band, or both."""
    correction_level: Literal["token", "sequence_mean", "sequence_sum"] | None = None
    """Of that ratio."""
    correction_low: NotNegative | None = None
    """masked, both: lower bound."""
    correction_high: Positive | None = None
    """Upper bound."""

    aggregation: Aggregation = "tokens"
    """What has the same weight: every token, sequence, or problem; or all over groups x size x max_new_tokens."""

    kl: KL = "none"
    """Estimator of KL(policy || reference)."""
    kl_place: KLPlace | None = None
    """Where it acts: in the loss; in the advantage of its own token; summed over the rollout, in its reward."""
    kl_weight: Positive | None = None
    """Its coefficient; with kl_target the first one."""
    kl_reference: Literal["fixed", "refreshed", "ema", "behavior"] | None = None
    """The start weights, a copy taken every kl_refresh_interval steps, a moving average, or the sampler's logprobs."""
    kl_refresh_interval: Annotated[int, Field(ge=1)] | None = None
    """refreshed: learner steps between two copies."""
    kl_ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """ema: what a learner step leaves of the average."""
    kl_target: Positive | None = None
    """The coefficient is steered so that the KL per token stays here. None: it is fixed."""
    kl_horizon: Positive | None = None
    """With kl_target: sequences over which the coefficient follows."""
    entropy_weight: NotNegative = 0.0
    """Coefficient of the entropy bonus. 0: off."""
    regularize_without_signal: bool | None = None
    """Whether KL and entropy act in groups without signal."""
    learning_rate_scale: Literal["none", "ess"] = "none"
    """ess: the learning rate times the root of the effective share of the batch."""
    ess_base: Annotated[float, Field(gt=0, le=1)] | None = None
    """ess: effective share at which the learning rate is whole."""

    @model_validator(mode="after")
    def _choices_fit(self) -> Recipe:
        for complaint in complaints(self):
            raise ValueError(complaint)
        return self

    @property
    def needs_spread(self) -> bool:
        """Whether a group without spread has gradient exactly 0, so that the buffer need not keep it."""
        return self.baseline in GROUP_BASELINES and not (self.regularize_without_signal or self.length_without_signal)

    @property
    def needs_first_pass(self) -> bool:
        """Whether logprobs of the whole batch are needed before its first gradient."""
        return self.mask_second_moment is not None or self.learning_rate_scale == "ess" or self.kl_place == "advantage"

    @property
    def needs_reference(self) -> bool:
        """Whether weights other than the policy's give logprobs."""
        return self.kl_reference in ("fixed", "refreshed", "ema")

    @property
    def has_critic(self) -> bool:
        """Whether a second model, which says what prefixes are worth, is trained beside the policy."""
        return self.advantage == "gae"

    @property
    def reads_steps(self) -> bool:
        """Whether step scores enter the advantage, so that a group may have signal where its rewards do not differ."""
        return self.step_rewards != "none"

    @property
    def has_mask(self) -> bool:
        """Whether any trust mask is on."""
        return any(getattr(self, name) is not None for name in _MASKS)

    @property
    def has_regularizer(self) -> bool:
        """Whether something besides the advantage gives gradient."""
        return self.kl != "none" or self.entropy_weight > 0


_MASKS = tuple(name for name in Recipe.model_fields if name.startswith("mask_"))

_READ_BY: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("gae_gamma", "gae_lambda", "gae_whiten", "value_clip", "critic_rate"),
            ("advantage = gae", lambda r: r["advantage"] == "gae"),
        ),
        "baseline_decay": ("baseline = running_mean", lambda r: r["baseline"] == "running_mean"),
        "baseline_quantile": ("baseline = running_quantile", lambda r: r["baseline"] == "running_quantile"),
        "baseline_step": ("baseline = running_quantile", lambda r: r["baseline"] == "running_quantile"),
        "std": ("a scale that is a std", lambda r: r["scale"].endswith("_std")),
        "scale_floor": ("any scale but none", lambda r: r["scale"] != "none"),
        "robust_low": ("robust = clip", lambda r: r["robust"] == "clip"),
        "robust_high": ("robust = clip", lambda r: r["robust"] == "clip"),
        "robust_share": ("robust = winsorize", lambda r: r["robust"] == "winsorize"),
        "step_weight": ("any step_rewards but none", lambda r: r["step_rewards"] != "none"),
        "outcome_weight": ("any step_rewards but none", lambda r: r["step_rewards"] != "none"),
        "length_without_signal": ("length_deviation above 0", lambda r: r["length_deviation"] > 0),
        "clip_low": ("weight = ppo, geometric", lambda r: r["weight"] in ("ppo", "geometric")),
        "clip_high": ("weight = ppo, geometric", lambda r: r["weight"] in ("ppo", "geometric")),
        "dual_clip": ("weight = ppo", lambda r: r["weight"] == "ppo"),
        "cap": ("weight = cispo", lambda r: r["weight"] == "cispo"),
        "soft_positive": ("weight = soft", lambda r: r["weight"] == "soft"),
        "soft_negative": ("weight = soft", lambda r: r["weight"] == "soft"),
        "gamma_positive": ("weight = gamma", lambda r: r["weight"] == "gamma"),
        "gamma_negative": ("weight = gamma", lambda r: r["weight"] == "gamma"),
        "correction_level": ("any correction but none", lambda r: r["correction"] != "none"),
        "correction_low": ("correction = masked, both", lambda r: r["correction"] in ("masked", "both")),
        "correction_high": ("any correction but none", lambda r: r["correction"] != "none"),
        "kl_place": ("any kl but none", lambda r: r["kl"] != "none"),
        "kl_weight": ("any kl but none", lambda r: r["kl"] != "none"),
        "kl_reference": ("any kl but none", lambda r: r["kl"] != "none"),
        "kl_refresh_interval": ("kl_reference = refreshed", lambda r: r["kl_reference"] == "refreshed"),
        "kl_ema_decay": ("kl_reference = ema", lambda r: r["kl_reference"] == "ema"),
        "kl_target": ("any kl but none", lambda r: r["kl"] != "none"),
        "kl_horizon": ("kl_target", lambda r: r["kl_target"] is not None),
        "regularize_without_signal": ("kl or entropy_weight", lambda r: r["kl"] != "none" or r["entropy_weight"] > 0),
        "ess_base": ("learning_rate_scale = ess", lambda r: r["learning_rate_scale"] == "ess"),
    }
)
"""For every number that only some choices read: which, in words and as a test."""

_RHO_MASKS = ("mask_ratio", "mask_sequence", "mask_sequence_k3", "mask_veto")
"""Masks on proximal / behavior."""
_LEVELS = {("geometric", "reinforce"): "token", ("topr", "gamma"): "sequence_sum"}
"""The ratio that these weights take."""
_MAY_BE_ABSENT = frozenset({"dual_clip", "kl_target", "value_clip"})


def readers(name: str, choices: Mapping[str, Any]) -> str | None:
    """Who would read a number that the choices leave unread, in words; None where it is read."""
    if name not in _READ_BY:
        return None
    words, is_read = _READ_BY[name]
    return None if is_read(choices) else words


def complaints(recipe: Recipe) -> Iterable[str]:
    """What cannot work together: the choice, its value, the reason, and what would be right."""
    choices = {name: getattr(recipe, name) for name in Recipe.model_fields}
    for name, (words, is_read) in _READ_BY.items():
        if choices[name] is not None and not is_read(choices):
            yield f"{name} = {choices[name]} would do nothing: it is read with {words}; leave it out"
        if choices[name] is None and is_read(choices) and name not in _MAY_BE_ABSENT:
            yield f"{name} is missing: {words} needs it"
    for name in ("mask_ratio", "mask_sequence", "mask_veto"):
        if (band := choices[name]) is not None and not band[0] <= 1 <= band[1]:
            yield f"{name} = {list(band)}: the band must hold 1, or matched policies would be rejected"
    if not (recipe.correction_low or 0) <= 1 <= (recipe.correction_high or 1):
        yield (
            f"correction_low = {recipe.correction_low}, correction_high = {recipe.correction_high}: 1 must lie between "
            f"them, or matched policies would be corrected"
        )
    if recipe.robust_low is not None and recipe.robust_high is not None and recipe.robust_low >= recipe.robust_high:
        yield f"robust_low = {recipe.robust_low}: not below robust_high = {recipe.robust_high}"
    if recipe.scale in GROUP_SCALES and recipe.baseline not in GROUP_BASELINES:
        yield (
            f"scale = {recipe.scale} with baseline = {recipe.baseline}: a group without spread keeps its advantage and "
            f"would be divided by the floor; use a baseline of the group, or a scale of the batch"
        )
    if recipe.step_rewards == "position" and recipe.scale not in ("none", "group_std"):
        yield (
            f"step_rewards = position with scale = {recipe.scale}: the steps of a group are divided by their own "
            f"spread or not at all; use scale = group_std or none"
        )
    yield from _critic_complaints(recipe)
    yield from _ratio_complaints(recipe)
    yield from _unread_complaints(recipe)
    yield from _kl_complaints(recipe)


def _critic_complaints(recipe: Recipe) -> Iterable[str]:
    if not recipe.has_critic:
        return
    for name in ("baseline", "scale"):
        if (value := getattr(recipe, name)) != "none":
            yield (
                f"{name} = {value} with advantage = gae: the critic is the baseline, and rewards go to it as they are; "
                f"use {name} = none{', and gae_whiten = true for advantages of one size' if name == 'scale' else ''}"
            )
    if recipe.step_rewards == "position":
        yield (
            "step_rewards = position with advantage = gae: what single tokens get comes from the critic; use another "
            "step_rewards, which makes one reward of the steps, or advantage = reward"
        )
    if recipe.length_deviation:
        yield (
            f"length_deviation = {recipe.length_deviation} with advantage = gae: it is a part of the advantage of a "
            f"group, and the critic's are of tokens; use length_deviation = 0"
        )


def _ratio_complaints(recipe: Recipe) -> Iterable[str]:
    if recipe.correction != "none" and recipe.ratio_to == "behavior" and recipe.weight != "reinforce":
        yield (
            f"correction = {recipe.correction}: weight = {recipe.weight} is already taken on policy / behavior, and "
            f"the ratio would count twice; use ratio_to = proximal, or correction = none"
        )
    if recipe.correction != "none" and recipe.proximal == "behavior":
        yield (
            f"correction = {recipe.correction} with proximal = behavior: proximal / behavior is 1 everywhere and the "
            f"correction could not act; use proximal = recomputed"
        )
    if recipe.proximal == "behavior" and recipe.ratio_to == "proximal" and recipe.weight != "reinforce":
        yield (
            "ratio_to = proximal with proximal = behavior: say ratio_to = behavior, which is the same ratio under the "
            "name of what it is"
        )
    for name in _RHO_MASKS:
        if getattr(recipe, name) is not None and recipe.proximal == "behavior":
            yield f"{name} is on proximal / behavior, which proximal = behavior makes 1; use proximal = recomputed"
    for weights, level in _LEVELS.items():
        if recipe.weight in weights and recipe.ratio_level != level:
            yield f"ratio_level = {recipe.ratio_level}: weight = {recipe.weight} is defined on the {level}; use {level}"


def _unread_complaints(recipe: Recipe) -> Iterable[str]:
    """Choices that nothing would read, or that would read something else than they say."""
    proximal_is_read = (
        recipe.ratio_to == "proximal"
        or recipe.correction != "none"
        or any(getattr(recipe, name) is not None for name in _RHO_MASKS)
    )
    if recipe.proximal != "behavior" and not proximal_is_read:
        yield (
            f"proximal = {recipe.proximal} would do nothing: the weight is on policy / behavior, and no correction or "
            f"mask reads it; leave it out"
        )
    if recipe.learning_rate_scale == "ess" and recipe.correction not in ("none", "truncated"):
        yield f"learning_rate_scale = ess with correction = {recipe.correction}: use truncated, or none"
    if recipe.learning_rate_scale == "ess" and recipe.correction_level == "token":
        yield "learning_rate_scale = ess counts sequences: use correction_level = sequence_sum or sequence_mean"


def _kl_complaints(recipe: Recipe) -> Iterable[str]:
    if recipe.kl == "k1" and recipe.kl_place == "loss":
        yield (
            "kl = k1 with kl_place = loss: the expected gradient of k1 on-policy is 0, so it would do nothing but add "
            "noise; use kl_place = advantage, or kl = k2 or k3"
        )
    if recipe.kl in ("k2", "k3", "k3_off_policy") and recipe.kl_place in ("advantage", "reward"):
        yield (
            f"kl = {recipe.kl} with kl_place = {recipe.kl_place}: only k1 gives KL's gradient there; use kl_place = "
            f"loss"
        )
    if recipe.kl_reference == "behavior" and recipe.kl_place in ("advantage", "reward"):
        yield f"kl_reference = behavior with kl_place = {recipe.kl_place}: use kl = k2 with kl_place = loss"


Number = TypeVar("Number")


def given(value: Number | None) -> Number:
    """A number of a recipe that its check has found to be there."""
    assert value is not None, "a recipe holds every number that its choices read"
    return value
