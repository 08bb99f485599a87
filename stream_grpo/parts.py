"""How each process of a run is built from its configuration. Knows no Ray: tests build the same parts in one process.

A part has `run(stop)` and `status()`, and `address` where others connect to it. The libraries of a part are imported
by its builder alone, so that no process loads what it does not use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

from curator.schema import PROBLEM_SCHEMA, Problem, batch_from_bytes, problem_from_row
from curator.wire import Client, Keys, Server
from stream_grpo import keys
from stream_grpo.config import Config
from stream_grpo.failpoints import failpoint
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.model_folder import model_config, vocab_size
from stream_grpo.sampler.environment import environment as sampler_environment
from stream_grpo.types import PolicyVersion

if TYPE_CHECKING:  # each builder imports what its part needs
    from stream_grpo.evaluation import EvaluationRun
    from stream_grpo.learner.crew import Crew
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.learner.ranks import Ranks
    from stream_grpo.learner.train_step import TrainStep
    from stream_grpo.rewards.scoring import Scoring
    from stream_grpo.sampler.generation import Engine
    from stream_grpo.sampler.heldout import HeldoutEvaluation
    from stream_grpo.sampler.prompts import Prompts
    from stream_grpo.transport.channels import SamplerChannel
    from stream_grpo.weights.nccl_sender import NcclPublisher
    from stream_grpo.weights.nccl_subscriber import NcclSubscriber
    from stream_grpo.weights.publisher import Publisher
    from stream_grpo.weights.puller import Puller
    from stream_grpo.weights.subscriber import Subscriber

LOOPBACK = "tcp://127.0.0.1:*"
HELDOUT_FILE = "heldout.arrow"
INTERVAL_HELDOUT_FILE = "heldout-interval.arrow"
GUARDS_FILE = "guards.arrow"


class Part(Protocol):
    """What the launcher needs of a process's class."""

    def run(self, stop: Event) -> Any:
        """The loop, until it is done or `stop` is set."""

    def status(self) -> dict[str, Any]:
        """An account of itself; safe from another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a part needs of the machine it is placed on."""

    num_cpus: float = 0
    num_gpus: float = 0
    environment: dict[str, str] = field(default_factory=dict)


def server_keys(config: Config) -> Keys | None:
    """Of the sockets that this run binds; none on loopback."""
    return keys.server_keys(config.run_dir / keys.FOLDER) if config.cluster.address else None


def client_keys(config: Config) -> Keys | None:
    """Of the sockets that connect to them."""
    return keys.client_keys(config.run_dir / keys.FOLDER) if config.cluster.address else None


def connect(config: Config, address: str, *, name: str, peer: str) -> Client:
    """A client of one of the run's servers."""
    return Client(address, name=name, peer=peer, keys=client_keys(config))


def build_curator(config: Config, bind: str = LOOPBACK) -> Part:
    """The curator on the run's pool."""
    from curator.curation import Curation
    from curator.pool import Pool
    from curator.service import CuratorService

    curation = Curation(
        Pool.open(config.run_dir / "pool"),
        group_size=config.sampler.group_size,
        seed=config.run.seed,
        at_point=failpoint,
        **config.curator.model_dump(),
    )
    return CuratorService(curation, Server(bind, keys=server_keys(config)))


def build_buffer(config: Config, curator: str, bind: str = LOOPBACK) -> Part:
    """The buffer on the run's journal; `curator` is an address."""
    from curator.client import Curator
    from stream_grpo.buffer.process import BufferProcess, credits_for

    credits = credits_for(config.stream)
    server = Server(
        bind,
        credits=credits,
        keys=server_keys(config),
        max_message_bytes=config.buffer.max_message_bytes,
        remembered=4 * credits,
    )
    return BufferProcess(
        server,
        Curator(curator, name="buffer", keys=client_keys(config)),
        directory=config.run_dir / "journal",
        stream=config.stream,
        buffer=config.buffer,
        seed=config.run.seed,
        vocab_size=vocab_size(model_config(config.model.path)),
        config_hash=json.loads((config.run_dir / MANIFEST_FILE).read_text())["group_config_hash"],
        signal_tolerance=config.algo.signal_tolerance if config.algo.needs_spread else None,
        counts_steps=config.algo.reads_steps,
    )


