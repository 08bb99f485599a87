"""SmolLM2-135M-Instruct trained for an hour on two cores, in pieces, by this trainer and by TRL's GRPOTrainer.

Both begin with the same weights and have the same problems, reward, group size and held-out problems. A training is
stopped when --minutes of a call are over, leaves a checkpoint, and the same command goes on; its clock runs from the
first sampling of each piece to its last step, and stands still while things are loaded or saved. Weights are kept every
few minutes and scored afterwards. --only names what is trained: ours, trl, or trials, four of ten minutes for each,
which choose learning rate and batch of what is begun later. results.jsonl in --root has a line for each that is scored.
step_vs_trl: seconds of a step of as many rollouts. Exit code 3: not all of it is there yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import made, page
from benchmarks.results import Results, differing
from benchmarks.watch import Figures, watched_memory
from smollm2 import pages, picture
from smollm2.cells import OURS, TRL, Cell, Score, chosen, trials
from smollm2.ours import Training, overrides_of
from time_to_score.scoring import Counts, Scorer, pass_at_1, scorer
from time_to_score.training import call_trl, places_of, shape_of

from stream_grpo.config import Config
from stream_grpo.config_file import load
from stream_grpo.errors import ConfigError, StreamGrpoError
from stream_grpo.evaluation import bootstrap_interval
from stream_grpo.files import read_object, sha256, write_json

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "smollm2-135m-cpu.toml"
SETTINGS, SCORES, MEMORY, TRL_MADE = "settings.json", "scores.json", "memory.json", "trl.json"
LEAST_S, END_S, SCORE_S = 180.0, 60.0, 120.0
"""A piece shorter than this is not begun; of each the end, for the step in hand and a checkpoint; one score."""
PHASES = ("train", "score", "report")
NUM_ANSWERS = 12


class Bench:
    """The trainings, what is there of them, and what they score."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.root = options, options.root.resolve()
        self.config: Config = load(CONFIG, [*self._places(), *options.set])
        weights = options.model.resolve() / "model.safetensors"
        for needed in (weights, *self.config.pool.files, *self.config.evaluation.files):
            if not needed.exists():
                raise ConfigError(
                    f"{needed} is missing: scripts/fetch_smollm2 and scripts/make_smollm2_problems make it"
                )
        self._weights = weights
        self.results = Results(self.root / "results.jsonl")

    def _places(self) -> list[str]:
        options = self.options
        files = {
            name: json.dumps([str((options.problems / f"{name}.jsonl").resolve())]) for name in ("pool", "heldout")
        }
        return [
            f"model.path={options.model.resolve()}",
            f"pool.files={files['pool']}",
            f"evaluation.files={files['heldout']}",
        ]

    def cells(self) -> list[Cell]:
        """What is asked for, in order."""
        found: list[Cell] = []
        for name in self.options.only:
            found += trials(self.options.trial_minutes) if name == "trials" else [self.final(name)]
        return found

    def final(self, trainer: str) -> Cell:
        """The long training: with what it was begun with, else what is given, else what the trials chose."""
        options, known = self.options, self._known(trainer)
        default = (self.config.learner.learning_rate, self.config.stream.groups_per_step)
        scores = {line["key"]: line["curve"][-1][3] for line in self.results if "-trial-" in line["key"]}
        rate, groups = chosen(trainer, scores, default)
        given = options.learning_rate if trainer == OURS else options.trl_learning_rate
        if known:
            rate, groups = known["learning_rate"], known["groups_per_step"]
        return Cell(trainer, trainer, given or rate, groups, options.train_minutes)

    def _known(self, name: str) -> dict[str, Any]:
        path = self.root / name / SETTINGS
        if path.exists():
            return read_object(path)
        line = self.results.find(name)
        return {} if line is None else dict(line["settings"])

    def settings(self, cell: Cell) -> dict[str, Any]:
        """All that a training depends on, without where things lie and how long it takes."""
        options = self.options
        own = {
            "weights": sha256(self._weights),
            "pool": [sha256(path) for path in self.config.pool.files],
            "learning_rate": cell.learning_rate,
            "groups_per_step": cell.groups_per_step,
        }
        if cell.trainer == OURS:
            return {**own, "config": sha256(CONFIG), "set": list(options.set)}
        shape = {**shape_of(self.config), "groups_per_step": cell.groups_per_step}
        more = {"seed": 0, "num_microbatches": options.trl_microbatches, "num_threads": options.trl_threads}
        return {**shape, **own, **more, "num_steps": 1_000_000}

    def _check(self, cell: Cell) -> None:
        """Keep what a training is begun with. Raises SystemExit where it was begun with something else."""
        settings, path = self.settings(cell), self.root / cell.name / SETTINGS
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, settings)
        elif said := differing(read_object(path), settings):
            sys.exit(f"train_smollm2: {path.parent} was begun with other settings ({said}); choose another --root")

    def _ours(self, cell: Cell) -> Training:
        folder, minutes = self.root / cell.name, cell.minutes
        return Training(folder, every_s=60 * self.options.every_minutes, limit_s=60 * minutes, say=log)

    def seconds(self, cell: Cell) -> float:
        """Of training that a cell has had."""
        if cell.trainer == OURS:
            return self._ours(cell).clock.seconds
        path = self.root / cell.name / TRL_MADE
        return read_object(path)["seconds"] if path.exists() else 0.0

    def is_trained(self, cell: Cell) -> bool:
        """Whether a cell has had its minutes, or is scored already."""
        is_scored = self.results.find(cell.name, self.settings(cell)) is not None
        return is_scored or self.seconds(cell) >= 60 * cell.minutes

    def train(self, deadline: float) -> None:
        """Go on with what is missing, one after the other."""
        for cell in self.cells():
            if self.is_trained(cell):
                continue
            self._check(cell)
            left_s = deadline - time.monotonic()
            if left_s < LEAST_S:
                log("the time is up; the same command goes on")
                return
            with self._memory_of(cell):
                if cell.trainer == OURS:
                    given = overrides_of(self._places(), cell.learning_rate, cell.groups_per_step, self.options.set)
                    self._ours(cell).go(CONFIG, given, self._weights, left_s - END_S)
                else:
                    self._trl(cell, left_s - END_S)
            log(f"{cell.name}: {self.seconds(cell) / 60:.1f} of {cell.minutes:g} minutes of training")

    def _trl(self, cell: Cell, left_s: float) -> None:
        stop_after_s = min(left_s, 60 * cell.minutes - self.seconds(cell))
        request = {
            **self.settings(cell),
            **places_of(self.config),
            "every_s": 60 * self.options.every_minutes,
            "stop_after_s": stop_after_s,
            "save_every": 10,
        }
        call_trl(self.options.trl_python, request, self.root / cell.name, log)

    @contextmanager
    def _memory_of(self, cell: Cell) -> Iterator[None]:
        """Keep the figures of the longest piece, with the largest peaks of all."""
        with watched_memory() as found:
            yield
        path = self.root / cell.name / MEMORY
        before: Figures = read_object(path) if path.exists() else {}
        write_json(path, merged(before, found))

    def score(self, deadline: float) -> None:
        """What the kept weights of the trainings that have had their minutes score, each once."""
        waiting = [cell for cell in self.cells() if self.results.find(cell.name) is None and self.is_trained(cell)]
        if not waiting:
            return
        config = load(CONFIG, [*self._places(), *self.options.set, "evaluation.num_problems=100000"])
        with scorer(config, self.options.heldout, self.options.samples) as asked:
            for cell in waiting:
                if not self._score(cell, asked, deadline):
                    log("the time is up; the same command goes on")
                    return

    def _score(self, cell: Cell, asked: Scorer, deadline: float) -> bool:
        folder = self.root / cell.name
        left = self._left(cell)
        path = folder / SCORES
        known: dict[str, Counts] = read_object(path) if path.exists() else {}
        for snapshot in left["snapshots"]:
            if (name := str(snapshot["step"])) in known:
                continue
            if time.monotonic() + SCORE_S > deadline:
                return False
            (known[name],) = asked.counts([folder / f"{snapshot['step']:06}.safetensors"])
            write_json(path, known)
            log(f"{cell.name}: step {name}: {pass_at_1(known[name]):.3f}")
        curve = [scored(s, known[str(s["step"])]) for s in left["snapshots"]]
        first, last = (known[str(left["snapshots"][place]["step"])] for place in (0, -1))
        values: dict[str, Any] = {"trainer": cell.trainer, "curve": curve, "rise": rise(first, last)}
        values |= {"num_scored": len(first), "num_samples": self.options.samples, "loop": left["loop"]}
        values |= {"versions": left["versions"], "memory": read_object(folder / MEMORY), "minutes": cell.minutes}
        if "-trial-" not in cell.name:
            before, after = (asked.answers(folder / f"{curve[place].step:06}.safetensors") for place in (0, -1))
            values["answers"] = pages.side_by_side(before, after, NUM_ANSWERS)
        self.results.add(cell.name, self.settings(cell), values)
        for point in curve[1:-1]:
            (folder / f"{point.step:06}.safetensors").unlink(missing_ok=True)
        return True

    def _left(self, cell: Cell) -> dict[str, Any]:
        """What a training has left: `snapshots`, `loop`, `versions`."""
        if cell.trainer == OURS:
            training = self._ours(cell)
            return {"snapshots": training.snapshots(), "loop": training.loop(), "versions": {}}
        return read_object(self.root / cell.name / TRL_MADE)


