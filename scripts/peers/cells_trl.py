"""The cells of TRL: every loss type with its options, its importance corrections, its advantages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from peers import causes, oracle, oracle_advantage, ours, trl_peer
from peers.batch import Batch, Draw, Result
from peers.cell import Cause, Cell
from peers.oracle import Flags
from peers.ours import Constant
from stream_grpo.algo.recipe import Recipe

GAMMA = {"gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0)}
SOFT = {"weight": "soft", "soft_positive": 1.0, "soft_negative": 1.05}
SEQUENCE = {"ratio_level": "sequence_mean"}
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}


def cells() -> Iterator[Cell]:
    yield from _losses()
    yield from _cuts()
    yield from _corrections()
    yield from _advantages()


def _cell(
    loss: str,
    options: str,
    recipe: Recipe,
    settings: dict[str, Any] | None = None,
    *,
    draw: Draw = "mixed",
    constant: Constant = "rollout_tokens",
    cause: Cause | None = None,
) -> Cell:
    trainer = trl_peer.trainer(loss.removeprefix("gspo, ").replace("gspo", "grpo"), **(settings or {}))
    return Cell(
        peer="trl",
        loss=loss,
        options=options,
        draw=draw,
        cause=cause,
        run_peer=partial(trl_peer.loss, trainer),
        run_ours=partial(ours.loss, recipe, constant=constant),
        run_oracle=partial(oracle.loss, recipe, constant=constant),
    )


def _losses() -> Iterator[Cell]:
    wide = {"epsilon_high": 0.28}
    wide_clip = {"clip_high": 0.28}
    gspo = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
    gspo_clip = SEQUENCE | {"clip_low": 0.03, "clip_high": 0.04}
    masked = causes.TRL_COUNTS_MASKED
    grpo, dapo = ours.recipe(aggregation="sequences"), ours.recipe(aggregation="tokens")
    yield _cell("grpo", "clip 0.2", grpo, draw="trained")
    yield _cell("grpo", "clip 0.2, masked rollouts", grpo, cause=masked)
    yield _cell("grpo", "clip 0.2/0.28", ours.recipe(aggregation="sequences", **wide_clip), wide, draw="trained")
    delta = ours.recipe(aggregation="sequences", dual_clip=3.0)
    yield _cell("grpo", "clip 0.2, delta 3", delta, {"args_delta": 3.0}, draw="trained")
    opsm = ours.recipe(aggregation="tokens", mask_negative_kl=0.1)
    yield _cell("dapo", "off-policy mask 0.1", opsm, {"off_policy_mask_threshold": 0.1})
    yield _cell("dapo", "clip 0.2", dapo)
    yield _cell("dapo", "clip 0.2/0.28", ours.recipe(aggregation="tokens", **wide_clip), wide)
    yield _cell("dapo", "clip 0.2/0.28, delta 3", ours.recipe(dual_clip=3.0, **wide_clip), wide | {"args_delta": 3.0})
    yield _cell("dapo", "log ratios beyond 20", dapo, draw="beyond", cause=causes.TRL_UNBOUNDED)
    yield _cell("dapo", "log ratios beyond 20, delta 3", ours.recipe(dual_clip=3.0), {"args_delta": 3.0}, draw="beyond")
    yield _cell("bnpo", "clip 0.2", dapo)
    yield _cell("bnpo", "clip 0.2/0.28", ours.recipe(**wide_clip), wide)
    constant = ours.recipe(aggregation="constant")
    yield _cell("dr_grpo", "clip 0.2", constant)
    yield _cell("dr_grpo", "clip 0.2/0.28", ours.recipe(aggregation="constant", **wide_clip), wide)
    yield _cell("cispo", "cap 5", ours.recipe(weight="cispo", cap=5.0), {"epsilon_high": 5.0})
    yield _cell("cispo", "cap 1.28", ours.recipe(weight="cispo", cap=1.28), {"epsilon_high": 1.28})
    yield _cell("gspo", "clip 0.03/0.04", ours.recipe(aggregation="sequences", **gspo_clip), gspo, draw="trained")
    masked_gspo = ours.recipe(aggregation="sequences", **gspo_clip)
    yield _cell("gspo", "clip 0.03/0.04, masked rollouts", masked_gspo, gspo, cause=masked)
    for loss_type, choices in (("dapo", {}), ("bnpo", {}), ("dr_grpo", {"aggregation": "constant"})):
        yield _cell(f"gspo, {loss_type}", "clip 0.03/0.04", ours.recipe(**choices, **gspo_clip), gspo)
    luspo = ours.recipe(aggregation="constant", **gspo_clip)
    yield _cell("luspo", "clip 0.03/0.04", luspo, gspo, constant="rollouts")
    yield _cell("sapo", "tau 1/1.05", ours.recipe(aggregation="sequences", **SOFT), draw="trained")
    yield _cell("sapo", "tau 1/1.05, masked rollouts", ours.recipe(aggregation="sequences", **SOFT), cause=masked)
    yield _cell("vespo", "k, lambda 2, 3 / 3, 2", ours.recipe(weight="gamma", ratio_level="sequence_sum", **GAMMA))


def _cuts() -> Iterator[Cell]:
    """One optimizer step over two microbatches, and two optimizer steps per generation."""
    two = {"args_steps_per_generation": 2, "args_gradient_accumulation_steps": 2}
    four = {"args_steps_per_generation": 4, "args_gradient_accumulation_steps": 2}
    grpo, dapo = ours.recipe(aggregation="sequences"), ours.recipe(aggregation="tokens")
    yield _cell("grpo", "two microbatches", grpo, two, draw="trained")
    yield _cell("dapo", "two microbatches", dapo, two)
    yield _cell("cispo", "two microbatches", ours.recipe(weight="cispo", cap=5.0), two | {"epsilon_high": 5.0})
    yield _cell("dr_grpo", "two microbatches", ours.recipe(aggregation="constant"), two)
    yield _cell("bnpo", "two microbatches", dapo, two, cause=causes.TRL_MICROBATCH)
    steps = "first of two steps per generation"
    yield _half(_cell("dapo", steps, dapo, four, draw="trained", cause=causes.TRL_GENERATION))
    for loss_type, recipe in (("dapo", dapo), ("dr_grpo", ours.recipe(aggregation="constant"))):
        yield _on_policy(_cell(loss_type, "no old logprobs", recipe))


def _on_policy(cell: Cell) -> Cell:
    """The cell without old logprobs: in a first update TRL takes the policy's own."""

    def at_proximal(batch: Batch) -> Batch:
        return replace(batch, proximal_BT=batch.policy_BT)

    return replace(
        cell,
        run_peer=partial(cell.run_peer, is_on_policy=True),
        run_ours=lambda batch: cell.run_ours(at_proximal(batch)),
        run_oracle=lambda batch, flags: cell.run_oracle(at_proximal(batch), flags),
    )


