# ruff: noqa: D102 - what these methods do is said where they are asked for: by the protocols of sampler and learner.
"""The parts of a run without vLLM and DeepSpeed: real loops, sockets, journal, pool, checkpoints, weights, rewards.

The engine of the sampler draws digits; the model of the learner is the list of the groups it was trained on, so that a
checkpoint says by itself what is in the model. Every part is a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch

from curator.client import Curator
from curator.pool import Pool
from curator.schema import Problem
from curator.wire import Client, Server
from stream_grpo import parts
from stream_grpo.buffer.process import BufferProcess, credits_for
from stream_grpo.config import Config
from stream_grpo.config_file import parse, to_toml
from stream_grpo.files import write_json
from stream_grpo.identity import MANIFEST_FILE
from stream_grpo.learner.batching import Scored
from stream_grpo.learner.process import LearnerProcess
from stream_grpo.metrics import MetricsLog
from stream_grpo.rewards.scoring import Scoring, scoring_version
from stream_grpo.sampler.alarms import Alarms
from stream_grpo.sampler.heldout import HeldoutEvaluation, Run
from stream_grpo.sampler.process import SamplerProcess
from stream_grpo.sampler.rollout import config_hash
from stream_grpo.transport.channels import LearnerChannel, Lease, SamplerChannel, Taken
from stream_grpo.types import EndReason, Generation, GenerationRequest, PolicyVersion, Ticket
from stream_grpo.weights.manifest import TensorSpec
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber

RESEND_S = 0.1
"""What was not answered is sent again so soon: the processes are back within a tenth of a second."""
VOCAB_SIZE = 10


def configuration(root: Path, *, num_steps: int, seed: int, **sections: dict[str, Any]) -> Config:
    """A run of two samplers, 2 groups a step, a checkpoint every 2 steps."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "model")},
        "run": {"root": str(root), "name": "run", "num_steps": num_steps, "seed": seed},
        "sampler": {"num_samplers": 2, "group_size": 3, "max_new_tokens": 6, "max_num_seqs": 24},
        "stream": {"groups_per_step": 2, "max_policy_age": 2, "partial_interval_s": 0.05},
        "learner": {"checkpoint_interval": 2, "keep_checkpoints": 2},
        "buffer": {"min_free_bytes": 0, "log_bytes": 1 << 20},
        "curator": {"flush_outcomes": 4},
        "evaluation": {"interval": 0, "num_problems": 0},
    }
    tree |= {name: {**tree.get(name, {}), **values} for name, values in sections.items()}
    return parse(tree, "chaos")


def make_run(config: Config, *, num_problems: int = 24, num_pooled: int = 0) -> None:
    """The folder of a new run; the answers of the first `num_pooled` problems are checked by a reward worker."""
    run_dir = config.run_dir
    (run_dir / "logs").mkdir(parents=True)
    config.model.path.mkdir()
    write_json(config.model.path / "config.json", {"vocab_size": VOCAB_SIZE})
    problems = [
        Problem(problem_id=f"p{i:02d}", prompt=str(i), answer="1", verifier="regex" if i < num_pooled else "exact")
        for i in range(num_problems)
    ]
    Pool.create(run_dir / "pool", problems).close()
    (run_dir / "config.toml").write_text(to_toml(config))
    groups = config_hash(config, Digits.fingerprint, scoring_version(config.rewards))
    write_json(run_dir / MANIFEST_FILE, {"group_config_hash": groups})


