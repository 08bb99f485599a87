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

from stream_grpo import keys
from stream_grpo.alarms import Alarms, SafeAlarms
from stream_grpo.config import Config
from stream_grpo.config_file import missing_files
from stream_grpo.console import Console
from stream_grpo.dashboard.commands import PageBeside
from stream_grpo.errors import ConfigError, StreamGrpoError
from stream_grpo.evaluation import ProblemScore, as_dicts, paired_rise, summarize
from stream_grpo.files import read_object, write_json
from stream_grpo.fleet import Fleet
from stream_grpo.guards import alarms, guard_lines, judge, split
from stream_grpo.heldout_tables import by_length, length_buckets, pass_at_powers, report_lines
from stream_grpo.launch import Launcher
from stream_grpo.learner.checkpoint import newest_version
from stream_grpo.local_ray import ray_session
from stream_grpo.metrics import MetricsLog, MetricsReader
from stream_grpo.model_folder import unusable
from stream_grpo.orders import Orders
from stream_grpo.parts import learner_names
from stream_grpo.parts_common import connect
from stream_grpo.parts_sampler import Evaluation, evaluation_shares
from stream_grpo.rundir import choose_heldout, held, load_prompts, prepare, with_absolute_paths
from stream_grpo.sampler.environment import environment
from stream_grpo.sinks.sink import Sinks
from stream_grpo.sinks.trackers import open_trackers
from stream_grpo.stall import StallWatch, who_waits
from stream_grpo.summary import AgeAccount, account, headline_of, loop_facts
from stream_grpo.transport.channels import read_ledger
from stream_grpo.types import spent_tokens

POLL_S = 0.2
STATUS_EVERY_S = 2.0


def train(config: Config, *, resume: bool, console: Console) -> dict[str, Any]:
    """Run it; returns what is also in `summary.json`.

    Raises StreamGrpoError with the cause where it cannot go on; SystemExit after a stop by signal: 0 after SIGTERM,
    where the learner has left a checkpoint of its last step, 130 after Ctrl-C and SIGHUP.
    """
    begun = time.time()
    config = with_absolute_paths(config)
    if not resume:
        prepare(config, resume=False, say=console.say)
    with held(config.run_dir):
        if resume:
            refuse_finished(config)
            prepare(config, resume=True, say=console.say)
        _make_keys(config)
        with _live_page(config, console):
            summary = _run(config, begun, resume, console)
    write_json(config.run_dir / "summary.json", summary)
    console.summary(summary)
    for line in (*report_lines(summary), *guard_lines(summary["guards"])):
        console.say(line)
    return summary


def _make_keys(config: Config) -> None:
    """On a cluster sockets listen beyond loopback, for those alone that have the keys of this run."""
    folder = config.run_dir / keys.FOLDER
    if config.cluster.address and not folder.exists():
        keys.make(folder)


@contextmanager
def _live_page(config: Config, console: Console) -> Iterator[None]:
    """Serve the page of this run as long as it goes on, where that is asked for."""
    if not config.tracking.dashboard:
        yield
        return
    page = PageBeside(config.run_dir, config.tracking.dashboard_port, console.say)
    try:
        yield
    finally:
        page.stop()


def refuse_finished(config: Config) -> None:
    """Raise ConfigError where a run has come to its end, summary included, and is asked for no further step."""
    try:
        summary = read_object(config.run_dir / "summary.json")
    except ValueError:
        return  # the end is still to be made
    done, newest = summary.get("steps"), newest_version(config.run_dir / "checkpoints")
    if newest is None or newest.step != done:
        return
    budget, num_tokens = config.run.max_generated_tokens, spent_tokens(summary.get("tokens") or {})
    if budget is not None and num_tokens >= budget:
        raise ConfigError(
            f"run.max_generated_tokens = {budget}: nothing to do, {num_tokens} tokens are sampled; raise it, for "
            f"example --set run.max_generated_tokens={2 * num_tokens}"
        )
    if config.run.num_steps <= done:
        raise ConfigError(
            f"run.num_steps = {config.run.num_steps}: nothing to do, {done} steps are done; "
            f"raise it, for example --set run.num_steps={done + 100}"
        )


