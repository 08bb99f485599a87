"""Each stage against its bound, measured in one run.

sampler: tokens a second with requests, scoring and groups as the sampler makes them, over those of vLLM's own loop with
the same prompts in the same process; goal 0.95. learner: seconds of the same step in plain torch over those of a
learner step; goal 0.9. learner_flops: FLOP/s of a learner step over those of the model's matrices multiplied alone.
publish_apply: what publishing weights and loading them takes, as a share of a step of a run; goal under 0.02. start_s:
from the command to the first trained step. Peak resident memory is of the processes of that run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import made, page
from benchmarks.page import Goal, table
from benchmarks.results import Results
from benchmarks.watch import memory_table
from stages import whole_run

from stream_grpo.config import Config
from stream_grpo.config_file import load
from stream_grpo.experiments.cells import call
from stream_grpo.files import sha256
from stream_grpo.parts import RESOURCES

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "arithmetic-cpu.toml"
GOALS = {"sampler": 0.95, "learner": 0.9}
MAX_PUBLISH_APPLY = 0.02


STAGES = ("sampler", "learner", "run")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a last line of all figures")
    parser.add_argument("--quick", action="store_true", help="a minute or two: a look, not a measurement")
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the model and the run that are measured")
    parser.add_argument("--root", type=Path, help="a folder to keep, whose results are not made again; else temporary")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="what is measured in this call")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="where the section is written")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="repeatable")
    options = parser.parse_args()
    root = (options.root or Path(tempfile.mkdtemp(prefix="bench-stages-"))).resolve()
    overrides = [*own_model(options.config, root), *options.set]
    results = Results(root / "results.jsonl")
    settings = {"config": sha256(options.config), "set": options.set, "is_quick": options.quick}
    for stage in options.only:
        if results.find(stage, settings) is None:
            log(f"{stage}: begins")
            results.add(stage, settings, {"found": measure(stage, options, overrides, root)})
    lines = {stage: line for stage in STAGES if (line := results.find(stage, settings)) is not None}
    if missing := [stage for stage in STAGES if stage not in lines]:
        log(f"still to be measured: {' '.join(missing)}; the same --root goes on")
        return 3
    sampler, learner, run = (lines[stage]["found"] for stage in STAGES)
    figures = figures_of(sampler, learner, run)
    text = page_of(options.config, sampler, learner, run, figures)
    print(text)
    page.put(
        options.page,
        "bench_stages",
        "Stages",
        text,
        is_quick=options.quick,
        command=made.command("bench_stages", sys.argv[1:]),
        made=[line["made"] for line in lines.values()],
        say=log,
    )
    if options.json:
        print(json.dumps(figures))
    return 0 if options.quick or all(goal.is_met for goal in goals_of(figures)) else 1


def measure(stage: str, options: argparse.Namespace, overrides: list[str], root: Path) -> dict[str, Any]:
    """One stage. Raises SystemExit for the learner where the sampler, whose groups it takes, is not measured yet."""
    config = load(options.config, [*overrides, *whole_run.SETTINGS])
    groups = root / "groups"
    if stage == "run":
        num_steps = 6 if options.quick else 60
        return whole_run.measured(options.config, overrides, root / "runs", num_steps=num_steps, say=log)
    if stage == "learner":
        if not groups.exists():
            raise SystemExit("bench_stages: the learner takes the sampler's groups: --only sampler learner")
        return in_process(
            "learner",
            config,
            groups=[path.read_bytes() for path in sorted(groups.iterdir())],
            num_rounds=3 if options.quick else 12,
        )
    num_groups = 2 * config.sampler.max_num_seqs // config.sampler.group_size
    found = in_process("sampler", config, num_groups=num_groups, num_rounds=2 if options.quick else 6)
    groups.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(found.pop("groups")):
        (groups / f"{number:04}").write_bytes(data)
    return found


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def own_model(config: Path, root: Path) -> list[str]:
    """Of the configuration of the small model: where this script's own is, made where it is missing."""
    if config != CONFIG:
        return []
    models = root / "models"
    if not (models / "model" / "model.safetensors").exists():
        root.mkdir(parents=True, exist_ok=True)
        call(["make-model", str(models)], root / "make-model.log")
    return [
        f"model.path={models / 'model'}",
        f"pool.files={json.dumps([str(models / 'pool.jsonl')])}",
        f"evaluation.files={json.dumps([str(models / 'heldout.jsonl')])}",
    ]


