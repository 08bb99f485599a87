"""How soon a held-out score is reached: this trainer in five ways, and TRL's GRPOTrainer.

All begin with the same weights and have the same pool, reward, group size and batch; TRL runs in an environment of its
own. Trainings leave weights with their times as they go, which are scored when all have ended. The clock runs from the
first sampling; what came before, imports and loading, is told apart. Every training and every score is kept in --root:
the next call goes on. vs_trl, vs_sync_uniform: seconds to the target over this trainer's; tokens_vs_uniform: generated
tokens. Medians over seeds. A contestant that never reaches the target counts with all it has spent, which is a bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, table, write_section
from benchmarks.small_model import made_model
from time_to_score import outcome, picture, scoring
from time_to_score.contestants import OURS, SAID, TRL, Point
from time_to_score.training import SNAPSHOTS, train_ours, train_trl

from stream_grpo.config import Config
from stream_grpo.config_file import load
from stream_grpo.experiments.cells import Series
from stream_grpo.files import read_object
from stream_grpo.parts import RESOURCES

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "arithmetic-cpu.toml"
SCORES = "scores.json"
OFF_THE_CLOCK = (
    "evaluation.interval=0",
    "evaluation.num_problems=0",
    "tracking.wandb=disabled",
    "tracking.dashboard=false",
)


def main() -> int:
    options = parse_arguments()
    root = options.root.resolve()
    models = made_model(root)
    config = load(CONFIG, [*paths(models), *options.set])
    deadline = time.monotonic() + 60 * options.minutes
    for name, seed in cells(options):
        if time.monotonic() >= deadline:
            log("the time is up; the same command goes on")
            return 3
        train(name, seed, config, root, models, options)
    with scorer(config, options) as score:
        curves = {
            name: [curve_of(root / f"{name}-{seed}", score) for seed in range(options.seeds)]
            for name in options.contestants
        }
    report(curves, root, options)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder that is kept; runs/bench_time_to_score, or ..._quick")
    parser.add_argument("--contestants", nargs="+", choices=list(SAID), default=list(SAID), metavar="NAME")
    parser.add_argument("--seeds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--steps", type=int, help="learner steps of this trainer; 120, or 8 with --quick")
    parser.add_argument("--trl-steps", type=int, help="optimizer steps of TRL; 240, or 8 with --quick")
    parser.add_argument("--trl-learning-rate", type=float, help="by default that of this trainer")
    parser.add_argument("--trl-microbatches", type=int, default=1, help="of TRL's batch: 1 is fastest with the memory")
    parser.add_argument("--trl-threads", type=int, default=2)
    parser.add_argument(
        "--trl-python", type=Path, help="of an environment with TRL; scripts/bench_time_to_score has one"
    )
    parser.add_argument("--every", type=int, help="steps between two scores; 5, or 4 with --quick")
    parser.add_argument("--target", type=float, help="held-out pass@1; 0.9, or 0.7 with --quick")
    parser.add_argument("--problems", type=int, help="held-out problems of a score; 300, or 100 with --quick")
    parser.add_argument("--samples", type=int, help="of each; 4, or 2 with --quick")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no training after so many minutes")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the section is written, the picture beside it")
    parser.add_argument("--quick", action="store_true", help="some minutes: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="a last line {vs_trl, vs_sync_uniform, tokens_vs_uniform}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all contestants")
    options = parser.parse_args()
    whole = {"seeds": 3, "steps": 120, "trl_steps": 240, "every": 5, "target": 0.9, "problems": 300, "samples": 4}
    quick = {"seeds": 1, "steps": 8, "trl_steps": 8, "every": 4, "target": 0.7, "problems": 100, "samples": 2}
    for name, value in (quick if options.quick else whole).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.root = options.root or Path(f"runs/bench_time_to_score{'_quick' if options.quick else ''}")
    if TRL in options.contestants and not (options.trl_python and options.trl_python.exists()):
        parser.error("--trl-python: no environment with TRL there; leave trl out of --contestants, or give one")
    return options


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def paths(models: Path) -> list[str]:
    """Overrides for the model and its problems."""
    files = {name: json.dumps([str(models / f"{name}.jsonl")]) for name in ("pool", "heldout")}
    return [f"model.path={models / 'model'}", f"pool.files={files['pool']}", f"evaluation.files={files['heldout']}"]


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Seed by seed, so that what is there after a part of the time is of all contestants."""
    for seed in range(options.seeds):
        for name in options.contestants:
            yield name, seed


