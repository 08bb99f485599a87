"""The trainings: each leaves weights with their times, step by step, in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stream_grpo.config import Config
from stream_grpo.experiments.cells import SHOWN_LINES, Cell, CellFailed, Series
from stream_grpo.files import read_object
from stream_grpo.metrics import MetricsReader
from stream_grpo.weights.manifest import MANIFEST_FILE, TENSORS_FILE

SNAPSHOTS = "snapshots.json"
"""Written last: a folder that has it is complete."""
RUNNER = Path(__file__).parent / "trl_run.py"


def kept(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether this training is complete. What was cut off is removed: a clock cannot go on.

    Raises SystemExit where the folder is of other settings.
    """
    if not (folder / SNAPSHOTS).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return False
    if (found := read_object(folder / SNAPSHOTS)["settings"]) != settings:
        differing = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
        raise SystemExit(f"{folder}: made with other settings ({', '.join(differing)}); choose another --root")
    return True


def train_ours(
    series: Series, settings: Mapping[str, str], folder: Path, *, every: int, say: Callable[[str], None]
) -> None:
    """A run of this trainer, which keeps every version it publishes; each `every` steps one is left."""
    noted = {**settings, "overrides": list(series.overrides), "every": every}
    if kept(folder, noted):
        say(f"{folder.name}: kept")
        return
    folder.mkdir(parents=True)
    own = Series(file=series.file, overrides=series.overrides, root=folder)
    begun_s = time.time()
    run = own.made(Cell("run", settings), lambda text: say(f"{folder.name}/{text}"))
    lines = list(MetricsReader(run).new_lines())
    began_s = min(line["first_busy_at"] for line in lines if line["event"] == "status" and line.get("first_busy_at"))
    tokens = {0: 0} | {line["step"]: line["tokens"]["generated"] for line in lines if line["event"] == "step"}
    snapshots = []
    for manifest in sorted(run.glob(f"weights/*/{MANIFEST_FILE}")):
        version = read_object(manifest)
        step = int(manifest.parent.name.partition(".")[2])
        if step % every == 0 or step == max(tokens):
            os.replace(manifest.parent / TENSORS_FILE, folder / f"{step:06}.safetensors")
            seconds = max(0.0, version["created_at_s"] - began_s)
            snapshots.append({"step": step, "seconds": seconds, "tokens": tokens[step]})
    for name in ("weights", "checkpoints", "journal", "pool"):
        shutil.rmtree(run / name, ignore_errors=True)
    _finish(folder, noted, began_s - begun_s, snapshots)


def train_trl(
    python: Path, config: Config, options: Mapping[str, Any], folder: Path, *, say: Callable[[str], None]
) -> None:
    """TRL in its own environment. Raises CellFailed with the end of its log."""
    options = {**options, **shape_of(config)}
    if kept(folder, options):
        say(f"{folder.name}: kept")
        return
    folder.mkdir(parents=True)
    say(f"{folder.name}: begins, log in {folder / 'log'}")
    threads = str(options["num_threads"])
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    begun_s = time.time()
    with (folder / "log").open("wb") as log:
        request = json.dumps({**options, "folder": str(folder)})
        code = subprocess.run(
            [python, RUNNER, request], env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        end = (folder / "log").read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        raise CellFailed("\n".join([f"TRL ended with exit code {code}; the end of {folder / 'log'}:", *end]))
    made = read_object(folder / "trl.json")
    _finish(folder, options, made["began_s"] - begun_s, made["snapshots"], versions=made["versions"])


def shape_of(config: Config) -> dict[str, Any]:
    """What TRL is told of a run, so that it trains the same."""
    learner, sampler = config.learner, config.sampler
    return {
        "model": str(config.model.path),
        "pool": [str(path) for path in config.pool.files],
        "group_size": sampler.group_size,
        "groups_per_step": config.stream.groups_per_step,
        "max_new_tokens": sampler.max_new_tokens,
        "temperature": sampler.temperature,
        "adam_betas": list(learner.adam_betas),
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "warmup_steps": learner.warmup_steps,
    }


def _finish(
    folder: Path, settings: Mapping[str, Any], start_s: float, snapshots: Sequence[Mapping[str, Any]], **more: Any
) -> None:
    values = {"settings": settings, "start_s": start_s, "snapshots": list(snapshots), **more}
    partial = folder / f"{SNAPSHOTS}.part"
    partial.write_text(json.dumps(values, indent=1))
    partial.replace(folder / SNAPSHOTS)
