"""One run from its configuration to its summary: prepare, evaluate, train, evaluate again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from curator.wire import Client
from stream_grpo.config import Config
from stream_grpo.console import Console
from stream_grpo.evaluation import ProblemScore, as_dicts, paired_rise, summarize
from stream_grpo.launch import Launcher, ray_session
from stream_grpo.metrics import MetricsLog, MetricsReader, WandbSink
from stream_grpo.parts import Evaluation
from stream_grpo.rundir import choose_heldout, prepare, with_absolute_paths, write_json
from stream_grpo.sampler.environment import environment
from stream_grpo.transport.channels import read_ledger

POLL_S = 0.2
STATUS_EVERY_S = 2.0


def train(config: Config, *, resume: bool, console: Console) -> dict[str, Any]:
    """Run it; returns what is also in `summary.json`.

    Raises StreamGrpoError with the cause where it cannot go on, SystemExit(130) after Ctrl-C or SIGTERM.
    """
    begun = time.time()
    config = prepare(config, resume=resume, say=console.say)
    run = TrainingRun(config, console, resume=resume)
    with _terminable(), ray_session(config):
        try:
            summary = run.go(begun)
        except KeyboardInterrupt:
            run.stop_early()
            console.say(f"stopped; go on with: stream-grpo train --resume {config.run_dir}")
            raise SystemExit(130) from None
    write_json(config.run_dir / "summary.json", summary)
    console.summary(summary)
    return summary


class TrainingRun:
    """The order of a run; what the parts do is theirs."""

    def __init__(self, config: Config, console: Console, *, resume: bool) -> None:
        self._config, self._console, self._resume = config, console, resume
        self._reader = MetricsReader(config.run_dir)
        # A resumed run has shown its earlier steps already.
        self._ignored_lines = len(list(self._reader.new_lines()))
        self._metrics = MetricsLog(config.run_dir, "launcher")
        self._next_status_at = 0.0
        self._launcher = Launcher(config, console.say)
        self._samplers = [f"sampler-{i}" for i in range(config.sampler.num_samplers)]
        self._wandb = WandbSink(
            config.run_dir,
            config.run.name,
            config.tracking.wandb_project,
            config.tracking.wandb,
            config.model_dump(mode="json"),
        )

    def go(self, begun: float) -> dict[str, Any]:
        """From the first process to the summary."""
        self._place()
        before = self._evaluate("before", self._config.model.path)
        self._train()
        facts = self._end()
        after = self._evaluate("after", self._config.run_dir / "model")
        summary = {**self._heldout(before, after), **facts, "wall_s": time.time() - begun}
        self._wandb.finish(summary)
        return summary

    def _place(self) -> None:
        """Start all processes; the slow ones load their libraries while the evaluation runs."""
        config, launcher = self._config, self._launcher
        launcher.place("curator", "curator", restarts=3)
        curator = launcher.built("curator")
        launcher.place("buffer", "buffer", restarts=3, curator=curator)
        buffer = launcher.built("buffer")
        launcher.run("curator", "buffer")
        launcher.place("learner", "learner", restarts=config.learner.max_restarts, buffer=buffer)
        for name in self._samplers:
            restarts = config.sampler.max_restarts
            launcher.place(name, "sampler", restarts=restarts, sampler_id=name, curator=curator, buffer=buffer)

    def _evaluate(self, when: str, model_dir: Path) -> list[ProblemScore]:
        """Score a model folder, or read the scores of an earlier start of this run."""
        kept = self._config.run_dir / f"evaluation-{when}.json"
        if self._resume and when == "before" and kept.exists():
            return _read_scores(kept)
        if not self._config.evaluation.num_problems or not self._config.evaluation.files:
            return []
        name = f"evaluation-{when}"
        self._launcher.place(name, "evaluation", model_dir=model_dir)
        self._launcher.built(name)
        self._launcher.run(name)
        scores: list[ProblemScore] = self._launcher.result(name)
        self._launcher.stop(name)
        write_json(kept, [asdict(score) for score in scores])
        self._console.scores(self._scores(scores), title=f"held-out pass@1 {when} training")
        return scores

    def _train(self) -> None:
        for name in ("learner", *self._samplers):
            self._launcher.built(name)
        self._launcher.run("learner", *self._samplers)
        with self._console.steps(self._config.run.num_steps):
            self._launcher.supervise("learner", POLL_S, self._each_turn)
            self._each_turn()

    def _each_turn(self) -> None:
        for line in self._reader.new_lines():
            if line["event"] == "step":
                self._console.step(line, self._config.run.num_steps)
                self._wandb.log(line["step"], line)
            elif line["event"] == "warning":
                self._console.say(f"{line['source']}: {line['message']}")
        now = time.monotonic()
        if now < self._next_status_at:
            return
        self._next_status_at = now + STATUS_EVERY_S
        for name in (*self._samplers, "buffer", "curator"):
            self._metrics.write("status", {"part": name, **self._launcher.status(name)})

    def _end(self) -> dict[str, Any]:
        """Stop in order, and gather what the summary says of the loop."""
        launcher = self._launcher
        statuses = [status for name in self._samplers for status in launcher.statuses(name)]
        now = time.time()
        learner = launcher.status("learner")
        launcher.stop(*self._samplers)
        buffer = Client(launcher.parts["buffer"].address, name="launcher", peer="buffer")
        ledger = read_ledger(buffer)
        buffer.close()
        launcher.stop("learner", "buffer", "curator")
        return _loop_facts(self._config, learner, statuses, ledger, sampled_after_s=now - learner["last_step_at"])

    def stop_early(self) -> None:
        """Stop everything that runs: the learner first, since it writes a checkpoint that the buffer must note."""
        self._launcher.stop("learner", *self._samplers, "buffer", "curator")

    def _scores(self, scores: Sequence[ProblemScore]) -> dict[str, dict[str, Any]]:
        return as_dicts(summarize(scores, self._config.run.seed, self._config.evaluation.domains))

    def _heldout(self, before: Sequence[ProblemScore], after: Sequence[ProblemScore]) -> dict[str, Any]:
        if not before:
            return {"heldout_before": {}, "heldout_after": {}, "heldout_rise": None}
        chosen = set(self._config.evaluation.domains) or {score.domain for score in before}
        headline = [[score for score in scores if score.domain in chosen] for scores in (before, after)]
        return {
            "heldout_before": self._scores(before),
            "heldout_after": self._scores(after),
            "heldout_rise": paired_rise(headline[0], headline[1], self._config.run.seed).as_dict(),
        }


def _loop_facts(
    config: Config,
    learner: Mapping[str, Any],
    samplers: Sequence[Mapping[str, Any]],
    ledger: Mapping[str, Any],
    sampled_after_s: float,
) -> dict[str, Any]:
    """Overlap and accounts of the loop.

    overlap = (busy sampler + busy learner - wall) / the smaller of the two; wall runs from the first engine step with
    running requests to the end of the last learner step. What samplers did after that end is taken off as if they had
    been busy all the time, which can only lower the overlap.
    """
    first = min((status["first_busy_at"] for status in samplers if status.get("first_busy_at")), default=0.0)
    wall_s = max(0.0, learner["last_step_at"] - first) if first else 0.0
    sampler_s = max(0.0, sum(status.get("busy_s", 0.0) for status in samplers) - sampled_after_s)
    learner_s = learner["busy_s"]
    smaller = min(sampler_s, learner_s)
    tokens = dict(ledger["tokens"])
    gaps = [status["probe_gap"] for status in samplers if status.get("probe_gap")]
    num_probed = sum(gap["num_tokens"] for gap in gaps)
    return {
        "steps": learner["version"][1],
        "loop_wall_s": wall_s,
        "busy_s": {"sampler": sampler_s, "learner": learner_s},
        "overlap": (sampler_s + learner_s - wall_s) / smaller if smaller else 0.0,
        "tokens": tokens,
        "trained_share": tokens["trained"] / tokens["generated"] if tokens["generated"] else 0.0,
        "groups": dict(ledger["groups"]),
        "age": {"max": learner["age_max"], "mean": learner["age_mean"]},
        "probe_gap": {
            "max": max((gap["max"] for gap in gaps), default=0.0),
            "mean": sum(gap["mean"] * gap["num_tokens"] for gap in gaps) / num_probed if num_probed else 0.0,
            "num_tokens": num_probed,
        },
        "ledger_closes": bool(ledger["closes"]),
        "model_dir": str(config.run_dir / "model"),
    }


def evaluate_model(config: Config, console: Console) -> dict[str, dict[str, Any]]:
    """Score `model.path` on `evaluation.files` in this process; returns the scores by domain. Raises ConfigError."""
    config = with_absolute_paths(config)
    os.environ.update(environment(config))
    evaluation = Evaluation(config, choose_heldout(config, console.say))
    scores = evaluation.run(threading.Event())
    return as_dicts(summarize(scores, config.run.seed, config.evaluation.domains))


def _read_scores(path: Path) -> list[ProblemScore]:
    return [ProblemScore(**fields) for fields in json.loads(path.read_text())]


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