def train(name: str, seed: int, config: Config, root: Path, models: Path, options: argparse.Namespace) -> None:
    """One training, where it is not there yet."""
    folder = root / f"{name}-{seed}"
    if name == TRL:
        rate = options.trl_learning_rate or config.learner.learning_rate
        chosen = {
            "seed": seed,
            "num_steps": options.trl_steps,
            "every": options.every,
            "learning_rate": rate,
            "num_microbatches": options.trl_microbatches,
            "num_threads": options.trl_threads,
        }
        train_trl(options.trl_python, config, chosen, folder, say=log)
        return
    overrides = (
        *paths(models),
        *OFF_THE_CLOCK,
        f"run.seed={seed}",
        f"run.num_steps={options.steps}",
        # The weights of every step stay, for their scores.
        f"weights.keep_versions={options.steps + 2}",
        *options.set,
    )
    series = Series(file=CONFIG, overrides=overrides, root=folder)
    train_ours(series, OURS[name].settings, folder, every=options.every, say=log)


@contextmanager
def scorer(config: Config, options: argparse.Namespace) -> Iterator[Any]:
    """A function from files of weights to their scores; its process begins with the first question."""
    environment = RESOURCES["evaluation"](config).environment
    with ProcessPoolExecutor(
        1, get_context("spawn"), scoring.start, (environment, config, options.problems)
    ) as executor:
        yield lambda files: executor.submit(scoring.pass_at_1, config, files, options.samples).result()


def curve_of(folder: Path, score: Any) -> list[Point]:
    """The scores of a training, each made once."""
    snapshots, path = read_object(folder / SNAPSHOTS)["snapshots"], folder / SCORES
    known: dict[str, float] = read_object(path) if path.exists() else {}
    missing = [s["step"] for s in snapshots if str(s["step"]) not in known]
    for begin in range(0, len(missing), 4):
        steps = missing[begin : begin + 4]
        found = score([folder / f"{step:06}.safetensors" for step in steps])
        known |= {str(step): value for step, value in zip(steps, found, strict=True)}
        path.write_text(json.dumps(known))
        log(f"{folder.name}: step {steps[-1]}: {found[-1]:.3f}")
    return [Point(s["step"], s["seconds"], s["tokens"], known[str(s["step"])]) for s in snapshots]


def report(curves: Mapping[str, Sequence[Sequence[Point]]], root: Path, options: argparse.Namespace) -> None:
    """Table, picture, page, and the line for programs."""
    found = {
        name: outcome.typical([outcome.reached(curve, options.target) for curve in seeds])
        for name, seeds in curves.items()
    }
    ratios = outcome.ratios(found)
    starts = {
        name: sum(read_object(root / f"{name}-{seed}" / SNAPSHOTS)["start_s"] for seed in range(options.seeds))
        / options.seeds
        for name in curves
    }
    text = section(found, ratios, starts, root, options)
    print(text)
    image = options.page.parent / "images" / "time_to_score.png"
    drawn = root / image.name
    picture.draw(curves, options.target, drawn)
    if write_section(options.page, "bench_time_to_score", "Time to a score", text, is_quick=options.quick):
        image.parent.mkdir(parents=True, exist_ok=True)
        os.replace(drawn, image)
    else:
        log(f"{options.page}: left as it is; it has figures of a whole measurement")
    if options.json:
        bounds = [name for name, (other, *_) in outcome.RATIOS.items() if other in found and found[other].is_bound]
        print(json.dumps({**ratios, "bounds": bounds}))


def section(
    found: Mapping[str, outcome.Reached],
    ratios: Mapping[str, float | None],
    starts: Mapping[str, float],
    root: Path,
    options: argparse.Namespace,
) -> str:
    """The section in docs/benchmarks.md."""
    rows = [
        (
            SAID[name],
            f"{'over ' if reached.is_bound else ''}{reached.seconds:.0f} s",
            f"{starts[name]:.0f} s",
            f"{reached.tokens / 1000:,.0f}",
            f"{reached.step:.0f}",
        )
        for name, reached in found.items()
    ]
    compared = []
    for name, (other, of, goal) in outcome.RATIOS.items():
        value = ratios[name]
        bound = "at least " if other in found and found[other].is_bound else ""
        compared.append((f"`{name}`", of, "not known" if value is None else f"{bound}{value:.2f}", f"{goal:g}"))
    trl = ""
    if TRL in found:
        made = read_object(root / f"{TRL}-0" / SNAPSHOTS)
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        chosen = made["settings"]
        trl = f" TRL: {versions}, learning rate {chosen['learning_rate']:g}, {chosen['num_threads']} threads."
    heads = ("contestant", "to the target", "start before it", "generated tokens, thousands", "optimizer steps")
    return "\n\n".join(
        [
            f"Held-out pass@1 of {options.target:g}, {options.problems} problems, {options.samples} samples each; "
            f"medians over seeds, of which there are {options.seeds}. `{CONFIG.name}`: the same weights, pool, reward, "
            f"group size and batch for all.{trl}",
            table(heads, rows),
            table(("ratio", "of", "measured", "goal"), compared),
            "![Held-out pass@1 by seconds and by generated tokens](images/time_to_score.png)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
