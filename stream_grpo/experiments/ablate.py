"""The command `ablate`: one choice changed at a time, several seeds each, at equal sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from stream_grpo.algo.choices import Aggregation
from stream_grpo.comparison.compare import Comparison, compare
from stream_grpo.comparison.runs import read_run
from stream_grpo.config import Config
from stream_grpo.config_file import load
from stream_grpo.errors import ConfigError
from stream_grpo.experiments.cells import Cell, Series, check_names, name_of

BASE = "base"
KL_WEIGHT = 0.01
MORE_STEPS = 10
"""So many times the configured steps a cell may make, as its tokens end it."""

Variant = tuple[str, Mapping[str, str]]
"""Its name, and the settings in which it is not the configuration."""


def _group_size(config: Config) -> Iterable[Variant]:
    """Half and double, with as many rollouts a step as before."""
    size, per_step = config.sampler.group_size, config.stream.groups_per_step
    for other in (size // 2, size * 2):
        if other >= 2 and (size * per_step) % other == 0:
            groups = size * per_step // other
            settings = {"sampler.group_size": str(other), "stream.groups_per_step": str(groups)}
            if config.curator.group_sizes:
                settings["curator.group_sizes"] = "[]"
            yield f"group_size-{other}", settings


def _reward(config: Config) -> Iterable[Variant]:
    """Each term that is on left out, truncated responses taken the other way, and rewards that say nothing."""
    shaping = config.rewards.shaping
    for term in ("repetition_weight", "type_token_weight"):
        if getattr(shaping, term) > 0:
            yield f"reward-no-{term}", {f"rewards.shaping.{term}": "0"}
    other = "leave_out" if shaping.truncated == "keep" else "keep"
    yield f"reward-truncated-{other}", {"rewards.shaping.truncated": other}
    if not config.algo.shuffle_rewards:
        yield "reward-shuffled", {"algo.shuffle_rewards": "true"}


def _kl(config: Config) -> Iterable[Variant]:
    """None where there is one; else towards the start weights, and towards the behavior policy."""
    if config.algo.kl != "none":
        yield "kl-none", {"algo.kl": "none"}
        return
    for kl, reference in (("k3", "fixed"), ("k2", "behavior")):
        chosen = {"kl": kl, "kl_place": "loss", "kl_weight": str(KL_WEIGHT), "kl_reference": reference}
        if config.algo.regularize_without_signal is None:
            chosen["regularize_without_signal"] = "false"
        yield f"kl-{reference}", {f"algo.{name}": value for name, value in chosen.items()}


def _aggregation(config: Config) -> Iterable[Variant]:
    """Every other one."""
    for option in get_args(Aggregation):
        if option != config.algo.aggregation:
            yield f"aggregation-{option}", {"algo.aggregation": option}


def _recipe(config: Config) -> Iterable[Variant]:
    """The one that everybody compares with, and the one with a critic."""
    for preset in ("grpo", "ppo"):
        if preset != config.algo.preset:
            yield f"recipe-{preset}", {"algo.preset": preset}


AXES: Mapping[str, Callable[[Config], Iterable[Variant]]] = {
    "group_size": _group_size,
    "reward": _reward,
    "kl": _kl,
    "aggregation": _aggregation,
    "recipe": _recipe,
}
"""What may be ablated, by name."""


FIXED = frozenset(
    {
        "run.seed",
        "run.num_steps",
        "run.max_generated_tokens",
        *(f"evaluation.{name}" for name in ("files", "domains", "num_problems", "problems_seed")),
    }
)
"""Settings that no variant may have for itself: seeds, the budget, and what all are compared on."""


def variants_of(config: Config, over: Sequence[str], vary: Iterable[str] = ()) -> list[Variant]:
    """The configuration first, then each of its variants. `vary`: `section.name=value,value` for settings by hand.

    Raises ConfigError for an axis that is none, or where nothing varies.
    """
    if unknown := [name for name in over if name not in AXES]:
        raise ConfigError(f"--over {unknown[0]}: no such axis; known: {', '.join(AXES)}; other settings go by --vary")
    found: list[Variant] = [variant for name in over for variant in AXES[name](config)]
    for text in vary:
        name, equals, values = text.partition("=")
        if not equals or "." not in name:
            raise ConfigError(f"--vary {text}: expected section.name=value,value, as --vary stream.max_policy_age=1,8")
        if name.strip() in FIXED:
            raise ConfigError(f"--vary {name.strip()}: all runs of an ablation have it in common; vary another")
        found += [(name_of([f"{name.rpartition('.')[2]}-{v.strip()}"]), {name: v.strip()}) for v in values.split(",")]
    if not found:
        raise ConfigError("ablate: nothing varies; name axes with --over, or settings with --vary")
    return [(BASE, {}), *found]


def cells_of(config: Config, variants: Iterable[Variant], num_seeds: int, budget: int | None) -> list[Cell]:
    """Every variant with every seed, all on the same held-out problems; a whole set of variants a seed.

    `budget`: sampled tokens that end each; None: by the steps of the configuration.
    """
    first, evaluation = config.run.seed, config.evaluation
    shared = {"evaluation.problems_seed": str(first if evaluation.problems_seed is None else evaluation.problems_seed)}
    if budget is not None:
        shared |= {"run.max_generated_tokens": str(budget), "run.num_steps": str(MORE_STEPS * config.run.num_steps)}
    variants = list(variants)
    return [
        Cell(f"{name}-s{seed}", {**shared, **settings, "run.seed": str(seed)})
        for seed in range(first, first + num_seeds)
        for name, settings in variants
    ]


def ablate(
    series: Series,
    over: Sequence[str],
    vary: Iterable[str],
    *,
    num_seeds: int,
    num_tokens: int | None,
    say: Callable[[str], None],
) -> Comparison:
    """Train every variant with every seed to the same sampled tokens, and compare each with the configuration.

    Without `num_tokens` and run.max_generated_tokens the configuration's first run, by its steps, says how many those
    are. Raises ConfigError before anything starts for a cell that cannot be run, CellFailed for one that fails.
    """
    config = load(series.file, series.overrides)
    if not config.evaluation.files or not config.evaluation.num_problems:
        raise ConfigError("ablate: evaluation.files and num_problems are what variants are compared by; give them")
    variants = variants_of(config, over, vary)
    budget = num_tokens or config.run.max_generated_tokens
    cells = cells_of(config, variants, num_seeds, budget)
    check_names(cells)
    if budget is None:
        for cell in cells:
            series.config(cell)
        series.check(cells[:1])
        budget = read_run(series.made(cells[0], say)).after.num_tokens
        say(f"{cells[0].name} sampled {budget:,} tokens: where the others end")
        cells[1:] = cells_of(config, variants, num_seeds, budget)[1:]
    series.check(cells)
    runs = {cell.name: series.made(cell, say) for cell in cells}
    # The configuration first, and all seeds of a variant together.
    order = [f"{name}-s{config.run.seed + index}" for name, _ in variants for index in range(num_seeds)]
    return compare([read_run(runs[name]) for name in order], config.run.seed)