def _half(cell: Cell) -> Cell:
    """The cell with our side and the oracle on the first half of the rollouts, which is all that the step trains."""

    def run_oracle(batch: Batch, flags: Flags) -> Result:
        found = cell.run_oracle(batch.first_half(), frozenset())
        if "generation_denominator" not in flags:
            return found
        scale = 2 * float(batch.first_half().mask_BT.sum() / batch.mask_BT.sum())
        return Result(found.value * scale, found.gradient * scale)

    return replace(cell, run_ours=lambda batch: cell.run_ours(batch.first_half()), run_oracle=run_oracle)


def _corrections() -> Iterator[Cell]:
    """vllm_importance_sampling_mode: what TRL makes of completions, and the loss that follows."""
    modes = {
        "token_truncate": {"correction": "truncated", "correction_level": "token"},
        "token_mask": {"correction": "masked", "correction_level": "token", "correction_low": 0.0},
        "sequence_truncate": {"correction": "truncated", "correction_level": "sequence_sum"},
        "sequence_mask": {"correction": "masked", "correction_level": "sequence_sum", "correction_low": 0.0},
    }
    gspo = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
    for mode, choices in modes.items():
        high = {"correction_high": 3.0}
        settings = _mode(mode, 3.0, None)
        yield _cell("dapo", f"{mode} 3", ours.recipe(**choices, **high), settings)
        cispo = ours.recipe(weight="cispo", cap=5.0, **choices, **high)
        yield _cell("cispo", f"{mode} 3", cispo, settings | {"epsilon_high": 5.0})
        recipe = ours.recipe(clip_low=0.03, clip_high=0.04, **SEQUENCE, **choices, **high)
        spreads = causes.TRL_SPREADS if mode.startswith("token") else None
        yield _cell("gspo, dapo", f"{mode} 3", recipe, settings | gspo, cause=spreads)
        if mode.endswith("mask"):
            band = choices | {"correction_low": 0.5, "correction_high": 2.0}
            yield _cell("dapo", f"{mode} 0.5 to 2", ours.recipe(**band), _mode(mode, 2.0, 0.5))
    floor = ours.recipe(**modes["token_truncate"], correction_high=2.0)
    yield _cell("dapo", "token_truncate 0.5 to 2", floor, _mode("token_truncate", 2.0, 0.5), cause=causes.TRL_FLOOR)
    grpo = ours.recipe(aggregation="sequences", **modes["token_truncate"], correction_high=3.0)
    yield _cell("grpo", "token_truncate 3", grpo, _mode("token_truncate", 3.0, None), draw="trained")
    vespo = ours.recipe(weight="gamma", ratio_level="sequence_sum", ratio_to="behavior", **GAMMA)
    yield _cell("vespo", "token_truncate 3", vespo, _mode("token_truncate", 3.0, None), cause=causes.TRL_INSIDE)
    yield _cell("vespo", "token_mask 3", vespo, _mode("token_mask", 3.0, None), cause=causes.TRL_COLLAPSES)


def _mode(mode: str, high: float, low: float | None) -> dict[str, Any]:
    return VLLM | {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": high,
        "vllm_importance_sampling_clip_min": low,
    }


def _advantages() -> Iterator[Cell]:
    """scale_rewards, with rewards that are missing."""
    for scale, name, cause in (
        ("none", "none", None),
        ("group_std", "group", causes.TRL_STD),
        ("batch_reward_std", "batch", causes.TRL_STD),
    ):
        trainer = trl_peer.trainer("grpo", scale_rewards=name, **_mode("token_truncate", 3.0, None))
        choices = {"baseline": "group_mean", "scale": scale, "group": "equal", "only_valid": True}
        yield Cell(
            peer="trl",
            loss="advantage",
            options=f"scale_rewards {name}",
            cause=cause,
            run_peer=lambda batch, trainer=trainer: Result(0.0, trl_peer.scored(trainer, batch)["advantages"]),
            run_ours=partial(_ours_advantage, choices),
            run_oracle=partial(_oracle_advantage, choices),
        )


def _ours_advantage(choices: dict[str, Any], batch: Batch) -> Result:
    return ours.advantage(batch, **choices)


def _oracle_advantage(choices: dict[str, Any], batch: Batch, flags: Flags) -> Result:
    return oracle_advantage.advantage(batch, **choices, flags=flags)
