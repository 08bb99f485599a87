"""A training of this trainer in pieces: a run that is stopped when the time is up, and goes on from its checkpoint."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smollm2.clock import Clock
from stream_grpo.experiments.cells import SHOWN_LINES, CellFailed
from stream_grpo.files import read_object, write_json
from stream_grpo.metrics import MetricsReader
from stream_grpo.weights.manifest import MANIFEST_FILE, TENSORS_FILE

LINKED = "linked.json"
LOOK_S, STOP_S = 1.0, 600.0
_PR_SET_PDEATHSIG = 1


class Training:
    """One run with what is kept of it in a folder."""

    def __init__(self, folder: Path, *, every_s: float, limit_s: float, say: Callable[[str], None]) -> None:
        """`every_s`: seconds of training between two weights that are kept; `limit_s`: seconds of training in all."""
        self.folder, self.run = folder, folder / "run"
        self._every_s, self._limit_s, self._say = every_s, limit_s, say
        self._reader, self.clock = MetricsReader(self.run), Clock()
        self._linked: list[dict[str, Any]] = []
        if (folder / LINKED).exists():
            self._linked = read_object(folder / LINKED)["linked"]
        self.clock.add(self._reader.new_lines())

    @property
    def is_done(self) -> bool:
        """Whether it has had its seconds."""
        return self.clock.seconds >= self._limit_s

    def go(self, file: Path, overrides: Sequence[str], start: Path, seconds: float) -> None:
        """Begin, or go on, for so many seconds, loading included. Raises CellFailed where the run ends with an error.

        `start`: the weights that it begins with.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._linked:
            self._keep(start, 0, None, 0)
        stop_at = time.monotonic() + seconds
        if (self.run / "config.toml").exists():
            arguments = ["train", "--resume", str(self.run)]
        else:
            given = [*overrides, "run.name=run", f"run.root={self.folder.resolve()}"]
            arguments = ["train", str(file), *(part for o in given for part in ("--set", o))]
        log = self.folder / "run.log"
        self._say(f"{self.folder.name}: {arguments[1]} at {self.clock.seconds:.0f} s of training, log in {log}")
        with log.open("ab") as output:
            begun = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "stream_grpo.cli", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
            try:
                self._follow(process, stop_at)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(STOP_S)
        self._look()
        self._keep_newest(is_last=True)
        if process.returncode:
            end = log.read_bytes()[begun:].decode(errors="replace").splitlines()[-SHOWN_LINES:]
            raise CellFailed("\n".join([f"the run ended with exit code {process.returncode}; the end of {log}:", *end]))

    def _follow(self, process: subprocess.Popen[bytes], stop_at: float) -> None:
        while process.poll() is None and time.monotonic() < stop_at and not self.is_done:
            time.sleep(LOOK_S)
            self._look()
            if self.clock.at(time.time()) >= self._next_s:
                self._keep_newest()

    def _look(self) -> None:
        self.clock.add(self._reader.new_lines())

    @property
    def _next_s(self) -> float:
        """Seconds of training from which weights are kept again."""
        times = [self._time_of(linked) for linked in self._linked]
        return self._every_s * (1 + int(max(times, default=0.0) / self._every_s))

    def _time_of(self, linked: dict[str, Any]) -> float:
        return self.clock.at(linked["created_at_s"]) if linked["created_at_s"] else 0.0

    def _keep_newest(self, *, is_last: bool = False) -> None:
        """Of the published versions, where it is late enough; the last one in any case."""
        manifests = sorted(self.run.glob(f"weights/*/{MANIFEST_FILE}"), key=_version)
        if not manifests:
            return
        _, step = _version(manifests[-1])
        created_at_s = read_object(manifests[-1])["created_at_s"]
        is_new = step > max(linked["step"] for linked in self._linked)
        if is_new and (is_last or self.clock.at(created_at_s) >= self._next_s):
            self._keep(manifests[-1].parent / TENSORS_FILE, step, created_at_s, self.clock.num_tokens)

    def _keep(self, file: Path, step: int, created_at_s: float | None, num_tokens: int) -> None:
        place = self.folder / f"{step:06}.safetensors"
        place.unlink(missing_ok=True)
        try:
            os.link(file, place)  # stays when the run removes its own
        except OSError:
            shutil.copyfile(file, place)
        self._linked.append({"step": step, "created_at_s": created_at_s, "tokens": num_tokens})
        write_json(self.folder / LINKED, {"linked": self._linked})

    def snapshots(self) -> list[dict[str, Any]]:
        """Step, seconds and tokens of the weights that are kept."""
        return [
            {"step": linked["step"], "seconds": self._time_of(linked), "tokens": linked["tokens"]}
            for linked in self._linked
        ]

    def loop(self) -> dict[str, float]:
        """Where the seconds went, and what share of the tokens was trained on."""
        lines = [line for line in MetricsReader(self.run).new_lines() if line["event"] == "step"]
        tokens = lines[-1]["tokens"] if lines else {"trained": 0, "generated": 0}
        return {**self.clock.loop(), "trained_share": tokens["trained"] / max(1, tokens["generated"])}


def _version(manifest: Path) -> tuple[int, int]:
    """Branch and step."""
    branch, _, step = manifest.parent.name.partition(".")
    return int(branch), int(step)


def _end_with_parent() -> None:
    """Where this process dies the run is told to stop, and leaves a checkpoint."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def overrides_of(places: Sequence[str], rate: float, groups: int, more: Sequence[str]) -> list[str]:
    """Of a run that is scored from outside, and ended from outside."""
    return [
        *places,
        "evaluation.interval=0",
        "evaluation.num_problems=0",
        "tracking.wandb=disabled",
        "tracking.dashboard=false",
        "run.num_steps=1000000",
        f"learner.learning_rate={json.dumps(rate)}",
        f"stream.groups_per_step={groups}",
        *more,
    ]