def build_weights(config: Config, bind: str = LOOPBACK) -> Part:
    """What gives published weights out to samplers that do not see the run's folder."""
    from stream_grpo.weights.service import PIECE_BYTES, WeightsService

    server = Server(bind, credits=4, keys=server_keys(config), max_message_bytes=2 * PIECE_BYTES)
    return WeightsService(config.run_dir / "weights", server)


def sampler_names(config: Config) -> list[str]:
    """The samplers of a run; the first of them evaluates during training."""
    return [f"sampler-{i}" for i in range(config.sampler.num_samplers)]


def away(config: Config, name: str) -> Config:
    """The configuration of a part on a node that does not see the run's folder: it has a folder of its own there."""
    assert config.cluster.node_root is not None
    run = config.run.model_copy(update={"root": config.cluster.node_root / config.run.name, "name": name})
    return config.model_copy(update={"run": run})


def files_to_send(config: Config) -> dict[str, bytes]:
    """What a sampler needs of the run's folder, by path in it: small files, and the keys to connect with."""
    names = (MANIFEST_FILE, INTERVAL_HELDOUT_FILE, f"{keys.FOLDER}/{keys.CLIENT_FILE}")
    return {name: (config.run_dir / name).read_bytes() for name in names if (config.run_dir / name).exists()}


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


def grammar(config: Config) -> str | None:
    """What the actions of this run keep to; None where they are free. Raises ConfigError where there is no grammar."""
    settings = config.environment
    if settings.name is None or not settings.grammar:
        return None
    from stream_grpo.environments.loading import grammar_of

    return grammar_of(settings.name, settings.options, [str(config.rewards.function_dir)])


def learner_grammar(config: Config) -> Grammar | None:
    """The same as masks over the model's tokens. Raises ConfigError where tokens or tokenizer cannot write a call."""
    settings = config.environment
    if settings.name is None or (tag := grammar(config)) is None:
        return None
    from stream_grpo.environments.calls import CallFormat
    from stream_grpo.environments.loading import call_format_of
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.sampler.prompts import end_token_ids, load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    num_tokens = vocab_size(model_config(config.model.path))
    form = call_format_of(settings.name, settings.options, [str(config.rewards.function_dir)])
    return Grammar(
        tag,
        tokenizer,
        vocab_size=num_tokens,
        end_token_ids=end_token_ids(config.model.path, tokenizer),
        calls=form.shortest_calls() if isinstance(form, CallFormat) else (),
    )


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


def learner_engine(config: Config) -> LearnerEngine:
    """The model under DeepSpeed, which sees the distribution that the sampler draws from."""
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.forward import Distribution

    sampler = config.sampler
    return LearnerEngine(
        config.model.path,
        learner=config.learner,
        recipe=config.algo,
        dtype=config.model.dtype,
        distribution=Distribution(
            temperature=sampler.temperature, top_p=sampler.top_p, top_k=sampler.top_k, min_p=sampler.min_p
        ),
        seed=config.run.seed,
        grammar=learner_grammar(config),
    )


def learner_step(config: Config, engine: LearnerEngine, ranks: Ranks) -> TrainStep:
    """One rank's learner step by the run's recipe."""
    from stream_grpo.learner.train_step import TrainStep

    return TrainStep(
        engine,
        config.algo,
        config.learner,
        max_new_tokens=config.sampler.max_new_tokens,
        ranks=ranks,
        critic=engine.critic,
    )


def learner_names(config: Config) -> list[str]:
    """The ranks of the learner; the first leads the others."""
    return ["learner", *(f"learner-{rank}" for rank in range(1, config.learner.num_ranks))]


def learner_crew(config: Config, rank: int, rendezvous: Path | str) -> Crew:
    """A rank's place among all; returns once they are there."""
    from stream_grpo.learner.crew import Crew

    return Crew(
        rank,
        config.learner.num_ranks,
        rendezvous,
        timeout_s=config.learner.collective_timeout_s,
        # The first waits for a batch for so long at most; twice that, as the launcher waits for whom nobody names.
        idle_timeout_s=2 * config.stream.stall_timeout_s + config.learner.collective_timeout_s,
    )


