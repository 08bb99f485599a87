"""How what samples is built from a run's configuration: samplers, and the engines that evaluate. Knows no Ray.

The libraries of a part are imported by its builder alone, see `parts`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from curator.schema import Problem
from stream_grpo.config import Config
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.parts_common import (
    GUARDS_FILE,
    INTERVAL_HELDOUT_FILE,
    Part,
    client_keys,
    connect,
    heldout_problems,
    let_weights_out,
    sampler_names,
)
from stream_grpo.types import PolicyVersion

if TYPE_CHECKING:  # each builder imports what its part needs
    from stream_grpo.evaluation import EvaluationRun
    from stream_grpo.rewards.scoring import Scoring
    from stream_grpo.sampler.generation import Engine
    from stream_grpo.sampler.heldout import HeldoutEvaluation
    from stream_grpo.sampler.prompts import Prompts
    from stream_grpo.transport.channels import SamplerChannel
    from stream_grpo.weights.nccl_subscriber import NcclSubscriber
    from stream_grpo.weights.puller import Puller
    from stream_grpo.weights.subscriber import Subscriber


def pull_weights(config: Config, sampler_id: str, weights: str) -> Puller:
    """What brings published weights into this node's folder, in a thread that ends with the process."""
    from stream_grpo.weights.puller import Puller

    puller = Puller(connect(config, weights, name=sampler_id, peer="weights"), config.run_dir / "weights")
    Thread(target=puller.run, args=(Event(),), name="puller", daemon=True).start()
    return puller


def build_sampler(config: Config, sampler_id: str, curator: str, buffer: str, weights: str = "") -> Part:
    """A sampler with its vLLM engine; `curator`, `buffer` and `weights` are addresses.

    Without the last it reads weights where the learner publishes them.
    """
    from curator.client import Curator
    from stream_grpo.metrics import MetricsLog
    from stream_grpo.rewards.composed import ComposedScoring
    from stream_grpo.sampler.alarms import Alarms
    from stream_grpo.sampler.engines import make_engine
    from stream_grpo.sampler.process import SamplerProcess
    from stream_grpo.sampler.prompts import Prompts
    from stream_grpo.transport.channels import SamplerChannel

    let_weights_out(config, buffer)
    scoring = ComposedScoring(
        config.rewards, expected_verifiers(config, sampler_id)
    )  # workers load while the engine does
    puller = pull_weights(config, sampler_id, weights) if weights else None
    prompts = Prompts(config)
    engine = with_environment(config, make_engine(config), prompts)
    metrics = MetricsLog(config.run_dir, sampler_id)
    channel = SamplerChannel(connect(config, buffer, name=sampler_id, peer="buffer"), sampler_id)
    return SamplerProcess(
        config,
        sampler_id,
        engine,
        channel,
        Curator(curator, name=sampler_id, keys=client_keys(config)),
        weights_subscriber(config, sampler_id),
        prompts,
        scoring,
        heldout_evaluation(config, sampler_id, engine, channel, prompts, scoring),
        Alarms(
            lambda message: metrics.write("warning", {"message": message}),
            max_new_tokens=config.sampler.max_new_tokens,
            time_limit_s=config.rewards.time_limit_s,
        ),
        pull_trouble=lambda: puller.trouble if puller else "",
    )


def with_environment(config: Config, engine: Engine, prompts: Prompts) -> Engine:
    """The engine, around which trajectories are made where the run has an environment."""
    settings = config.environment
    if settings.name is None:
        return engine
    from stream_grpo.environments.pool import EnvironmentPool, Limits
    from stream_grpo.sampler.observations import Observations
    from stream_grpo.sampler.trajectories import TrajectoryEngine

    limits = Limits(
        step_s=settings.step_timeout_s,
        memory_bytes=settings.memory_limit_bytes,
        max_retries=settings.max_retries,
        max_errors_in_row=settings.max_errors_in_row,
    )
    pool = EnvironmentPool(
        settings.name,
        settings.options,
        num_workers=settings.num_workers,
        limits=limits,
        paths=[str(config.rewards.function_dir)],
    )
    return TrajectoryEngine(engine, pool, Observations(config), prompts.decode, settings, grammar(config))


def check_environment(config: Config) -> None:
    """Raises ConfigError for an environment that is not there, and for options that a built-in one does not take."""
    from stream_grpo.environments.loading import check_named

    check_named(config.environment.name, config.environment.options, [str(config.rewards.function_dir)])


def grammar(config: Config) -> str | None:
    """What the actions of this run keep to; None where they are free. Raises ConfigError where there is no grammar."""
    settings = config.environment
    if settings.name is None or not settings.grammar:
        return None
    from stream_grpo.environments.loading import grammar_of

    return grammar_of(settings.name, settings.options, [str(config.rewards.function_dir)])


