"""How each process of a run is built from its configuration. Knows no Ray: tests build the same parts in one process.

A part has `run(stop)` and `status()`, and `address` where others connect to it. The libraries of a part are imported
by its builder alone, so that no process loads what it does not use. What samples is built in `parts_sampler`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from curator.wire import Server
from stream_grpo.config import Config
from stream_grpo.failpoints import failpoint
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.model_folder import model_config, vocab_size
from stream_grpo.parts_common import LOOPBACK, Part, client_keys, connect, let_weights_out, server_keys
from stream_grpo.parts_sampler import build_evaluation, build_sampler, grammar
from stream_grpo.sampler.environment import environment as sampler_environment

if TYPE_CHECKING:  # each builder imports what its part needs
    from stream_grpo.learner.crew import Crew
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.grammar import Grammar
    from stream_grpo.learner.ranks import Ranks
    from stream_grpo.learner.train_step import TrainStep
    from stream_grpo.weights.nccl_sender import NcclPublisher
    from stream_grpo.weights.publisher import Publisher


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


def check_learner(config: Config) -> None:
    """Refuse, before anything starts, what the learner would refuse once it is built. Loads no weights.

    Raises ConfigError for a grammar that the model cannot write, and for a model that cannot do what `[learner]` asks.
    """
    learner_grammar(config)
    if config.learner.lora.rank or config.learner.activation_checkpointing:
        from stream_grpo.learner.fit import check_fit

        check_fit(config.model.path, config.learner)


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


def build_learner(config: Config, buffer: str, rendezvous: Path | str | None = None, bind: str = LOOPBACK) -> Part:
    """The learner with its DeepSpeed engine; `buffer` is an address, `bind` where it gives weights out over NCCL.

    With several ranks this is the first, and `rendezvous` is where they find each other, as for a `Crew`.
    """
    from stream_grpo.learner.lead import Lead, LeadEngine, LeadStep
    from stream_grpo.learner.process import LearnerProcess
    from stream_grpo.learner.ranks import ALONE
    from stream_grpo.metrics import MetricsLog
    from stream_grpo.transport.channels import LearnerChannel

    let_weights_out(config, bind)
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
        grammar=engine.grammar,
    )
    return process if crew is None else Lead(process, crew)


def build_follower(config: Config, rank: int, rendezvous: Path | str, bind: str = LOOPBACK) -> Part:
    """A rank of the learner other than the first, at whose `bind` that one gives weights out."""
    from stream_grpo.learner.follower import Follower

    let_weights_out(config, bind)
    crew = learner_crew(config, rank, rendezvous)
    engine = learner_engine(config)
    return Follower(engine, learner_step(config, engine, crew), crew)


BUILDERS: Mapping[str, Callable[..., Part]] = {
    "curator": build_curator,
    "buffer": build_buffer,
    "weights": build_weights,
    "sampler": build_sampler,
    "learner": build_learner,
    "follower": build_follower,
    "evaluation": build_evaluation,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a part needs of the machine it is placed on."""

    num_cpus: float = 0
    num_gpus: float = 0
    environment: dict[str, str] = field(default_factory=dict)


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
