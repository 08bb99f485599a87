"""A real run on the small model as a target of kills: vLLM, DeepSpeed and Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kills.audit import IN_FLIGHT, read_log
from stream_grpo import failpoints

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic-cpu.toml"
SETTINGS = (
    "run.num_steps=1000000",
    "sampler.group_size=4",
    "sampler.max_num_seqs=64",
    "sampler.kv_cache_bytes=67108864",
    "sampler.max_restarts=1000",
    "stream.groups_per_step=4",
    "learner.checkpoint_interval=2",
    "learner.max_restarts=1000",
    "curator.flush_outcomes=4",
    "evaluation.num_problems=0",
    "evaluation.interval=0",
    "tracking.wandb=disabled",
    "tracking.dashboard=false",
)
"""Small steps and many checkpoints; nothing but the stream."""
POOLED_SHARE = 4
"""The answer of every fourth problem is checked by a reward worker."""


class RealTarget:
    """`stream-grpo train` in a session of its own."""

    poll_s = 0.05
    patience_s = 240.0

    def __init__(self, root: Path, model: Path, seed: int) -> None:
        """`model`: the folder of `make-model`."""
        self.run_dir, self.points = root / "run", root / "points"
        self.points.mkdir(parents=True)
        pool = root / "pool.jsonl"
        pool.write_text("".join(_pooled((model / "pool.jsonl").read_text().splitlines())))
        paths = (f"run.root={root}", "run.name=run", f"model.path={model / 'model'}", f'pool.files=["{pool}"]')
        self._settings = (*SETTINGS, *paths, "evaluation.files=[]", f"run.seed={seed}")
        self._log, self._witness = root / "output.log", root / "witness.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool) -> int:
        """Start the command; its process id."""
        again = ["--resume", str(self.run_dir)]
        self._process = self._begin(again if resume else [str(CONFIG), *_set(self._settings)])
        return self._process.pid

    def _begin(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "stream_grpo.cli", "train", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, failpoints.VARIABLE: str(self.points)},
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """Its exit code, or None while it lives."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        """As a supervisor of services does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def finish(self, num_steps: int) -> int:
        """Resume once more, to the last step and the summary; the exit code."""
        self._process = self._begin(["--resume", str(self.run_dir), *_set([f"run.num_steps={num_steps}"])])
        return self._process.wait(self.patience_s)

    def output(self) -> str:
        """The last lines of the run."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def note(self) -> None:
        """Groups that the log names are durable: they must be there ever after."""
        durable = [row for row in read_log(self.run_dir / "journal") if row["length"] and row["kind"] not in IN_FLIGHT]
        self._witness.write_text("".join(f"{row['group_id']}\n" for row in durable))

    def witnesses(self) -> list[Path]:
        """Files of the groups that must be in the journal."""
        return [self._witness]


def _set(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _pooled(lines: Sequence[str]) -> list[str]:
    """The rows of the small model's pool, every so many of them with a verifier that runs in a worker."""
    rows = [json.loads(line) for line in lines]
    for row in rows[::POOLED_SHARE]:
        row |= {"verifier": "regex", "answer": f"{row['answer_prefix']}{row['answer']}$"}
    return [json.dumps(row) + "\n" for row in rows]