def scored(snapshot: Mapping[str, Any], found: Counts) -> Score:
    """A point of the curve with its interval."""
    rates = np.array([passed / num for _, (passed, num) in sorted(found.items()) if num])
    low, high = bootstrap_interval(rates, 0)
    return Score(snapshot["step"], snapshot["seconds"], snapshot["tokens"], float(rates.mean()), low, high)


def rise(before: Counts, after: Counts) -> list[float]:
    """Mean rise over problems, each paired with itself, and its 95 % interval."""
    both = [(before[p], after[p]) for p in sorted(before) if before[p][1] and after.get(p, [0, 0])[1]]
    differences = np.array([a[0] / a[1] - b[0] / b[1] for b, a in both])
    return [float(differences.mean()), *bootstrap_interval(differences, 0)]


def merged(before: Figures, found: Figures) -> Figures:
    """Of two pieces: the larger peak of each process, and the growth in the longer of the two."""
    names = {*before, *found}
    pieces = {name: [piece[name] for piece in (before, found) if name in piece] for name in names}
    return {
        name: {
            **max(of_name, key=lambda figure: figure["span_s"] or 0.0),
            "peak_bytes": max(figure["peak_bytes"] or 0.0 for figure in of_name),
        }
        for name, of_name in pieces.items()
    }