def _run(config: Config, begun: float, resume: bool, console: Console) -> dict[str, Any]:
    run = TrainingRun(config, console, resume=resume)
    with ray_session(config), _terminable() as stopped_by:  # Ray sets a handler of its own as it starts
        try:
            return run.go(begun)
        except KeyboardInterrupt:
            failed = run.stop_all()
            console.say(f"stopped; go on with: stream-grpo train --resume {config.run_dir}")
            if signal.SIGTERM not in stopped_by:
                raise SystemExit(130) from None
            # As service managers ask for it: to stop is what is wanted, and no error.
            raise SystemExit(int("learner" in failed)) from None
        except StreamGrpoError:
            run.stop_all()
            raise


class TrainingRun:
    """The order of a run; what the parts do is theirs."""

    def __init__(self, config: Config, console: Console, *, resume: bool) -> None:
        self._config, self._console, self._resume = config, console, resume
        self._reader = MetricsReader(config.run_dir)
        self._ages = AgeAccount()
        self._heldout_during: list[dict[str, Any]] = []
        self._metrics = MetricsLog(config.run_dir, "launcher")
        self._alarms = SafeAlarms(Alarms(config.alarms, config.model.dtype), self._warn)
        for line in self._reader.new_lines():  # a resumed run has shown its earlier steps already
            self._note(line)
            self._alarms.take(line)
        self._next_status_at = 0.0
        self._stall = StallWatch(config.stream.stall_timeout_s)
        self._launcher = Launcher(config, console.say)
        self._fleet = Fleet(config, self._launcher, console.say)
        self._orders = Orders(config.run_dir, self._fleet.handlers)
        self._ranks = learner_names(config)
        self._sinks = Sinks(self._warn)
        self._sinks.open("console", lambda: console)
        open_trackers(self._sinks, config, console.say)

    def _warn(self, message: str) -> None:
        """Into the metrics, and from there to whoever shows them."""
        self._metrics.write("warning", {"message": message})

    def go(self, begun: float) -> dict[str, Any]:
        """From the first process to the summary."""
        self._place()
        before = self._evaluate("before", self._config.model.path)
        self._train()
        facts = self._end()
        after = self._evaluate("after", self._config.run_dir / "model")
        evaluation_tokens = sum(score.num_tokens for score in (*before, *after))  # those of guards too
        (before, guarded_before), (after, guarded_after) = split(before), split(after)
        heldout = {
            "evaluation_tokens": evaluation_tokens,
            **self._heldout(before, after),
            "heldout_during": self._heldout_during,
        }
        guards = self._guards(guarded_before, guarded_after, facts["steps"])
        summary = {**heldout, **guards, **facts, "wall_s": time.time() - begun}
        self._sinks.finish(summary)
        return summary

    def _place(self) -> None:
        """Start all processes; the slow ones load their libraries while the evaluation runs."""
        config, launcher = self._config, self._launcher
        launcher.place("curator", "curator", restarts=3)
        curator = launcher.built("curator")
        launcher.place("buffer", "buffer", restarts=3, curator=curator)
        buffer = launcher.built("buffer")
        launcher.run("curator", "buffer")
        addresses = {"curator": curator, "buffer": buffer}
        if config.cluster.node_root is not None:
            launcher.place("weights", "weights", restarts=3)
            addresses["weights"] = launcher.built("weights")
            launcher.run("weights")
        learner: dict[str, Any] = {"restarts": config.learner.max_restarts}
        if len(self._ranks) > 1:
            learner["team"] = "learner"
        launcher.place("learner", "learner", **learner, buffer=buffer)
        for rank, name in enumerate(self._ranks[1:], start=1):
            launcher.place(name, "follower", **learner, rank=rank)
        self._fleet.place(**addresses)

    def _evaluate(self, when: str, model_dir: Path) -> list[ProblemScore]:
        """Score a model folder, or read the scores of an earlier start of this run; those of guards too."""
        kept, of_guards = (self._config.run_dir / f"{name}-{when}.json" for name in ("evaluation", "guards"))
        if self._resume and when == "before" and kept.exists():
            return [*_read_scores(kept), *(_read_scores(of_guards) if self._config.evaluation.guards else [])]
        launcher = self._launcher
        names = [f"evaluation-{when}-{share}" for share, _ in enumerate(evaluation_shares(self._config))]
        if not names:
            return []
        for share, name in enumerate(names):
            launcher.place(name, "evaluation", restarts=1, model_dir=model_dir, share=share)
        for name in names:
            launcher.built(name)
        launcher.run(*names)
        shares: list[list[ProblemScore]] = launcher.supervise(*names, every_s=POLL_S, each_turn=self._orders.turn)
        launcher.stop(*names)
        scores = [score for share in shares for score in share]
        heldout, guarded = split(scores)
        # First of the guards: where those of the held-out problems are, both are.
        for path, of_one in ((of_guards, guarded), (kept, heldout)):
            write_json(path, [asdict(score) for score in of_one])
        if heldout:
            self._console.scores(self._scores(heldout), title=f"held-out pass@1 {when} training")
        return scores

    def _train(self) -> None:
        names = (*self._ranks, *self._fleet.present)
        for name in names:
            self._launcher.built(name)
        self._launcher.run(*names)
        self._fleet.has_begun()
        run = self._config.run
        with self._console.steps(run.num_steps, max_tokens=run.max_generated_tokens):
            self._launcher.supervise(*self._ranks, every_s=POLL_S, each_turn=self._each_turn)
            self._each_turn()

    def _each_turn(self) -> None:
        self._pass_on()
        self._orders.turn()
        now = time.monotonic()
        if now < self._next_status_at:
            return
        self._next_status_at = now + STATUS_EVERY_S
        servers = [name for name in ("buffer", "curator", "weights") if self._launcher.has(name)]
        statuses = {name: self._launcher.status(name) for name in (*self._fleet.present, *self._ranks[1:], *servers)}
        statuses["learner"] = self._launcher.status("learner")
        for name, status in statuses.items():
            # The account is the buffer's to tell; a part that is being built has nothing to tell.
            if told := {key: value for key, value in status.items() if name != "learner" or key != "ledger"}:
                self._metrics.write("status", {"part": name, **told})
        moved = f"learner at step {self._ages.step}, buffer {statuses['buffer'].get('ledger')}"
        if sentence := self._stall.look(moved, [*who_waits(statuses), *self._launcher.silent()]):
            self._console.say(sentence)

    def _pass_on(self) -> None:
        """Give the new lines to all that follow them."""
        for line in self._reader.new_lines():
            self._note(line)
            self._sinks.write(line)
            for alarm in self._alarms.take(line):
                self._metrics.write("alarm", alarm.as_fields())

    def _note(self, line: Mapping[str, Any]) -> None:
        """Keep what the summary says of a line of metrics."""
        self._ages.add(line)
        if line["event"] == "evaluation":
            self._heldout_during.append(headline_of(line))

    def _end(self) -> dict[str, Any]:
        """Stop in order, and gather what the summary says of the loop."""
        launcher = self._launcher
        samplers = [launcher.statuses(name) for name in self._fleet.names]
        now = time.time()
        learners = launcher.statuses("learner")
        # Steps that a crash took after the newest checkpoint, where none was left to make them again.
        if version := learners[-1].get("version"):
            self._ages.keep_before(version[1] + 1)
        self._fleet.end()
        buffer = connect(self._config, launcher.address("buffer"), name="launcher", peer="buffer")
        ledger = read_ledger(buffer)
        buffer.close()
        launcher.stop(*self._ranks, "weights", "buffer", "curator")
        return {
            "steps": self._ages.step,
            **loop_facts(learners, samplers, now),
            **account(ledger),
            "age": {"max": self._ages.max, "mean": self._ages.mean},
            "model_dir": str(self._config.run_dir / "model"),
        }

    def stop_all(self) -> list[str]:
        """Stop everything that runs, in order; the parts that did not end by themselves."""
        failed = self._launcher.stop_all()
        self._sinks.finish({})
        return failed

    def _scores(self, scores: Sequence[ProblemScore]) -> dict[str, dict[str, Any]]:
        return as_dicts(summarize(scores, self._config.run.seed, self._config.evaluation.domains))

    def _guards(self, before: Sequence[ProblemScore], after: Sequence[ProblemScore], step: int) -> dict[str, Any]:
        """What became of the guards, and an alarm of each that dropped, told at once to all sinks."""
        judged = judge(self._config.evaluation.guards, before, after, self._config.run.seed)
        dropped = alarms(judged, step)
        for alarm in dropped:
            self._metrics.write("alarm", alarm)
        self._pass_on()
        return {"guards": judged, "guard_alarms": dropped}

    def _heldout(self, before: Sequence[ProblemScore], after: Sequence[ProblemScore]) -> dict[str, Any]:
        if not (before and after):  # without the one, as where a resume leaves it out, the other says nothing
            names = ("before", "after", "rise", "pass_at_k", "by_length")
            return {f"heldout_{name}": None for name in names}
        chosen = set(self._config.evaluation.domains) or {score.domain for score in before}
        headline = [[score for score in scores if score.domain in chosen] for scores in (before, after)]
        return {
            "heldout_before": self._scores(before),
            "heldout_after": self._scores(after),
            "heldout_rise": paired_rise(headline[0], headline[1], self._config.run.seed).as_dict(),
            **self._heldout_tables({"before": before, "after": after}),
        }

    def _heldout_tables(self, scores: Mapping[str, Sequence[ProblemScore]]) -> dict[str, Any]:
        """pass@k by domain, and pass@1 by the length that answers had before training."""
        seed, domains = self._config.run.seed, self._config.evaluation.domains
        buckets = length_buckets(scores["before"])
        return {
            "heldout_pass_at_k": {when: pass_at_powers(found, seed, domains) for when, found in scores.items()},
            "heldout_by_length": {when: by_length(found, buckets, seed) for when, found in scores.items()},
        }


