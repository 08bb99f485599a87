"""The folder of a run before anything starts: configuration, pool, held-out problems, manifest."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from curator.earlier import start_from
from curator.errors import CuratorError
from curator.ingest.report import import_files
from curator.pool import Pool
from curator.pool_features import features_of_pool, has_text_numbers
from curator.schema import Problem, batch_to_bytes, problems_to_batch
from stream_grpo.config import Config
from stream_grpo.config_file import differences, load_run, missing_files, to_toml
from stream_grpo.config_problems import Guard
from stream_grpo.errors import ConfigError
from stream_grpo.files import read_object, replace_with, write_json
from stream_grpo.guards import GUARDED, guarded_id, is_guarded
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.identity import differences as identity_differences
from stream_grpo.learner.adapter_note import check_note
from stream_grpo.learner.branches import Branches
from stream_grpo.learner.checkpoint import newest_version, read_index
from stream_grpo.learner.layout import Layout, needs_conversion
from stream_grpo.lifetime import wait_for_parts
from stream_grpo.model_folder import model_config, unusable, vocab_size
from stream_grpo.parts import check_learner
from stream_grpo.parts_common import GUARDS_FILE, HELDOUT_FILE, INTERVAL_HELDOUT_FILE
from stream_grpo.parts_sampler import check_environment
from stream_grpo.rewards.environment import NAME as OF_ENVIRONMENT
from stream_grpo.rewards.scoring import asked_verifiers, check_scores_alone, check_verifiers
from stream_grpo.run_manifest import make_manifest, resumed_manifest
from stream_grpo.sampler.observations import Observations
from stream_grpo.sampler.prompts import PromptRefused, Prompts
from stream_grpo.sizes import impossible, shape_of

MAX_SHOWN = 5
"""Refused prompts that are shown one by one."""


def prepare(config: Config, *, resume: bool, say: Callable[[str], None]) -> Config:
    """Make the folder of a new run, or check that of one to resume; returns the configuration with absolute paths.

    Raises ConfigError for what is missing, in the way, or refused.
    """
    config = with_absolute_paths(config)
    if found := [*unusable(config), *([] if resume else missing_files(config))]:
        raise ConfigError("\n".join(found))
    shape = shape_of(config.model.path)
    if shape and (found := list(impossible(config, shape))):
        raise ConfigError("\n".join(found))
    if not resume and config.run_dir.exists():
        raise _taken(config)
    prompts = load_prompts(config)
    check_learner(config)
    check_environment(config)
    if resume:
        _take_up(config, prompts, say)
        return config
    problems, heldout = read_problems(config, prompts, say)
    if not heldout.around:
        why = "evaluation.num_problems = 0" if config.evaluation.files else "evaluation.files names no file"
        say(f"no evaluation before and after training: {why}")
    try:
        config.run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.root = {config.run.root}: no folder can be made there: {error.strerror}") from error
    check_room(config)
    building = config.run_dir.with_name(f".{config.run.name}.preparing-{os.getpid()}")
    try:
        (building / "logs").mkdir(parents=True)
        pool = Pool.create(building / "pool", problems)
        if config.curator.start_from is not None:
            start_from(pool, config.curator.start_from)
        _number_texts(config, pool, say)
        pool.close()
        (building / HELDOUT_FILE).write_bytes(batch_to_bytes(problems_to_batch(heldout.around)))
        (building / INTERVAL_HELDOUT_FILE).write_bytes(batch_to_bytes(problems_to_batch(heldout.during)))
        (building / GUARDS_FILE).write_bytes(batch_to_bytes(problems_to_batch(heldout.guards)))
        write_json(building / MANIFEST_FILE, make_manifest(config, pool, prompts))
        (building / "config.toml").write_text(to_toml(config))
        # A run folder is whole or not there, whatever happens meanwhile.
        building.rename(config.run_dir)
    except OSError as error:
        raise _taken(config) if config.run_dir.exists() else ConfigError(f"{config.run_dir}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return config


def _number_texts(config: Config, pool: Pool, say: Callable[[str], None]) -> None:
    """Let the pool keep what its curator reads of all prompts, which takes a while for a large pool.

    A part that starts has a deadline; here nothing has. Raises PoolError.
    """
    num = config.curator.text_numbers
    if config.curator.estimator != "item_response" or not num or has_text_numbers(pool, num):
        return
    began = time.monotonic()
    pool.become_writer()
    features_of_pool(pool, num)
    pool.close()
    say(f"curator.text_numbers = {num}: made of {pool.num_problems()} prompts in {time.monotonic() - began:.1f} s")


def _taken(config: Config) -> ConfigError:
    return ConfigError(f"{config.run_dir} exists: choose another run.name, or go on with --resume {config.run_dir}")


def check_room(config: Config) -> None:
    """Raise ConfigError where disk or memory are too small whatever the run does."""
    sampler, memory = config.sampler, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    caches = sampler.num_samplers * sampler.kv_cache_bytes
    if caches > memory and config.cluster.address is None and not sampler.num_gpus:
        raise ConfigError(
            f"sampler.num_samplers = {sampler.num_samplers}: with sampler.kv_cache_bytes = "
            f"{sampler.kv_cache_bytes >> 20} MiB each they need {caches >> 20} MiB, this machine has {memory >> 20} MiB"
            f"; use num_samplers = {max(1, memory // sampler.kv_cache_bytes // 2)} or less, or smaller caches"
        )
    root, needed = config.run.root, config.buffer.min_free_bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(
            f"run.root = {root}: {free >> 20} MiB are free, buffer.min_free_bytes asks for {needed >> 20} MiB"
        )


def load_prompts(config: Config) -> Prompts:
    """The tokenizer of the model folder. Raises ConfigError where it cannot be loaded."""
    try:
        if config.environment.name is not None:
            Observations(config)
        return Prompts(config)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"model.path = {config.model.path}: its tokenizer cannot be used: {error}") from error


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep a run folder for this process, once nothing of an earlier start lives.

    Raises ConfigError where it is none, or another process has it; StallError where what is left does not end.
    """
    if not (run_dir / "config.toml").exists():
        raise ConfigError(f"{run_dir}: no run there (no config.toml)")
    # The kernel drops the lock when its holder dies, however it dies.
    with (run_dir / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{run_dir}: another process runs this run") from None
        wait_for_parts(run_dir)
        yield


def _take_up(config: Config, prompts: Prompts, say: Callable[[str], None]) -> None:
    """Check that a run can go on, say which settings are new, and note it in the manifest."""
    manifest = _read_manifest(config.run_dir / MANIFEST_FILE)
    Branches.load(config.run_dir / "branches.json")  # damage is told now, not once the learner is built
    read_index(config.run_dir / "checkpoints")
    pool = Pool.open(config.run_dir / "pool")
    now = make_manifest(config, pool, prompts)
    if now["pool_fingerprint"] != manifest["pool_fingerprint"]:
        raise ConfigError(f"{pool.path}: not the pool that this run began with")
    if now["model_sha256"] != manifest["model_sha256"]:
        raise ConfigError(f"{config.model.path}: not the model that this run began with")
    begun = load_run(config.run_dir)
    if config.pool.files != begun.pool.files:
        raise ConfigError(
            f"pool.files = {list(map(str, config.pool.files))}: a run keeps the pool that was imported when it began, "
            f"from {list(map(str, begun.pool.files))}; leave it as it is, or begin another run"
        )
    if config.curator.start_from != begun.curator.start_from:
        raise ConfigError(
            f"curator.start_from = {config.curator.start_from}: a run keeps the outcomes that were copied when it "
            f"began, from {begun.curator.start_from or 'nowhere'}; leave it as it is, or begin another run"
        )
    if config.evaluation.guards != begun.evaluation.guards:
        raise ConfigError(
            "evaluation.guards: not those that this run began with; what it loses is told from scores before its first "
            "step; leave them as they are, or begin another run"
        )
    for difference in differences(config, begun):
        say(f"changed: {difference}")
    newest = newest_version(config.run_dir / "checkpoints")
    if newest is not None:
        folder = config.run_dir / "checkpoints" / f"checkpoint-{newest}" / "engine"
        layout = Layout(config.learner.num_ranks, config.learner.zero_stage)
        check_note(folder, config.learner.lora)
        if needs_conversion(folder, layout):
            say(f"checkpoint-{newest} is of other ranks, and cut anew for {layout.num_ranks} before the first step")
    _number_texts(config, pool, say)
    after = resumed_manifest(manifest, now, from_step=newest.step if newest else 0)
    _say_what_is_optimised(after["identities"][len(manifest.get("identities", [])) - 1 :], say)
    write_json(config.run_dir / MANIFEST_FILE, after)
    replace_with(config.run_dir / "config.toml", to_toml(config).encode())


def _say_what_is_optimised(identities: Sequence[dict[str, Any]], say: Callable[[str], None]) -> None:
    """Say where one identity gives way to the next."""
    for before, after in pairwise(identities):
        names = [difference.name for difference in identity_differences(before["identity"], after["identity"])]
        say(f"from step {after['from_step']} on something else is optimised, see manifest.json: {', '.join(names)}")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise ConfigError(
            f"{error}; put back a copy of the file: it says which pool and model the run is of"
        ) from error


def with_absolute_paths(config: Config) -> Config:
    """The same configuration for processes with any working directory."""

    def absolute(files: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(file.resolve() for file in files)

    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"root": config.run.root.resolve()}),
            "model": config.model.model_copy(update={"path": config.model.path.resolve()}),
            "pool": config.pool.model_copy(update={"files": absolute(config.pool.files)}),
            "curator": config.curator.model_copy(
                update={"start_from": config.curator.start_from and config.curator.start_from.resolve()}
            ),
            "evaluation": config.evaluation.model_copy(
                update={
                    "files": absolute(config.evaluation.files),
                    "guards": tuple(
                        guard.model_copy(update={"files": absolute(guard.files)}) for guard in config.evaluation.guards
                    ),
                }
            ),
            "rewards": config.rewards.model_copy(update={"function_dir": config.rewards.function_dir.resolve()}),
        }
    )