def main() -> int:
    options = parse_arguments()
    deadline = time.monotonic() + 60 * options.minutes
    try:
        bench = Bench(options)
        if "train" in options.phase:
            bench.train(deadline)
        if "score" in options.phase:
            bench.score(deadline)
    except StreamGrpoError as error:
        sys.exit(f"train_smollm2: {error}")
    lines = {line["key"]: line for line in bench.results}
    if "report" in options.phase and lines:
        report(options, lines)
    return 0 if all(cell.name in lines for cell in bench.cells()) else 3


def report(options: argparse.Namespace, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """The section, its picture, and the line for programs."""
    text, step_vs_trl = pages.section(lines, config=CONFIG.name)
    print(text)
    curves = {name: [Score(*point) for point in lines[name]["curve"]] for name in (OURS, TRL) if name in lines}
    page.put(
        options.page,
        "train_smollm2",
        "A pretrained model, an hour on two cores",
        text,
        is_quick=options.quick,
        command=made.command("train_smollm2", sys.argv[1:]),
        made=[line["made"] for line in lines.values()],
        image="smollm2.png",
        draw=lambda path: picture.draw(curves, path),
        say=log,
    )
    if options.json:
        told = {name: {"rise": line["rise"], "score": line["curve"][-1][3]} for name, line in lines.items()}
        print(json.dumps({"step_vs_trl": step_vs_trl, **told}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("trials", OURS, TRL), default=[OURS, TRL], help="what is trained")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES), help="what is done; all of it")
    parser.add_argument("--root", type=Path, help="folder that is kept; runs/train_smollm2, or ..._quick")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m", help="of scripts/fetch_smollm2")
    parser.add_argument(
        "--problems", type=Path, default=ROOT / "models" / "smollm2-135m-problems", help="of make_smollm2_problems"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of this call, loading included")
    parser.add_argument("--train-minutes", type=float, help="of training, each of the two; 60, or 2 with --quick")
    parser.add_argument("--trial-minutes", type=float, help="of training, each trial; 10, or 1 with --quick")
    parser.add_argument("--every-minutes", type=float, help="of training between two scores; 10, or 2 with --quick")
    parser.add_argument("--learning-rate", type=float, help="of this trainer; by default of the best trial, or config")
    parser.add_argument("--trl-learning-rate", type=float, help="likewise of TRL")
    parser.add_argument("--trl-microbatches", type=int, default=4, help="of TRL's batch, whose activations are 12 GB")
    parser.add_argument("--trl-threads", type=int, default=2)
    parser.add_argument("--trl-python", type=Path, help="of an environment with TRL; scripts/train_smollm2 has one")
    parser.add_argument("--heldout", type=int, help="held-out problems of a score; 320, or 18 with --quick")
    parser.add_argument("--samples", type=int, help="of each; 2")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="where the section is written, the picture beside")
    parser.add_argument("--quick", action="store_true", help="some minutes: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="a last line {step_vs_trl, ours, trl}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of this trainer's run, repeat")
    options = parser.parse_args()
    whole = {"train_minutes": 60.0, "trial_minutes": 10.0, "every_minutes": 10.0, "heldout": 320, "samples": 2}
    quick = {"train_minutes": 2.0, "trial_minutes": 1.0, "every_minutes": 2.0, "heldout": 18, "samples": 2}
    for name, value in (quick if options.quick else whole).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.root = options.root or Path(f"runs/train_smollm2{'_quick' if options.quick else ''}")
    has_trl = options.trl_python is not None and options.trl_python.exists()
    if "train" in options.phase and {TRL, "trials"} & set(options.only) and not has_trl:
        parser.error("--trl-python: no environment with TRL there; --only ours, or give one")
    return options


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