def evaluate_model(config: Config, console: Console) -> dict[str, dict[str, Any]]:
    """Score `model.path` on `evaluation.files` in this process; scores by domain, with pass@k. Raises ConfigError."""
    config = with_absolute_paths(config)
    if found := [*unusable(config), *missing_files(config)]:
        raise ConfigError("\n".join(found))
    os.environ.update(environment(config))
    evaluation = Evaluation(config, choose_heldout(config, load_prompts(config), console.say).around)
    scores = evaluation.run(threading.Event())
    rows = as_dicts(summarize(scores, config.run.seed, config.evaluation.domains))
    powers = pass_at_powers(scores, config.run.seed, config.evaluation.domains)
    return {name: {**row, "pass_at_k": powers[name]} for name, row in rows.items()}


def _read_scores(path: Path) -> list[ProblemScore]:
    try:
        return [ProblemScore(**fields) for fields in json.loads(path.read_bytes())]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: no scores in it: {error}; remove it to evaluate the model anew") from error


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and SIGHUP stop a run in the same way, the first time; while it stops they have no effect.

    Gives the signal that came. The exception alone cannot say: Ray raises another KeyboardInterrupt in its place.
    """
    stops, came = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), list[int]()

    def interrupt(number: int, frame: object) -> None:
        for name in stops:
            signal.signal(name, signal.SIG_IGN)
        came.append(number)
        raise KeyboardInterrupt

    earlier = {name: signal.signal(name, interrupt) for name in stops}
    try:
        yield came
    finally:
        for name, handler in earlier.items():
            signal.signal(name, handler)