class Heldout(NamedTuple):
    """The problems that are evaluated and never trained on."""

    around: list[Problem]
    """Evaluated before and after training."""
    during: list[Problem]
    """Evaluated every `evaluation.interval` learner steps."""
    guards: list[Problem]
    """Those of all guards, under ids that name theirs; evaluated before and after training."""


def read_problems(config: Config, prompts: Prompts, say: Callable[[str], None]) -> tuple[list[Problem], Heldout]:
    """The problems to train on, none of them held out, and those to evaluate. Raises ConfigError."""
    if not config.pool.files:
        raise ConfigError("pool.files: none given; a run needs problems")
    problems = read_files(config, config.pool.files, prompts, say)
    heldout = choose_heldout(config, prompts, say)
    held = {_content(problem) for problem in (*heldout.around, *heldout.during, *heldout.guards)}
    kept = [problem for problem in problems if _content(problem) not in held]
    if len(kept) < len(problems):
        say(f"{len(problems) - len(kept)} problems are held out by content and leave the pool")
    if not kept:
        raise ConfigError(
            f"pool.files: all {len(problems)} problems stand in evaluation.files too and are held out; nothing is left "
            f"to train on; add problems, or hold out fewer with evaluation.num_problems"
        )
    return kept, heldout


def read_files(config: Config, files: Sequence[Path], prompts: Prompts, say: Callable[[str], None]) -> list[Problem]:
    """Problems from files, with a report; verifiers that cannot run and too many unusable prompts are refused.

    Raises ConfigError.
    """
    try:
        report = import_files(
            files,
            default_verifier=config.pool.verifier,
            mapping={str(field): column for field, column in config.pool.mapping.items()},
            max_refused_share=config.pool.max_refused_share,
        )
    except CuratorError as error:
        raise ConfigError(str(error)) from error
    if not report.problems:
        raise ConfigError(f"{_named(files)}: all {report.num_rows} rows are refused:\n" + "\n".join(report.refusals()))
    check_verifiers(report.verifiers, config.rewards, config.stream.sample_deadline_s)
    if config.environment.name is None and OF_ENVIRONMENT in asked_verifiers(report.verifiers, config.rewards):
        raise ConfigError(
            f"{_named(files)}: verifier {OF_ENVIRONMENT!r} scores trajectories, and environment.name names no "
            f"environment; name one, or another verifier"
        )
    say(f"{_named(files)}: {report.num_rows} rows, {report.num_kept} kept, {report.num_duplicates} duplicates")
    for refusal in report.refusals():
        say(f"  {refusal}")
    return _with_usable_prompts(config, report.problems, prompts, say)


