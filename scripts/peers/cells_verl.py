"""The cells of verl: its policy losses with every aggregation, its rollout corrections, its advantage estimators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from peers import causes, oracle, oracle_advantage, ours, verl_peer
from peers.batch import MAX_NEW_TOKENS, Batch, Draw, Result
from peers.cell import Cause, Cell
from peers.oracle import Flags
from peers.ours import Constant
from stream_grpo.algo.recipe import Recipe

AGGREGATIONS: dict[str, tuple[str, Constant]] = {
    "token-mean": ("tokens", "one"),
    "token-sum": ("constant", "one"),
    "seq-mean-token-sum": ("constant", "rollouts"),
    "seq-mean-token-sum-norm": ("constant", "rollout_tokens"),
    "seq-mean-token-mean": ("sequences", "one"),
}
"""verl's loss_agg_mode as our aggregation and, for `constant`, its denominator."""
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla": ({}, {}),
    "gspo": (
        {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
        {"ratio_level": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "cispo": ({"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}, {"weight": "cispo", "cap": 5.0}),
    "gpg": ({}, {"weight": "reinforce"}),
}
"""A loss as settings of verl and choices of ours."""


def cells() -> Iterator[Cell]:
    yield from _losses()
    yield from _divergence_masks()
    yield from _importance_weights()
    yield from _rejections()
    yield from _bypass()
    yield from _advantages()


def _cell(
    loss: str,
    options: str,
    recipe: Recipe,
    settings: dict[str, Any] | None = None,
    *,
    aggregation: str = "token-mean",
    draw: Draw = "mixed",
    constant: Constant = "one",
    cause: Cause | None = None,
    **run: Any,
) -> Cell:
    actor = verl_peer.config(**({"loss_agg_mode": aggregation} | (settings or {})))
    return Cell(
        peer="verl",
        loss=loss,
        options=options,
        draw=draw,
        cause=cause,
        run_peer=partial(verl_peer.loss, loss, actor, **run),
        run_ours=partial(ours.loss, recipe, constant=constant),
        run_oracle=partial(oracle.loss, recipe, constant=constant),
    )


def _losses() -> Iterator[Cell]:
    for loss, (settings, choices) in LOSSES.items():
        for mode, (aggregation, constant) in AGGREGATIONS.items():
            if loss == "gpg" and aggregation == "constant":
                continue
            recipe = ours.recipe(aggregation=aggregation, **choices)
            length = {"loss_scale_factor": MAX_NEW_TOKENS} if mode == "seq-mean-token-sum-norm" else {}
            is_mean = mode == "seq-mean-token-mean"
            yield _cell(
                loss,
                mode,
                recipe,
                settings | length,
                aggregation=mode,
                draw="trained" if is_mean else "mixed",
                constant=constant,
            )
    sequences = ours.recipe(aggregation="sequences")
    masked, mean = causes.VERL_COUNTS_MASKED, "seq-mean-token-mean"
    yield _cell("vanilla", f"{mean}, masked rollouts", sequences, aggregation=mean, cause=masked)
    norm, constant_recipe = "seq-mean-token-sum-norm", ours.recipe(aggregation="constant")
    yield _cell(
        "vanilla",
        f"{norm}, no loss_scale_factor",
        constant_recipe,
        aggregation=norm,
        constant="rollout_tokens",
        cause=causes.VERL_PADDED,
    )
    yield _cell("vanilla", "two microbatches", ours.recipe(), num_microbatches=2)
    wide = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    yield _cell("vanilla", "clip 0.2/0.28", ours.recipe(clip_high=0.28), wide)
    for dual in (3.0, 10.0):
        yield _cell("vanilla", f"clip_ratio_c {dual:g}", ours.recipe(dual_clip=dual), {"clip_ratio_c": dual})
    yield _cell("vanilla", "log ratios beyond 20", ours.recipe(), draw="beyond")
    beyond_dual = ours.recipe(dual_clip=3.0)
    yield _cell("vanilla", "log ratios beyond 20, clip_ratio_c 3", beyond_dual, {"clip_ratio_c": 3.0}, draw="beyond")
    settings, choices = LOSSES["gspo"]
    gspo = ours.recipe(**choices)
    yield _cell("gspo", "log ratios beyond 20", gspo, settings, draw="beyond", cause=causes.VERL_GSPO_BOUND)
    floor = ours.recipe(weight="cispo", cap=5.0)
    low = {"clip_ratio_low": 0.2, "clip_ratio_high": 4.0}
    yield _cell("cispo", "clip_ratio_low 0.2", floor, low, cause=causes.VERL_CISPO_FLOOR)
    geometric = {"weight": "geometric", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequences"}
    log_clip = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    gmpo = ours.recipe(**geometric)
    yield _cell("geo_mean", "log clip 0.4", gmpo, log_clip, draw="trained")
    yield _cell("geo_mean", "log clip 0.4, masked rollouts", gmpo, log_clip, cause=causes.VERL_GEO_MEAN_COUNTS)
    unbounded = causes.VERL_GEO_MEAN_UNBOUNDED
    yield _cell("geo_mean", "log ratios beyond 20", gmpo, log_clip, draw="beyond", cause=unbounded)
    soft = {"weight": "soft", "soft_positive": 1.0, "soft_negative": 1.05}
    yield _cell("sapo", mean, ours.recipe(aggregation="sequences", **soft), aggregation=mean, draw="trained")
    yield _cell("sapo", "token-mean", ours.recipe(**soft), draw="trained", cause=causes.VERL_SAPO)


def _divergence_masks() -> Iterator[Cell]:
    choices = {"ratio_to": "behavior", "proximal": "behavior", "weight": "cispo", "cap": 20.0}
    on_behavior = {"clip_ratio_c": 20.0}
    for loss, name, delta in (("dppo_tv", "mask_tv", 0.15), ("dppo_kl", "mask_binary_kl", 0.05)):
        settings = on_behavior | {"clip_ratio_low": delta, "clip_ratio_high": delta}
        recipe = ours.recipe(**choices, **{name: delta})
        yield _cell(loss, f"{delta}, cap 20", recipe, settings, ratio_to="behavior")


def _importance_weights() -> Iterator[Cell]:
    """rollout_is, over the losses that take it."""
    truncated = {"correction": "truncated", "correction_high": 2.0}
    masked = {"correction": "masked", "correction_low": 0.5, "correction_high": 2.0}
    levels = {"token": "token", "sequence": "sequence_sum"}
    for loss in ("vanilla", "gspo", "cispo"):
        settings, choices = LOSSES[loss]
        for name, level in levels.items():
            for threshold, correction in (("2.0", truncated), ("0.5_2.0", masked)):
                recipe = ours.recipe(**choices, **correction, correction_level=level)
                given = {"rollout_is": name, "rollout_is_threshold": threshold}
                yield _cell(loss, f"rollout_is {name} {threshold}", recipe, settings, correction=given)
    normalized = {"rollout_is": "token", "rollout_is_threshold": "2.0", "rollout_is_batch_normalize": True}
    recipe = ours.recipe(**truncated, correction_level="token")
    cause = causes.VERL_BATCH_NORMALIZED
    yield _cell("vanilla", "rollout_is token 2.0, normalized", recipe, correction=normalized, cause=cause)
    geometric = {"weight": "geometric", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequences"}
    log_clip = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    for name, level in levels.items():
        recipe = ours.recipe(**geometric, **truncated, correction_level=level)
        given = {"rollout_is": name, "rollout_is_threshold": "2.0"}
        mean = causes.VERL_GEO_MEAN_CORRECTION if name == "token" else None
        yield _cell(
            "geo_mean", f"rollout_is {name} 2.0", recipe, log_clip, draw="trained", correction=given, cause=mean
        )


def _rejections() -> Iterator[Cell]:
    """rollout_rs. Under token-sum, which divides by nothing, the masks alone are compared."""
    k2 = (math.exp(-math.sqrt(2 * 0.1)), math.exp(math.sqrt(2 * 0.1)))
    k3 = _k3_band(0.1)
    rows = (
        ("token_k1", "0.5_2.0", {"mask_ratio": (0.5, 2.0)}),
        ("token_k2", "0.1", {"mask_ratio": k2}),
        ("token_k3", "0.1", {"mask_ratio": k3}),
        ("seq_mean_k1", "0.8_1.25", {"mask_sequence": (0.8, 1.25)}),
        ("seq_mean_k3", "0.05", {"mask_sequence_k3": 0.05}),
        ("seq_max_k2", "0.1", {"mask_veto": k2}),
        ("seq_max_k3", "0.1", {"mask_veto": k3}),
        ("token_k1,seq_mean_k3", "0.5_2.0,0.05", {"mask_ratio": (0.5, 2.0), "mask_sequence_k3": 0.05}),
    )
    for mode, threshold, masks in rows:
        yield _rejection(mode, threshold, masks, "token-sum")
    one_sided = ("token_k1", "0.5_4.0", {"mask_ratio": (0.5, 4.0)})
    yield _rejection(*one_sided, "token-sum", causes.VERL_INVERTED)
    one_sided = ("seq_mean_k1", "0.9_1.5", {"mask_sequence": (0.9, 1.5)})
    yield _rejection(*one_sided, "token-sum", causes.VERL_INVERTED)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        yield _rejection("token_k1", "0.5_2.0", rows[0][2], aggregation, causes.VERL_SURVIVORS)
    yield _rejection("seq_mean_k3", "0.05", rows[4][2], "token-mean", causes.VERL_SURVIVORS)
    both = {"correction": "truncated", "correction_level": "token", "correction_high": 2.0}
    given = {"rollout_is": "token", "rollout_is_threshold": "2.0"}
    yield _rejection("seq_mean_k3", "0.05", rows[4][2] | both, "token-sum", None, given)


def _rejection(
    mode: str,
    threshold: str,
    choices: dict[str, Any],
    aggregation: str,
    cause: Cause | None = None,
    weights: dict[str, Any] | None = None,
) -> Cell:
    ours_aggregation, constant = AGGREGATIONS[aggregation]
    given = {"rollout_rs": mode, "rollout_rs_threshold": threshold} | (weights or {})
    with_weights = ", rollout_is token 2.0" if weights else ""
    return _cell(
        "vanilla",
        f"rollout_rs {mode} {threshold}, {aggregation}{with_weights}",
        ours.recipe(aggregation=ours_aggregation, **choices),
        aggregation=aggregation,
        # A sequence mean over all rollouts is a cause of its own.
        draw="trained" if aggregation == "seq-mean-token-mean" else "mixed",
        constant=constant,
        cause=cause,
        correction=given,
    )


def _k3_band(bound: float) -> tuple[float, float]:
    """The ratios at which rho - 1 - log rho is the bound, below and above 1."""

    def root(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            if middle - 1 - math.log(middle) <= bound:
                inside = middle
            else:
                outside = middle
        return inside

    return root(1.0, 1e-9), root(1.0, 1e3)


def _bypass() -> Iterator[Cell]:
    """bypass_mode: the ratio to the behavior policy takes the place of the ratio to the proximal one."""
    on_behavior = {"ratio_to": "behavior", "proximal": "behavior"}
    ppo = {"rollout_is": None, "loss_type": "ppo_clip"}
    yield _cell("bypass_mode", "ppo_clip", ours.recipe(**on_behavior), {"bypass": ppo}, ratio_to="behavior")
    for name, level in (("token", "token"), ("sequence", "sequence_sum")):
        bypass = {"rollout_is": name, "rollout_is_threshold": 2.0, "loss_type": "reinforce"}
        recipe = ours.recipe(**on_behavior, weight="cispo", cap=2.0, ratio_level=level)
        options = f"reinforce, rollout_is {name} 2.0"
        yield _cell("bypass_mode", options, recipe, {"bypass": bypass}, ratio_to="behavior")


def _advantages() -> Iterator[Cell]:
    mean, loo = {"baseline": "group_mean"}, {"baseline": "leave_one_out"}
    std = mean | {"scale": "group_std"}
    no_std = {"norm_adv_by_std_in_grpo": False}
    batch = mean | {"scale": "batch_std"}
    yield _advantage("grpo", "no std", mean, "equal", no_std)
    yield _advantage("grpo", "no std, groups of one", mean, "drawn", no_std, causes.VERL_LONE_GRPO)
    yield _advantage("grpo", "std", std, "equal", {}, causes.VERL_STD)
    yield _advantage("rloo", "", loo, "equal", {})
    yield _advantage("rloo", "groups of one", loo, "drawn", {}, causes.VERL_LONE_RLOO)
    yield _advantage("rloo_vectorized", "groups of one", loo, "drawn", {})
    yield _advantage("reinforce_plus_plus_baseline", "", batch, "equal", {}, causes.VERL_WHITENING)


def _advantage(
    name: str, options: str, choices: dict[str, Any], group: str, settings: dict[str, Any], cause: Cause | None = None
) -> Cell:
    def run_ours(batch: Batch) -> Result:
        return ours.advantage(batch, **choices, group=group, only_valid=False)

    def run_oracle(batch: Batch, flags: Flags) -> Result:
        return oracle_advantage.advantage(batch, **choices, group=group, only_valid=False, flags=flags)

    return Cell(
        peer="verl",
        loss=f"advantage {name}",
        options=options,
        cause=cause,
        run_peer=partial(verl_peer.advantage, name, group=group, **settings),
        run_ours=run_ours,
        run_oracle=run_oracle,
    )