class Digits:
    """Prompts of two tokens, responses of digits: right where the sum of the digits is odd."""

    fingerprint = "digits"

    def token_ids(self, problem: Problem) -> tuple[int, ...]:
        number = int(str(problem.prompt))
        return (number // 10, number % 10)

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"#### {sum(token_ids) % 2}"


@dataclass
class _Running:
    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        # From 2 tokens on, by the seed.
        return len(self.ids) == min(2 + self.request.seed % 5, self.request.max_new_tokens)

    def generation(self, end_reason: EndReason) -> Generation:
        return Generation(
            request_id=self.request.request_id,
            token_ids=np.array(self.ids, np.int32),
            logprobs=np.full(len(self.ids), -1.0, np.float32),
            versions=tuple(self.versions),
            end_reason=end_reason,
        )


class DigitEngine:
    """One digit a step for every running sequence, by its seed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.version = num_slots, PolicyVersion(0, 0)
        self._running: dict[str, _Running] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def add(self, request: GenerationRequest) -> None:
        self._running[request.request_id] = _Running(request)

    def step(self) -> list[Generation]:
        for running in self._running.values():
            running.ids.append((running.request.seed >> (4 * len(running.ids))) % VOCAB_SIZE)
            running.versions.append(self.version)
        done = [name for name, running in self._running.items() if running.is_done]
        return [self._running.pop(name).generation(EndReason.EOS) for name in done]

    def abort(self, request_ids: Iterable[str]) -> list[Generation]:
        found = [self._running.pop(name) for name in request_ids if name in self._running]
        return [running.generation(EndReason.ABORT) for running in found]

    def progress(self, request_ids: Iterable[str]) -> list[Generation]:
        found = [self._running[name] for name in request_ids if name in self._running]
        return [running.generation(EndReason("partial")) for running in found]

    def num_sampled(self, request_ids: Iterable[str]) -> int:
        return sum(len(self._running[name].ids) for name in request_ids if name in self._running)

    def expected_tensors(self) -> dict[str, TensorSpec]:
        return {"w": TensorSpec((1,), "float32")}

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        self.version = version
        return 0.0

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    def clear_kv(self) -> None: ...

    def close(self) -> None: ...


class Witness(SamplerChannel):
    """Writes down every group that the buffer has acknowledged: what may not be lost from then on."""

    def __init__(self, client: Client, sampler_id: str, path: Path) -> None:
        super().__init__(client, sampler_id)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def poll(self, timeout_s: float = 0.0) -> tuple[list[Ticket], list[Taken]]:
        tickets, taken = super().poll(timeout_s)
        kept = [answer.group_id for answer in taken if answer.fate.value != "refused"]
        if kept:
            os.write(self._file, "".join(f"{group_id}\n" for group_id in kept).encode())
        return tickets, taken


class Leased(LearnerChannel):
    """Remembers which groups were leased last."""

    group_ids: Sequence[str] = ()

    def lease(self, version: PolicyVersion, num_groups: int, **how: Any) -> Lease:
        lease = super().lease(version, num_groups, **how)
        if lease.groups:
            self.group_ids = [group.group_id for group in lease.groups]
        return lease


class ListModel:
    """Engine and step of the learner: a step adds the leased groups to the list."""

    vocab_size = VOCAB_SIZE
    attention_cost = None
    adapter = None

    def __init__(self, channel: Leased) -> None:
        self._channel, self.trained = channel, list[str]()

    def probe_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[()]:
        return ()

    def weight_specs(self) -> dict[str, TensorSpec]:
        return {"w": TensorSpec((1,), "float32")}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.tensor([float(len(self.trained))])

    def save(self, directory: Path, state: Any) -> None:
        directory.mkdir(parents=True)
        (directory / "trained.json").write_text(json.dumps(self.trained))

    def load(self, directory: Path) -> Any:
        self.trained = json.loads((directory / "trained.json").read_text())
        return {}

    def export(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "trained.json").write_text(json.dumps(self.trained))

    def rewarded(self, groups: Any, **_: Any) -> Any:
        return groups

    def advantages(self, rewards_B: Any, valid_B: Any, group_B: Any, *_: Any) -> Scored:
        return Scored(np.where(valid_B, rewards_B - np.nanmean(rewards_B), 0.0), valid_B)

    def run(self, batch: Any, watch: Any) -> dict[str, float]:
        self.trained += self._channel.group_ids
        return {"loss": 0.0}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...


def address_of(config: Config, name: str) -> str:
    """Where a server listens, before and after it is killed."""
    return f"ipc://{config.run_dir / name}.sock"


def build(config: Config, name: str) -> parts.Part:
    """The part of that name: curator, buffer, learner or sampler-i."""
    builders = {"curator": _curator, "buffer": _buffer, "learner": _learner}
    return builders[name](config) if name in builders else _sampler(config, name)


def _curator(config: Config) -> parts.Part:
    return parts.build_curator(config, bind=address_of(config, "curator"))


def _buffer(config: Config) -> parts.Part:
    server = Server(address_of(config, "buffer"), credits=credits_for(config.stream))
    return BufferProcess(
        server,
        Curator(address_of(config, "curator"), name="buffer", resend_s=RESEND_S),
        directory=config.run_dir / "journal",
        stream=config.stream,
        buffer=config.buffer,
        seed=config.run.seed,
        vocab_size=VOCAB_SIZE,
        config_hash=json.loads((config.run_dir / MANIFEST_FILE).read_text())["group_config_hash"],
    )


def buffer_client(config: Config, name: str) -> Client:
    """A connection to the buffer."""
    return Client(address_of(config, "buffer"), name=name, peer="buffer", resend_s=RESEND_S)


def _learner(config: Config) -> parts.Part:
    channel = Leased(buffer_client(config, "learner"))
    model: Any = ListModel(channel)
    publisher = Publisher(config.run_dir / "weights", config.weights.keep_versions)
    return LearnerProcess(config, model, model, channel, publisher, MetricsLog(config.run_dir, "learner"))


def _sampler(config: Config, name: str) -> parts.Part:
    engine, prompts, scoring = DigitEngine(config.sampler.max_num_seqs), Digits(), Scoring(config.rewards)
    channel = Witness(buffer_client(config, name), name, config.run_dir / f"acknowledged-{name}.txt")
    metrics = MetricsLog(config.run_dir, name)
    heldout = HeldoutEvaluation(
        engine, channel, metrics, _never, interval=0, num_steps=0, max_policy_age=config.stream.max_policy_age
    )
    alarms = Alarms(
        lambda message: metrics.write("warning", {"message": message}),
        max_new_tokens=config.sampler.max_new_tokens,
        time_limit_s=config.rewards.time_limit_s,
    )
    return SamplerProcess(
        config,
        name,
        engine,
        channel,
        Curator(address_of(config, "curator"), name=name, resend_s=RESEND_S),
        Subscriber(config.run_dir / "weights"),
        prompts,  # type: ignore[arg-type]
        scoring,
        heldout,
        alarms,
    )


def _never(version: PolicyVersion) -> Run:
    raise AssertionError(f"an evaluation of {version} was not asked for")


def run_part(config: Config, name: str, stop: Event) -> None:
    """Build a part and run its loop."""
    build(config, name).run(stop)