def in_process(stage: str, config: Config, **arguments: Any) -> dict[str, Any]:
    """What a stage measures in a process of its own, which has the environment that the stage's own process has."""
    with ProcessPoolExecutor(1, get_context("spawn"), _start, (RESOURCES[stage](config).environment,)) as executor:
        return executor.submit(_measured, stage, config, arguments).result()


def _start(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _measured(stage: str, config: Config, arguments: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = import_module(f"stages.{stage}").measured(config, **arguments)
    return result


def figures_of(sampler: Mapping[str, Any], learner: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios, and what stands for itself."""
    return {
        "sampler": sampler["tokens_per_s"] / sampler["bare_tokens_per_s"],
        "learner": learner["plain_s"] / learner["step_s"],
        "learner_flops": learner["flops_per_s"] / learner["matmul_flops_per_s"],
        "publish_apply": (run["publish_s"] + run["apply_s"]) / run["step_s"],
        "start_s": run["start_s"],
        "peak_bytes": {name: figure["peak_bytes"] for name, figure in run["memory"].items()},
    }


def goals_of(figures: Mapping[str, Any]) -> list[Goal]:
    """What the figures are to be."""
    publish_apply = Goal("publish_apply", figures["publish_apply"], MAX_PUBLISH_APPLY, at_least=False)
    return [*(Goal(name, figures[name], goal) for name, goal in GOALS.items()), publish_apply]


def page_of(
    config: Path,
    sampler: Mapping[str, Any],
    learner: Mapping[str, Any],
    run: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> str:
    """The section in docs/benchmarks.md."""
    ms, giga = 1e3, 1e-9
    rows = [
        (
            "sampler against bare vLLM",
            f"{sampler['tokens_per_s']:,.0f} tokens/s, {sampler['bare_tokens_per_s']:,.0f} bare",
            f"{figures['sampler']:.3f}",
            "at least 0.95",
        ),
        (
            f"learner step of {learner['num_tokens']:,} tokens against plain torch",
            f"{ms * learner['step_s']:,.0f} ms, {ms * learner['plain_s']:,.0f} ms plain",
            f"{figures['learner']:.3f}",
            "at least 0.9",
        ),
        (
            "its FLOP/s against matrix products of its shapes",
            f"{giga * learner['flops_per_s']:.1f} GFLOP/s, {giga * learner['matmul_flops_per_s']:.1f} alone",
            f"{figures['learner_flops']:.3f}",
            "",
        ),
        (
            "publish and apply, of a step",
            f"{ms * run['publish_s']:.0f} ms and {ms * run['apply_s']:.0f} ms of {ms * run['step_s']:,.0f} ms",
            f"{figures['publish_apply']:.3f}",
            "under 0.02",
        ),
        ("start to the first trained step", f"{run['start_s']:.1f} s", "", ""),
    ]
    loop = [
        (part, kind, f"{share:.1%}") for part, shares in run["loop"].items() for kind, share in shares.items() if share
    ]
    cached = f"{sampler['cached_share']:.0%} of prompt tokens came from the prefix cache."
    parts = [
        f"`{config.name}`; medians of turns, one thread each. {cached if sampler['cached_share'] else ''}".strip(),
        table(("stage", "measured", "ratio", "goal"), rows),
        page.goals(goals_of(figures)),
        *bounded(figures, learner, run),
        f"Publishing includes the probe that proves the weights; the sampler's own proof takes "
        f"{ms * run['prove_s']:.0f} ms more, in which running sequences go on.",
        "Where the seconds of that run's loop go:",
        table(("part", "what", "share of the loop"), loop),
        "Memory of the processes of that run:",
        memory_table(run["memory"]),
    ]
    return "\n\n".join(parts)


def bounded(figures: Mapping[str, Any], learner: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """What bounds the goals that are missed, by number."""
    missed = {goal.name for goal in goals_of(figures) if not goal.is_met}
    parts = []
    if "learner" in missed:
        over = learner["step_s"] - learner["plain_s"]
        parts.append(
            f"The learner takes {1e3 * over:,.0f} ms a step more than plain torch, and reaches "
            f"{figures['learner_flops']:.0%} of the FLOP/s of matrix products of its shapes alone."
        )
    if "publish_apply" in missed:
        step_s = (run["publish_s"] + run["apply_s"]) / MAX_PUBLISH_APPLY
        parts.append(
            f"Publish and apply take {1e3 * (run['publish_s'] + run['apply_s']):.0f} ms whatever a step takes: steps "
            f"of {step_s:.1f} s and more meet the goal."
        )
    return parts


if __name__ == "__main__":
    sys.exit(main())
