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

from benchmarks.watch import watched_memory

from stream_grpo.config import Config
from stream_grpo.experiments.cells import SHOWN_LINES, Cell, CellFailed, Series
from stream_grpo.files import read_object, write_json
from stream_grpo.metrics import MetricsReader
from stream_grpo.weights.manifest import MANIFEST_FILE, TENSORS_FILE

SNAPSHOTS = "snapshots.json"
"""Written last: a folder that has it is complete."""
RUNNER = Path(__file__).parent / "trl_run.py"


def is_complete(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether this training is there. What was cut off is removed: a clock cannot go on.

    Raises SystemExit where the folder is of other settings.
    """
    if not (folder / SNAPSHOTS).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return False
    if (found := read_object(folder / SNAPSHOTS)["settings"]) != json.loads(json.dumps(settings)):
        differing = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
        raise SystemExit(f"{folder}: made with other settings ({', '.join(differing)}); choose another --root")
    return True


def train_ours(
    series: Series, own: Mapping[str, str], settings: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> None:
    """A run of this trainer with its `own` settings, which keeps every version it publishes.

    `settings` has `every`, the steps between two versions that are left for their score.
    """
    folder.mkdir(parents=True)
    begun_s = time.time()
    series = Series(file=series.file, overrides=series.overrides, root=folder)
    with watched_memory() as memory:
        run = series.made(Cell("run", own), lambda text: say(f"{folder.name}/{text}"))
    lines = list(MetricsReader(run).new_lines())
    began_s = min(line["first_busy_at"] for line in lines if line["event"] == "status" and line.get("first_busy_at"))
    tokens = {0: 0} | {line["step"]: line["tokens"]["generated"] for line in lines if line["event"] == "step"}
    snapshots = []
    for manifest in sorted(run.glob(f"weights/*/{MANIFEST_FILE}")):
        version = read_object(manifest)
        step = int(manifest.parent.name.partition(".")[2])
        if step % settings["every"] == 0 or step == max(tokens):
            os.replace(manifest.parent / TENSORS_FILE, folder / f"{step:06}.safetensors")
            seconds = max(0.0, version["created_at_s"] - began_s)
            snapshots.append({"step": step, "seconds": seconds, "tokens": tokens[step]})
    loop = loop_of(read_object(run / "summary.json"))
    for name in ("weights", "checkpoints", "journal", "pool", "model"):
        shutil.rmtree(run / name, ignore_errors=True)
    _finish(folder, settings, begun_s, began_s, snapshots, loop=loop, memory=memory)


def loop_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Where the seconds of a run's loop went, and how much of what was sampled was trained on."""
    return {
        "wall_s": summary["loop_wall_s"],
        "steps": summary["steps"],
        "sampler_s": summary["busy_s"]["sampler"],
        "learner_s": summary["busy_s"]["learner"],
        "tokens": summary["tokens"]["generated"],
        "trained_share": summary["trained_share"],
    }


def train_trl(
    python: Path,
    settings: Mapping[str, Any],
    places: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None],
    *,
    packages: Path | None = None,
) -> None:
    """TRL in its own environment, on the files of `places`; with `packages`, what it lacks is found there.

    Raises CellFailed with the end of its log.
    """
    folder.mkdir(parents=True)
    begun_s = time.time()
    with watched_memory() as memory:
        made = call_trl(python, {**settings, **places}, folder, say, packages=packages)
    keep = {"loop": made["loop"], "memory": memory, "versions": made["versions"]}
    _finish(folder, settings, begun_s, made["began_s"], made["snapshots"], **keep)


def call_trl(
    python: Path,
    request: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None],
    *,
    packages: Path | None = None,
) -> dict[str, Any]:
    """Run `trl_run.py`, and return what it leaves. Raises CellFailed with the end of its log."""
    say(f"{folder.name}: begins, log in {folder / 'log'}")
    threads = str(request["num_threads"])
    paths = [Path(__file__).parents[2]]
    if packages is not None:
        # TRL's own come first, so that it has the versions that it asks for.
        paths += [*sorted(python.parents[1].glob("lib/python3*/site-packages")), packages]
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "log").open("ab") as log:
        begin = log.tell()
        asked = [python, RUNNER, json.dumps({**request, "folder": str(folder)})]
        code = subprocess.run(asked, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        end = (folder / "log").read_bytes()[begin:].decode(errors="replace").splitlines()[-SHOWN_LINES:]
        raise CellFailed("\n".join([f"TRL ended with exit code {code}; the end of {folder / 'log'}:", *end]))
    return read_object(folder / "trl.json")


def shape_of(config: Config) -> dict[str, Any]:
    """What TRL is told of a run, so that it trains the same."""
    learner, sampler = config.learner, config.sampler
    return {
        "dtype": config.model.dtype,
        "group_size": sampler.group_size,
        "groups_per_step": config.stream.groups_per_step,
        "max_new_tokens": sampler.max_new_tokens,
        "temperature": sampler.temperature,
        "adam_betas": list(learner.adam_betas),
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "warmup_steps": learner.warmup_steps,
    }


def places_of(config: Config) -> dict[str, Any]:
    """Where TRL finds the model and the problems of a run."""
    return {"model": str(config.model.path), "pool": [str(path) for path in config.pool.files]}


def _finish(
    folder: Path,
    settings: Mapping[str, Any],
    begun_s: float,
    began_s: float,
    snapshots: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    """`begun_s`: when the command was given, `began_s`: when sampling began."""
    seconds = {"start_s": began_s - begun_s, "spent_s": time.time() - begun_s}
    write_json(folder / SNAPSHOTS, {"settings": settings, **seconds, "snapshots": list(snapshots), **more})
