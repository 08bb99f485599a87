"""How soon a held-out score is reached: this trainer in five ways, and TRL's GRPOTrainer in two.

All begin with the same weights and have the same pool, reward, group size and batch; TRL runs in an environment of its
own. Trainings leave weights with their times as they go, which are scored afterwards, off every clock. The clock runs
from the first sampling; what came before, imports and loading, is told apart. A training or score that is there is
kept: results.jsonl in --root has a line for each training, and the next call goes on. --phase train needs an idle
machine, score and report do not; --phase tune gives TRL four learning rates to choose from, before its first training.
vs_trl, vs_sync_uniform: seconds to the target over this trainer's; tokens_vs_uniform:
generated tokens. Medians over seeds. A contestant that never reaches the target counts with all it has spent, which is
a bound. Exit code 3: not all of it is there yet.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import made, page
from benchmarks.results import Results
from benchmarks.small_model import made_model
from time_to_score import outcome, pages, picture, tuning
from time_to_score.contestants import OURS, PEERS, SAID, SCORE_S, START_S, STEP_S, TRL, TRL_VLLM, Point, key
from time_to_score.scoring import Scorer, pass_at_1, scorer
from time_to_score.training import SNAPSHOTS, is_complete, places_of, shape_of, train_ours, train_trl

from stream_grpo.config import Config
from stream_grpo.config_file import load
from stream_grpo.errors import StreamGrpoError
from stream_grpo.experiments.cells import CellFailed, Series
from stream_grpo.files import read_object, sha256, write_json

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "arithmetic-cpu.toml"
SCORES = "scores.json"
OFF_THE_CLOCK = (
    "evaluation.interval=0",
    "evaluation.num_problems=0",
    "tracking.wandb=disabled",
    "tracking.dashboard=false",
)
PHASES = ("tune", "train", "score", "report")


class Bench:
    """One comparison: its cells, what is there of them, and how long the rest takes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.root = options, options.root.resolve()
        self.models = made_model(self.root)
        self.config: Config = load(CONFIG, [*self.places(), *options.set])
        self.results = Results(self.root / "results.jsonl")
        self._files = {
            "weights": sha256(self.models / "model" / "model.safetensors"),
            "pool": sha256(self.models / "pool.jsonl"),
            "heldout": sha256(self.models / "heldout.jsonl"),
        }

    def places(self) -> list[str]:
        """Overrides for the model and its problems."""
        files = {name: json.dumps([str(self.models / f"{name}.jsonl")]) for name in ("pool", "heldout")}
        return [
            f"model.path={self.models / 'model'}",
            f"pool.files={files['pool']}",
            f"evaluation.files={files['heldout']}",
        ]

    def cells(self) -> Iterator[tuple[str, int]]:
        """Seed by seed, so that what is there after a part of the time is of all contestants."""
        for seed in range(self.options.seeds):
            for name in self.options.contestants:
                yield name, seed

    def settings(self, name: str, seed: int) -> dict[str, Any]:
        """All that the training of a cell depends on, without where things lie."""
        options = self.options
        common = {"seed": seed, "every": options.every, **self._files}
        if name in PEERS:
            return common | shape_of(self.config) | {
                "num_steps": options.trl_steps,
                "learning_rate": options.trl_learning_rate or self._tuned() or self.config.learner.learning_rate,
                "num_microbatches": options.trl_microbatches,
                "num_threads": options.trl_threads,
                "use_vllm": name == TRL_VLLM,
            }  # fmt: skip
        return common | {
            "config": sha256(CONFIG),
            "num_steps": options.steps,
            "own": dict(OURS[name].settings),
            "set": list(options.set),
        }

    def find(self, name: str, seed: int) -> dict[str, Any] | None:
        """The result of a cell. Raises SystemExit for one of other settings."""
        return self.results.find(key(name, seed), {**self.settings(name, seed), **self._scored()})

    def _scored(self) -> dict[str, int]:
        return {"num_problems": self.options.problems, "num_samples": self.options.samples}

    def is_trained(self, name: str, seed: int) -> bool:
        """Whether there is a result, or weights to be scored, or it is known not to work."""
        if self.find(name, seed) is not None or self._failed(name) is not None:
            return True
        return is_complete(self.root / key(name, seed), self.settings(name, seed))

    def _failed(self, name: str) -> dict[str, Any] | None:
        """What is known of a contestant that does not work on this machine; tried again with another environment."""
        return self.results.find(f"{name}-failed")

    def expected_s(self, name: str) -> float:
        """Of one training: as the ones that are there, else as reckoned."""
        there = [read_object(path) for path in self.root.glob(f"{name}-[0-9]*/{SNAPSHOTS}")]
        if there:
            return fmean(found["spent_s"] for found in there)
        steps = self.options.trl_steps if name in PEERS else self.options.steps
        return START_S + steps * STEP_S.get(name, 1.2)

    def _tuned(self) -> float | None:
        """The best of TRL's learning rates; None where none was tried."""
        return tuning.best(
            {line["rate"]: line["curve"] for line in self.results if "rate" in line}, self.options.target
        )

    def tune(self, deadline: float) -> None:
        """TRL with each of the learning rates, half as long as a training, with a seed of its own, and its scores."""
        settings = {}
        for rate in tuning.RATES:
            about = {**self.settings(TRL, tuning.SEED), "learning_rate": rate, "num_steps": self.options.trl_steps // 2}
            folder = self.root / tuning.key(rate)
            if self.results.find(folder.name, {**about, **self._scored()}) is not None:
                continue
            settings[rate] = about
            if is_complete(folder, about):
                continue
            if time.monotonic() + self.expected_s(TRL) / 2 > deadline:
                log(f"{folder.name} would not end in time; the same command goes on")
                return
            train_trl(self.options.trl_python, about, places_of(self.config), folder, log)
        if settings:
            with self._scorer() as asked:
                for rate, about in settings.items():
                    self._curve(tuning.key(rate), about, {"rate": rate}, asked, deadline)

    def train(self, deadline: float) -> None:
        """What is missing, as far as the time suffices."""
        missing = [cell for cell in self.cells() if not self.is_trained(*cell)]
        total_s = sum(self.expected_s(name) for name, _ in missing)
        log(f"{len(missing)} trainings to make, about {total_s / 60:.0f} minutes")
        for name, seed in missing:
            if time.monotonic() + self.expected_s(name) > deadline:
                log(f"{key(name, seed)} would not end in time; the same command goes on")
                return
            if self._failed(name) is None:
                self._train(name, seed)

    def _train(self, name: str, seed: int) -> None:
        folder, settings = self.root / key(name, seed), self.settings(name, seed)
        if name in PEERS:
            packages = self.options.trl_vllm_packages if name == TRL_VLLM else None
            try:
                train_trl(self.options.trl_python, settings, places_of(self.config), folder, log, packages=packages)
            except CellFailed as error:
                if name == TRL:
                    raise
                log(str(error))
                self.results.add(f"{name}-failed", settings, {"error": cause_of(str(error))})
            return
        overrides = (
            *self.places(),
            *OFF_THE_CLOCK,
            f"run.seed={seed}",
            f"run.num_steps={self.options.steps}",
            # The weights of every step stay, for their scores.
            f"weights.keep_versions={self.options.steps + 2}",
            *self.options.set,
        )
        series = Series(file=CONFIG, overrides=overrides, root=folder)
        train_ours(series, OURS[name].settings, settings, folder, log)

    def score(self, deadline: float) -> None:
        """Give every training that has ended its curve, as far as the time suffices."""
        waiting = [
            cell
            for cell in self.cells()
            if self.find(*cell) is None and (self.root / key(*cell) / SNAPSHOTS).exists() and self.is_trained(*cell)
        ]
        if not waiting:
            return
        with self._scorer() as asked:
            for name, seed in waiting:
                about = {"contestant": name, "seed": seed}
                if not self._curve(key(name, seed), self.settings(name, seed), about, asked, deadline):
                    log("the time is up; the same command goes on")
                    return

    def _scorer(self) -> AbstractContextManager[Scorer]:
        # All held-out problems of the headline's domains can be chosen, however few the run's own evaluation takes.
        config = load(CONFIG, [*self.places(), *self.options.set, "evaluation.num_problems=100000"])
        return scorer(config, self.options.problems, self.options.samples)

    def _curve(
        self, name: str, settings: Mapping[str, Any], about: Mapping[str, Any], asked: Scorer, deadline: float
    ) -> bool:
        """Score the weights of a training, each once; whether all are scored now, and its result is kept."""
        folder = self.root / name
        left, path = read_object(folder / SNAPSHOTS), folder / SCORES
        known: dict[str, Any] = read_object(path) if path.exists() else {}
        if known.get("of") != (of := self._scored()):
            known = {"of": of, "scores": {}}
        scores = known["scores"]
        missing = [s["step"] for s in left["snapshots"] if str(s["step"]) not in scores]
        for begin in range(0, len(missing), 4):
            if time.monotonic() + 4 * SCORE_S > deadline:
                return False
            steps = missing[begin : begin + 4]
            found = asked.counts([folder / f"{step:06}.safetensors" for step in steps])
            scores |= {str(step): pass_at_1(counts) for step, counts in zip(steps, found, strict=True)}
            known["num_scored"] = len(found[0])
            write_json(path, known)
            log(f"{folder.name}: step {steps[-1]}: {scores[str(steps[-1])]:.3f}")
        curve = [Point(s["step"], s["seconds"], s["tokens"], scores[str(s["step"])]) for s in left["snapshots"]]
        kept = {field: left[field] for field in ("start_s", "spent_s", "loop", "memory", "versions") if field in left}
        self.results.add(name, {**settings, **of}, {**about, "curve": curve, "num_scored": known["num_scored"], **kept})
        return True

    def there(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Results by contestant and seed, those of earlier calls with them."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        num_seeds = 1 + max((line.get("seed", 0) for line in self.results), default=0)
        for name, seed in ((name, seed) for name in SAID for seed in range(max(num_seeds, self.options.seeds))):
            if (line := self.find(name, seed)) is not None:
                found.setdefault(name, {})[seed] = line
        return found

    def failures(self) -> dict[str, str]:
        """By contestant, why it does not work here."""
        return {name: line["error"] for name in SAID if (line := self._failed(name)) is not None}


def main() -> int:
    options = parse_arguments()
    bench = Bench(options)
    deadline = time.monotonic() + 60 * options.minutes
    try:
        if "tune" in options.phase:
            bench.tune(deadline)
        if "train" in options.phase:
            bench.train(deadline)
        if "score" in options.phase:
            bench.score(deadline)
    except StreamGrpoError as error:
        sys.exit(f"bench_time_to_score: {error}")
    found = bench.there()
    if "report" in options.phase and found:
        report(bench, found)
    is_whole = all(bench.find(*cell) is not None or cell[0] in bench.failures() for cell in bench.cells())
    return 0 if is_whole else 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder that is kept; runs/bench_time_to_score, or ..._quick")
    parser.add_argument(
        "--phase", nargs="+", choices=PHASES, default=list(PHASES[1:]), help="what is done; all but tune"
    )
    parser.add_argument("--contestants", nargs="+", choices=list(SAID), metavar="NAME", help=", ".join(SAID))
    parser.add_argument("--seeds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--steps", type=int, help="learner steps of this trainer; 120, or 8 with --quick")
    parser.add_argument("--trl-steps", type=int, help="optimizer steps of TRL; 240, or 8 with --quick")
    parser.add_argument("--trl-learning-rate", type=float, help="by default that of this trainer")
    parser.add_argument("--trl-microbatches", type=int, default=1, help="of TRL's batch: 1 is fastest with the memory")
    parser.add_argument("--trl-threads", type=int, default=2)
    parser.add_argument(
        "--trl-python", type=Path, help="of an environment with TRL; scripts/bench_time_to_score has one"
    )
    parser.add_argument("--trl-vllm-packages", type=Path, help="site-packages with vLLM, for TRL with vLLM")
    parser.add_argument("--every", type=int, help="steps between two scores; 5, or 4 with --quick")
    parser.add_argument("--target", type=float, help="held-out pass@1; 0.9, or 0.7 with --quick")
    parser.add_argument("--problems", type=int, help="held-out problems of a score; 300, or 100 with --quick")
    parser.add_argument("--samples", type=int, help="of each; 4, or 2 with --quick")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would end later")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="where the section is written, the picture beside")
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
    options.contestants = options.contestants or [
        name for name in SAID if name != TRL_VLLM or options.trl_vllm_packages is not None
    ]
    has_trl = options.trl_python is not None and options.trl_python.exists()
    needs_trl = "train" in options.phase and set(PEERS) & set(options.contestants)
    if (needs_trl or "tune" in options.phase) and not has_trl:
        parser.error("--trl-python: no environment with TRL there; leave trl out of --contestants, or give one")
    if TRL_VLLM in options.contestants and options.trl_vllm_packages is None:
        parser.error("--trl-vllm-packages: trl_vllm needs the site-packages of an environment with vLLM")
    return options


def cause_of(text: str) -> str:
    """The line of a log that names the error, else its last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(bench: Bench, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """Table, picture, page, and the line for programs."""
    options = bench.options
    curves = {name: [curve_of(line) for line in lines.values()] for name, lines in found.items()}
    tried = {line["rate"]: line["curve"] for line in bench.results if "rate" in line}
    text, compared = pages.section(found, bench.failures(), options, config=CONFIG.name, tried=tried)
    print(text)
    page.put(
        options.page,
        "bench_time_to_score",
        "Time to a score",
        text,
        is_quick=options.quick,
        command=made.command("bench_time_to_score", sys.argv[1:]),
        made=[line["made"] for lines in found.values() for line in lines.values()],
        image="time_to_score.png",
        draw=lambda path: picture.draw(curves, options.target, path),
        say=log,
    )
    if options.json:
        print(json.dumps({name: ratio.value for name, ratio in compared.items()} | bounds(compared)))


def bounds(compared: Mapping[str, outcome.Ratio]) -> dict[str, Any]:
    """Which of the ratios are bounds, and of what kind."""
    return {"bounds": {name: ratio.bound for name, ratio in compared.items() if ratio.bound}}


def curve_of(line: Mapping[str, Any]) -> Sequence[Point]:
    """As a line of results has it."""
    return [Point(*point) for point in line["curve"]]


if __name__ == "__main__":
    sys.exit(main())