def expected_verifiers(config: Config, sampler_id: str) -> set[str]:
    """The verifiers that the problems of a sampler name: those of the pool, and of what the first one evaluates."""
    identity = json.loads((config.run_dir / MANIFEST_FILE).read_text())["identities"][-1]["identity"]
    return {*identity["verifiers"], *(problem.verifier for problem in interval_problems(config, sampler_id))}


def interval_problems(config: Config, sampler_id: str) -> list[Problem]:
    """The problems that a sampler evaluates during training; one that is not the first has none."""
    if not config.evaluation.interval or sampler_id != sampler_names(config)[0]:
        return []
    return heldout_problems(config, INTERVAL_HELDOUT_FILE)[: config.evaluation.interval_problems]


def heldout_evaluation(
    config: Config, sampler_id: str, engine: Engine, channel: SamplerChannel, prompts: Prompts, scoring: Scoring
) -> HeldoutEvaluation:
    """The evaluations during training."""
    from stream_grpo.evaluation import EvaluationRun
    from stream_grpo.metrics import MetricsLog, MetricsReader
    from stream_grpo.sampler.heldout import HeldoutEvaluation

    evaluation = config.evaluation
    problems = interval_problems(config, sampler_id)

    def begin(version: PolicyVersion) -> EvaluationRun[Problem]:
        return EvaluationRun(
            problems,
            prompts.token_ids,
            prompts.decode,
            scoring,
            num_samples=evaluation.interval_samples,
            seed=config.run.seed,
            max_new_tokens=config.sampler.max_new_tokens,
            version=version,
            has_environment=config.environment.name is not None,
        )

    lines = MetricsReader(config.run_dir).new_lines()
    return HeldoutEvaluation(
        engine,
        channel,
        MetricsLog(config.run_dir, sampler_id),
        begin,
        interval=evaluation.interval if problems else 0,
        num_steps=config.run.num_steps,
        max_policy_age=config.stream.max_policy_age,
        evaluated=[PolicyVersion(*line["version"]) for line in lines if line["event"] == "evaluation"],
    )


def weights_subscriber(config: Config, sampler_id: str) -> Subscriber | NcclSubscriber:
    """A sampler's side of it."""
    directory = config.run_dir / "weights"
    if config.weights.transfer == "files":
        from stream_grpo.weights.adapter import Base
        from stream_grpo.weights.subscriber import Subscriber

        return Subscriber(directory, Base(config.model.path, config.model.dtype))
    from stream_grpo.weights.nccl_subscriber import NcclSubscriber

    return NcclSubscriber(
        directory,
        lambda address: connect(config, address, name=sampler_id, peer="learner"),
        wait_s=config.stream.stall_timeout_s,
    )


class Evaluation:
    """Scores one model folder on the held-out problems: an engine of its own, one version, nothing else running."""

    def __init__(self, config: Config, problems: Sequence[Problem]) -> None:
        from stream_grpo.rewards.composed import ComposedScoring
        from stream_grpo.sampler.engines import make_engine
        from stream_grpo.sampler.prompts import Prompts

        self._config, self._problems = config, problems
        self._scoring = ComposedScoring(config.rewards, {problem.verifier for problem in problems})
        self._prompts = Prompts(config)
        self._engine = with_environment(config, make_engine(config), self._prompts)

    def run(self, stop: Event) -> Any:
        """The scores, in the order of the problems."""
        from stream_grpo.evaluation import EvaluationRun, evaluate
        from stream_grpo.sampler.generation import generate

        run = EvaluationRun(
            self._problems,
            self._prompts.token_ids,
            self._prompts.decode,
            self._scoring,
            num_samples=self._config.evaluation.num_samples,
            seed=self._config.run.seed,
            max_new_tokens=self._config.sampler.max_new_tokens,
            has_environment=self._config.environment.name is not None,
        )
        with self._scoring:
            return evaluate(run, lambda requests: generate(self._engine, requests))

    def status(self) -> dict[str, Any]:
        """Nothing to tell before it ends."""
        return {}


def evaluation_shares(config: Config) -> list[list[Problem]]:
    """The problems that each engine of an evaluation scores, those of guards too, dealt out one by one; none empty."""
    evaluation, num_engines = config.evaluation, config.evaluation.num_engines
    problems = heldout_problems(config) if evaluation.num_problems and evaluation.files else []
    problems += heldout_problems(config, GUARDS_FILE) if evaluation.guards else []
    return [problems[index::num_engines] for index in range(min(num_engines, len(problems)))]


def build_evaluation(config: Config, model_dir: Path, share: int) -> Part:
    """An evaluation of a Hugging Face folder on one share of the problems."""
    model = config.model.model_copy(update={"path": model_dir})
    return Evaluation(config.model_copy(update={"model": model}), evaluation_shares(config)[share])