def weights_publisher(config: Config, bind: str) -> Publisher | NcclPublisher:
    """The learner's side of `weights.transfer`; `bind` is where samplers ask for what goes over NCCL."""
    from stream_grpo.weights.publisher import Publisher

    directory = config.run_dir / "weights"
    publisher = Publisher(directory, config.weights.keep_versions, changed_alone=config.weights.publish == "changed")
    if config.weights.transfer == "files":
        return publisher
    from stream_grpo.weights.nccl_sender import NcclPublisher, NcclSender, vllm_endpoint

    sender = NcclSender(Server(bind, keys=server_keys(config)), directory, vllm_endpoint)
    Thread(target=sender.run, args=(Event(),), name="sender", daemon=True).start()
    return NcclPublisher(publisher, sender)


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


def build_learner(config: Config, buffer: str, rendezvous: Path | str | None = None, bind: str = LOOPBACK) -> Part:
    """The learner with its DeepSpeed engine; `buffer` is an address, `bind` where it gives weights out over NCCL.

    With several ranks this is the first, and `rendezvous` is where they find each other, as for a `Crew`.
    """
    from stream_grpo.learner.lead import Lead, LeadEngine, LeadStep
    from stream_grpo.learner.process import LearnerProcess
    from stream_grpo.learner.ranks import ALONE
    from stream_grpo.metrics import MetricsLog
    from stream_grpo.transport.channels import LearnerChannel

    crew = None if rendezvous is None else learner_crew(config, 0, rendezvous)
    engine = learner_engine(config)
    step = learner_step(config, engine, crew or ALONE)
    process = LearnerProcess(
        config,
        engine if crew is None else LeadEngine(engine, crew),
        step if crew is None else LeadStep(step, crew),
        LearnerChannel(connect(config, buffer, name="learner", peer="buffer")),
        weights_publisher(config, bind),
        MetricsLog(config.run_dir, "learner"),
    )
    return process if crew is None else Lead(process, crew)


def build_follower(config: Config, rank: int, rendezvous: Path | str) -> Part:
    """A rank of the learner other than the first."""
    from stream_grpo.learner.follower import Follower

    crew = learner_crew(config, rank, rendezvous)
    engine = learner_engine(config)
    return Follower(engine, learner_step(config, engine, crew), crew)


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


def heldout_problems(config: Config, file_name: str = HELDOUT_FILE) -> list[Problem]:
    """The held-out problems that `rundir.prepare` chose for this run, by default those before and after training."""
    batch = batch_from_bytes((config.run_dir / file_name).read_bytes(), PROBLEM_SCHEMA)
    return [problem_from_row(row) for row in batch.to_pylist()]


BUILDERS: Mapping[str, Callable[..., Part]] = {
    "curator": build_curator,
    "buffer": build_buffer,
    "weights": build_weights,
    "sampler": build_sampler,
    "learner": build_learner,
    "follower": build_follower,
    "evaluation": build_evaluation,
}


def _light(config: Config) -> Resources:
    return Resources(environment={"OMP_NUM_THREADS": "1"})


def _sampler(config: Config) -> Resources:
    num_cpus, num_gpus = config.sampler.num_threads, config.sampler.num_gpus
    return Resources(num_cpus=num_cpus, num_gpus=num_gpus, environment=sampler_environment(config))


def _learner(config: Config) -> Resources:
    threads = str(config.learner.num_threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if config.learner.num_gpus == 0:
        environment["DS_ACCELERATOR"] = "cpu"
    return Resources(num_cpus=config.learner.num_threads, num_gpus=config.learner.num_gpus, environment=environment)


RESOURCES: Mapping[str, Callable[[Config], Resources]] = {
    "curator": _light,
    "buffer": _light,
    "weights": _light,
    "sampler": _sampler,
    "learner": _learner,
    "follower": _learner,
    "evaluation": _sampler,
}


def num_cpus_needed(config: Config) -> int:
    """Cores that a local Ray must believe in so that all parts are placed, the evaluation beside them."""
    samplers = (config.sampler.num_samplers + config.evaluation.num_engines) * _sampler(config).num_cpus
    return math.ceil(samplers + config.learner.num_ranks * _learner(config).num_cpus)