def _named(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files)


def _with_usable_prompts(
    config: Config, problems: Sequence[Problem], prompts: Prompts, say: Callable[[str], None]
) -> list[Problem]:
    """The problems whose prompts can be sampled, counted after the template. Raises ConfigError for too many others."""
    num_tokens = vocab_size(model_config(config.model.path))
    usable: list[Problem] = []
    refusals: list[str] = []
    for problem in problems:
        try:
            highest = max(prompts.token_ids(problem))
        except PromptRefused as refusal:
            refusals.append(str(refusal))
            continue
        if num_tokens is None or highest < num_tokens:
            usable.append(problem)
        else:
            refusals.append(
                f"problem {problem.problem_id}: token id {highest}, but the model's vocab_size = {num_tokens}"
            )
    for reason in refusals[:MAX_SHOWN]:
        say(f"  refused: {reason}")
    if not usable or len(refusals) > config.pool.max_refused_share * len(problems):
        raise ConfigError(
            f"{len(refusals)} of {len(problems)} prompts cannot be sampled, first: {refusals[0]}; "
            f"pool.max_refused_share allows {config.pool.max_refused_share:.0%}"
        )
    return usable


def choose_heldout(config: Config, prompts: Prompts, say: Callable[[str], None]) -> Heldout:
    """Seeded subsets of the problems held out and of the guards', spread evenly over domains. Raises ConfigError."""
    evaluation = config.evaluation
    seed = config.run.seed if evaluation.problems_seed is None else evaluation.problems_seed
    guarded = [problem for guard in evaluation.guards for problem in _guarded(config, guard, seed, prompts, say)]
    if not evaluation.files:
        return Heldout([], [], guarded)
    problems = _in_turns(read_files(config, evaluation.files, prompts, say), seed)
    if taken := sorted(problem.problem_id for problem in problems if is_guarded(problem.problem_id)):
        raise ConfigError(
            f"evaluation.files: problem {taken[0]!r}: ids that begin with {GUARDED!r} are those of guards, and its "
            f"score would be taken for one; give it another id"
        )
    check_scores_alone({problem.verifier for problem in problems}, config.rewards)
    domains = {problem.domain for problem in problems}
    if unknown := set(evaluation.domains) - domains:
        raise ConfigError(f"evaluation.domains: no held-out problem in {sorted(unknown)}; there are {sorted(domains)}")
    headline = [problem for problem in problems if problem.domain in (evaluation.domains or domains)]
    return Heldout(problems[: evaluation.num_problems], headline[: evaluation.interval_problems], guarded)


def _guarded(config: Config, guard: Guard, seed: int, prompts: Prompts, say: Callable[[str], None]) -> list[Problem]:
    problems = _in_turns(read_files(config, guard.files, prompts, say), seed)[: guard.num_problems]
    check_scores_alone({problem.verifier for problem in problems}, config.rewards)
    return [replace(problem, problem_id=guarded_id(guard.name, problem.problem_id)) for problem in problems]


def _in_turns(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """All problems in a seeded order that takes one of every domain in turn, so that any beginning is spread evenly."""
    rng = np.random.default_rng([seed, 1])
    by_domain: dict[str, list[Problem]] = {}
    for index in rng.permutation(len(problems))[::-1]:
        by_domain.setdefault(problems[index].domain, []).append(problems[index])
    turns = zip_longest(*(by_domain[domain] for domain in sorted(by_domain)))
    return [problem for turn in turns for problem in turn if problem is not None]


def _content(problem: Problem) -> str:
    text = problem.prompt if isinstance(problem.prompt, str) else json.dumps(list(problem.prompt), sort_keys=True)
    return " ".join(text.split())
