"""Carries a schedule of kills out on a run: waits, kills, resumes, and notes what happened."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kills import processes
from kills.schedule import ENDS_THE_RUN, Kill
from stream_grpo import failpoints
from stream_grpo.metrics import MetricsReader


class Target(Protocol):
    """A run that is killed."""

    run_dir: Path
    points: Path
    """Folder that arms failpoints."""
    poll_s: float
    """How often it is looked at."""
    patience_s: float
    """How long steps, points and ends of the run are waited for at most."""

    def start(self, *, resume: bool) -> int:
        """Start the launcher; its process id."""

    def ended(self) -> int | None:
        """The exit code of the launcher, or None while it lives; negative: killed by that signal."""

    def output(self) -> str:
        """What the launcher has said last."""

    def note(self) -> None:
        """Look at the journal before a kill, as a witness of what it must still have afterwards."""


class ChaosError(Exception):
    """The run did not take a kill as it must; the message says which and how."""


@dataclass
class Tally:
    """What was killed, and how."""

    num_kills: int = 0
    by_process: Counter[str] = field(default_factory=Counter)
    by_point: Counter[str] = field(default_factory=Counter)
    num_resumes: int = 0


class Driver:
    """Kills one run."""

    def __init__(self, target: Target, seed: int, say: Callable[[str], None]) -> None:
        self._target, self._rng, self._say = target, random.Random(seed), say
        self._reader = MetricsReader(target.run_dir)
        self._variable = f"{failpoints.VARIABLE}={target.points}"
        self._launcher = 0
        self.num_steps = 0
        """Learner steps so far, those made again included."""
        self.step = 0
        """The newest step."""
        self.tally = Tally()

    def begin(self) -> None:
        """Start the run."""
        self._launcher = self._target.start(resume=False)

    def carry_out(self, kills: Sequence[Kill], deadline: float) -> None:
        """Kill by kill, until all are done or `deadline` (monotonic) has passed. Raises ChaosError."""
        for kill in kills:
            if time.monotonic() > deadline:
                return
            began, step = time.monotonic(), self.step
            self.wait_for_steps(kill.after_steps)
            time.sleep(kill.delay_s)
            self._target.note()
            self._at_point(kill) if kill.point else self._plain(kill)
            self.tally.num_kills += 1
            self.tally.by_process[kill.who] += 1
            if kill.point:
                self.tally.by_point[kill.point] += 1
            if kill.who in ENDS_THE_RUN:
                self._resume(kill)
            where = f"{kill.who} at {kill.point}" if kill.point else kill.who
            took_s = time.monotonic() - began
            self._say(f"{self.tally.num_kills:4}  {where}, step {step} to {self.step}, {took_s:.1f} s")

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        """Until it holds. Raises ChaosError where the run ends before, or patience does."""
        deadline = time.monotonic() + self._target.patience_s
        while not holds():
            if (code := self._target.ended()) is not None:
                raise ChaosError(f"waiting for {what}: the run ended with {code}: {self._target.output()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"{what}: not within {self._target.patience_s:.0f} s: {self._target.output()}")
            time.sleep(self._target.poll_s)

    def look(self) -> None:
        """Read the steps that were made since the last look."""
        for line in self._reader.new_lines():
            if line["event"] == "step":
                self.num_steps, self.step = self.num_steps + 1, line["step"]

    def end_all(self) -> None:
        """Leave no process behind, however the kills came out."""
        if self._target.ended() is None:
            processes.end([self._launcher])
        processes.end(self._pids("all"))

    def wait_for_end(self) -> int:
        """Until the run has ended; its exit code. Raises ChaosError where it does not end in time."""
        deadline = time.monotonic() + self._target.patience_s
        while (code := self._target.ended()) is None:
            if time.monotonic() > deadline:
                raise ChaosError(f"the run has not ended in {self._target.patience_s:.0f} s: {self._target.output()}")
            time.sleep(self._target.poll_s)
        self.look()
        return code

    def wait_for_step(self, step: int) -> None:
        """Until the learner has made this step. Raises ChaosError."""

        def reached() -> bool:
            self.look()
            return self.step >= step

        self.wait_for(reached, f"step {step}")

    def wait_for_steps(self, count: int) -> None:
        """Until the learner has made so many more steps, from now on. Raises ChaosError."""
        self.look()
        goal = self.num_steps + count

        def reached() -> bool:
            self.look()
            return self.num_steps >= goal

        self.wait_for(reached, f"{count} more steps")

    def _at_point(self, kill: Kill) -> None:
        points = self._target.points
        failpoints.arm(points, kill.point, kill.passage)
        try:
            self.wait_for(lambda: not failpoints.is_armed(points, kill.point), f"a passage of {kill.point}")
        except ChaosError:
            failpoints.disarm(points, kill.point)
            raise

    def _plain(self, kill: Kill) -> None:
        if kill.who == "launcher":
            processes.end([self._launcher])
            return
        # What is about to start has no process yet.
        self.wait_for(lambda: bool(self._pids(kill.who)), f"a process of {kill.who}")
        pids = self._pids(kill.who)
        if kill.who in ("sampler", "reward worker"):
            pids = [self._rng.choice(pids)] if pids else []
        elif kill.who == "all":
            pids = [self._launcher, *pids]
        processes.end(pids)

    def _pids(self, who: str) -> list[int]:
        found = processes.find(self._target.run_dir, self._variable)
        return processes.pids_of(who, found, self._target.run_dir)

    def _resume(self, kill: Kill) -> None:
        """After a kill that ends the run: it ends, with an exit code other than 0, and is started again."""
        code = self.wait_for_end()
        if code == 0:
            raise ChaosError(f"{kill.who} was killed, and the run ended with 0: {self._target.output()}")
        if code > 0:
            self._say(f"      {self._target.output().strip().splitlines()[-1:]}")
        self._launcher = self._target.start(resume=True)
        self.tally.num_resumes += 1
